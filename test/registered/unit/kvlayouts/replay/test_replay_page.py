"""The HTML page of a replay: what it shows, that it loads nothing, and where its charts draw their lines."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from kvlayouts.replay.page.charts import Axis, nice_axis, step_area, step_line, x_axis
from kvlayouts.replay.page.panels import count_tick, eviction_panels, hit_panels, percent_tick
from kvlayouts.replay.page.render import render_page, write_page
from kvlayouts.replay.report import TABLE_SECTIONS, verdict
from kvlayouts.replay.results import rerun_command

if TYPE_CHECKING:
    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig
    from kvlayouts.replay.results import LayoutResult

VOID = {"meta", "link", "wbr"}
UNIT_AXIS = Axis(low=0.0, high=1.0, ticks=(0.0, 1.0))


class _Page(HTMLParser):
    """Elements with their attributes, and the text outside of `<style>`. Fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self._words: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        return " ".join("".join(self._words).split())  # a no-break space is space too

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    @override
    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self._words.append(data)


@pytest.fixture
def both(identity: LayoutResult, sharded: LayoutResult) -> dict[str, LayoutResult]:
    return {"identity": identity, "cp_shared": sharded}


def test_the_page_has_the_verdict_the_command_and_every_number_of_the_table(
    both: dict[str, LayoutResult], config: ReplayConfig, trace: Trace
) -> None:
    text = _Page(render_page(config, trace, both)).text
    assert verdict(both) in text
    assert rerun_command(config, trace) in text
    for _, rows in TABLE_SECTIONS:
        for label, show in rows:
            cells = [" ".join(show(result).replace("( ", "(").split()) for result in both.values()]
            assert f"{label.strip()}{''.join(cells)}" in text, label


def test_the_page_has_every_picture_for_both_layouts_and_bars_for_each_rank(
    both: dict[str, LayoutResult], config: ReplayConfig, trace: Trace
) -> None:
    page = _Page(render_page(config, trace, both))
    pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(pictures) == 3 * len(both)
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert (attributes["aria-label"] or "").startswith(
            ("identity, requests 1 to 3: ", "cp_shared, requests 1 to 3: ")
        )
    widths = [attributes.get("style") for tag, attributes in page.elements if tag == "span" and attributes.get("style")]
    assert widths.count("width:75.0%") == len(both)  # rank 0: 12 of 16 device pages
    assert widths.count("width:39.39%") == len(both)  # rank 0: 13 of 33 host pages
    assert widths.count("width:33.33%") == len(both)  # rank 0: 512 of 1,536 bytes


