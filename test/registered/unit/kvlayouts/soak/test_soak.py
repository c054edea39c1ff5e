"""`kvlayouts soak`: real ranks under faults, what it reports, and that broken layouts do not get through."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts import main as command
from kvlayouts.common.errors import InputError, RankError
from kvlayouts.replay.content import KVContent
from kvlayouts.soak.config import FAULTS, SoakConfig, repeat_command
from kvlayouts.soak.driver import run_soak
from kvlayouts.soak.events import SoakRank
from sglang.srt.mem_cache.layouts import PoolKind
from support.caches import CacheSpec, CacheTestCase
from support.groups import Group
from support.replays import FAULTY_LAYOUTS, rank_processes

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), pytest.mark.usefixtures("fork_server")]

CONFIG = SoakConfig(ranks=2, events=4000, check_every=500, seed=3)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, layout="identity", policy="write_back", host_layout="page_first_direct"),
        replace(CONFIG, ranks=3, policy="write_through_selective", eviction_policy="slru", pool="mha"),
        replace(CONFIG, events=1500, pool="dsa", page_size=64),
    ],
    ids=["cp_shared", "identity, write_back", "three ranks, mha", "dsa"],
)
def test_it_finds_nothing_wrong_under_any_fault(config: SoakConfig) -> None:
    result = run_soak(config, lambda *_: None)
    assert result.violations == ()
    assert result.events >= (config.events or 0)
    assert list(result.faults) == list(FAULTS)
    assert all(result.faults[fault] for fault in ("delay", "abort", "slow-rank")), result.faults
    assert result.verified_tokens > 1000
    assert rank_processes() == []


def test_the_same_seed_leads_to_the_same_events_on_every_rank() -> None:
    first, again = (run_soak(CONFIG, lambda *_: None) for _ in range(2))
    assert first.last_events == again.last_events
    assert first.faults == again.faults
    assert run_soak(replace(CONFIG, seed=4), lambda *_: None).last_events != first.last_events


def test_faults_that_are_not_asked_for_are_not_injected(tmp_path: Path) -> None:
    target = tmp_path / "soak.json"
    arguments = ["--ranks", "2", "--events", "1500", "--faults", "abort", "--json", str(target)]
    assert command.main(["soak", *arguments]) == 0
    found = json.loads(target.read_text())
    assert list(found["faults"]) == ["abort"]
    assert {"events", "faults", "checks", "violations", "rss_start_bytes", "rss_end_bytes"} <= set(found)
    assert found["violations"] == 0


@pytest.mark.parametrize(
    "chosen",
    ["swaps_pages", "forgets_a_page", "forgets_if_told --layout-config '{\"forgets\": true}'"],
    ids=lambda chosen: chosen.split()[0],
)
def test_a_layout_that_copies_wrongly_is_a_violation_and_says_how_to_repeat_it(
    chosen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FAULTY_LAYOUTS))
    arguments = f"--ranks 2 --events 20000 --check-every 500 --layout {chosen} --seed 3"
    assert command.main(["soak", *shlex.split(arguments)]) == 1
    shown = capsys.readouterr().out
    assert "wrong bytes" in shown
    assert f"again with: kvlayouts soak --ranks 2 --layout {chosen} --pool mla" in " ".join(shown.split())


def test_a_rank_that_raises_is_named_with_the_event_and_the_command_that_leads_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FAULTY_LAYOUTS))
    arguments = ["--ranks", "2", "--events", "4000", "--layout", "breaks_on_rank_1", "--seed", "3"]
    assert command.main(["soak", *arguments]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    found = re.search(
        r"rank 1 of 2 failed: soak at event (\d+), after event .*; again with: (kvlayouts soak .*?): ", line
    )
    assert found is not None, line
    assert line.endswith("ZeroDivisionError: three backups are enough")
    assert "--layout breaks_on_rank_1" in found[2]
    assert f"--events {int(found[1]) + 1}" in found[2]
    assert rank_processes() == []


def test_ranks_that_place_pages_differently_fail_or_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAULTY_LAYOUTS))
    try:
        result = run_soak(replace(CONFIG, layout="deals_by_rank"), lambda *_: None, peer_seconds=10.0)
    except RankError as error:
        assert "rank" in str(error)  # noqa: PT017  # either way it must not pass
    else:
        assert any("differ" in violation for violation in result.violations)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--faults delay,thunder", "--faults thunder: must be none, or among delay,"),
        ("--faults none,delay", "--faults none: must be none, or among delay,"),
        ("--faults delay,abort,delay", "--faults delay: given twice; each kind is named once"),
        ("--minutes 0", "--minutes 0: must be above 0"),
        ("--minutes 1 --events 5", "--minutes 1: must not be given together with --events 5"),
        ("--layout-config {", "--layout-config must be JSON or @FILE with JSON, got '{': "),
        ('--layout-config {"a":1}', "--layout cp_shared: --layout-config: layout 'cp_shared' has no setting 'a'"),
        ("--layout zigzag", "--layout zigzag: unknown; known layouts are identity, cp_shared"),
        ("--pool dsa --page-size 16", "--page-size 16: must be 64 with --pool dsa"),
        ("--json /nowhere/soak.json", "--json /nowhere/soak.json: directory /nowhere does not exist"),
        ("--ranks 0", "--ranks"),
    ],
)
def test_bad_input_is_one_line_that_names_the_flag(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["soak", *arguments.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that cannot be written")
def test_figures_that_cannot_be_written_are_an_error_after_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["soak", "--ranks", "1", "--events", "50", "--json", "/dev/full"]) == 1
    shown = capsys.readouterr()
    assert "violations" in shown.out
    assert "--json /dev/full: cannot be written: No space left on device" in shown.err


class TestSlowRank(CacheTestCase):
    def test_one_rank_naps_at_a_time_whatever_the_layout(self) -> None:
        for layout in ("identity", "cp_shared"):
            with self.subTest(layout=layout):
                config = replace(CONFIG, layout=layout, faults=("slow-rank",))
                group = Group(CacheSpec(layout=layout, ranks=2, pool=PoolKind.MHA))
                soaks = [
                    SoakRank(config, rank.cache, KVContent(rank.device_pool, page_size=4, seed=0), rank.number)
                    for rank in group.ranks
                ]
                naps = [[self._naps(soak) for soak in soaks] for _ in range(40)]
                self.assertEqual({sum(at_once) for at_once in naps}, {1})
                self.assertEqual({at_once.index(1) for at_once in naps}, {0, 1})

    def _naps(self, soak: SoakRank) -> int:
        with patch("time.sleep") as sleep:
            soak._nap()  # noqa: SLF001  # the fault itself, without the events around it
        return sleep.call_count


def test_the_command_that_repeats_a_soak_names_every_option_that_matters() -> None:
    text = repeat_command(replace(CONFIG, faults=("delay", "reset")), 1234)
    for part in (
        "--ranks 2",
        "--page-size 4",
        "--faults delay,reset",
        "--check-every 500",
        "--seed 3",
        "--events 1234",
    ):
        assert part in text
    with pytest.raises(InputError, match="--ranks 0"):
        replace(CONFIG, ranks=0)
