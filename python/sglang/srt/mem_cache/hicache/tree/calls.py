"""What is asked of a cache, and what it answers: the core's own types, the same with every release of SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple

from sglang.srt.mem_cache.layouts.protocol import MetadataT

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang.srt.mem_cache.layouts.pages import PageArray

    from .node import LayoutTreeNode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match(Generic[MetadataT]):
    """The longest cached prefix of a key.

    `slots` are those of what is on the device, int64, shape ``[tokens]``, on the pool's device, down to `device_node`.
    `host_tokens` more lie on the host alone, down to `host_node`, which is the deepest node with a host copy.
    """

    slots: torch.Tensor
    device_node: LayoutTreeNode[MetadataT]
    host_node: LayoutTreeNode[MetadataT]
    host_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class RequestUse:
    """The first `counted` tokens of a request's chain have been counted as used by it."""

    counted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Insertion:
    """A chain to put into the tree: `value` has one slot a token of `key`, int64, on the pool's device.

    `slot_pages` are the same as page numbers; without them they are read from the device. `use` is that of the request
    whose slots these are: it uses a node once, however often it is inserted, and not at all if `is_use` is False.
    """

    key: RadixKey
    value: torch.Tensor
    slot_pages: PageArray | None = None
    use: RequestUse | None = None
    is_use: bool = True
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inserted(Generic[MetadataT]):
    """`known_tokens` had slots in the tree already, the caller frees its own for those. The chain ends at `node`."""

    known_tokens: int
    node: LayoutTreeNode[MetadataT]


class LoadedBack(NamedTuple, Generic[MetadataT]):
    """New slots, int64, shape ``[tokens]``, on the pool's device, empty if none; and the deepest node on the device."""

    slots: torch.Tensor
    node: LayoutTreeNode[MetadataT]
