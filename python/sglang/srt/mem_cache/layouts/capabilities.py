"""What a strategy may be able to do besides: one optional protocol and one guard for each capability.

A guard asks the object and not its class, so a strategy inherits nothing: it has the member, or it cannot do this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from typing_extensions import TypeIs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .pages import LaneArray


class HostLanesLayout(Protocol):
    """A strategy whose pages have other owners on the host than on the device.

    A *host lane* is the host pages of one owner. Each is one rank's, or there is one and every rank keeps all.
    `BackupPlan.lanes`, its demand and the metadata's `pages_per_lane` are by host lane then, and `plan_load` says
    which pages the ranks must exchange. Without this, the host lanes are the lanes.
    """

    @property
    def host_lane_count(self) -> int:
        """Number of owners on the host."""
        ...

    @property
    def host_lane(self) -> int | None:
        """The host lane whose pages this rank backs up, in ``[0, host_lane_count)``, or None if it has none."""
        ...


def has_host_lanes(layout: object) -> TypeIs[HostLanesLayout]:
    """Whether a strategy says who owns pages on the host."""
    return isinstance(getattr(layout, "host_lane_count", None), int) and hasattr(layout, "host_lane")


class StripedLayout(Protocol):
    """A strategy that shares out the tokens within a page: each rank has `page_rows` rows of every page.

    Plans, ledgers and lanes count pages as ever; only the last step, from pages to rows, differs.
    """

    @property
    def page_rows(self) -> int:
        """Rows of a page in the pools of one rank."""
        ...


def stripes_pages(layout: object) -> TypeIs[StripedLayout]:
    """Whether a strategy says how many rows a page has."""
    return isinstance(getattr(layout, "page_rows", None), int)


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
