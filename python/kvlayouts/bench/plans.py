"""Planning by page against planning by token, and what each keeps.

The token-wise form is the first design's: an owner mask over every token, positions and host indices for each owned
token, and splits by masks. It is written here to be measured; nothing else uses it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvlayouts.bench.figures import Figure, compared
from kvlayouts.bench.subjects import OurSubject, sizes_for, subjects_runtime
from kvlayouts.bench.timing import alternating
from sglang.srt.mem_cache.layouts import CpSharedKVLayout, CpSharedLayout
from sglang.srt.mem_cache.layouts.pages import tokens_of_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlayouts.bench.config import BenchConfig
    from kvlayouts.bench.figures import OnStep
    from kvlayouts.common.trace import Trace
    from sglang.srt.mem_cache.layouts import CopyPlan
    from sglang.srt.mem_cache.layouts.pages import PageArray
    from sglang.srt.mem_cache.layouts.protocol import NodeMetadata

NODE_TOKENS = 131_072
PAGE_SIZE = 64
RANKS = 8
REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenwiseMetadata:
    """Node-local positions of the owned tokens and their host slots: int64, CPU, one each an owned token."""

    logical_len: int
    owned_positions: torch.Tensor
    host_indices: torch.Tensor

    def split(self, split_len: int) -> tuple[TokenwiseMetadata, TokenwiseMetadata]:
        """The first `split_len` tokens and the rest, by a mask over the positions."""
        first = self.owned_positions < split_len
        return (
            TokenwiseMetadata(
                logical_len=split_len,
                owned_positions=self.owned_positions[first],
                host_indices=self.host_indices[first],
            ),
            TokenwiseMetadata(
                logical_len=self.logical_len - split_len,
                owned_positions=self.owned_positions[~first] - split_len,
                host_indices=self.host_indices[~first],
            ),
        )


def tokenwise_cycle(
    geometry: CpSharedKVLayout, slots: torch.Tensor, host_indices: torch.Tensor, new_slots: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Backup, split in the middle and load, by token: rows of the backup, then host and device rows of the load."""
    owned = geometry.owned_by_this_rank(slots)
    positions = owned.nonzero(as_tuple=True)[0]
    rows = geometry.logical_locs_to_physical(slots[owned])
    metadata = TokenwiseMetadata(
        logical_len=len(slots), owned_positions=positions.cpu(), host_indices=host_indices.cpu()
    )
    parts = metadata.split(len(slots) // 2)
    host, device, start = [], [], 0
    for part in parts:
        own_slots = new_slots[start : start + part.logical_len][part.owned_positions]
        device.append(geometry.logical_locs_to_physical(own_slots))
        host.append(part.host_indices)
        start += part.logical_len
    return rows, torch.cat(host), torch.cat(device)


def pagewise_cycle(
    layout: CpSharedLayout, slot_pages: PageArray, host_pages: PageArray, new_pages: PageArray
) -> tuple[CopyPlan, CopyPlan]:
    """The same with this package's strategy: the copies of the backup and of the load."""
    plan = layout.plan_backup(slot_pages)
    backup = plan.bind(host_pages)
    parts = layout.finish_backup(plan, host_pages).split(plan.logical_tokens // 2)
    layout.load_lanes(parts)
    return backup, layout.plan_load(parts, new_pages).copies


def rows_of(cycle: tuple[CopyPlan, CopyPlan]) -> tuple[torch.Tensor, ...]:
    """What `tokenwise_cycle` returns, from what `pagewise_cycle` does."""
    backup, load = cycle
    pages = backup.device_pages(), load.host_pages(), load.device_pages()
    return tuple(tokens_of_pages(each, load.page_size) for each in pages)


def bench_plan(config: BenchConfig, trace: Trace, on_step: OnStep) -> list[Figure]:
    """Backup plan, split and load plan of one long node on one rank, by page and by token."""
    layout = CpSharedLayout(page_size=PAGE_SIZE, shard_size=RANKS, shard_rank=3)
    pages = NODE_TOKENS // PAGE_SIZE
    slot_pages = np.arange(RANKS, RANKS + pages, dtype=np.int64)
    new_pages = slot_pages + 4 * pages
    host_pages = np.arange(pages // RANKS, dtype=np.int64)
    slots, new_slots, host = (tokens_of_pages(some, PAGE_SIZE) for some in (slot_pages, new_pages, host_pages))
    by_page = rows_of(pagewise_cycle(layout, slot_pages, host_pages, new_pages))
    by_token = tokenwise_cycle(layout.geometry, slots, host, new_slots)
    for mine, theirs in zip(by_page, by_token, strict=True):
        if not torch.equal(mine, theirs):
            raise AssertionError("planning by page and by token copy different rows")
    seconds = alternating(
        {
            "page": lambda: pagewise_cycle(layout, slot_pages, host_pages, new_pages),
            "token": lambda: tokenwise_cycle(layout.geometry, slots, host, new_slots),
        },
        rounds=config.rounds,
        repeats=REPEATS,
    )
    on_step("plan", 1, 1)
    return [
        compared(
            "plan",
            f"backup + split + load of {NODE_TOKENS:,} tokens, {RANKS} ranks",
            [1e3 * value for value in seconds["page"]],
            [1e3 * value for value in seconds["token"]],
            unit="ms",
            baseline_name="owner mask over every token",
            at_most=0.05,
        )
    ]


def bench_metadata(config: BenchConfig, trace: Trace, on_step: OnStep) -> list[Figure]:
    """Bytes that the metadata of a replayed tree takes for each token cached on the host."""
    sizes = sizes_for(trace, RANKS)
    figures = []
    with subjects_runtime(sizes):
        for number, (name, ranks) in enumerate((("identity", 1), ("cp_shared", RANKS))):
            subject = OurSubject(name, ranks, sizes)
            for request in trace.requests:
                subject.serve(trace.token_ids(request))
            on_step("metadata", number + 1, 2)
            held = [node.metadata for node in subject.cache.nodes() if node.metadata is not None]
            figures.append(metadata_figure(subject.name, ranks, held))
            subject.close()
    return figures


def metadata_figure(subject: str, ranks: int, held: Sequence[NodeMetadata]) -> Figure:
    """Bytes a token of the metadata objects `held` and of the arrays in them; no value if they are of no token.

    Not counted is what a node keeps beside its metadata: its tokens, and, while it is on the device, slots and slot
    pages.
    """
    tokens = sum(metadata.logical_len for metadata in held)
    case = f"{subject}: metadata objects, arrays included, of {tokens:,} tokens in {len(held):,} nodes"
    if not tokens:
        return Figure(bench="metadata", case=case, value=None, unit="B/token")
    value = sum(map(_bytes_of, held)) / tokens
    token_bytes = 16 / ranks + (1 if ranks > 1 else 0)
    return Figure(
        bench="metadata",
        case=case,
        value=value,
        unit="B/token",
        baseline=token_bytes,
        baseline_name="position, index and mask a token",
        ratio=value / token_bytes,
        goal="<= 0.3 B/token",
        passed=value <= 0.3,
    )


def _bytes_of(metadata: object) -> int:
    """The object and what it stores."""
    stored = [getattr(metadata, name) for name in type(metadata).__slots__]  # type: ignore[attr-defined]  # slotted
    return sys.getsizeof(metadata) + sum(sys.getsizeof(value) for value in stored if isinstance(value, np.ndarray))
