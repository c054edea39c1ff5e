"""What a strategy may be able to do besides: one optional protocol and one guard for each capability.

A guard asks the object and not its class, so a strategy inherits nothing: it has the member, or it cannot do this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .pages import LaneArray


class ShardedPoolLayout(Protocol):
    """A strategy with several lanes whose device pools the server can shard.

    A strategy with one lane needs none of this: its rows are its slots.
    """

    def local_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Row of each slot in this rank's device pool; same shape and device as `slots`, int64.

        Slots that others store get rows of the padding page, ``[0, page_size)``: a write there is discarded, and a
        reader must ask the owner. Shapes never depend on values, so nothing waits for the device.
        """
        ...


def shares_pools(layout: object) -> TypeIs[ShardedPoolLayout]:
    """Whether a strategy can say which row of the local pool a slot has."""
    return callable(getattr(layout, "local_rows", None))


class TurnwiseLayout(Protocol):
    """A strategy that deals pages to its lanes in turn: slot pages as well as those of a chain.

    ``lanes_of`` is the number of the slot page modulo `lane_count`, and each page of a chain has the lane behind that
    of the page before. Where it says so, free slot pages are kept in one list instead of one a lane, and a chain
    becomes a range of slots.
    """

    @property
    def deals_in_turn(self) -> Literal[True]:
        """True; a strategy that does not deal so has no such attribute, or another value."""
        ...


def deals_in_turn(layout: object) -> TypeIs[TurnwiseLayout]:
    """Whether a strategy says that it deals pages to its lanes in turn."""
    return getattr(layout, "deals_in_turn", False) is True


class StorageAwareLayout(Protocol):
    """A strategy that can also name its pages for a storage (L3) backend.

    A key says what the bytes of a page are, whoever asks and whenever. Model, pipeline stage and pool (a sidecar
    shares the pages of its anchor) are the backend's to add.
    """

    def storage_keys(self, page_hashes: Sequence[str], lanes: LaneArray) -> Sequence[str]:
        """One key a page of this rank, in node order: key i names host page i of the node's metadata.

        `page_hashes` are hexadecimal, each of a page's tokens and its parent's hash; `lanes` are the owners. Both
        have one entry a page of the node, shape ``[pages]``; `LayoutInvariantError` if not.
        A key is made from these arguments, the page size and the settings: the same in every process. Keys of
        different owners, shard sizes or layouts must differ for the same content. It may become a file name.
        """
        ...


def names_pages(layout: object) -> TypeIs[StorageAwareLayout]:
    """Whether a strategy can name its pages for a storage backend."""
    return callable(getattr(layout, "storage_keys", None))
