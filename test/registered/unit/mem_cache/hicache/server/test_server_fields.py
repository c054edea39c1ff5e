"""Every field of SGLang's server arguments has been looked at, on the installed release, and means what we reckon."""

from __future__ import annotations

import argparse
import re
import unittest
from array import array
from collections import Counter
from importlib import import_module
from typing import Any
from unittest import mock

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_eviction_strategy
from sglang.srt.runtime_context import get_memory
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

from sglang.srt.mem_cache.hicache.host.memory import HostBudget
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.seam import server_flags
from sglang.srt.mem_cache.hicache.server import fields
from sglang.srt.mem_cache.hicache.server.args import shard_size
from sglang.srt.mem_cache.hicache.server.fields import COMMON, NEWER, OLDER, Verdict
from sglang.srt.mem_cache.hicache.server.refusals import RULES, applying
from sglang.srt.mem_cache.hicache.server.rule import Scope
from sglang.srt.mem_cache.hicache.server.values import refuse_values
from sglang.srt.mem_cache.hicache.settings import HiCacheSettings
from sglang.srt.mem_cache.hicache.tree.node import LayoutTreeNode
from sglang.srt.mem_cache.layouts import LayoutConfigError
from support.server_cases import CASES, is_known, make_facts, sglang_args

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

# Judged by what SGLang makes of them, which a case states as a fact.
JUDGED_BY_FACTS = {"cuda_graph_config", "cuda_graph_backend_decode", "cuda_graph_backend_prefill"}
GROUPS = "several attention groups (--attn-dp-size, or --dp-size with --enable-dp-attention)"
ON_ONE_SIDE = {**fields.NEWER_FIELDS, **fields.OLDER_FIELDS}


class TestFields(CustomTestCase):
    def test_every_field_of_the_installed_release_has_one_row_and_no_row_is_left_over(self) -> None:
        rows = Counter((*COMMON, *NEWER, *OLDER))
        self.assertEqual([name for name, count in rows.items() if count > 1], [])
        side = NEWER if server_flags.FIELDS & set(NEWER) else OLDER
        self.assertEqual(server_flags.FIELDS - {*COMMON, *side}, set())
        self.assertEqual({*COMMON, *side} - server_flags.FIELDS, set())

    def test_a_field_that_is_refused_has_a_row_that_refuses_a_server_with_it(self) -> None:
        refused = {
            name
            for name, row in {**fields.FIELDS, **ON_ONE_SIDE}.items()
            if row.verdict is Verdict.REFUSED and name not in JUDGED_BY_FACTS
        }
        seen = {name for case_fields, _ in CASES.values() for name in case_fields} | {"attn_dp_size"}
        warned = {name for name, row in fields.FIELDS.items() if row.verdict is Verdict.WARNED}
        self.assertEqual(refused - seen, set())
        self.assertEqual(seen - refused - warned, set())

    def test_what_hangs_on_a_refused_setting_names_a_row_of_the_table(self) -> None:
        settings = {rule.setting for rule in RULES}
        for groups in (fields.WITHOUT_EFFECT, fields.NEWER_WITHOUT_EFFECT, fields.OLDER_WITHOUT_EFFECT):
            self.assertEqual(groups.keys() - settings, set())

    def test_every_row_gives_a_reason_of_one_line(self) -> None:
        for name, row in {**fields.FIELDS, **ON_ONE_SIDE}.items():
            self.assertRegex(row.why, r"\A[^\n]{2,100}\Z", name)


class TestValues(CustomTestCase):
    def test_an_eviction_policy_of_this_release_is_refused_or_ranks_our_nodes(self) -> None:
        node: LayoutTreeNode[Any] = LayoutTreeNode(node_id=1, tick=1, key=RadixKey(array("q", range(4))))
        refused = set()
        for policy in sorted(_choices("radix_eviction_policy")):
            facts = make_facts({"radix_eviction_policy": policy}, {})
            if any(applying(facts, {Scope.ANY})):
                refused.add(policy)
            else:
                get_eviction_strategy(policy, {}).get_priority(node)
        self.assertLessEqual(refused, {"tlru"})

    def test_the_values_that_a_flag_can_have_are_those_that_were_looked_at(self) -> None:
        for name, looked_at in (
            ("hicache_write_policy", {"write_back", "write_through", "write_through_selective"}),
            ("hicache_io_backend", {"direct", "kernel", "kernel_ascend"}),
            (
                "hicache_mem_layout",
                {"layer_first", "page_first", "page_first_direct", "page_first_kv_split", "page_head"},
            ),
            ("hicache_host_memory_mode", {"cache", "buffer_only"}),
            (
                "kv_cache_dtype",
                {"auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16", "fp4_e2m1"},
            ),
        ):
            self.assertLessEqual(_choices(name), looked_at, name)


