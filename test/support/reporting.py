"""Ranks that report to ``/metrics`` as the processes of a server do, and a scrape of all of them, in one process.

prometheus_client keeps the values of a process in files of its own and adds the files up when it is scraped. Here each
rank of a `Group` is such a process: it has its own metric objects, registry and files.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import prometheus_client
import torch
from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector

from sglang.srt.mem_cache.hicache.seam.records import Place
from sglang.srt.mem_cache.hicache.server.allocator import ServingSlotAllocator
from sglang.srt.mem_cache.hicache.server.metrics import LayoutMetrics, ReportingRank, traffic_collector
from support.groups import Group
from support.scrape import Scrape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.layouts import AnyKVLayoutStrategy
    from support.caches import CacheSpec, Rank

KINDS = ("Counter", "Gauge", "Histogram")


class ReportingGroup(Group):
    """The ranks of one tensor-parallel server with ``--enable-metrics``; `folder` takes their files."""

    def __init__(self, spec: CacheSpec, folder: Path) -> None:
        with mock.patch("support.caches.make_allocator", _make_allocator):
            super().__init__(spec)
        self.folder = folder
        self.published = self.each(self._let_report)

    def scrape(self) -> Scrape:
        """What all ranks say now. Once: they publish again after a second."""
        for rank, metrics in zip(self.ranks, self.published, strict=True):
            metrics.publish(rank.cache)
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self.folder))  # type: ignore[no-untyped-call]  # not annotated
        return Scrape(generate_latest(registry).decode())

    def _let_report(self, rank: Rank) -> LayoutMetrics:
        place = ReportingRank.at(place_of(tp=rank.number, attn_tp=rank.number))
        assert isinstance(rank.allocator, ServingSlotAllocator)
        with own_metrics(self.folder, rank.number):
            rank.cache.parts.report.collector = traffic_collector("HiRadixCache", place)
            return LayoutMetrics(rank.layout, rank.allocator, place)


def place_of(*, tp: int = 0, attn_tp: int = 0, attn_cp: int = 0, pp: int = 0, dp: int | None = None) -> Place:
    """A scheduler's place in its server."""
    return Place(tp_rank=tp, attn_tp_rank=attn_tp, attn_cp_rank=attn_cp, pp_rank=pp, dp_rank=dp)


@contextmanager
def own_metrics(folder: Path, process: int) -> Iterator[None]:
    """Metrics that are made within belong to process number `process`, whose files lie in `folder`."""
    registry = CollectorRegistry()
    with mock.patch.dict(os.environ, {"PROMETHEUS_MULTIPROC_DIR": str(folder)}):
        value_class = values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call]  # ditto
    with ExitStack() as patches:
        for kind in KINDS:
            own = _own(getattr(prometheus_client, kind), registry, value_class, folder)
            patches.enter_context(mock.patch.object(prometheus_client, kind, own))
        yield


def _own(kind: Any, registry: CollectorRegistry, value_class: type, folder: Path) -> type:  # noqa: ANN401  # a class
    class Own(kind):  # type: ignore[misc]  # one of three classes
        def __init__(self, *positional: Any, **named: Any) -> None:  # noqa: ANN401
            super().__init__(*positional, **{**named, "registry": registry})

        def _metric_init(self) -> None:
            with (
                mock.patch.object(values, "ValueClass", value_class),
                mock.patch.dict(os.environ, {"PROMETHEUS_MULTIPROC_DIR": str(folder)}),
            ):
                super()._metric_init()

    return Own


def _make_allocator(spec: CacheSpec, layout: AnyKVLayoutStrategy, device_pool: KVCache) -> ServingSlotAllocator:
    return ServingSlotAllocator(
        layout=layout,
        physical_size=spec.device_pages * spec.page_size,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=device_pool,
    )
