"""draft"""

from __future__ import annotations

import random
import unittest
from dataclasses import replace
from typing import TYPE_CHECKING

import tempfile
from pathlib import Path
import torch
import torch.distributed as dist
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.cpu.support import install_cpu_support
from sglang.srt.mem_cache.layouts import PoolKind

from .identity_content import totals, tree
from .identity_operations import Kind, Operation, finish_all, perform, random_operations
from .identity_reference import Case, both_sides
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

if TYPE_CHECKING:
    from collections.abc import Sequence

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

NO_PRESSURE = Case(corrected=False, device_pages=512, host_ratio=2.0, symbols=3, depth=4)


def run(case: Case, operations: Sequence[Operation]) -> None:
    with both_sides(case) as (ours, theirs):
        for step, operation in enumerate(operations):
            where = f"step {step}: {operation}"
            assert perform(ours, operation) == perform(theirs, operation), where
            assert totals(ours) == totals(theirs), where
            assert tree(ours) == tree(theirs), where


class TestIdentityMatchesSGLang(CustomTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        install_cpu_support()
        cls.folder = tempfile.TemporaryDirectory()
        store = dist.FileStore(str(Path(cls.folder.name) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    @classmethod
    def tearDownClass(cls) -> None:
        dist.destroy_process_group()
        cls.folder.cleanup()

    def test_x(self):
        import time, os
        n = int(os.environ.get("N", "400"))
        for pressure in (False, True):
          for pool, page in ((PoolKind.MLA, 16), (PoolKind.MHA, 4), (PoolKind.MLA, 1), (PoolKind.DSA, 64)):
            for policy in os.environ.get("P","write_through write_through_selective write_back").split():
                for ev in os.environ.get("E","lru lfu fifo mru filo priority slru").split():
                    base = Case() if pressure else NO_PRESSURE
                    if pool is PoolKind.DSA and not pressure: base = replace(base, device_pages=128, depth=3, symbols=3)
                    if page == 1: base = replace(base, depth=16, device_pages=48 if pressure else 5000, symbols=3)
                    case = replace(base, pool=pool, page_size=page, write_policy=policy, eviction=ev, lanes=ev in ("lfu","mru"), mem_layout="layer_first" if ev < "m" else "page_first_direct")
                    t = time.time()
                    try:
                        run(case, random_operations(random.Random(int(os.environ.get("S","1"))), case, n))
                        print("ok", case.pool, page, policy, ev, pressure, time.time() - t, flush=True)
                    except Exception as e:
                        print("FAIL", case, repr(e)[:1500], flush=True)
                        if os.environ.get("RAISE"): raise
