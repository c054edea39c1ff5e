"""Entry point of the group ``sglang.srt.plugins``: hooks SGLang up, in every process that it starts.

The table says which function of ours stands at which of SGLang's. That they really do is looked up before the launch
and when the cache is built: see `hooks`.
"""

from __future__ import annotations

import multiprocessing
import pkgutil
import sys
from typing import Final

from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..cpu.platform import PLATFORM_CLASS, use_absorbed_mla
from ..cpu.support import install_cpu_support
from ..device import index_writes
from . import args as server_args
from . import batches, metrics, startup
from .choice import RADIX_BACKEND
from .hooks import Hook, expect_hooks

_CONFIGURATOR: Final = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ALLOCATION: Final = "sglang.srt.mem_cache.allocation"
_SERVER_ARGS: Final = "sglang.srt.server_args.ServerArgs"
_INDEXER: Final = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
_METRICS: Final = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_ENGINE_MODULE: Final = "sglang.srt.entrypoints.engine"


HOOKS: Final = (
    Hook(target=f"{_SERVER_ARGS}.add_cli_args", function=server_args.add_options, kind=HookType.AFTER),
    Hook(target=f"{_SERVER_ARGS}.from_cli_args", function=server_args.read_options, kind=HookType.AROUND),
    Hook(target=f"{_SERVER_ARGS}.check_server_args", function=server_args.check, kind=HookType.AROUND),
    Hook(target=f"{_CONFIGURATOR}._build_token_to_kv_pool", function=startup.build_pool, kind=HookType.AROUND),
    Hook(
        target=f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        function=startup.build_allocator,
        kind=HookType.AROUND,
    ),
    Hook(target=f"{_CONFIGURATOR}.configure", function=startup.report_logical_capacity, kind=HookType.AFTER),
    Hook(target=f"{_ALLOCATION}.alloc_for_extend", function=batches.extend_batch, kind=HookType.AROUND),
    Hook(target=f"{_ALLOCATION}.alloc_for_decode", function=batches.decode_batch, kind=HookType.AROUND),
    Hook(target=f"{_INDEXER}._store_index_k_cache", function=index_writes.store_keys, kind=HookType.AROUND),
    Hook(
        target=f"{_INDEXER}._fused_k_prepare_and_store",
        function=index_writes.prepare_and_store_keys,
        kind=HookType.AROUND,
    ),
    Hook(target=f"{_METRICS}._log_hicache_stats", function=metrics.report_host_tokens, kind=HookType.AFTER),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        function=batches.begin_forward,
        kind=HookType.AROUND,
    ),
)


def register() -> None:
    """Register hooks, cache and CPU support. SGLang applies the hooks afterwards."""
    expect_hooks(HOOKS)
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    if get_radix_cache_factory(RADIX_BACKEND) is None:
        register_radix_cache_backend(RADIX_BACKEND, startup.build_cache)
    _extend_engine()
    if install_cpu_support() and _on_our_platform():
        use_absorbed_mla()


def _extend_engine() -> None:
    """Let `Engine(...)` take our keywords. Only where an engine can be made: not in SGLang's child processes."""
    if multiprocessing.parent_process() is not None and _ENGINE_MODULE not in sys.modules:
        return
    engine = pkgutil.resolve_name(f"{_ENGINE_MODULE}:Engine")
    engine.server_args_class = staticmethod(server_args.keyword_factory(engine.server_args_class))


def _on_our_platform() -> bool:
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__module__}.{type(current_platform).__qualname__}" == PLATFORM_CLASS
