"""The contract between a layout strategy and the cache that uses it.

A *layout strategy* decides which rank of a shard group owns which page and what must be copied where.
It owns the plans and the metadata; it touches no pool, stream or process group. The tree and the
controller call it and never ask which strategy they have.

How one node lives, and who answers:

    insert      chain_base, extend_lanes   which owners the new pages of a chain must have
    backup      plan_backup                demand on every rank, rows that this rank copies
                finish_backup              host pages in hand: the node's metadata
    split       metadata.split             metadata of the two halves
    load back   load_lanes                 owners that the new slots must have
                plan_load                  host pages to rows, and what ranks exchange
    evict       metadata.pages_per_lane    what every rank gets back

**Agreement.** Everything that the methods below return, except rows, row pages, the metadata's host pages and
`LoadPlan.copies`, must be equal on all ranks of the group for equal arguments. The cache turns these answers into
admissions, evictions and exchanges without asking the other ranks.

**Errors.** Every method is a pure function of its arguments: one that raises has changed nothing, neither here nor in
its arguments, and the same call raises again.

**Lanes.** A *lane* is the pages of one owner. A strategy with one copy of everything on each rank has
one lane, every other one a lane for each rank: pages are gathered by a sum, to which a second copy would be added.
That is about the device. The host has the same owners, unless the strategy says otherwise (`HostLanesLayout`).
Arrays are numpy, in host memory, one number a page; see `pages`. What a strategy may be able to do besides is in
`capabilities`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import torch

    from .config import LayoutEnvironment
    from .pages import LaneArray, PageArray
    from .plans import BackupPlan, LoadPlan


class NodeMetadata(Protocol):
    """Where the host copy of one tree node lies, seen from one rank. Immutable."""

    @property
    def logical_len(self) -> int:
        """Tokens of the node, whoever owns them; equal on all ranks."""
        ...

    @property
    def host_pages(self) -> PageArray:
        """This rank's host pages in node order, int64, shape ``[owned pages]``; may be empty."""
        ...

    @property
    def pages_per_lane(self) -> tuple[int, ...]:
        """Host pages that the node holds in each lane; equal on all ranks."""
        ...

    @property
    def legacy_host_value(self) -> torch.Tensor | None:
        """What SGLang's ``TreeNode.host_value`` means: host indices of *every* token, or None.

        CPU int64, shape ``[logical_len]``.
        None under every strategy whose host rows are not one a token.
        """
        ...

    def split(self, split_len: int) -> tuple[Self, Self]:
        """Metadata of the first `split_len` tokens and of the rest, sharing no memory with this one.

        Either half may be empty. Raises `LayoutConfigError` (a ``ValueError``) if `split_len` is outside
        ``[0, logical_len]`` or no multiple of the page size.
        """
        ...


MetadataT = TypeVar("MetadataT", bound=NodeMetadata)


class KVLayoutStrategy(Protocol[MetadataT]):
    """Which rank owns which page, and what a backup and a load-back do about it."""

    @property
    def name(self) -> str:
        """The name that selects it, for messages."""
        ...

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        ...

    @property
    def lane_count(self) -> int:
        """Number of owners: that of the ranks, or 1 if every rank holds everything."""
        ...

    @property
    def lane(self) -> int:
        """The lane whose pages this rank stores, in ``[0, lane_count)``; no other rank's, unless there is only one."""
        ...

    def validate(self, environment: LayoutEnvironment) -> None:
        """Raise `LayoutConfigError` naming both settings if pool, allocator, group or backend do not fit."""
        ...

    def logical_tokens(self, physical_tokens: int) -> int:
        """Slots that a device pool of `physical_tokens` rows on every rank provides together."""
        ...

    def chain_base(self, first_page: bytes, namespace: str) -> int:
        """Lane of the first page of a chain, from the content of that page and its cache namespace.

        A pure function of its arguments in every process, so that all ranks and concurrent requests with
        the same prefix agree.
        """
        ...

    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        """Lanes of pages ``first_page .. first_page + pages - 1`` of a chain that starts in lane `base`.

        Shape ``[pages]``. `first_page` counts pages from the chain's first one; how a chain is cut into calls makes no
        difference.
        """
        ...

    def lanes_of(self, slot_pages: PageArray) -> LaneArray:
        """Lane of each existing logical page, shape ``[pages]``."""
        ...

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """What this rank stores: the row of each slot in its device pool; same shape and device, int64.

        Slots that it does not store get rows of the padding page, row page 0: a write there is discarded, and a reader
        must ask the owner. Shapes never depend on values, so nothing waits for the device.
        """
        ...

    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        """Plan the backup of a node whose logical pages are `slot_pages`, shape ``[pages]``.

        Raises `LayoutConfigError` if a page is reserved. Allocates nothing.
        """
        ...

    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> MetadataT:
        """The node's metadata after `host_pages`, shape ``[plan.owned_pages]``, were allocated for `plan`.

        Raises `LayoutInvariantError` if the number of pages differs.
        """
        ...

    def load_lanes(self, parts: Sequence[MetadataT]) -> LaneArray:
        """Lanes that the new slots of a load of `parts` must have, shape ``[pages of all parts]``.

        Raises `LayoutConfigError` for no parts.
        """
        ...

    def plan_load(self, parts: Sequence[MetadataT], slot_pages: PageArray) -> LoadPlan:
        """Plan the load of `parts` into newly allocated logical pages, shape ``[pages of all parts]``.

        Raises `LayoutInvariantError` if the pages are not as many, and in the lanes, as `load_lanes` asked for,
        and `LayoutConfigError` for no parts or a reserved page.
        """
        ...


AnyKVLayoutStrategy: TypeAlias = KVLayoutStrategy[Any]
"""A strategy chosen by name, whose metadata type the caller does not know."""