class TestAttentionGroups(CustomTestCase):
    def test_shard_groups_are_counted_as_sglang_divides_ranks(self) -> None:
        for asked, expected in (
            ({"tp_size": 8}, 8),
            ({"tp_size": 8, "attn_cp_size": 4}, 4),
            ({"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}, 2),
            ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 2),
            ({"tp_size": 4, "attn_dp_size": 2}, 2),
            ({"tp_size": 4, "dp_size": 2}, 4),
            ({"tp_size": 1}, 1),
        ):
            if not is_known(asked):
                continue
            with self.subTest(asked):
                args = make_facts(asked, {}).args
                self.assertEqual(shard_size(args), expected)
                if args.attn_cp_size == 1:
                    self.assertEqual(_sglangs_attention_tp(args), expected)

    def test_several_groups_are_refused_with_shared_pages_however_they_are_asked_for(self) -> None:
        asked: dict[str, Any]
        for asked in ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, {"tp_size": 4, "attn_dp_size": 2}):
            if is_known(asked):
                facts = make_facts(asked, {})
                self.assertEqual([rule.setting for rule in applying(facts, set(Scope))], [GROUPS])
                self.assertEqual(list(applying(facts, {Scope.ANY})), [])


class TestHostMemoryFraction(CustomTestCase):
    def test_it_is_judged_in_the_parent(self) -> None:
        if not server_flags.SIZED_BY_FRACTION:
            self.assertIsNone(server_flags.host_memory_fraction(object()))
            return
        facts = make_facts({"hicache_ratio": None}, {})
        self.assertEqual((facts.args.hicache_ratio, server_flags.host_memory_fraction(facts.args)), (2.0, 0.8))
        refuse_values(facts)
        with (
            mock.patch("sglang.srt.mem_cache.hicache.server.values.host_memory_fraction", return_value=True),
            self.assertRaisesRegex(LayoutConfigError, "^--hicache-host-memory-fraction True: must be above 0 and at"),
        ):
            refuse_values(facts)

    def test_ranks_are_judged_by_what_sglang_set_aside_before_any_of_them_took_its_share(self) -> None:
        with standalone_runtime(page_size=64):
            self.assertIsNotNone(get_memory().hicache_ratio)
            if not server_flags.SIZED_BY_FRACTION:
                self.assertIsNone(server_flags.host_budget())
                return
            with import_module("sglang.srt.mem_cache.pool_host.base").host_memory_budget_scope(12345):
                self.assertEqual(
                    HiCacheSettings.from_server().host_budget, HostBudget(fraction=0.8, machine_bytes=12345)
                )

    def test_a_size_of_the_users_own_leaves_no_fraction(self) -> None:
        for sized in ({"hicache_ratio": 3.0}, {"hicache_ratio": None, "hicache_size": 1}):
            with self.subTest(sized):
                self.assertIsNone(server_flags.host_memory_fraction(make_facts(sized, {}).args))


def _choices(name: str) -> set[str]:
    """What SGLang's parser accepts for a flag, from the line that it prints about it."""
    parser = argparse.ArgumentParser(prog="x")
    sglang_args.ServerArgs.add_cli_args(parser)
    shown = re.search(rf"\[--{name.replace('_', '-')} {{([^}}]*)}}\]", "".join(parser.format_usage().split("\n")))
    assert shown is not None, f"--{name.replace('_', '-')} has no choices"
    return set(shown[1].replace(" ", "").split(","))


def _sglangs_attention_tp(args: Any) -> int:  # noqa: ANN401  # a view of ServerArgs
    """The size of an attention-TP group by SGLang's own arithmetic."""
    attention: Any = import_module("sglang.srt.layers.dp_attention")  # other parameters on other releases
    divide = attention.compute_dp_attention_world_info
    if "attn_dp_size" in server_flags.FIELDS:
        return int(divide(0, args.tp_size, args.attn_dp_size, args.attn_cp_size)[1])
    return int(divide(args.enable_dp_attention, 0, args.tp_size, args.dp_size, args.attn_cp_size)[1])


if __name__ == "__main__":
    unittest.main()
