"""One machine's memory is counted once, and every size that a server's parent can judge is judged there."""

from __future__ import annotations

import json
import tempfile
import unittest
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.hicache.device.geometry import DsaGeometry
from sglang.srt.mem_cache.hicache.device.pools import build_device_pool, bytes_of
from sglang.srt.mem_cache.hicache.host import memory as host_memory
from sglang.srt.mem_cache.hicache.host.memory import (
    CPU_RESERVE_BYTES,
    HostBudget,
    available_bytes,
    ranks_on_this_machine,
)
from sglang.srt.mem_cache.hicache.host.pools import build_host_pool, host_bytes_of
from sglang.srt.mem_cache.hicache.host.sizes import device_pool_bytes, host_pages, host_pool_bytes
from sglang.srt.mem_cache.hicache.server import args as server_args
from sglang.srt.mem_cache.hicache.server.values import refuse_values
from sglang.srt.mem_cache.layouts import LayoutConfigError, PoolKind
from support.caches import GEOMETRIES, CacheTestCase
from support.server_cases import is_known

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

_sglang: Any = import_module("sglang.srt.server_args")  # records of 600 fields: not in our stubs
GB = 10**9
PAGE, PAGES, LAYERS = 64, 6, 3
MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "torch_dtype": "bfloat16",
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 64,
}
MLA = {**MODEL, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
DSA = {**MODEL, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}


def left(free_bytes: int) -> Any:  # noqa: ANN401  # a patch
    """A machine that has `free_bytes` beyond what stays free on a CPU. All else is real."""
    return mock.patch.object(host_memory, "available_bytes", return_value=free_bytes + CPU_RESERVE_BYTES)


class TestOneMachine(CacheTestCase):
    def test_the_bytes_of_a_pool_are_those_that_sglang_takes(self) -> None:
        for geometry in (*GEOMETRIES.values(), DsaGeometry()):
            with self.subTest(geometry):
                device = build_device_pool(
                    geometry.kind, tokens=PAGES * PAGE, page_size=PAGE, layers=LAYERS, geometry=geometry
                )
                slot = (geometry.kv_bytes + geometry.index_bytes) * LAYERS
                self.assertEqual(bytes_of(device), device_pool_bytes(pages=PAGES, page_size=PAGE, slot_bytes=slot))
                host = build_host_pool(device, ratio=1.5, page_size=PAGE, mem_layout="layer_first")
                kv_bytes = geometry.kv_bytes * LAYERS
                pages = host_pages(
                    ratio=1.5, gigabytes=0, device_tokens=PAGES * PAGE, page_size=PAGE, kv_slot_bytes=kv_bytes
                )
                expected = host_pool_bytes(
                    pages=pages,
                    page_size=PAGE,
                    kv_slot_bytes=kv_bytes,
                    index_slot_bytes=geometry.index_bytes * LAYERS,
                )
                self.assertEqual(host_bytes_of(host), expected)

    def test_a_rank_counts_its_index_and_its_peers_before_it_takes_anything(self) -> None:
        device = build_device_pool(PoolKind.DSA, tokens=PAGES * PAGE, page_size=PAGE, layers=LAYERS)
        alone = host_bytes_of(build_host_pool(device, ratio=2.0, page_size=PAGE, mem_layout="layer_first"))
        for ranks in (1, 4):
            with left(ranks * alone):
                build_host_pool(device, ratio=2.0, page_size=PAGE, mem_layout="layer_first", ranks_on_machine=ranks)
            with (
                left(ranks * alone - 1),
                mock.patch("sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost.init_kv_buffer") as taken,
                self.assertRaisesRegex(LayoutConfigError, "^--hicache-ratio 2: .* for KV and index .* that are left"),
            ):
                build_host_pool(device, ratio=2.0, page_size=PAGE, mem_layout="layer_first", ranks_on_machine=ranks)
            taken.assert_not_called()

    def test_a_budget_is_what_counts_where_it_made_the_ratio(self) -> None:
        device = build_device_pool(PoolKind.MLA, tokens=PAGES * PAGE, page_size=PAGE, layers=LAYERS)
        alone = host_bytes_of(build_host_pool(device, ratio=2.0, page_size=PAGE, mem_layout="layer_first"))
        budget = HostBudget(fraction=0.8, machine_bytes=2 * alone)

        def build(budget: HostBudget, ratio: float = 2.0) -> None:
            build_host_pool(
                device, ratio=ratio, page_size=PAGE, mem_layout="layer_first", ranks_on_machine=2, budget=budget
            )

        with left(0):  # what earlier ranks took is not missing to later ones
            build(budget)
        with self.assertRaisesRegex(LayoutConfigError, r"^--hicache-host-memory-fraction 0\.8: 2 ranks .* at most"):
            build(replace(budget, machine_bytes=2 * alone - 1))
        with self.assertRaisesRegex(LayoutConfigError, r"^--hicache-host-memory-fraction 0\.8: .*give --hicache-size"):
            build(budget, ratio=0.01)

    def test_a_size_that_leaves_no_page_is_refused_with_one_that_leaves_one(self) -> None:
        device = build_device_pool(PoolKind.MLA, tokens=PAGES * PAGE, page_size=PAGE, layers=LAYERS)
        page_gb = PAGE * LAYERS * 576 * 2 / GB
        with self.assertRaisesRegex(LayoutConfigError, r"^--hicache-ratio 0\.16: leaves no host page.*least 0\.167$"):
            build_host_pool(device, ratio=0.16, page_size=PAGE, mem_layout="layer_first")
        build_host_pool(device, ratio=0.167, page_size=PAGE, mem_layout="layer_first")
        with self.assertRaisesRegex(LayoutConfigError, r"^--hicache-size 0\.000110592: leaves no host page"):
            build_host_pool(device, size_gb=page_gb / 2, page_size=PAGE, mem_layout="layer_first")

    def test_a_bound_that_is_told_is_accepted_also_where_three_digits_are_not_enough(self) -> None:
        sizes: dict[str, Any] = {"device_tokens": 1250, "page_size": 3, "kv_slot_bytes": 1}
        with self.assertRaisesRegex(LayoutConfigError, r"must be at least 0\.00241$"):
            host_pages(ratio=0.0024, gigabytes=0, **sizes)  # exactly the 3 tokens of a page, but not in binary
        self.assertEqual(host_pages(ratio=0.00241, gigabytes=0, **sizes), 1)

    def test_ranks_of_one_machine_are_those_of_all_data_parallel_copies_over_the_nodes(self) -> None:
        for sizes, expected in (
            ((8, 1, 1, False, 1), 8),
            ((16, 2, 1, False, 4), 8),
            ((2, 1, 4, False, 1), 8),  # copies, each with its own group: SGLang counts 2
            ((8, 1, 8, True, 1), 8),
        ):
            names = ("tp_size", "pp_size", "dp_size", "enable_dp_attention", "nnodes")
            self.assertEqual(ranks_on_this_machine(SimpleNamespace(**dict(zip(names, sizes, strict=True)))), expected)


class TestControlGroups(unittest.TestCase):
    @override
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def _available(self, own: str, files: dict[str, str]) -> int:
        for name, text in files.items():
            file = self.folder / "groups" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        (self.folder / "own").write_text(own, encoding="utf-8")
        with (
            mock.patch.object(host_memory, "CONTROL_GROUPS", self.folder / "groups"),
            mock.patch.object(host_memory, "OWN_CONTROL_GROUPS", self.folder / "own"),
            mock.patch("psutil.virtual_memory", return_value=SimpleNamespace(available=1000)),
        ):
            return available_bytes()

    def test_the_least_of_machine_and_groups_counts_and_cached_files_are_free(self) -> None:
        files = {
            "a/memory.max": "900",
            "a/memory.current": "500",
            "a/memory.stat": "anon 1\ninactive_file 100\n",
            "a/b/memory.max": "max",
            "a/b/memory.current": "1",
            "a/b/memory.stat": "inactive_file 0\n",
        }
        self.assertEqual(self._available("0::/a/b\n", files), 500)

    def test_the_first_version_of_groups_counts_too(self) -> None:
        files = {
            "memory/c/memory.limit_in_bytes": "700",
            "memory/c/memory.usage_in_bytes": "650",
            "memory/c/memory.stat": "inactive_file 9\ntotal_inactive_file 50\n",
        }
        self.assertEqual(self._available("4:memory:/c\n3:cpuset:/c\n0::/\n", files), 100)

    def test_a_group_that_is_not_mounted_here_falls_back_to_the_root(self) -> None:
        files = {"memory.max": "300", "memory.current": "100", "memory.stat": ""}
        self.assertEqual(self._available("0::/kubepods/pod1\n", files), 200)

    def test_no_limit_is_what_the_machine_has(self) -> None:
        self.assertEqual(self._available("0::/a\n", {}), 1000)


class TestInTheParent(CacheTestCase):
    """SGLang's real resolution and check of a real model's configuration, up to where processes would be spawned."""

    folder: ClassVar[str]

    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        for name, config in (("mla", MLA), ("dsa", DSA)):
            path = Path(cls.folder, name)
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def _record(self, model: str, **fields: Any) -> Any:  # noqa: ANN401  # fields of ServerArgs, and one
        good = {
            "model_path": str(Path(self.folder, model)),
            "device": "cpu",
            "enable_hierarchical_cache": True,
            "hicache_io_backend": "direct",
            "page_size": PAGE,
            "tp_size": 2,
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "kv_layout_strategy": "cp_shared",
        }
        return server_args.keyword_factory(_sglang.ServerArgs)(**{**good, **fields})

    def _check(self, **fields: Any) -> None:  # noqa: ANN401
        record = self._record("mla", **fields)
        record.resolve_once()
        record.check_server_args()

    def test_what_cannot_be_is_refused_in_one_line_with_flag_value_and_what_is_accepted(self) -> None:
        nan, inf = float("nan"), float("inf")
        for field, flag, values in (
            ("hicache_ratio", "--hicache-ratio", (0.0, -1.0, nan, inf, -inf, 1e9, "2")),
            ("hicache_size", "--hicache-size", (-3, nan, inf, True, 10**400, 1e300)),
            ("page_size", "--page-size", (0, -1, 1.5)),
            ("tp_size", "--tp-size", (0, -2)),
            ("max_total_tokens", f"--max-total-tokens with --page-size {PAGE}:", (0, -1, 10, 63, 10**400)),
            ("hicache_write_policy", "--hicache-write-policy", ("write_around",)),
            ("hicache_mem_layout", "--hicache-io-backend", ("page_head", "page_first_kv_split", "rows")),
            ("radix_eviction_policy", "--radix-eviction-policy", ("random",)),
            ("radix_eviction_policy_config", "--radix-eviction-policy-config", ({"x": 1}, [1], {"x": nan})),
        ):
            for value in values:
                with self.subTest(field=field, value=value):
                    with self.assertRaises(LayoutConfigError) as refused:
                        self._check(**{field: value})
                    line = str(refused.exception)
                    self.assertTrue(line.startswith(flag), line)
                    self.assertRegex(line, "must|needs|Supported")
                    self.assertNotIn("\n", line)

    def test_parameters_of_an_eviction_policy_are_whole_and_positive(self) -> None:
        for threshold in (0, -1, float("nan"), "a", 1.5):
            with self.assertRaisesRegex(LayoutConfigError, f"protected_threshold {threshold}: must be a whole number"):
                self._check(
                    radix_eviction_policy="slru", radix_eviction_policy_config={"protected_threshold": threshold}
                )
        self._check(radix_eviction_policy="slru", radix_eviction_policy_config={"protected_threshold": 3})

    def test_attention_groups_and_sessions_are_refused_before_the_scheduler_would(self) -> None:
        groups: tuple[dict[str, Any], ...] = ({"dp_size": 2, "enable_dp_attention": True}, {"attn_dp_size": 2})
        for fields in filter(is_known, groups):
            with self.assertRaisesRegex(LayoutConfigError, "cp_shared does not .* several attention groups"):
                self._check(tp_size=4, **fields)
        with self.assertRaisesRegex(LayoutConfigError, "cp_shared does not .* --enable-streaming-session"):
            self._check(enable_streaming_session=True)
        with (
            mock.patch.object(server_args, "post_capture_kv_sizing_planned", return_value=True),
            self.assertRaisesRegex(LayoutConfigError, "does not .* SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ):
            self._check()

    def test_what_can_be_is_accepted(self) -> None:
        for fields in (
            {},
            {"hicache_ratio": 0.1},
            {"max_total_tokens": 640, "hicache_ratio": 0.1},
            {"hicache_mem_layout": "layer_first"},
        ):
            self._check(**fields)

    def test_a_ratio_that_leaves_no_page_of_the_tokens_asked_for_is_refused(self) -> None:
        with self.assertRaisesRegex(LayoutConfigError, r"^--hicache-ratio 0\.1: leaves no host page .* least 0\.2$"):
            self._check(max_total_tokens=320, hicache_ratio=0.1)

    def test_all_ranks_of_the_machine_are_counted(self) -> None:
        with left(20 * GB):
            self._check(hicache_size=10)
            with self.assertRaisesRegex(
                LayoutConfigError,
                r"^--hicache-size 11: 2 ranks on this machine need 22 GB of host memory for KV \(11 GB a rank\); "
                r"must be at most the 20 GB that are left, with 1\.074 GB kept free$",
            ):
                self._check(hicache_size=11)

    def test_the_index_of_a_dsa_model_is_counted(self) -> None:
        # SGLang's resolution of a DSA model asks for a GPU, so its record is read as the user gave it.
        record = self._record("dsa", hicache_size=500, hicache_mem_layout="layer_first", hicache_ratio=2.0)
        facts = server_args.server_facts(record)
        self.assertEqual(facts.model.index_share, 132 / 1152)
        with left(1000 * GB):
            with self.assertRaisesRegex(LayoutConfigError, "^--hicache-size 500: 2 ranks .* 1,115 GB .*KV and index"):
                refuse_values(facts)
            refuse_values(replace(facts, model=replace(facts.model, index_share=0.0)))
        packed = server_args.server_facts(self._record("dsa", kv_cache_dtype="fp8_e4m3"))
        self.assertEqual(packed.model.index_share, 132 / 656)


if __name__ == "__main__":
    unittest.main()
