"""Values of SGLang's flags that a layout strategy depends on, judged before anything is spawned.

SGLang's parser knows types and choices; a config file or `Engine` need not pass through it. What depends on the size
of the device pool is judged where that is known, in the ranks, by the same functions (`host.pools`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.utils import get_eviction_strategy

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

from ..host.memory import CPU_RESERVE_BYTES, FRACTION_FLAG, ranks_on_this_machine, refuse_too_large
from ..host.sizes import BYTES_PER_GB, check_fraction, check_gb, check_ratio, check_whole, host_pages, size_flag
from ..seam.server_flags import GROUP_SIZES, host_memory_fraction
from ..settings import check_mem_layout, check_write_policy

if TYPE_CHECKING:
    from .facts import ServerFacts

SIZES: Final = {
    "page_size": "--page-size",
    "tp_size": "--tp-size",
    "pp_size": "--pp-size",
    "dp_size": "--dp-size",
    "attn_cp_size": "--attention-context-parallel-size",
    "nnodes": "--nnodes",
    **GROUP_SIZES,
}
"""Numbers that the shard group and its memory are reckoned with: whole, and at least 1."""


def refuse_sizes(args: Any) -> None:  # noqa: ANN401  # a view of ServerArgs
    """Raise `LayoutConfigError` for a page size or a number of ranks that cannot be."""
    for field, flag in SIZES.items():
        check_whole(flag, getattr(args, field), 1)


def refuse_values(facts: ServerFacts) -> None:
    """Raise `LayoutConfigError`, one line with flag, value and what is accepted, for the first value that cannot be."""
    args = facts.args
    check_write_policy(args.hicache_write_policy)
    _refuse_eviction_policy(args.radix_eviction_policy, args.radix_eviction_policy_config)
    _refuse_host_sizes(facts)
    check_mem_layout(
        args.hicache_io_backend,
        args.hicache_mem_layout,
        is_mla=facts.model.is_mla,
        uneven_heads=facts.model.has_uneven_heads,
    )


def _refuse_eviction_policy(policy: str, config: object) -> None:
    flag = "--radix-eviction-policy-config"
    if config is not None and not isinstance(config, Mapping):
        raise LayoutConfigError(f"{flag} {config!r}: must be a JSON object")
    parameters = dict(config or {})
    try:
        get_eviction_strategy(policy, parameters)
    except ValueError as error:
        raise LayoutConfigError(f"--radix-eviction-policy {policy}: {error}") from error
    except TypeError as error:  # a parameter that the policy does not have
        raise LayoutConfigError(
            f"{flag} {parameters}: must hold parameters of --radix-eviction-policy {policy}: {error}"
        ) from error
    for name, value in parameters.items():
        check_whole(f"{flag} {name}", value, 1)


def _refuse_host_sizes(facts: ServerFacts) -> None:
    args = facts.args
    gigabytes = check_gb("--hicache-size", args.hicache_size)
    ratio = check_ratio("--hicache-ratio", args.hicache_ratio)
    fraction = host_memory_fraction(args)
    if fraction is not None:
        check_fraction(FRACTION_FLAG, fraction)
    if args.max_total_tokens is not None:
        check_whole(f"--max-total-tokens with --page-size {args.page_size}:", args.max_total_tokens, args.page_size)
        if gigabytes == 0:  # the device pool can only become smaller
            host_pages(
                ratio=ratio,
                gigabytes=0,
                device_tokens=args.max_total_tokens,
                page_size=args.page_size,
                kv_slot_bytes=1,
            )
    if gigabytes > 0:
        refuse_too_large(
            size_flag(ratio, gigabytes),
            rank_bytes=int(gigabytes * BYTES_PER_GB * (1 + facts.model.index_share)),
            ranks=ranks_on_this_machine(args),
            reserve_bytes=CPU_RESERVE_BYTES if facts.on_cpu else base.HICACHE_HOST_MEMORY_RESERVE_BYTES,
            parts="KV and index" if facts.model.index_share else "KV",
        )
