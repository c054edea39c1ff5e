"""`LayoutTreeNode`: one radix-tree node with its slots on the device and its metadata for the host.

A node is in one of four states::

    slots on the device   metadata    state
    yes                   no          only on the device
    yes                   yes         backed up (or the copy is under way and the node is locked)
    no                    yes         evicted, can be loaded back
    no                    no          deleted

Counters of children that are on the device and on the host make "is a leaf" a question of O(1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

from sglang.srt.mem_cache.radix_cache import TreeNode
from typing_extensions import override

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.pages import NO_PAGES, PageArray
from sglang.srt.mem_cache.layouts.protocol import MetadataT

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.radix_cache import RadixKey


class LayoutTreeNode(TreeNode, Generic[MetadataT]):
    """A tree node whose host copy is described by a strategy's metadata.

    `value` are the logical slots, int64, shape ``[tokens]``, on the pool's device, or None if evicted;
    `slot_pages` are the same as page numbers in host memory, empty if evicted. `metadata` is None if the node
    has no host copy. `host_ref_counter` counts the transfers that hold it or one below it. Times are ticks of the
    tree's logical clock, equal on all ranks.
    """

    parent: LayoutTreeNode[MetadataT] | None
    tokens: int  # logical tokens of the node; follows `key`

    def __init__(self, *, node_id: int, tick: int, key: RadixKey, priority: int = 0) -> None:
        super().__init__(id=node_id, priority=priority)
        self.children: dict[object, LayoutTreeNode[MetadataT]] = {}  # no defaultdict: a look-up creates nothing
        self.key = key
        self.last_access_time = tick
        self.creation_time = tick
        self.slot_pages: PageArray = NO_PAGES
        self.lane_pages: PageArray | None = None  # pages in each lane, kept by the tree while it counts them
        self.metadata: MetadataT | None = None
        self.host_ref_counter = 0
        self.copy_pages: tuple[int, ...] = ()  # `metadata.pages_per_lane`, which strategies may have to count
        self.device_children = 0
        self.host_children = 0

    @property  # type: ignore[explicit-override]  # mypy misses it where there is a setter
    @override
    def key(self) -> RadixKey:
        """The node's tokens."""
        return self._key

    @key.setter
    def key(self, key: RadixKey) -> None:
        self._key = key
        self.tokens = len(key) if key else 0  # SGLang's constructor sets None

    @property
    def is_root(self) -> bool:
        """Whether this is the tree's root, which holds no tokens."""
        return self.parent is None

    @property
    def backuped(self) -> bool:
        """Whether a host copy exists; SGLang's spelling. The root counts as backed up."""
        return self.metadata is not None or self.parent is None

    @property
    def host_len(self) -> int:
        """Logical tokens of the host copy, 0 without one; equal on all ranks."""
        return 0 if self.metadata is None else self.metadata.logical_len

    @property
    def host_value(self) -> torch.Tensor | None:
        """SGLang's legacy field: host indices of every token, CPU int64, shape ``[tokens]``, if the layout has them."""
        return None if self.metadata is None else self.metadata.legacy_host_value

    @host_value.setter
    def host_value(self, value: None) -> None:
        """SGLang's constructor sets None; anything else must come as metadata, and raises `TypeError` here."""
        if value is not None:
            raise TypeError(f"host_value is derived from metadata, got {type(value).__name__}")

    def set_slots(self, value: torch.Tensor, slot_pages: PageArray) -> None:
        """Put the node on the device: slots, int64, shape ``[tokens]``, on the pool's device, and the same as pages."""
        if self.value is None and self.parent is not None:
            self.parent.device_children += 1
        self.value = value
        self.slot_pages = slot_pages
        self.lane_pages = None

    def clear_slots(self) -> None:
        """Take the node off the device; its slots are the caller's to free."""
        if self.value is not None and self.parent is not None:
            self.parent.device_children -= 1
        self.value = None
        self.slot_pages = NO_PAGES
        self.lane_pages = None

    def set_metadata(self, metadata: MetadataT) -> None:
        """Record a host copy."""
        if self.metadata is None and self.parent is not None:
            self.parent.host_children += 1
        self.metadata = metadata
        self.copy_pages = metadata.pages_per_lane

    def clear_metadata(self) -> None:
        """Forget the host copy; its host pages are the caller's to free."""
        if self.metadata is not None and self.parent is not None:
            self.parent.host_children -= 1
        self.metadata = None
        self.copy_pages = ()

    @property
    def is_device_leaf(self) -> bool:
        """On the device, unlocked, with no child on the device: can be evicted from it."""
        return self.value is not None and self.lock_ref == 0 and self.device_children == 0 and not self.is_root

    @property
    def is_mirror_leaf(self) -> bool:
        """On the device and on the host, not held there, with no child on the host: the host copy can be given up."""
        return (
            self.metadata is not None
            and self.value is not None
            and self.host_ref_counter == 0
            and self.host_children == 0
        )

    @property
    def is_host_leaf(self) -> bool:
        """Only on the host, neither locked nor held, with no child on the host: can be deleted."""
        return (
            self.value is None
            and self.metadata is not None
            and self.lock_ref == 0
            and self.host_ref_counter == 0
            and self.host_children == 0
        )


def parent_of(node: LayoutTreeNode[MetadataT]) -> LayoutTreeNode[MetadataT]:
    """The node above `node`. Raises `LayoutInvariantError` for the root."""
    if node.parent is None:
        raise LayoutInvariantError(f"node {node.id} has no parent; the walk should have ended at the root")
    return node.parent
