"""How SGLang asks an out-of-tree platform for its pools. Loaded while SGLang is being imported."""

from __future__ import annotations

from typing import Final, Literal, Protocol, TypeAlias

from sglang.srt.platforms.interface import SRTPlatform
from typing_extensions import override

PoolName: TypeAlias = Literal["mha", "mla", "dsa"]
SINCE_0_5_23: Final[bool] = hasattr(SRTPlatform, "get_kv_pool_cls")


class HasPools(Protocol):
    """What a platform needs to become one with `PoolClasses`."""

    def pool_class(self, kind: PoolName) -> type:
        """The device pool of a kind."""
        ...


class PoolClasses(SRTPlatform):
    """Lets SGLang ask for a pool; the answer is that of `HasPools`, which the platform itself must be."""

    if SINCE_0_5_23:

        @override
        def get_kv_pool_cls(self: HasPools, *, kind: PoolName) -> type:
            """See `HasPools`."""
            return self.pool_class(kind)

    else:

        @override
        def get_mha_kv_pool_cls(self: HasPools) -> type:
            """See `HasPools`."""
            return self.pool_class("mha")

        @override
        def get_mla_kv_pool_cls(self: HasPools) -> type:
            """See `HasPools`."""
            return self.pool_class("mla")

        @override
        def get_dsa_kv_pool_cls(self: HasPools) -> type:
            """See `HasPools`."""
            return self.pool_class("dsa")


def pool_class_for(platform: SRTPlatform, kind: PoolName) -> type | None:
    """The pool that SGLang would take from `platform`, asked as SGLang asks."""
    if SINCE_0_5_23:
        return platform.get_kv_pool_cls(kind=kind)
    else:
        asked = {
            "mha": platform.get_mha_kv_pool_cls,
            "mla": platform.get_mla_kv_pool_cls,
            "dsa": platform.get_dsa_kv_pool_cls,
        }
        return asked[kind]()
