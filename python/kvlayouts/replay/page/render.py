"""Fills the template."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvlayouts.replay.numbers import count, percent, show_range
from kvlayouts.replay.page import panels, view
from kvlayouts.replay.report import TABLE_SECTIONS, verdict
from kvlayouts.replay.results import rerun_command

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig
    from kvlayouts.replay.results import LayoutResult


def write_page(path: Path, config: ReplayConfig, trace: Trace, results: Mapping[str, LayoutResult]) -> None:
    """Write the page as UTF-8, replacing what is there. Raises OSError where the file cannot be written.

    Bytes of a file name that are no text become question marks.
    """
    path.write_text(render_page(config, trace, results), encoding="utf-8", errors="replace")


def render_page(config: ReplayConfig, trace: Trace, results: Mapping[str, LayoutResult]) -> str:
    """The page. Names in it (layouts, trace) are escaped."""
    environment = Environment(
        loader=PackageLoader(__package__, package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_unbroken,
    )
    axis, layouts = view.overview(trace, results)
    hits = trace.infinite_cache_hits()
    return environment.get_template("page.html.j2").render(
        style=files(__package__).joinpath("page.css").read_text(encoding="utf-8"),
        trace=trace,
        names=list(results),
        requests=count(len(trace.requests)),
        prompt_tokens=count(trace.prompt_tokens),
        ranks=config.cp_size,
        bound=percent(hits.token_share),
        passed=all(result.passed for result in results.values()),
        verdict=verdict(results),
        axis=axis,
        layouts=layouts,
        base=min(results, key=lambda name: results[name].logical_capacity_tokens),
        hit_panels=panels.hit_panels(results),
        hit_numbers=view.hit_numbers(results),
        traffic=view.traffic_tables(results),
        balance=view.balance_tables(results),
        device_pages=show_range([result.device_capacity_pages for result in results.values()], count),
        host_pages=show_range([result.host_capacity_pages for result in results.values()], count),
        imbalance_panels=panels.imbalance_panels(results),
        imbalance_numbers=view.imbalance_numbers(results),
        eviction_panels=panels.eviction_panels(results),
        eviction_numbers=view.eviction_numbers(results),
        sections=[
            (title, [(label.strip(), label[0] == " ", [show(r) for r in results.values()]) for label, show in rows])
            for title, rows in TABLE_SECTIONS
        ],
        settings=view.settings(config, trace),
        command=rerun_command(config, trace).split(" --"),
        versions=view.versions(),
    )


def _unbroken(value: object) -> object:
    """Text whose numbers stay on one line with their units; what is HTML already stays as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return re.sub(r"(?<=\d) (?=%|B\b|[KMG]iB)", "\N{NO-BREAK SPACE}", value.replace("( ", "("))
