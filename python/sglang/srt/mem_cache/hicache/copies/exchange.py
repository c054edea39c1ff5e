"""Performs the exchange of a load: after a layer's copies the ranks give each other its pages.

    stream of the loads   copy 0 │ copy 1 │ copy 2 │ ...
                               └▶ event   └▶ event                what was copied, a layer each
    stream of exchanges          give 0 │  give 1 │ ...           beside the copy of the next layer
                                      └▶ event 0  └▶ event 1      what the forward pass waits for

Each rank packs its pages into a buffer, gets those of all, and puts the others' where they belong. Ranks with fewer
pages pad with the padding page, row page 0, and into it go pads, and the pages that a rank has already or does not
store. A load goes through buffers of a fixed size in as many rounds as it takes: owners are equal on all ranks, so all
take as many.

On a CPU, where copies are done when they are submitted, it happens in the same order, all before the call returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from sglang.srt.managers.cache_controller import LayerLoadingEvent, device_module
from sglang.srt.mem_cache.l2_transfer import TransferCompletion, make_timing_event_pair

from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError

from ..device.page_reader import as_integer_pages
from ..device.pools import index_buffers, kv_buffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang.srt.mem_cache.layouts.exchange import PageExchange
    from sglang.srt.mem_cache.layouts.pages import PageArray

    from .peers import PeerGather

    Round = tuple[torch.Tensor, torch.Tensor]
    """Row pages that this rank gives, and those to put what all give into, int64, on the device."""

STAGING_BYTES: Final = 64 << 20
"""Device memory of the buffers that pages go through, both together."""


class PageExchanger:
    """Exchanges pages of `device_pool` with the other ranks of `peers`. For one thread.

    Takes at most `staging_bytes` of the pool's device, or what a page of each rank needs, and meets the peers once to
    warm the way up. `received_pages` counts the pages that this rank was given.
    """

    def __init__(self, device_pool: KVCache, peers: PeerGather, *, staging_bytes: int = STAGING_BYTES) -> None:
        self._peers = peers
        self._layers = _pages_of_layers(device_pool)
        self._device = torch.device(device_pool.device)
        widest = max(_page_bytes(pages) for kinds in self._layers for pages in kinds)
        self._most_pages = max(staging_bytes // (widest * (peers.ranks + 1)), 1)  # of a rank, in a round
        self._sent = torch.zeros(self._most_pages * widest, dtype=torch.uint8, device=self._device)
        self._received = torch.zeros(len(self._sent) * peers.ranks, dtype=torch.uint8, device=self._device)
        self._copied = LayerLoadingEvent(len(self._layers))
        self._stream = device_module.Stream()
        self.received_pages = 0
        self._warm_up()

    def begin(self, exchange: PageExchange, producer: LayerLoadingEvent) -> LayerExchange:
        """`exchange` in parts, a layer each; `producer` records an event after each.

        Raises `LayoutInvariantError`, with nothing submitted, for an owner that is no rank.
        """
        sends, receives = self._rounds(exchange)
        with device_module.stream(self._stream):
            rounds = self._on_device(sends, receives)
        self.received_pages += exchange.received_pages(self._peers.rank)
        self._copied.start_event = producer.start_event
        return LayerExchange(self, rounds, copied=self._copied, producer=producer)

    def give_layer(self, layer: int, rounds: Sequence[Round], copied: torch.Event, done: LayerLoadingEvent) -> None:
        """Submit the rounds of one layer, after `copied`; `done` records the layer's event. Raises what peers raise."""
        with device_module.stream(self._stream):
            copied.wait(self._stream)
            for own, theirs in rounds:
                for pages in self._layers[layer]:
                    self._give(pages, own, theirs)
            done.complete(layer)

    def record(self, event: torch.Event) -> None:
        """Record `event` behind what was submitted so far."""
        event.record(self._stream)

    def _rounds(self, exchange: PageExchange) -> tuple[PageArray, PageArray]:
        """Row pages that this rank gives, ``[n]``, and those to put what all give into, ``[ranks, n]``; 0 where none.

        n is the number of pages of the rank that has most.
        """
        ranks, own = self._peers.ranks, self._peers.rank
        counts = np.bincount(exchange.owners, minlength=ranks)
        if len(counts) > ranks:
            raise LayoutInvariantError(f"an exchange of {ranks} ranks has pages of rank {len(counts) - 1}")
        receives = np.zeros((ranks, int(counts.max())), dtype=np.int64)
        for rank in range(ranks):
            receives[rank, : counts[rank]] = exchange.row_pages[exchange.owners == rank]
        sends = receives[own].copy()
        receives[own] = 0
        return sends, receives

    def _on_device(self, sends: PageArray, receives: PageArray) -> list[Round]:
        """The index tensors of each round, in one copy to the device."""
        parts: list[PageArray] = []
        for first in range(0, len(sends), self._most_pages):
            end = first + self._most_pages
            parts += [sends[first:end], receives[:, first:end].reshape(-1)]
        indices = torch.from_numpy(np.concatenate(parts))
        if self._device.type == "cuda":
            indices = indices.pin_memory()  # else the thread would wait for the exchange before this one
        on_device = torch.split(indices.to(self._device, non_blocking=True), [len(part) for part in parts])
        return list(zip(on_device[::2], on_device[1::2], strict=True))

    def _give(self, pages: torch.Tensor, own: torch.Tensor, theirs: torch.Tensor) -> None:
        """One round of a buffer, `pages`, as integers: row pages `own` are given, `theirs` take what all give."""
        page_bytes, count = _page_bytes(pages), len(own)
        sent = self._sent[: count * page_bytes].view(pages.dtype).view(count, -1)
        received = self._received[: len(theirs) * page_bytes].view(pages.dtype).view(self._peers.ranks, count, -1)
        torch.index_select(pages, 0, own, out=sent)
        self._peers.gather(sent, received)
        pages.index_copy_(0, theirs, received.view(len(theirs), -1))

    def _warm_up(self) -> None:
        """Connections are made, and kernels loaded, before anybody waits for them."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        with device_module.stream(self._stream):
            for pages in self._layers[0]:
                self._give(pages, nothing, nothing.expand(self._peers.ranks))
        warm = device_module.Event()
        self.record(warm)
        warm.synchronize()


class LayerExchange:
    """One exchange under way. `copied` has the events that the copies of each layer are to record."""

    def __init__(
        self,
        exchanger: PageExchanger,
        rounds: Sequence[Round],
        *,
        copied: LayerLoadingEvent,
        producer: LayerLoadingEvent,
    ) -> None:
        self._exchanger = exchanger
        self._rounds = rounds
        self._producer = producer
        self.copied = copied

    def after_layer(self, layer: int) -> None:
        """The copies of a layer have just been submitted to the current stream, and its exchange follows.

        With the last layer the current stream comes to wait for it, so that what ends the copies ends the load.
        """
        self.copied.complete(layer)
        self._exchanger.give_layer(layer, self._rounds, self.copied.load_events[layer], self._producer)
        if layer == len(self.copied.load_events) - 1:
            self._producer.finish_event.wait(device_module.current_stream())

    def after_copies(self, copies: TransferCompletion) -> TransferCompletion:
        """All copies were submitted, as `copies`, and have recorded `copied`. What the load as a whole ends with."""
        _, finished, timed = make_timing_event_pair()
        for layer, event in enumerate(self.copied.load_events):
            self._exchanger.give_layer(layer, self._rounds, event, self._producer)
        self._exchanger.record(finished)
        return TransferCompletion(copies.start_event, finished, timed and copies.timing_enabled)


def _pages_of_layers(device_pool: KVCache) -> list[list[torch.Tensor]]:
    """The buffers of each layer by page, as integers ``[pages, integers a page]``: KV rows and index keys."""
    layers = device_pool.layer_num
    by_layer: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    for number, buffer in enumerate(kv_buffers(device_pool)):
        by_layer[number % layers].append(as_integer_pages(buffer, device_pool.page_size))
    for layer, buffer in enumerate(index_buffers(device_pool)):
        if buffer.numel():  # some layers of a model may have no index
            by_layer[layer].append(as_integer_pages(buffer, 1))
    return by_layer


def _page_bytes(pages: torch.Tensor) -> int:
    return pages.shape[1] * pages.element_size()
