"""`kvlayouts explain`: what it tells is what the strategy does, also for large nodes and strategies from elsewhere."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ET
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from kvlayouts.common.errors import RunError
from kvlayouts.explain.elision import shown_items, shown_ranges
from kvlayouts.explain.picture import to_svg
from kvlayouts.explain.story import ExplainConfig, NodeStory, tell
from kvlayouts.explain.terminal import print_story
from kvlayouts.main import main
from sglang.srt.mem_cache.layouts.plans import CopyRun
from support.replays import FAULTY_LAYOUTS

if TYPE_CHECKING:
    from pathlib import Path

    from sglang.srt.mem_cache.layouts.pages import PageArray

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

SVG = "{http://www.w3.org/2000/svg}"


def _config(**options: Any) -> ExplainConfig:  # noqa: ANN401  # fields of ExplainConfig
    """Fifteen pages of 64 tokens on four ranks."""
    fields: dict[str, Any] = {
        "layout": "cp_shared",
        "options": {},
        "shard_size": 4,
        "page_size": 64,
        "tokens": 1000,
        **options,
    }
    return ExplainConfig(**fields)


def _shown(story: NodeStory, width: int = 120) -> str:
    out = StringIO()
    print_story(Console(width=width, file=out), story)
    return out.getvalue()


# The story.


def test_a_node_of_cp_shared_is_told_as_worked_out_by_hand() -> None:
    story = tell(_config(shard_size=3, page_size=4, tokens=22, split_tokens=8))
    base = story.base
    lanes = [(base + page) % 3 for page in range(5)]
    assert story.lanes.tolist() == lanes
    # Slot page p is row page p // 3 of rank p % 3; pages 0, 1 and 2 are padding, the lowest free ones go first.
    next_row = {0: 1, 1: 1, 2: 1}
    rows = []
    for lane in lanes:
        rows.append(next_row[lane])
        next_row[lane] += 1
    assert story.slot_pages.tolist() == [3 * row + lane for row, lane in zip(rows, lanes, strict=True)]
    assert [story.row_page(page) for page in range(5)] == rows
    assert [story.host_page(page) for page in range(5)] == [row - 1 for row in rows]
    counts = [lanes.count(lane) for lane in range(3)]
    assert story.demand_pages == tuple(counts)
    assert [story.new_row_page(page) for page in range(5)] == [
        row + counts[lane] for row, lane in zip(rows, lanes, strict=True)
    ]
    for rank in story.ranks:
        pages = counts[rank.rank]
        assert rank.positions.tolist() == [page for page in range(5) if lanes[page] == rank.rank]
        assert rank.backup == (CopyRun(host_page=0, device_page=1, pages=pages),)
        assert rank.load == (CopyRun(host_page=0, device_page=1 + pages, pages=pages),)
        assert rank.metadata_bytes == 5 * 2 + 8 * pages
        first = lanes[:2].count(rank.rank)
        assert rank.half_pages == (first, pages - first)
        assert rank.half_bytes == (2 * 2 + 8 * first, 3 * 2 + 8 * (pages - first))
    assert [half.pages for half in story.halves] == [2, 3]
    assert story.halves[0].pages_per_lane == tuple(lanes[:2].count(lane) for lane in range(3))


def test_every_rank_of_identity_stores_every_page() -> None:
    story = tell(_config(layout="identity", shard_size=2, tokens=400))
    for rank in story.ranks:
        assert rank.positions.tolist() == list(range(6))
        assert rank.backup == (CopyRun(host_page=0, device_page=1, pages=6),)
        assert rank.load == (CopyRun(host_page=0, device_page=7, pages=6),)
    assert story.demand_pages == (6,)
    assert story.halves == ()


@pytest.mark.parametrize("layout", ["identity", "cp_shared"])
def test_used_pools_give_scattered_pages_and_runs_that_cover_each_page_once(layout: str) -> None:
    story = tell(_config(layout=layout, tokens=64 * 200, seed=5, split_tokens=64 * 77))
    assert len(set(story.slot_pages.tolist()) | set(story.new_slot_pages.tolist())) == 400
    for rank in story.ranks:
        assert len(rank.backup) > 3
        for runs, rows in ((rank.backup, rank.row_pages), (rank.load, rank.new_row_pages)):
            pairs = [(run.host_page + at, run.device_page + at) for run in runs for at in range(run.pages)]
            assert pairs == list(zip(rank.host_pages.tolist(), rows.tolist(), strict=True))
    assert tell(_config(layout=layout, tokens=64 * 200, seed=5)).slot_pages.tolist() == story.slot_pages.tolist()
    other = tell(_config(layout=layout, tokens=64 * 200, seed=6))
    assert other.slot_pages.tolist() != story.slot_pages.tolist()


def test_a_strategy_of_another_distribution_is_explained_by_its_own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAULTY_LAYOUTS))
    told, built_in = tell(_config(layout="swaps_pages")), tell(_config())
    rank, usual = told.ranks[0], built_in.ranks[0]
    assert rank.backup == usual.backup
    rows = usual.new_row_pages.tolist()
    assert rank.new_row_pages.tolist() == [rows[1], rows[0], *rows[2:]]
    assert len(rank.load) == 3


def test_a_strategy_that_contradicts_itself_is_a_failed_run_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FAULTY_LAYOUTS))
    with pytest.raises(RunError, match="--layout misplaces: the strategy contradicts itself"):
        _tell_misplacing(monkeypatch)
    assert capsys.readouterr().out == ""


def _tell_misplacing(monkeypatch: pytest.MonkeyPatch) -> NodeStory:
    from kvlayouts.explain import story as module
    from sglang.srt.mem_cache.layouts import BackupPlan, CpSharedLayout

    class Misplaces(CpSharedLayout):
        """Copies one page less than it owns."""

        @override
        def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
            plan = super().plan_backup(slot_pages)
            return replace(plan, device_pages=plan.device_pages[:-1])

    def create(_: str, *, page_size: int, shard_size: int, rank: int, **__: object) -> Misplaces:
        return Misplaces(page_size=page_size, shard_size=shard_size, shard_rank=rank)

    monkeypatch.setattr(module, "create_rank", create)
    return tell(_config(layout="misplaces"))


# What is shown.


def test_the_terminal_shows_pages_owners_rows_runs_metadata_and_both_halves() -> None:
    story = tell(_config(split_tokens=512))
    shown = _shown(story)
    assert "A node of 15 pages, 960 tokens (the last 40 of 1,000 fill no page and stay out of the tree)" in shown
    strips = {line[:18].strip(): line[18:].split() for line in shown.splitlines() if line[18:19] == " "}
    assert strips["page"] == [str(page) for page in range(15)]
    assert strips["lane (owner)"] == [str(lane) for lane in story.lanes]
    assert strips["slot page"] == [str(page) for page in story.slot_pages]
    assert strips["row page"] == [str(story.row_page(page)) for page in range(15)]
    assert strips["host page"] == [str(story.host_page(page)) for page in range(15)]
    assert strips["half"] == ["1st"] * 8 + ["2nd"] * 7
    for rank in story.ranks:
        pages = len(rank.positions)
        assert f"row 1..{pages} → host 0..{pages - 1}" in shown
        assert f"host 0..{pages - 1} → row {pages + 1}..{2 * pages}" in shown
        assert f"{rank.metadata_bytes} = " in shown
    assert "first half: 8 pages, 512 tokens; host pages by lane: 2, 2, 2, 2; metadata of all ranks 128 bytes" in shown


@pytest.mark.parametrize("width", [60, 80, 200])
def test_large_nodes_and_groups_are_elided_in_the_terminal(width: int) -> None:
    story = tell(_config(shard_size=64, tokens=64 * 100_000, split_tokens=64 * 50_000, seed=1))
    shown = _shown(story, width)
    assert len(shown.splitlines()) < 120
    strip = " ".join(line[18:] for line in shown.splitlines() if line.startswith("page "))
    for page in ("0", "49999", "50000", "99999"):
        assert page in strip.split()
    assert "…" in strip
    assert "56 more ranks" in shown
    assert "more runs" in shown


def test_a_chosen_rank_is_shown_alone() -> None:
    story = tell(_config(rank=2))
    rows = [line.split()[:2] for line in _shown(story).splitlines() if " → " in line]
    assert rows == [["2", "2"]]
    assert "3 more ranks" in _shown(story)


def test_the_picture_is_svg_with_every_page_of_a_small_node_and_colours_for_both_schemes() -> None:
    story = tell(_config(split_tokens=512))
    text = to_svg(story)
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert "prefers-color-scheme: dark" in text
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for shape in root.iter(f"{SVG}rect"):
        assert float(shape.get("x", "0")) + float(shape.get("width", "0")) <= width
        assert float(shape.get("y", "0")) + float(shape.get("height", "0")) <= height
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for page in range(15):  # in the strip, and above and below the arrows of backup and load
        assert texts.count(str(page)) >= 5
    assert {"first half", "second half", "rank 0", "rank 3"} <= set(texts)
    pages = [shape for shape in root.iter(f"{SVG}rect") if shape.get("height") == "36"]
    assert [shape.get("class") for shape in pages] == [f"lane{lane}" for lane in story.lanes]
    at = [float(shape.get("x", "0")) for shape in pages]
    brackets = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "half"]
    ends = [float(path.partition("H")[2].partition("v")[0]) for path in brackets]
    assert [sum(x < end for x in at) for end in ends] == [8, 15]


@pytest.mark.parametrize(
    "options", [{"tokens": 64 * 2**20, "shard_size": 64}, {"tokens": 64 * 5000, "seed": 2}, {"rank": 1}]
)
def test_pictures_of_large_nodes_stay_small_and_within_their_frame(options: dict[str, int]) -> None:
    text = to_svg(tell(_config(**{"split_tokens": 640, **options})))
    root = ET.fromstring(text)
    assert len(text) < 80_000
    assert max(float(shape.get("x", "0")) for shape in root.iter(f"{SVG}text")) < float(root.get("width", "0"))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 40, 1000])
@pytest.mark.parametrize("around", [None, 0, 1, 3, 20, 500, 999])
def test_what_is_shown_of_a_long_row_are_its_ends_and_both_sides_of_a_point(length: int, around: int | None) -> None:
    ranges = shown_ranges(length, 8, around)
    points = [point for part in ranges for point in part]
    assert points == sorted(set(points))
    assert {points[0], points[-1]} == {0, length - 1}
    assert len(points) <= length
    if length <= 8:
        assert len(ranges) == 1
    else:
        assert len(points) <= 10  # gaps of one are closed
    assert all(later.start - earlier.stop > 1 for earlier, later in pairwise(ranges))
    if around is not None and 0 < around < length:
        assert {around - 1, around} <= set(points)


def test_long_lists_keep_their_last_item() -> None:
    assert shown_items("abcd", 4) == ("abcd", (), ())
    assert shown_items("abcdef", 4) == ("ab", "cde", "f")


# The command.

BAD_ARGUMENTS = {
    "--layout nonesuch": "--layout nonesuch: unknown; known layouts are identity, cp_shared",
    "--cp-size 0": "'--cp-size': 0 is not in the range 1<=x<=64",
    "--page-size 0": "'--page-size': 0 is not in the range 1<=x<=1024",
    "--tokens 63": "--tokens 63: must be between 64 and 67108864",
    "--tokens 100000000000": "--tokens 100000000000: must be between 64 and 67108864",
    "--rank 4": "--rank 4: must be between 0 and 3",
    "--rank -1": "--rank -1: must be between 0 and 3",
    "--split 500": "--split 500: must be a multiple of --page-size 64 between 0 and 960, the node's tokens",
    "--split 1024": "--split 1024: must be a multiple of --page-size 64 between 0 and 960",
    "--split -64": "--split -64: must be a multiple of --page-size 64 between 0 and 960",
    "--used -1": "'--used': -1 is not in the range",
    "--layout-config '{\"a\": 1}'": "--layout-config: layout 'cp_shared' has no setting 'a'; accepted: none",
    "--layout-config [": "--layout-config must be JSON or @FILE with JSON, got '['",
    f"--svg {'x' * 300}.svg": ".svg: File name too long",
    "--layout-config @none": "--layout-config: cannot read 'none': No such file",
    "--svg out.png": "--svg out.png: must end with .svg",
    "--svg none/out.svg": "--svg none/out.svg: directory none does not exist",
    "--svg a.svg --json ./a.svg": "--json a.svg: is the same file as --svg",
}


@pytest.mark.parametrize(("arguments", "complaint"), BAD_ARGUMENTS.items(), ids=list(BAD_ARGUMENTS))
def test_bad_input_exits_with_2_and_one_line(
    arguments: str,
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *shlex.split(arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvlayouts: error: ")
    assert captured.err.count("\n") == 1
    assert complaint in captured.err
    assert list(tmp_path.iterdir()) == []


def test_picture_and_numbers_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, numbers = tmp_path / "node.svg", tmp_path / "node.json"
    arguments = ["--tokens", "1000", "--split", "512", "--svg", str(picture), "--json", str(numbers)]
    assert main(["explain", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("cp_shared: 4 ranks, 4 lanes, pages of 64 tokens\n")
    assert "\x1b" not in captured.out + captured.err
    story = tell(_config(split_tokens=512))
    assert picture.read_text(encoding="utf-8") == to_svg(story)
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert np.array_equal(found["slot_pages"], story.slot_pages)
    assert [rank["metadata_bytes"] for rank in found["by_rank"]] == [rank.metadata_bytes for rank in story.ranks]
    assert found["halves"][1]["pages"] == 7
