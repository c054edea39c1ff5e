"""Server arguments whose meaning differs between SGLang's releases: the same names on each.

Each is chosen by the field that makes the difference, not by a version.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from sglang.srt.runtime_context import get_memory

_server_args: Any = import_module("sglang.srt.server_args")  # records of 500 fields: not in our stubs
_host_pools: Any = import_module("sglang.srt.mem_cache.pool_host.base")  # names that older releases lack
FIELDS: Final[frozenset[str]] = frozenset(_server_args.ServerArgs.__struct_fields__)
"""The fields of the installed release's `ServerArgs`."""

GROUP_SIZES: Final = {"attn_dp_size": "--attn-dp-size"} if "attn_dp_size" in FIELDS else {}
"""Numbers that only this release reckons the shard group with, and their flags."""

_FRACTION: Final = "hicache_host_memory_fraction"
SIZED_BY_FRACTION: Final = _FRACTION in FIELDS
"""Whether this release fits the default ``--hicache-ratio`` to the machine's memory."""


def attention_groups(args: Any) -> int:  # noqa: ANN401  # a view of ServerArgs, resolved
    """Data-parallel attention groups that a server's TP ranks are divided into."""
    if "attn_dp_size" in FIELDS:  # the older spelling, --dp-size with --enable-dp-attention, is resolved into it
        return int(args.attn_dp_size)
    return int(args.dp_size) if args.enable_dp_attention else 1


def host_memory_fraction(args: Any) -> float | None:  # noqa: ANN401  # a view of ServerArgs, resolved, or a namespace
    """The part of the free host memory that sizes the host tier; None where a ratio or a size does."""
    fraction: float | None = getattr(args, _FRACTION) if SIZED_BY_FRACTION else None
    return fraction


def host_budget() -> tuple[float, int] | None:
    """The fraction, and the bytes that SGLang set aside by it for the host pools of this machine's ranks.

    None where the user chose their size. It was measured before any rank took its share, so ranks that come later are
    not judged by what earlier ones left.
    """
    fraction = host_memory_fraction(get_memory())
    if fraction is None:
        return None
    return fraction, int(_host_pools.host_memory_budget_bytes()) * int(_host_pools.ranks_per_host())
