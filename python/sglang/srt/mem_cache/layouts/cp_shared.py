"""`CpSharedLayout`: each rank of the shard group keeps only its own pages.

N ranks together cache N times what one rank could. The tree stays logical and equal on all ranks; what
differs between ranks is which of a node's pages lie in the local pools. A node of five pages that starts
in lane 1, with three ranks (``owner = slot_page % lane_count``)::

    page of the node      0    1    2    3    4
    lane (owner)          1    2    0    1    2        the same on every rank
    host page on rank 0             17
    host page on rank 1   40             41
    host page on rank 2        8              3

The metadata keeps the lanes (2 bytes a page) and the local host pages (8 bytes an owned page); token-wise
positions and indices are derived. A rank may own nothing of a node; its metadata is valid all the same.

Owners rotate along a chain from a base that is a hash of the chain's first page, so any prefix is spread to
within one page, short prompts do not all land on rank 0, and every rank computes the same without asking.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from .checks import refuse_divergent_content, refuse_mismatch, refuse_storage, refuse_unknown_pool
from .config import LayoutConfig, LayoutEnvironment, check_range
from .errors import LayoutConfigError, LayoutInvariantError
from .owner_and_row import CpSharedKVLayout
from .pages import LaneArray, PageArray, page_array, tokens_of_pages, whole_pages
from .plans import BackupPlan, CopyPlan, LoadPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CpHiCacheNodeMetadata:
    """One rank's view of a node's host copy.

    `lanes` is the owner of each page, int16, shape ``[pages]``, equal on all ranks; `host_pages` are the
    host pages of the pages that `cp_rank` owns, int64, in node order. `pages_per_lane` are the pages that each
    rank owns, counted once: host room is accounted in them. Raises `LayoutInvariantError` if the number of host
    pages is not the number of owned pages.
    """

    page_size: int
    cp_size: int
    cp_rank: int
    lanes: LaneArray
    host_pages: PageArray
    pages_per_lane: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages_per_lane", _pages_per_lane(self.lanes, self.cp_size))
        owned = self.pages_per_lane[self.cp_rank]
        if owned != len(self.host_pages):
            raise LayoutInvariantError(
                f"rank {self.cp_rank} owns {owned} pages of the node but holds {len(self.host_pages)} host pages"
            )

    @property
    def logical_len(self) -> int:
        """Tokens of the node, whoever owns them."""
        return len(self.lanes) * self.page_size

    @property
    def owned_page_positions(self) -> PageArray:
        """Node-local numbers of the pages that this rank owns, ascending, shape ``[owned pages]``."""
        return np.flatnonzero(self.lanes == self.cp_rank)

    @property
    def owned_positions(self) -> torch.Tensor:
        """Node-local token positions that this rank owns: CPU int64, sorted, shape ``[owned tokens]``."""
        return tokens_of_pages(self.owned_page_positions, self.page_size)

    @property
    def host_indices(self) -> torch.Tensor:
        """Host rows of the owned tokens, in the order of `owned_positions`: CPU int64, shape ``[owned tokens]``."""
        return tokens_of_pages(self.host_pages, self.page_size)

    @property
    def legacy_host_value(self) -> None:
        """A sharded node has no host index for every token."""
        return None

    def split(self, split_len: int) -> tuple[CpHiCacheNodeMetadata, CpHiCacheNodeMetadata]:
        """The first `split_len` tokens and the rest, positions rebased; see `NodeMetadata.split`."""
        check_range("split_len", split_len, 0, self.logical_len)
        pages = whole_pages(split_len, self.page_size, "split_len")
        owned = int(np.count_nonzero(self.lanes[:pages] == self.cp_rank))
        return (
            self._part(self.lanes[:pages], self.host_pages[:owned]),
            self._part(self.lanes[pages:], self.host_pages[owned:]),
        )

    def _part(self, lanes: LaneArray, host_pages: PageArray) -> CpHiCacheNodeMetadata:
        return CpHiCacheNodeMetadata(
            page_size=self.page_size,
            cp_size=self.cp_size,
            cp_rank=self.cp_rank,
            lanes=lanes.copy(),
            host_pages=host_pages.copy(),
        )


class CpSharedLayout:
    """Pages dealt to the ranks of the shard group. Generic parameter: `CpHiCacheNodeMetadata`.

    Shapes, units and errors are those of `KVLayoutStrategy`; below stands what is particular to this strategy. Raises
    `LayoutConfigError` for an impossible geometry.
    """

    name = "cp_shared"
    deals_in_turn: Final = True

    def __init__(self, *, page_size: int, shard_size: int, shard_rank: int) -> None:
        self.geometry = CpSharedKVLayout(page_size=page_size, cp_size=shard_size, cp_rank=shard_rank)
        self.page_size = page_size
        self.lane_count = shard_size
        self.lane = shard_rank
        self._rotation: LaneArray = np.empty(
            0, dtype=np.int16
        )  # 0, 1, .. lane_count - 1, 0, 1, ..: as long as was needed

    @classmethod
    def from_config(cls, config: LayoutConfig) -> CpSharedLayout:
        """Build from a `LayoutConfig`; it has no settings of its own."""
        config.refuse_unknown_options()
        return cls(page_size=config.page_size, shard_size=config.shard_size, shard_rank=config.shard_rank)

    def validate(self, environment: LayoutEnvironment) -> None:
        """Refuse a storage backend, HiSparse and other unknown pools, pools whose content differs by rank,
        and a page size, group or allocator that was built for another geometry.
        """
        refuse_storage(self.name, environment)
        refuse_unknown_pool(self.name, environment)
        refuse_divergent_content(self.name, environment)
        refuse_mismatch(self.name, "page size", self.page_size, environment.page_size)
        refuse_mismatch(self.name, "shard group size", self.lane_count, environment.shard_size)
        refuse_mismatch(self.name, "shard group rank", self.lane, environment.shard_rank)
        refuse_mismatch(self.name, "allocator lanes", self.lane_count, environment.allocator_lanes)

    def logical_tokens(self, physical_tokens: int) -> int:
        """`lane_count` times the rows of one rank."""
        return physical_tokens * self.lane_count

    def chain_base(self, first_page: bytes, namespace: str) -> int:
        """A 64-bit BLAKE2b of content, keyed with the BLAKE2b of the namespace, modulo `lane_count`."""
        # Namespaces come from requests: of any length, and JSON lets lone surrogates through.
        key = hashlib.blake2b(namespace.encode("utf-8", "surrogatepass")).digest()
        digest = hashlib.blake2b(first_page, digest_size=8, key=key)
        return int.from_bytes(digest.digest(), "little") % self.lane_count

    def extend_lanes(self, base: int, first_page: int, pages: int) -> LaneArray:
        """``(base + page) % lane_count`` for each page of the chain."""
        start = (base + first_page) % self.lane_count
        if start + pages > len(self._rotation):
            self._rotation = (np.arange(2 * (start + pages)) % self.lane_count).astype(np.int16)
        return self._rotation[start : start + pages].copy()

    def lanes_of(self, slot_pages: PageArray) -> LaneArray:
        """``slot_page % lane_count``."""
        return self.geometry.page_owners(slot_pages)

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's slots, the padding page for all others."""
        return self.geometry.local_rows(slots)

    def plan_backup(self, slot_pages: PageArray) -> BackupPlan:
        """Each rank copies the pages of its lane."""
        self.geometry.check_slot_pages(slot_pages)
        lanes, rows = self.geometry.owners_and_rows(slot_pages)
        return BackupPlan(
            page_size=self.page_size,
            lanes=lanes,
            demand_pages=_pages_per_lane(lanes, self.lane_count),
            device_pages=rows[lanes == self.lane],
        )

    def finish_backup(self, plan: BackupPlan, host_pages: PageArray) -> CpHiCacheNodeMetadata:
        """Metadata of a node whose owned pages were given `host_pages`."""
        return CpHiCacheNodeMetadata(
            page_size=self.page_size,
            cp_size=self.lane_count,
            cp_rank=self.lane,
            lanes=plan.lanes,
            host_pages=page_array(host_pages),
        )

    def load_lanes(self, parts: Sequence[CpHiCacheNodeMetadata]) -> LaneArray:
        """The owners at backup: a page can only come back on the rank that has it."""
        if not parts:
            raise LayoutConfigError("parts must hold >= 1 metadata objects, got 0")
        return np.concatenate([part.lanes for part in parts])

    def plan_load(self, parts: Sequence[CpHiCacheNodeMetadata], slot_pages: PageArray) -> LoadPlan:
        """Each rank copies its own host pages to the rows of the new slots in the same places."""
        self.geometry.check_slot_pages(slot_pages)
        wanted = self.load_lanes(parts)
        lanes, rows = self.geometry.owners_and_rows(slot_pages)
        if len(lanes) != len(wanted) or np.count_nonzero(lanes != wanted):
            raise LayoutInvariantError(f"new slots lie in lanes {lanes}, the backup in lanes {wanted}")
        return LoadPlan(
            page_size=self.page_size,
            logical_pages=len(wanted),
            copies=CopyPlan.from_pages(
                page_size=self.page_size,
                host_pages=np.concatenate([part.host_pages for part in parts]),
                device_pages=rows[lanes == self.lane],
            ),
        )


def _pages_per_lane(lanes: LaneArray, lane_count: int) -> tuple[int, ...]:
    pages: list[int] = np.bincount(lanes, minlength=lane_count).tolist()
    return tuple(pages)