def test_the_page_loads_nothing_and_runs_no_script(
    both: dict[str, LayoutResult], config: ReplayConfig, trace: Trace
) -> None:
    text = render_page(config, trace, both)
    page = _Page(text)
    assert not {"script", "img", "iframe", "object", "base"} & {tag for tag, _ in page.elements}
    links = [attributes[name] for _, attributes in page.elements for name in ("src", "href") if name in attributes]
    assert links == ["data:,"]
    assert not re.search(r"@import|url\(|://", text)
    policies = [attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_names_from_outside_are_shown_and_never_become_markup(
    identity: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    plain = _Page(render_page(config, trace, {"b": identity, "i": identity}))
    hostile = '<script>alert("1")</script>&.jsonl'
    named = replace(trace, name=hostile, path=Path(hostile))
    page = _Page(render_page(config, named, {"<b>": identity, '"><i>': identity}))
    assert hostile in page.text
    assert '"><i>' in page.text
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]


def test_a_failed_run_says_so_in_the_words_of_the_table(
    identity: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    good = _Page(render_page(config, trace, {"identity": identity}))
    assert [a["class"] for _, a in good.elements if (a.get("class") or "").startswith("verdict")] == ["verdict good"]
    bad = _Page(render_page(config, trace, {"identity": replace(identity, mismatched_tokens=9)}))
    assert [a["class"] for _, a in bad.elements if (a.get("class") or "").startswith("verdict")] == ["verdict bad"]
    assert "FAILED: identity: 9 of 4,321 verified tokens wrong" in bad.text


@pytest.mark.parametrize("layouts", [1, 2, 5])
def test_any_number_of_layouts_can_be_shown(
    layouts: int, identity: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    page = _Page(render_page(config, trace, {f"layout_{number}": identity for number in range(layouts)}))
    assert sum(tag == "svg" for tag, _ in page.elements) == 3 * layouts
    lines = [a["class"] for tag, a in page.elements if tag == "path" and (a["class"] or "").endswith("base")]
    assert len(lines) == layouts - 1


def test_a_run_without_hits_bytes_or_evictions_can_be_shown(
    identity: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    fields: dict[str, Any] = dict.fromkeys(("device_hit_tokens", "host_hit_tokens"), 0) | {"computed_tokens": 2000}
    fields |= dict.fromkeys(("evicted_device_tokens", "evicted_host_tokens"), 0) | {"hit_series": ()}
    fields |= dict.fromkeys(("d2h_bytes_per_rank", "h2d_bytes_per_rank", "device_pages_per_rank"), (0, 0))
    page = _Page(render_page(config, trace, {"identity": replace(identity, host_pages_per_rank=(0, 0), **fields)}))
    assert "0 B" in page.text
    assert "nan" not in page.text


def test_a_name_that_is_no_unicode_has_a_mark_in_its_place(
    tmp_path: Path, both: dict[str, LayoutResult], config: ReplayConfig, trace: Trace
) -> None:
    target = tmp_path / "out.html"
    write_page(target, config, replace(trace, name="\udcff.jsonl", path=Path("\udcff.jsonl")), both)
    assert "<title>KV cache replay of ?.jsonl</title>" in target.read_text(encoding="utf-8")


def test_the_page_replaces_what_was_there(
    tmp_path: Path, both: dict[str, LayoutResult], config: ReplayConfig, trace: Trace
) -> None:
    target = tmp_path / "out.html"
    target.write_text("old", encoding="utf-8")
    write_page(target, config, trace, both)
    assert target.read_text(encoding="utf-8") == render_page(config, trace, both)


# Charts.


def test_a_step_area_runs_along_its_upper_edge_and_back_along_its_lower_one() -> None:
    path = step_area([0, 1, 4], [0.0, 0.25], [0.5, 1.0], UNIT_AXIS)
    assert path == "M0 500 L250 500 L250 0 L1000 0 L1000 750 L250 750 L250 1000 L0 1000Z"
    assert step_line([0, 1, 4], [0.5, 1.0], UNIT_AXIS) == "M0 500 L250 500 L250 0 L1000 0"


def test_host_hits_are_stacked_on_device_hits(identity: LayoutResult) -> None:
    # Windows of 2 and 1 requests: 10 % device and 0 % host, then 10 % device and 20 % host.
    (panel,) = hit_panels({"identity": identity})
    assert [tick.label for tick in panel.y_ticks] == ["0 %", "10 %", "20 %", "30 %"]
    device, host = panel.areas
    assert device.path.startswith("M0 666.7 L666.7 666.7 L666.7 666.7 L1000 666.7 L1000 1000")
    assert host.path.startswith("M0 666.7 L666.7 666.7 L666.7 0 L1000 0 L1000 666.7")
    assert panel.hovers[1].text == "requests 3 to 3\ndevice 10.0 %, host 20.0 % of 1,000 prompt tokens"


def test_evictions_are_told_per_request_so_that_a_shorter_last_window_compares(identity: LayoutResult) -> None:
    # 128 tokens left the host in 2 requests, 64 left the device in the last one.
    (panel,) = eviction_panels({"identity": identity})
    assert [tick.label for tick in panel.y_ticks] == ["0", "20", "40", "60", "80"]
    device, host = panel.lines
    assert device.path == "M0 1000 L666.7 1000 L666.7 200 L1000 200"
    assert host.path == "M0 200 L666.7 200 L666.7 1000 L1000 1000"


def test_the_layout_of_least_capacity_is_drawn_over_all_others(both: dict[str, LayoutResult]) -> None:
    identity, sharded = hit_panels(both)
    assert identity.lines == ()
    assert [line.kind for line in sharded.lines] == ["base"]
    # The identity's 10 % and 30 %, on an axis whose top is 60 %.
    assert sharded.lines[0].path == "M0 833.3 L666.7 833.3 L666.7 500 L1000 500"


@given(high=st.floats(1e-6, 1e9), most=st.integers(2, 9))
def test_an_axis_reaches_its_highest_value_in_few_round_steps(high: float, most: int) -> None:
    axis = nice_axis(0, high, most_ticks=most)
    assert axis.high >= high * (1 - 1e-6)
    assert 2 <= len(axis.ticks) <= most
    step = axis.ticks[1]
    assert f"{step:.0e}"[0] in "125"
    assert axis.high - step < high


@given(requests=st.integers(1, 100_000))
def test_the_axis_of_requests_ends_with_the_last_request_and_counts_in_whole_ones(requests: int) -> None:
    axis = x_axis(requests)
    assert axis.high == requests
    assert all(tick == int(tick) and 0 <= tick <= requests for tick in axis.ticks)


def test_labels_of_an_axis_are_short() -> None:
    assert [percent_tick(value) for value in (0, 0.05, 0.125, 1)] == ["0 %", "5 %", "12.5 %", "100 %"]
    assert [count_tick(value) for value in (0, 0.5, 800, 2500)] == ["0", "0.5", "800", "2.5k"]


def test_the_text_of_the_page_is_escaped_once(identity: LayoutResult, config: ReplayConfig, trace: Trace) -> None:
    text = render_page(config, replace(trace, name="a&b.jsonl"), {"identity": identity})
    assert "a&amp;b.jsonl" in text
    assert html.escape("a&amp;b") not in text
