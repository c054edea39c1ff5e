"""`kvlayouts explain`: options in, a picture out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from kvlayouts.replay import config as options
from kvlayouts.replay.config import ReplayError, ReplayInputError, check_range

if TYPE_CHECKING:
    from kvlayouts.explain.story import NodeStory

SVG_SUFFIX = ".svg"


@click.command(context_settings={"show_default": True})
@click.option("--layout", default="cp_shared", help="Layout strategy.")
@click.option("--layout-config", metavar="JSON|@FILE", help="Settings of the strategy.")
@click.option("--cp-size", type=click.IntRange(1, options.MAX_CP_SIZE), default=4, help="Ranks of the shard group.")
@click.option("--page-size", type=click.IntRange(1, options.MAX_PAGE_SIZE_TOKENS), default=64, help="Tokens a page.")
@click.option(
    "--tokens", type=click.IntRange(min=1), default=1000, help="Tokens; the whole pages among them are the node."
)
@click.option("--rank", type=int, show_default="all", help="Show this rank alone.")
@click.option("--split", type=int, help="Split the node after so many tokens, a multiple of the page size.")
@click.option(
    "--used", "seed", type=click.IntRange(0, options.MAX_SEED), help="Pools half in use, at random with this seed."
)
@click.option("--svg", "svg_path", type=click.Path(path_type=Path), help="Write the picture to this file.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write every number to this file.")
def explain(
    layout: str,
    layout_config: str | None,
    cp_size: int,
    page_size: int,
    tokens: int,
    rank: int | None,
    split: int | None,
    seed: int | None,
    svg_path: Path | None,
    json_path: Path | None,
) -> int:
    """A picture of what a layout strategy does with one node: pages, owners, copies, metadata, and a split.

    Everything comes from the strategy's own plans; nothing is copied, and no pool is made.
    """
    _check_outputs(svg_path, json_path)
    from kvlayouts.explain.story import MAX_PAGES, ExplainConfig, tell
    from kvlayouts.explain.strategies import check_known, read_layout_options

    check_known(layout)
    check_range("--tokens", tokens, page_size, page_size * MAX_PAGES)
    if rank is not None:
        check_range("--rank", rank, 0, cp_size - 1)
    _check_split(split, tokens // page_size, page_size)
    story = tell(
        ExplainConfig(
            layout=layout,
            options={} if layout_config is None else read_layout_options(layout, layout_config),
            ranks=cp_size,
            page_size=page_size,
            tokens=tokens,
            split_tokens=split,
            rank=rank,
            seed=seed,
        )
    )
    _show(story, svg_path, json_path)
    return 0


def _check_split(split: int | None, pages: int, page_size: int) -> None:
    if split is None:
        return
    most = pages * page_size
    if split % page_size or not 0 <= split <= most:
        raise ReplayInputError(
            f"--split {split}: must be a multiple of --page-size {page_size} between 0 and {most}, the node's tokens"
        )


def _check_outputs(svg_path: Path | None, json_path: Path | None) -> None:
    for flag, path in (("--svg", svg_path), ("--json", json_path)):
        options.check_output_file(flag, path)
    if svg_path is not None and svg_path.suffix.lower() != SVG_SUFFIX:
        raise ReplayInputError(f"--svg {svg_path}: must end with {SVG_SUFFIX}")
    if svg_path is not None and json_path is not None and svg_path.resolve() == json_path.resolve():
        raise ReplayInputError(f"--json {json_path}: is the same file as --svg")


def _show(story: NodeStory, svg_path: Path | None, json_path: Path | None) -> None:
    """Print the picture, then write the files, also where nobody reads the picture."""
    from kvlayouts.explain.terminal import print_story

    try:
        print_story(Console(force_terminal=sys.stdout.isatty()), story)
    finally:
        _write(story, svg_path, json_path)


def _write(story: NodeStory, svg_path: Path | None, json_path: Path | None) -> None:
    """Raises `ReplayError` where a file could not be written after all."""
    from kvlayouts.explain.picture import to_svg
    from kvlayouts.explain.story import to_json

    try:
        if svg_path is not None:
            svg_path.write_text(to_svg(story), encoding="utf-8")
        if json_path is not None:
            json_path.write_text(json.dumps(to_json(story), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ReplayError(f"{error.filename or 'output'}: cannot be written: {error.strerror or error}") from error
