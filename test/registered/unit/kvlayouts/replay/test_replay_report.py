"""The table and the verdict that a replay ends with, and the picture."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from kvlayouts.replay.plot import DEVICE_COLOUR, HOST_COLOUR, write_plot
from kvlayouts.replay.report import print_report, verdict
from kvlayouts.replay.results import LayoutResult

if TYPE_CHECKING:
    from pathlib import Path

    from kvlayouts.common.trace import Trace
    from kvlayouts.replay.config import ReplayConfig

Report = Callable[[Mapping[str, LayoutResult]], str]


@pytest.fixture
def both(identity: LayoutResult, sharded: LayoutResult) -> dict[str, LayoutResult]:
    return {"identity": identity, "cp_shared": sharded}


@pytest.fixture(params=["utf-8"])
def report(request: pytest.FixtureRequest, config: ReplayConfig, trace: Trace) -> Report:
    """Prints results as into a pipe, 80 columns wide, and returns the text."""

    def print_results(results: Mapping[str, LayoutResult]) -> str:
        stream = io.TextIOWrapper(io.BytesIO(), encoding=request.param, errors="strict")
        print_report(Console(file=stream, width=80, force_terminal=False), config, trace, results)
        stream.seek(0)
        return stream.read()

    return print_results


def _rows(text: str) -> dict[str, list[str]]:
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    return {first: rest for first, *rest in lines if rest}


def test_the_table_shows_every_number_of_every_layout(both: dict[str, LayoutResult], report: Report) -> None:
    assert _rows(report(both)) == {
        "identity": ["cp_shared"],
        "requests": ["3", "3"],
        "prompt tokens": ["2,000", "2,000"],
        "served from device": ["200 (10.0 %)", "600 (30.0 %)"],
        "served from host": ["200 (10.0 %)", "400 (20.0 %)"],
        "computed": ["1,600 (80.0 %)", "1,000 (50.0 %)"],
        "hit share": ["20.0 %", "50.0 %"],
        "device capacity, tokens": ["1,024", "2,000"],
        "host capacity, tokens": ["2,000", "4,000"],
        "device KV per rank": ["3.00 GiB", "3.00 GiB"],
        "host KV per rank": ["5.0 MiB", "5.0 MiB"],
        "device to host per rank": ["2.0 KiB", "2.0 KiB"],
        "host to device per rank": ["512 B .. 1.5 KiB", "512 B .. 1.5 KiB"],
        "from peers per rank": ["0 B", "256 B"],
        "page imbalance, max/mean": ["1.250", "1.250"],
        "evicted from device, tokens": ["64", "64"],
        "evicted from host, tokens": ["128", "128"],
        "refused backups": ["5", "5"],
        "write acks per rank": ["1,234", "1,234"],
        "load acks per rank": ["7", "7"],
        "tree digests": ["equal", "equal"],
        "verified tokens": ["4,321", "4,321"],
        "mismatched tokens": ["0", "0"],
        "seconds": ["1.5", "1.5"],
        "requests/s": ["2.0", "2.0"],
    }


def test_the_report_fits_into_80_columns_without_escapes_and_ends_with_the_verdict(
    both: dict[str, LayoutResult], report: Report
) -> None:
    *table, last = report(both).splitlines()
    assert max(len(line) for line in table) <= 80
    assert "\x1b" not in "".join(table) + last
    assert last == verdict(both)


@pytest.mark.parametrize("report", ["ascii"], indirect=True)
def test_the_report_can_be_written_where_only_ascii_is_possible(both: dict[str, LayoutResult], report: Report) -> None:
    assert "served from host" in report(both)


def test_the_headline_tells_what_was_run_and_the_bound(both: dict[str, LayoutResult], report: Report) -> None:
    text = report(both)
    assert "made.jsonl: 3 requests, 2,000 prompt tokens;" in text
    assert "an infinite cache would serve 25.6 %" in text
    assert "2 ranks, mla pool, pages of 64 tokens" in text
    assert "per rank: 1,024 device tokens, 2x that on host" in text


def test_the_verdict_compares_with_the_layout_of_the_least_capacity_whatever_the_order(
    both: dict[str, LayoutResult], identity: LayoutResult, sharded: LayoutResult
) -> None:
    expected = (
        "cp_shared: 2.0x the capacity per rank of identity, hit share 50.0 % vs 20.0 %; "
        "all bytes of 8,642 verified tokens right, ranks agree"
    )
    assert verdict(both) == expected
    assert verdict({"cp_shared": sharded, "identity": identity}) == expected


def test_the_verdict_compares_each_of_three_layouts(both: dict[str, LayoutResult], sharded: LayoutResult) -> None:
    third = replace(sharded, logical_capacity_tokens=512, host_capacity_tokens=1_000)
    text = verdict(both | {"third": third})
    assert text.startswith("identity: 2.0x the capacity per rank of third, hit share 20.0 % vs 50.0 %; cp_shared: 4.0x")


def test_the_verdict_of_a_single_layout_compares_with_nothing(sharded: LayoutResult) -> None:
    assert verdict({"cp_shared": sharded}) == (
        "cp_shared: hit share 50.0 %; all bytes of 4,321 verified tokens right, ranks agree"
    )


def test_the_verdict_names_every_layout_that_failed_and_how(identity: LayoutResult, sharded: LayoutResult) -> None:
    wrong = replace(identity, mismatched_tokens=1_000)
    split = replace(sharded, digests_equal=False, load_acks_per_rank=(7, 8))
    text = verdict({"identity": wrong, "cp_shared": split})
    assert text.endswith(
        "; FAILED: identity: 1,000 of 4,321 verified tokens wrong, cp_shared: ranks have different trees, "
        "cp_shared: ranks have different ack counts"
    )
    assert "agree" not in text
    assert "right" not in text


def test_the_verdict_claims_no_bytes_that_nobody_verified(identity: LayoutResult, sharded: LayoutResult) -> None:
    blind = replace(sharded, verified_tokens=0)
    assert verdict({"cp_shared": blind}).endswith("; no bytes verified, ranks agree")
    assert verdict({"identity": identity, "cp_shared": blind}).endswith(
        "; no bytes verified for cp_shared, no mismatch elsewhere, ranks agree"
    )


def test_a_disagreement_is_visible_in_the_table(report: Report, identity: LayoutResult) -> None:
    rows = _rows(report({"identity": replace(identity, digests_equal=False, write_acks_per_rank=(3, 4))}))
    assert rows["tree digests"] == ["DIFFERENT"]
    assert rows["write acks per rank"] == ["3 .. 4"]


def _decode_png(path: Path) -> tuple[int, int, bytes]:
    """Width, height and the inflated image data of a PNG; fails unless every chunk's checksum is right."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    position, chunks = 8, []
    while position < len(content):
        length, kind = struct.unpack(">I4s", content[position : position + 8])
        body = content[position + 8 : position + 8 + length]
        (checksum,) = struct.unpack(">I", content[position + 8 + length : position + 12 + length])
        assert checksum == zlib.crc32(kind + body)
        chunks.append((kind, body))
        position += 12 + length
    assert (chunks[0][0], chunks[-1][0]) == (b"IHDR", b"IEND")
    width, height = struct.unpack(">II", chunks[0][1][:8])
    return width, height, zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))


