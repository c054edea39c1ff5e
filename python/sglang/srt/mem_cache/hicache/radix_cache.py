"""`HiRadixCache`: SGLang's hierarchical radix cache with a layout strategy.

The layout strategy says where pages belong, the controller moves them, the tree remembers. The policy is the same for
every layout and on every rank::

      insert / hit           evict                     match + load_back
    ───────────────▶ device ───────▶ host only ─────────────────────────────▶ device
         │ hits reach the threshold      │ host memory is needed
         ▼                               ▼
      backup (locked until the ack)   deleted

Nothing is decided here: this class has the names that SGLang's scheduler calls, and `tree.parts.TreeParts` has the
parts that do the work. `assemble` makes and hands over whatever it needs. Every quota and threshold is in logical
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult, EvictResult, IncLockRefResult
from typing_extensions import override

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from sglang.srt.mem_cache.layouts.protocol import KVLayoutStrategy, MetadataT

from .host.pools import release_host_pool
from .no_storage import NoStorageTier
from .seam.calls import SchedulerCalls
from .tree.calls import Inserted, LoadedBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, EvictParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from sglang.srt.mem_cache.layouts.pages import LaneArray, PageArray

    from .controller import HiCacheController
    from .host.pools import AnyHostPool
    from .requests.insertion import RequestInsertion
    from .settings import HiCacheSettings
    from .slots.allocator import SlotAllocator
    from .tree.calls import Insertion, Match
    from .tree.in_flight import Backup, LoadBack
    from .tree.node import LayoutTreeNode
    from .tree.parts import TreeParts


class HiRadixCache(NoStorageTier, SchedulerCalls[MetadataT], Generic[MetadataT]):
    """A radix cache with a host tier whose pages a layout strategy places. Made by `assemble.assemble_cache`.

    `layout` is the one strategy object that allocator, controller and tree share. `requests` puts the scheduler's
    requests into the tree; a cache whose tree is filled by `insert` alone has none. `publish` is called after each
    settling, with this cache; it publishes metrics in a server.
    """

    root_node: LayoutTreeNode[MetadataT]
    cache_controller: HiCacheController[MetadataT]

    def __init__(
        self,
        params: CacheInitParams,
        *,
        layout: KVLayoutStrategy[MetadataT],
        settings: HiCacheSettings,
        slots: SlotAllocator,
        host_pool: AnyHostPool,
        controller: HiCacheController[MetadataT],
        parts: TreeParts[MetadataT],
        requests: RequestInsertion[MetadataT] | None = None,
        publish: Callable[[HiRadixCache[Any]], None] | None = None,
    ) -> None:
        self.layout = layout
        self.settings = settings
        self.slots = slots
        self.token_to_kv_pool_host = host_pool
        self.cache_controller = controller
        self.parts = parts
        self.stats = parts.report.stats
        self.requests = requests
        self.request_pages = None if requests is None else requests.pages
        self._publish = publish
        super().__init__(params)  # calls reset()
        self.kv_events = parts.events
        self.metrics_collector = parts.report.collector

    @override
    def init_metrics_collector(self) -> None:
        """SGLang's constructor would make one, which knows no rank; ours comes with the report."""

    @override
    def reset(self) -> None:
        """Drop the whole cache, transfers under way included, and give all host memory back.

        Slots are not freed: SGLang clears the slot allocator beside the tree.
        """
        self.cache_controller.reset()
        if self.request_pages is not None:
            self.request_pages.clear()
        tree = self.parts.tree
        tree.reset()
        self.root_node = tree.root
        self.parts.events.record_all_cleared()

    @override
    def release_host_resources(self) -> None:
        """Unregister pinned host memory before the process ends, when the copies under way have ended."""
        self.cache_controller.wait_for_copies()
        release_host_pool(self.token_to_kv_pool_host)

    # Requests. What SGLang's scheduler calls instead stands in `seam.calls`.

    @override
    def match(self, key: RadixKey) -> Match[MetadataT]:
        """See `LayoutRadixTree.match`."""
        return self.parts.tree.nothing_found if self.disable else self.parts.tree.match(key)

    @override
    def put(self, insertion: Insertion) -> Inserted[MetadataT]:
        """See `LayoutRadixTree.insert`. Nodes that are used often enough are backed up."""
        return Inserted(known_tokens=0, node=self.root_node) if self.disable else self.parts.insert(insertion)

    @property
    @override
    def insertion(self) -> RequestInsertion[MetadataT]:
        """The steps of putting a request into the tree. `LayoutInvariantError` without a request pool."""
        if self.requests is None:
            raise LayoutInvariantError("a cache that was made without a request pool was given a request")
        return self.requests

    @override
    def inc_lock_ref(self, node: LayoutTreeNode[MetadataT]) -> IncLockRefResult:
        """Keep `node` and its prefix from eviction. `delta` is the change of the evictable tokens (<= 0)."""
        return IncLockRefResult(delta=0 if self.disable else self.parts.accounting.lock(node))

    @override
    def dec_lock_ref(
        self,
        node: LayoutTreeNode[MetadataT],
        params: DecLockRefParams | None = None,
    ) -> DecLockRefResult:
        """Undo one `inc_lock_ref`. `delta` is the change of the evictable tokens (>= 0).

        Raises `LayoutInvariantError`, with nothing changed, if it is not locked or belongs to a tree before a reset.
        """
        return DecLockRefResult(delta=0 if self.disable else self.parts.accounting.unlock(node))

    # The way down.

    def write_backup(self, node: LayoutTreeNode[MetadataT], write_back: bool = False) -> int:
        """See `Backups.back_up`, or `back_up_leaving` with `write_back`: the node is about to leave the device."""
        backups = self.parts.backups
        return backups.back_up_leaving(node) if write_back else backups.back_up(node)

    @override
    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least `num_tokens` slots from unlocked leaves, or all that can be freed."""
        return EvictResult(num_tokens_evicted=self.parts.device_room.evict(params.num_tokens))

    def evict_host(self, num_tokens: int) -> int:
        """See `HostRoom.evict`."""
        return self.parts.host_room.evict(num_tokens)

    def alloc_slots(self, lanes: LaneArray) -> PageArray | None:
        """See `DeviceRoom.alloc`."""
        return self.parts.device_room.alloc(lanes)

    def make_device_room(self, lanes: LaneArray) -> None:
        """See `DeviceRoom.make`."""
        self.parts.device_room.make(lanes)

    # The way up.

    def load_back(self, node: LayoutTreeNode[MetadataT], mem_quota: int | None = None) -> torch.Tensor | None:
        """See `LoadBacks.load_back`."""
        return self.parts.load_backs.load_back(node, mem_quota)

    @override
    def bring_back(self, node: LayoutTreeNode[MetadataT], mem_quota: int | None = None) -> LoadedBack[MetadataT]:
        """Load back what a match found on the host, down to its `host_node`: all of it or nothing."""
        if node.value is None:
            value = self.parts.load_backs.load_back(node, mem_quota)
            if value is not None:
                return LoadedBack(value, node)
        while node.value is None and node.parent is not None:
            node = node.parent
        return LoadedBack(self.parts.tree.nothing_found.slots, node)

    @override
    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads; returns the layer counter to wait on, or -1."""
        return self.cache_controller.start_loading()

    def is_load_back_event_done(self, consumer_index: int) -> bool:
        """Whether this rank's load with that layer counter has ended. Local: it settles nothing."""
        if consumer_index < 0:
            return True
        return self.cache_controller.layer_done_counter.events[consumer_index].finish_event.query()

    # Acknowledgements.

    @override
    def check_hicache_events(self) -> None:
        """Settle the transfers that have finished on every rank: one reduction, whatever is pending."""
        self.parts.transfers.settle()
        if self._publish is not None:
            self._publish(self)

    def writing_check(self, write_back: bool = False) -> None:
        """Settle finished backups; with `write_back`, wait for all of them first, without a reduction."""
        if write_back:
            self.parts.transfers.finish_backups()
        else:
            self.parts.transfers.settle_backups()

    def loading_check(self) -> None:
        """Settle finished loads."""
        self.parts.transfers.settle_loads()

    @property
    def ongoing_write_through(self) -> Mapping[int, Backup[MetadataT]]:
        """Backups whose ack is not settled, by id."""
        return self.parts.in_flight.backups

    @property
    def ongoing_load_back(self) -> Mapping[int, LoadBack[MetadataT]]:
        """Loads whose ack is not settled, by id."""
        return self.parts.in_flight.loads

    # Inspection.

    @override
    def evictable_size(self) -> int:
        """Unlocked logical tokens on the device."""
        return self.parts.accounting.evictable_tokens

    @override
    def protected_size(self) -> int:
        """Locked logical tokens on the device."""
        return self.parts.accounting.protected_tokens

    @override
    def total_size(self) -> int:
        """Logical tokens on the device."""
        return self.parts.tree.total_size()

    @override
    def all_values_flatten(self) -> torch.Tensor:
        """Every slot that the tree holds: int64, shape ``[tokens]``, on the pool's device."""
        return self.parts.tree.all_values_flatten()

    def nodes(self) -> Iterator[LayoutTreeNode[MetadataT]]:
        """See `LayoutRadixTree.nodes`."""
        return self.parts.tree.nodes()
