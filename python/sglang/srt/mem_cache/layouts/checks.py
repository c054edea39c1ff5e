"""Refusals that strategies share.

Each changes nothing, and either returns or raises `LayoutConfigError` with both settings and what to do.
"""

from __future__ import annotations

from .config import GroupKind, LayoutEnvironment, PoolKind
from .errors import LayoutConfigError

SERVED_POOLS = (PoolKind.DSA, PoolKind.MLA, PoolKind.MHA)


def refuse_storage(layout: str, environment: LayoutEnvironment) -> None:
    """Raise `LayoutConfigError` for a storage backend: it would store pages under keys that do not describe them."""
    if environment.storage_backend is not None:
        raise LayoutConfigError(storage_refusal(layout, environment.storage_backend))


def storage_refusal(layout: str, backend: str, why: str = "it cannot name its pages for a storage tier") -> str:
    """The one line that refuses a storage backend."""
    return (
        f"--kv-layout-strategy {layout} does not support --hicache-storage-backend {backend}: {why}; "
        "drop --hicache-storage-backend (accepted: none)"
    )


def refuse_unknown_pool(layout: str, environment: LayoutEnvironment) -> None:
    """Raise `LayoutConfigError` for a device pool whose pages the host tier cannot describe."""
    if environment.pool_kind not in SERVED_POOLS:
        accepted = ", ".join(kind.value.upper() for kind in SERVED_POOLS)
        hint = " (--enable-hisparse)" if environment.pool_kind is PoolKind.HISPARSE else ""
        raise LayoutConfigError(
            f"--kv-layout-strategy {layout} does not support the KV pool {environment.pool_class}{hint}; "
            f"accepted pools: {accepted}"
        )


def refuse_divergent_content(layout: str, environment: LayoutEnvironment) -> None:
    """Raise `LayoutConfigError` for a pool whose content differs between ranks: one copy could not serve all."""
    if environment.pool_kind is PoolKind.MHA and environment.group_kind is GroupKind.ATTENTION_TP:
        raise LayoutConfigError(
            f"--kv-layout-strategy {layout} does not support the KV pool {environment.pool_class} with "
            f"--tp-size {environment.shard_size}: every rank holds other heads; accepted: a context-parallel "
            "group (--attention-context-parallel-size), or an MLA or DSA model"
        )
    if environment.layers_differ:
        raise LayoutConfigError(
            f"--kv-layout-strategy {layout} does not support --enable-dsa-cache-layer-split: every rank holds other "
            "layers; drop one of the two (accepted: --kv-layout-strategy identity)"
        )


def refuse_mismatch(layout: str, what: str, ours: int, theirs: int) -> None:
    """Raise `LayoutConfigError` for a size on which layout and serving side disagree."""
    if ours != theirs:
        raise LayoutConfigError(
            f"--kv-layout-strategy {layout} was built for {what} {ours}, but here it is {theirs}; accepted: {ours}"
        )
