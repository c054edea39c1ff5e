"""`kvlayouts explain`: options in, a picture out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvlayouts.common import options
from kvlayouts.common.errors import InputError
from kvlayouts.common.outputs import Output, check_outputs, deliver, json_output
from kvlayouts.common.strategies import load_layouts, read_options
from kvlayouts.common.values import MAX_SEED, check_range

if TYPE_CHECKING:
    from pathlib import Path

    from kvlayouts.explain.story import NodeStory

MAX_PAGES = 2**20


@click.command(context_settings={"show_default": True})
@options.layout_option
@options.layout_config_option()
@click.option("--cp-size", type=options.RANKS, default=4, help="Ranks of the shard group.")
@click.option("--page-size", type=options.PAGE_TOKENS, default=64, help="Tokens a page.")
@click.option(
    "--tokens", type=click.IntRange(min=1), default=1000, help="Tokens; the whole pages among them are the node."
)
@click.option("--rank", type=int, show_default="all", help="Show this rank alone.")
@click.option("--split", type=int, help="Split the node after so many tokens, a multiple of the page size.")
@click.option("--used", "seed", type=click.IntRange(0, MAX_SEED), help="Pools half in use, at random with this seed.")
@options.file_option("--svg", "Write the picture to this file.")
@options.file_option("--json", "Write every number to this file.")
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
    check_outputs({"--svg": svg_path, "--json": json_path})
    layout_options = read_options([layout], layout_config)
    check_range("--tokens", tokens, page_size, page_size * MAX_PAGES)
    if rank is not None:
        check_range("--rank", rank, 0, cp_size - 1)
    _check_split(split, tokens // page_size, page_size)
    load_layouts()
    from kvlayouts.explain.story import ExplainConfig, tell

    story = tell(
        ExplainConfig(
            layout=layout,
            options=layout_options,
            shard_size=cp_size,
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
        raise InputError(
            f"--split {split}: must be a multiple of --page-size {page_size} between 0 and {most}, the node's tokens"
        )


def _show(story: NodeStory, svg_path: Path | None, json_path: Path | None) -> None:
    from kvlayouts.explain.picture import to_svg
    from kvlayouts.explain.story import to_json
    from kvlayouts.explain.terminal import print_story

    deliver(
        lambda console: print_story(console, story),
        Output(flag="--svg", path=svg_path, write=lambda path: path.write_text(to_svg(story), encoding="utf-8")),
        json_output(json_path, lambda: to_json(story)),
    )
