"""Without one of our flags SGLang serves as it does alone: its tree, its tree's core, and every function we hook."""

from __future__ import annotations

import argparse
import dataclasses
import unittest
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.registry import get_radix_cache_factory
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_memory
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase
from typing_extensions import override

from sglang.srt.mem_cache.hicache.device.pools import build_device_pool
from sglang.srt.mem_cache.hicache.runtime import standalone_runtime
from sglang.srt.mem_cache.hicache.server import args as server_args
from sglang.srt.mem_cache.hicache.server import batches, startup
from sglang.srt.mem_cache.hicache.server.choice import RADIX_BACKEND, choice_of
from sglang.srt.mem_cache.hicache.server.hook_table import HOOKS
from sglang.srt.mem_cache.layouts import PoolKind

if TYPE_CHECKING:
    from collections.abc import Callable

from support.server_cases import sglang_args

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

OURS = "sglang.srt.mem_cache.hicache."
PAGE = 16
RECORD = sglang_args.ServerArgs(model_path="none")
ELSEWHERE: Any = SimpleNamespace(server_args=RECORD)
BATCH = SimpleNamespace(
    tree_cache=SimpleNamespace(token_to_kv_pool_allocator=object()), token_to_kv_pool=object(), out_cache_loc=object()
)
# What SGLang calls each hooked function with, as far as a hook looks before it knows that it has nothing to do.
CALLS: dict[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]] = {
    server_args.read_options: ((sglang_args.ServerArgs, argparse.Namespace()), {}),
    server_args.check: ((RECORD,), {}),
    startup.build_pool: ((ELSEWHERE,), {"sizes": object()}),
    startup.build_allocator: ((ELSEWHERE,), {"sizes": object(), "token_to_kv_pool": object(), "other": object()}),
    batches.extend_batch: ((BATCH,), {}),
    batches.decode_batch: ((SimpleNamespace(**vars(BATCH), seq_lens_cpu=object()), 1), {}),
    batches.begin_forward: ((SimpleNamespace(token_to_kv_pool=object()), BATCH), {"other": object()}),
}
# They ask for a pool, an allocator or a cache of ours in their first line, or only add options to the parser.
AFTERWARDS = {"add_options", "report_logical_capacity", "report_host_tokens"}
OF_AN_INDEXER = {"store_keys", "prepare_and_store_keys"}


class TestHooks(CustomTestCase):
    def test_each_function_that_we_wrap_is_called_as_it_was_and_its_result_handed_on(self) -> None:
        around = {hook.function for hook in HOOKS if hook.kind is HookType.AROUND}
        self.assertEqual({f.__name__ for f in around}, {f.__name__ for f in CALLS} | OF_AN_INDEXER)
        for hook, (positional, named) in CALLS.items():
            with self.subTest(hook.__name__):
                seen: list[object] = []
                result = RECORD

                def original(*given: object, _seen: list[object] = seen, **names: object) -> object:
                    _seen.append((given, names))
                    return RECORD

                self.assertIs(hook(original, *positional, **named), None if hook is server_args.check else result)
                self.assertEqual(seen, [(positional, named)])
        self.assertIsNone(choice_of(RECORD))

    def test_what_runs_after_a_function_looks_for_a_part_of_ours(self) -> None:
        self.assertEqual({hook.function.__name__ for hook in HOOKS if hook.kind is HookType.AFTER}, AFTERWARDS)
        result: Any = SimpleNamespace(token_to_kv_pool_allocator=object())
        self.assertIs(startup.report_logical_capacity(result, ELSEWHERE), result)


class TestTree(CustomTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()

    def test_the_tree_and_its_core_are_sglangs_own_choice(self) -> None:
        with standalone_runtime(page_size=PAGE, enable_hierarchical_cache=False):
            memory: Any = get_memory()
            self.assertIsNone(memory.radix_cache_backend)
            params = _params()
            tree = _create_tree(params)
            self.assertFalse(type(tree).__module__.startswith(OURS), type(tree))
            core = getattr(tree, "tree_core", None)
            self.assertIsNotNone(core)
            registry: Any = import_module("sglang.srt.mem_cache.unified_cache.tree_core_registry")
            choose = getattr(registry, "select_tree_core_backend", lambda _params: "python")  # once the only default
            backend = choose(params)
            self.assertEqual(type(core).__name__, {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}[backend])

    def test_with_a_flag_it_is_ours(self) -> None:
        record = server_args.keyword_factory(sglang_args.ServerArgs)(model_path="none", kv_layout_strategy="identity")
        self.assertEqual(record.radix_cache_backend, RADIX_BACKEND)
        self.assertIs(get_radix_cache_factory(RADIX_BACKEND), startup.build_cache)


def _params() -> Any:  # noqa: ANN401  # CacheInitParams, some of whose fields differ
    pool = build_device_pool(PoolKind.MLA, tokens=4 * PAGE, page_size=PAGE, layers=1)
    allocator_class: Any = import_module("sglang.srt.mem_cache.allocator").PagedTokenToKVPoolAllocator
    allocator = allocator_class(4 * PAGE, PAGE, pool.dtype, "cpu", pool, need_sort=False)
    parameters: Any = CacheInitParams
    return parameters(
        disable=False, req_to_token_pool=SimpleNamespace(), token_to_kv_pool_allocator=allocator, page_size=PAGE
    )


def _create_tree(params: Any) -> Any:  # noqa: ANN401
    """By SGLang's own chain of choices."""
    registry: Any = import_module("sglang.srt.mem_cache.registry")
    fields = dict.fromkeys(field.name for field in dataclasses.fields(registry.TreeCacheBuildContext))
    said = {"params": params, "is_hybrid_swa": False, "is_hybrid_ssm": False, "disable_radix_cache": False}
    return registry.create_tree_cache(registry.TreeCacheBuildContext(**{**fields, **said}))


if __name__ == "__main__":
    unittest.main()
