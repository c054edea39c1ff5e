"""Entry point of the group ``sglang.srt.plugins``: hooks SGLang up, in every process that it starts.

SGLang logs and swallows whatever goes wrong in a plugin, so nothing here is taken for granted: the check before the
launch and the factory of the cache both ask `refuse_missing_hooks`, which looks for our functions where they must be.
"""

from __future__ import annotations

import multiprocessing
import pkgutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

from ..cpu.platform import PLATFORM_CLASS, use_absorbed_mla
from ..cpu.support import install_cpu_support
from ..device import index_writes
from . import args as server_args
from . import metrics, serving
from .refusals import RADIX_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CONFIGURATOR: Final = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ALLOCATION: Final = "sglang.srt.mem_cache.allocation"
_SERVER_ARGS: Final = "sglang.srt.server_args.ServerArgs"
_INDEXER: Final = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
_METRICS: Final = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_ENGINE_MODULE: Final = "sglang.srt.entrypoints.engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A function of ours on a function of SGLang's."""

    target: str
    function: Callable[..., Any]
    kind: HookType


HOOKS: Final = (
    Hook(target=f"{_SERVER_ARGS}.add_cli_args", function=server_args.add_options, kind=HookType.AFTER),
    Hook(target=f"{_SERVER_ARGS}.from_cli_args", function=server_args.read_options, kind=HookType.AROUND),
    Hook(target=f"{_SERVER_ARGS}.check_server_args", function=server_args.check, kind=HookType.AROUND),
    Hook(target=f"{_CONFIGURATOR}._build_token_to_kv_pool", function=serving.build_pool, kind=HookType.AROUND),
    Hook(
        target=f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        function=serving.build_allocator,
        kind=HookType.AROUND,
    ),
    Hook(target=f"{_CONFIGURATOR}.configure", function=serving.report_logical_capacity, kind=HookType.AFTER),
    Hook(target=f"{_ALLOCATION}.alloc_for_extend", function=serving.extend_batch, kind=HookType.AROUND),
    Hook(target=f"{_ALLOCATION}.alloc_for_decode", function=serving.decode_batch, kind=HookType.AROUND),
    Hook(target=f"{_INDEXER}._store_index_k_cache", function=index_writes.store_keys, kind=HookType.AROUND),
    Hook(
        target=f"{_INDEXER}._fused_k_prepare_and_store",
        function=index_writes.prepare_and_store_keys,
        kind=HookType.AROUND,
    ),
    Hook(target=f"{_METRICS}._log_hicache_stats", function=metrics.report_host_tokens, kind=HookType.AFTER),
    Hook(
        target="sglang.srt.model_executor.model_runner.ModelRunner.forward",
        function=serving.begin_forward,
        kind=HookType.AROUND,
    ),
)


def register() -> None:
    """Register hooks, cache and CPU support. SGLang applies the hooks afterwards."""
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    if get_radix_cache_factory(RADIX_BACKEND) is None:
        register_radix_cache_backend(RADIX_BACKEND, serving.build_cache)
    _extend_engine()
    if install_cpu_support() and _on_our_platform():
        use_absorbed_mla()


def refuse_missing_hooks(asked: str) -> None:
    """Raise `LayoutConfigError` that names every function of SGLang's that our hooks did not reach."""
    missing = [hook.target for hook in HOOKS if not _is_applied(hook)]
    if get_radix_cache_factory(RADIX_BACKEND) is None:
        missing.append(f"radix cache backend {RADIX_BACKEND}")
    if missing:
        raise LayoutConfigError(
            f"{asked}: SGLang did not apply our hooks on {', '.join(missing)}; look for plugin errors in the log, "
            "and, if SGLANG_PLUGINS is set, add kv_layouts to it"
        )


def _is_applied(hook: Hook) -> bool:
    return any(hook.function in _closure(wrapper) for wrapper in _wrappers(hook.target))


def _wrappers(target: str) -> Iterator[Any]:
    """The function at `target`, what it wraps, what that wraps, ..."""
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return
    while function is not None:
        function = getattr(function, "__func__", function)
        yield function
        function = getattr(function, "__wrapped__", None)


def _closure(function: Any) -> list[object]:  # noqa: ANN401  # any callable
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _extend_engine() -> None:
    """Let `Engine(...)` take our keywords. Only where an engine can be made: not in SGLang's child processes."""
    if multiprocessing.parent_process() is not None and _ENGINE_MODULE not in sys.modules:
        return
    engine = pkgutil.resolve_name(f"{_ENGINE_MODULE}:Engine")
    engine.server_args_class = staticmethod(server_args.keyword_factory(engine.server_args_class))


def _on_our_platform() -> bool:
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__module__}.{type(current_platform).__qualname__}" == PLATFORM_CLASS