def test_the_picture_is_a_whole_png_with_one_panel_per_layout(
    tmp_path: Path, both: dict[str, LayoutResult], identity: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    two.write_text("replaced", encoding="utf-8")
    write_plot(one, config, trace, {"identity": identity})
    write_plot(two, config, trace, both)
    (width, low, _), (same_width, high, pixels) = _decode_png(one), _decode_png(two)
    assert width == same_width > 900
    assert low < high
    assert len(pixels) == high * (4 * width + 1)


def _count_pixels(path: Path, colour: str) -> int:
    from matplotlib.image import imread

    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    pixels = (imread(path)[:, :, :3] * 255).round()
    return int((pixels == wanted).all(axis=2).sum())


@pytest.mark.parametrize(("colour", "field"), [(DEVICE_COLOUR, "device_hit_tokens"), (HOST_COLOUR, "host_hit_tokens")])
def test_the_area_of_a_tier_grows_with_its_share(
    tmp_path: Path, colour: str, field: str, identity: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    small, large = tmp_path / "small.png", tmp_path / "large.png"
    parts: dict[str, Any] = {"device_hit_tokens": 900, "host_hit_tokens": 900, "computed_tokens": 200, "hit_series": ()}
    write_plot(large, config, trace, {"x": replace(identity, **parts)})
    parts |= {field: 300, "computed_tokens": 800}
    write_plot(small, config, trace, {"x": replace(identity, **parts)})
    share = {path: _count_pixels(path, colour) for path in (small, large)}
    # The axis ends at 1.25 times the highest share: 90 % of 1.125 against 60 % of 0.75 high.
    assert share[large] > 1.5 * share[small] > 0


@pytest.mark.filterwarnings("error")
def test_a_run_without_hits_can_be_drawn(
    tmp_path: Path, identity: LayoutResult, config: ReplayConfig, trace: Trace
) -> None:
    cold = replace(identity, device_hit_tokens=0, host_hit_tokens=0, computed_tokens=2000, hit_series=())
    write_plot(tmp_path / "cold.png", config, trace, {"identity": cold})
    _decode_png(tmp_path / "cold.png")
