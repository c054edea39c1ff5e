"""A replay has the same answers, trees and JSON beside each supported release of SGLang: all but its times.

One environment has one release. So a digest of what both found is written down here, for a slice of the shipped trace
that needs both tiers, and each release has to find it again.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest
from sglang.test.ci.ci_register import register_cpu_ci

from kvlayouts.common.trace import DEFAULT_TRACE, read_trace
from kvlayouts.replay.config import ReplayConfig
from kvlayouts.replay.driver import run_replay
from kvlayouts.replay.results import to_json

if TYPE_CHECKING:
    from kvlayouts.common.values import PoolName

register_cpu_ci(est_time=30, suite="base-a-test-cpu")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), pytest.mark.usefixtures("fork_server")]

TIMES = ("seconds", "requests_per_second")
EXPECTED: dict[PoolName, str] = {"mla": "b0a31dd1b16106ec", "mha": "979057ebed62a89a", "dsa": "ac9669ff4690e365"}
"""By pool. Change them together with what a tree decides, and only to what both releases find."""


@pytest.mark.parametrize("pool", EXPECTED)
def test_all_but_the_times_is_the_same_on_each_release(pool: PoolName) -> None:
    config = ReplayConfig(
        layouts=("identity", "cp_shared"),
        cp_size=2,
        pool=pool,
        page_size=64 if pool == "dsa" else 8,
        block_tokens=8,
        device_tokens=8192,
        host_ratio=6.0,
    )
    trace = read_trace(DEFAULT_TRACE, block_tokens=config.block_tokens, max_requests=310)
    found: dict[str, Any] = to_json(config, trace, run_replay(config, trace, lambda *_: None))
    for name, layout in found["layouts"].items():
        assert layout["host_hit_tokens"] > 0, f"{name}: the slice was meant to need the host"
        for time in TIMES:
            del layout[time]
    text = json.dumps(found, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == EXPECTED[pool], text
