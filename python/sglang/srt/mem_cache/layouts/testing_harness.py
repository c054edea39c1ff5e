"""What the contract suite asks of a binding, and the groups, chains and cases it builds from the answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .protocol import KVLayoutStrategy, MetadataT
from .testing_oracle import SimulatedGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .pages import PageArray
    from .testing_metadata import SplitRule


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCase:
    """One group and one chain of nodes: `node_pages` pages each, in slots that `shuffled` and `seed` choose."""

    page_size: int
    shard_size: int
    node_pages: tuple[int, ...]
    shuffled: bool = True
    seed: int = 0


class LayoutHarness(ABC, Generic[MetadataT]):
    """The part of `LayoutContract` that a binding fills in, and what the tests build from it."""

    split_rules: ClassVar[Mapping[str, SplitRule]] = {}
    """The decided split rule of every field that the metadata stores. No field may lack one."""

    page_sizes: ClassVar[Sequence[int]] = (1, 16, 64)
    shard_sizes: ClassVar[Sequence[int]] = range(1, 17)
    max_examples: ClassVar[int] = 60

    @abstractmethod
    def make_layout(self, *, page_size: int, shard_size: int, shard_rank: int) -> KVLayoutStrategy[MetadataT]:
        """The strategy of rank `shard_rank` in a group of `shard_size`."""

    def stated_home(self, slot_page: int, shard_size: int) -> tuple[int, int] | None:
        """Lane and row page of a logical page, worked out in another way than the strategy does.

        Optional. None: the oracle asks the strategy for one page at a time, which finds every disagreement
        of the strategy with itself, but not a mapping that is consistently another one than you meant.
        """
        return None

    def _layouts(self, case: LayoutCase) -> list[KVLayoutStrategy[MetadataT]]:
        return [
            self.make_layout(page_size=case.page_size, shard_size=case.shard_size, shard_rank=rank)
            for rank in range(case.shard_size)
        ]

    def _group(self, case: LayoutCase, row_pages: int | None = None) -> SimulatedGroup[MetadataT]:
        pages = sum(case.node_pages)

        def home(slot_page: int) -> tuple[int, int]:
            stated = self.stated_home(slot_page, case.shard_size)
            return stated if stated is not None else group.ask_home(slot_page)

        group: SimulatedGroup[MetadataT] = SimulatedGroup(
            self._layouts(case),
            row_pages=row_pages if row_pages is not None else 2 * pages + 2,
            host_pages=pages + 4,
            seed=case.seed,
            shuffled=case.shuffled,
            home=home,
        )
        return group

    def _chain_slots(self, group: SimulatedGroup[MetadataT], case: LayoutCase) -> list[PageArray]:
        layout = group.layouts[0]
        base = layout.chain_base(case.seed.to_bytes(8, "little"), "")
        return [group.allocate_slots(layout.extend_lanes(base, at, n)) for at, n in spans(case.node_pages)]

    def _stored(self, case: LayoutCase) -> tuple[SimulatedGroup[MetadataT], list[list[MetadataT]]]:
        """A group and, for each rank, the metadata of the chain's nodes."""
        group = self._group(case)
        by_node = [group.backup(slots)[1] for slots in self._chain_slots(group, case)]
        return group, [list(nodes) for nodes in zip(*by_node, strict=True)]

    def _cut(self, group: SimulatedGroup[MetadataT], nodes: Sequence[MetadataT]) -> list[MetadataT]:
        """Every node but the second split twice; equal cuts on all ranks."""
        pieces: list[MetadataT] = []
        for number, node in enumerate(nodes):
            if number == 1:
                pieces.append(node)
                continue
            pages = node.logical_len // group.page_size
            first, rest = node.split((7 * number + 1) % (pages + 1) * group.page_size)
            pages = rest.logical_len // group.page_size
            pieces.extend([first, *rest.split((pages + 1) // 2 * group.page_size)])
        return pieces

    def _corners(self) -> list[LayoutCase]:
        """One page; more ranks than pages (so ranks that own nothing); an uneven tail; many nodes."""
        few, many = self.shard_sizes[0], self.shard_sizes[-1]
        middle = self.shard_sizes[len(self.shard_sizes) // 3]
        return [
            LayoutCase(page_size=self.page_sizes[0], shard_size=few, node_pages=(1,)),
            LayoutCase(page_size=self.page_sizes[-1], shard_size=many, node_pages=(1,)),
            LayoutCase(page_size=self.page_sizes[0], shard_size=many, node_pages=(3, 2)),
            LayoutCase(page_size=self.page_sizes[0], shard_size=middle, node_pages=(2 * middle + 1, 1, 3)),
            LayoutCase(page_size=self.page_sizes[-1], shard_size=middle, node_pages=(middle + 2, 4), shuffled=False),
        ]

    def _for_all_cases(self, check: Callable[[LayoutCase], None]) -> None:
        """Run `check` on the corner cases, then on random ones.

        The property is a plain function made here: hypothesis refuses one decorated method that several
        subclasses inherit.
        """
        for case in self._corners():
            check(case)

        @settings(
            max_examples=self.max_examples,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],  # a busy machine is not a failure
        )
        @given(
            case=st.builds(
                LayoutCase,
                page_size=st.sampled_from(self.page_sizes),
                shard_size=st.sampled_from(self.shard_sizes),
                node_pages=st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple),
                shuffled=st.booleans(),
                seed=st.integers(0, 2**32 - 1),
            )
        )
        def check_random(case: LayoutCase) -> None:
            check(case)

        check_random()


def spans(node_pages: Sequence[int]) -> list[tuple[int, int]]:
    """First page and number of pages of each node of a chain."""
    return [(sum(node_pages[:number]), pages) for number, pages in enumerate(node_pages)]
