"""The table says which function of ours stands at which of SGLang's, in every process that SGLang starts.

That they really do is looked up before the launch and when the cache is built: see `hooks`.
"""

from __future__ import annotations

import pkgutil
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
from .options import add_to_engine

_CONFIGURATOR: Final = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ALLOCATION: Final = "sglang.srt.mem_cache.allocation"
_SERVER_ARGS: Final = "sglang.srt.server_args.ServerArgs"
_INDEXER: Final = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
_METRICS: Final = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"


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


def register_all() -> None:
    """Register hooks, cache and CPU support. SGLang applies the hooks afterwards.

    Raises whatever SGLang's names raise that are not as they should be, with no hook registered.
    """
    for hook in HOOKS:
        pkgutil.resolve_name(hook.target)
    if install_cpu_support() and _on_our_platform():
        use_absorbed_mla()
    if get_radix_cache_factory(RADIX_BACKEND) is None:
        register_radix_cache_backend(RADIX_BACKEND, startup.build_cache)
    add_to_engine(server_args.keyword_factory)
    expect_hooks(HOOKS)
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)


def _on_our_platform() -> bool:
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__module__}.{type(current_platform).__qualname__}" == PLATFORM_CLASS
