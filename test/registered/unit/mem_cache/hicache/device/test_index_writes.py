"""Index keys that SGLang's own indexer stores end up on the ranks that keep their pages, byte for byte.

SGLang chooses a way to store keys in Python and stores them in a kernel. The Python is SGLang's here. The two kernels
that need CUDA are torch functions with the same arguments and the same layout of a page, which is checked against
SGLang's Triton kernel, under Triton's interpreter, as are its kernels that read.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci
from typing_extensions import override

from sglang.srt.mem_cache.hicache.copies.transfer import HostTransfer
from sglang.srt.mem_cache.hicache.cpu.pools import CpuDSATokenToKVPool
from sglang.srt.mem_cache.hicache.device.page_reader import as_integer_pages
from sglang.srt.mem_cache.hicache.device.pools import index_buffers
from sglang.srt.mem_cache.hicache.host.pools import build_host_pool
from sglang.srt.mem_cache.layouts import PoolKind
from sglang.srt.mem_cache.layouts.errors import LayoutInvariantError
from support.caches import CacheTestCase
from support.shared_ranks import PAGE, ROW_PAGES, Ranks, index_pages, slots_of
from support.triton_interpreter import interpreted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang.srt.mem_cache.hicache.device.shared_pools import LayoutMLATokenToKVPool

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

WIDTH = 128
LAYERS = 2
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
# Kernels of the index keys; they were moved.
ACCESSOR = next(
    name
    for name in ("sglang.kernels.ops.kvcache.dsa_index_k_cache", "sglang.kernels.ops.attention.dsa.index_buf_accessor")
    if find_spec(name)
)
ACCESSOR_IN_CACHE = f"sglang.srt.mem_cache.index_key_cache.{ACCESSOR.rpartition('.')[2]}"
_indexer: Any = import_module(INDEXER)  # SGLang's model code has no stubs
_context: Any = import_module("sglang.srt.model_executor.forward_context")
_counters: Any = import_module("sglang.srt.managers.cache_controller")


# What CUDA would do.


def quantise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[tokens, 128]`` as float8 and a float32 scale each."""
    scales = keys.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-4) / 448
    return (keys.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn), scales


def store(keys: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, page_size: int) -> None:
    """In place of the kernel that quantises keys and stores them in a page: all keys, then all scales."""
    assert int(rows.max()) < len(pages) * page_size, "a GPU would write past the buffer"
    quantised, scales = quantise(keys)
    for row, key, scale in zip(rows.tolist(), quantised.view(torch.uint8), scales.view(torch.uint8), strict=True):
        page, at = pages[row // page_size], row % page_size
        page[at * WIDTH : (at + 1) * WIDTH] = key
        page[page_size * WIDTH + at * 4 :][:4] = scale


def prepare(
    keys: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """In place of the kernel that normalises and rotates; the rotation is a shift by a table."""
    normal = torch.nn.functional.layer_norm(keys.float(), (WIDTH,), weight, bias, epsilon)
    return (normal + cos_sin[positions]).to(keys.dtype)


def prepare_and_store(
    keys: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    page_size: int,
) -> None:
    """In place of the kernel that does both."""
    store(prepare(keys, weight, bias, epsilon, cos_sin, positions), pages, rows, page_size)


@contextmanager
def on_cuda(*, compiled: bool) -> Iterator[None]:
    """SGLang's indexer takes the ways that it takes on CUDA, with kernels that could be compiled or not."""
    with mock.patch.multiple(
        _indexer,
        create=True,
        _is_cuda=True,
        can_use_dsa_fused_store=lambda *_: compiled,
        fused_store_index_k_cache=store,
        fused_k_indexer_norm_rope=prepare,
        fused_k_indexer_norm_rope_store=prepare_and_store,
    ):
        yield


class BareIndexer:
    """The methods of SGLang's indexer that store, with the weights that they look at."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.block_size, self.scale_fmt = WIDTH, None
        weight, bias = torch.rand(2, WIDTH, generator=generator).unbind()
        self.k_norm = SimpleNamespace(weight=weight, bias=bias, variance_epsilon=1e-6)
        self._indexer_cos_sin_cache = torch.rand(4096, WIDTH, generator=generator)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # a method of SGLang's
        return getattr(_indexer.Indexer, name).__get__(self)

    def store_prepared(self, batch: Any, layer: int, keys: torch.Tensor) -> None:  # noqa: ANN401
        """As after a prefill under context parallelism, where the keys were gathered before."""
        self._store_index_k_cache(
            forward_batch=batch, layer_id=layer, key=keys, act_quant=lambda keys, *_: quantise(keys)
        )

    def store_raw(self, batch: Any, layer: int, keys: torch.Tensor) -> None:  # noqa: ANN401
        """As in any other pass, with the slots of unpadded tokens given apart."""
        slots = batch.out_cache_loc[: len(keys)]
        self._fused_k_prepare_and_store(
            keys, batch.positions, batch, layer, lambda keys, *_: quantise(keys), out_cache_loc=slots
        )


WAYS: dict[str, tuple[Callable[[BareIndexer, Any, int, torch.Tensor], None], bool]] = {
    "one kernel for all": (BareIndexer.store_raw, True),
    "a kernel to prepare and the pool's setter": (BareIndexer.store_raw, False),
    "a kernel to quantise and store": (BareIndexer.store_prepared, True),
    "the pool's setter": (BareIndexer.store_prepared, False),
}


@contextmanager
def serving(pool: LayoutMLATokenToKVPool) -> Iterator[None]:
    """A forward pass of the rank whose pool this is."""
    backend = SimpleNamespace(token_to_kv_pool=pool)
    with _context.forward_context(_context.ForwardContext(attn_backend=backend)):
        yield


def read_like_sglang(pool: LayoutMLATokenToKVPool, layer: int) -> torch.Tensor:
    """The buffer that SGLang's indexer hands to its kernels for decoding."""
    pages: torch.Tensor = _indexer.Indexer._get_index_k_read_buffer(pool, layer)  # noqa: SLF001  # what SGLang calls
    return pages


class TestIndexWrites(CacheTestCase):
    @classmethod
    @override
    def setUpClass(cls) -> None:
        super().setUpClass()
        load_plugins()

    @override
    def setUp(self) -> None:
        torch.manual_seed(1)
        self.indexer = BareIndexer()

    def _pass(self, group: Ranks, way: str, pages: list[int], slots: torch.Tensor, *, reads: bool = True) -> None:
        """One forward pass over `pages` that computes the tokens of `slots`; readers compared with the whole pool."""
        group.begin_batch(pages)
        for layer in range(LAYERS):
            self._store(group, way, layer, slots)
            group.write(layer, slots, index=False)
            if reads:
                self._check_readers(group, layer, pages)

    def _store(self, group: Ranks, way: str, layer: int, slots: torch.Tensor) -> None:
        act, compiled = WAYS[way]
        keys = torch.randn(len(slots), WIDTH).to(torch.bfloat16)
        batch = SimpleNamespace(out_cache_loc=slots, positions=torch.arange(len(slots)))
        for pool in (*group.shared, group.whole):
            with serving(pool), on_cuda(compiled=compiled):
                act(self.indexer, batch, layer, keys)

    def _check_readers(self, group: Ranks, layer: int, pages: list[int]) -> None:
        expected = index_pages(group.whole, layer)[pages]
        for found in group.everywhere(lambda pool: read_like_sglang(pool, layer)):
            self.assertTrue(torch.equal(found[pages], expected))

    def _check_stored(self, group: Ranks, pages: list[int]) -> None:
        """Each page lies on its owner, KV and index, and nowhere else."""
        for rank, pool in enumerate(group.shared):
            for layer in range(LAYERS):
                for buffer, rows_per_page in ((pool.kv_buffer, PAGE), (index_buffers(pool), 1)):
                    whole = group.whole.kv_buffer if rows_per_page == PAGE else index_buffers(group.whole)
                    mine = as_integer_pages(buffer[layer], rows_per_page)
                    theirs = as_integer_pages(whole[layer], rows_per_page)
                    kept = [page for page in pages if page % len(group.shared) == rank]
                    self.assertTrue(torch.equal(mine[[page // len(group.shared) for page in kept]], theirs[kept]))
                    others = set(range(1, ROW_PAGES + 1)) - {page // len(group.shared) for page in kept}
                    self.assertEqual(int(mine[sorted(others)].count_nonzero()), 0)

    def test_prefill_a_chunk_from_the_middle_of_a_page_and_decoding_give_one_big_pools_bytes(self) -> None:
        for way in WAYS:
            for ranks in (2, 3):
                with self.subTest(way, ranks=ranks):
                    group = Ranks(PoolKind.DSA, ranks)
                    first = random.Random(ranks).randrange(ranks, 2 * ranks)
                    chain = [first + 1, first, first + 3, first + 2]  # pages of one prompt, in no order
                    slots = slots_of(chain)
                    length = 0
                    for tokens in (PAGE + 36, 50, 1, 1, 1, PAGE):  # prefill, chunk, decode, another turn
                        end = length + tokens
                        self._pass(group, way, chain[: -(-end // PAGE)], slots[length:end])
                        length = end
                    self._check_stored(group, chain)

    def test_keys_that_no_layer_read_are_there_when_a_later_pass_does(self) -> None:
        for way in WAYS:
            with self.subTest(way):
                group = Ranks(PoolKind.DSA, 2)
                slots = slots_of([2, 3, 5])
                self._pass(group, way, [2, 3], slots[: PAGE + 10], reads=False)
                self.assertEqual(group.reduce.calls, 0)
                self._pass(group, way, [2, 3, 5], slots[PAGE + 10 : 2 * PAGE + 1])
                self._check_stored(group, [2, 3, 5])

    def test_keys_that_are_stored_after_a_layer_was_read_are_read(self) -> None:
        for way in WAYS:
            with self.subTest(way):
                group = Ranks(PoolKind.DSA, 2)
                group.begin_batch([2, 3])
                for tokens in (slots_of([2, 3])[:70], slots_of([3])[6:9]):
                    self._store(group, way, 0, tokens)
                    self._check_readers(group, 0, [2, 3])

    def test_padding_tokens_are_stored_in_the_padding_page_of_every_rank(self) -> None:
        group = Ranks(PoolKind.DSA, 2)
        self._pass(group, "the pool's setter", [2], torch.tensor([2 * PAGE, 0, 0]))
        self._check_stored(group, [2])

    def test_index_keys_are_gathered_once_a_layer_and_not_before_they_are_stored(self) -> None:
        group = Ranks(PoolKind.DSA, 2)
        self._pass(group, "one kernel for all", [2, 3], slots_of([2, 3]))
        self.assertEqual(group.reduce.calls, LAYERS)
        for layer in range(LAYERS):
            self._check_readers(group, layer, [2, 3])
        self.assertEqual(group.reduce.calls, 2 * LAYERS)  # the window has one layer

    def test_a_loaded_prefix_is_read_and_continued_in_other_pages_of_the_same_owners(self) -> None:
        group = Ranks(PoolKind.DSA, 2)
        old, new = [2, 3, 4], [8, 7, 6]
        self._pass(group, "one kernel for all", old, slots_of(old))
        for pool, layout in zip(group.shared, group.layouts, strict=True):
            host = build_host_pool(pool, page_size=PAGE, mem_layout="layer_first")
            transfer = HostTransfer(host_pool=host, device_pool=pool, io_backend="direct")
            plan = layout.plan_backup(np.array(old))
            pages = np.arange(plan.owned_pages)
            transfer.back_up(plan.bind(pages))
            for buffer in (*pool.kv_buffer, *index_buffers(pool)):
                buffer.fill_(0)
            load = layout.plan_load([layout.finish_backup(plan, pages)], np.array(new))
            transfer.load(load.copies, _counters.LayerDoneCounter(LAYERS).events[0])
        for buffer in (*group.whole.kv_buffer, *index_buffers(group.whole)):
            rows_per_page = PAGE if buffer.dim() == 3 else 1
            as_integer_pages(buffer, rows_per_page)[new] = as_integer_pages(buffer, rows_per_page)[old]
        for layer in range(LAYERS):
            group.begin_batch(new)
            self._check_readers(group, layer, new)
        self._pass(group, "one kernel for all", [*new, 5], slots_of([5])[:3])
        self._check_stored(group, [*new, 5])

    def test_a_writer_that_our_hooks_do_not_know_is_stopped_before_it_writes(self) -> None:
        pool = Ranks(PoolKind.DSA, 2).shared[1]
        batch = SimpleNamespace(out_cache_loc=slots_of([3]), positions=torch.arange(PAGE))
        unhooked = _indexer.Indexer._store_index_k_cache.__wrapped__  # noqa: SLF001  # SGLang's own
        keys = torch.randn(PAGE, WIDTH).to(torch.bfloat16)
        with serving(pool), on_cuda(compiled=True):
            with self.assertRaisesRegex(LayoutInvariantError, "get_index_k_with_scale_buffer takes slots for rows"):
                unhooked(self.indexer, batch, 0, keys)
            self.indexer.store_prepared(batch, 0, keys)
        self.assertEqual(int(index_buffers(pool)[0][1].count_nonzero() > 0), 1)

    def test_an_error_in_a_kernel_leaves_no_rank_taking_slots_for_rows(self) -> None:
        pool = Ranks(PoolKind.DSA, 2).shared[0]
        batch = SimpleNamespace(out_cache_loc=slots_of([2]), positions=torch.arange(PAGE))
        keys = torch.randn(PAGE, 3)  # no index keys
        with serving(pool), on_cuda(compiled=True), self.assertRaises(RuntimeError):
            self.indexer.store_prepared(batch, 0, keys)
        assert isinstance(pool, CpuDSATokenToKVPool)
        self.assertFalse(pool.writes_index_rows)

    def test_the_stand_ins_lay_pages_out_as_sglangs_own_kernels_write_and_read_them(self) -> None:
        keys = torch.randn(70, WIDTH).to(torch.bfloat16)
        rows = torch.randperm(4 * PAGE)[:70]
        quantised, scales = quantise(keys)
        ours, theirs = torch.zeros(2, 4, PAGE * (WIDTH + 4), dtype=torch.uint8).unbind()
        geometry = SimpleNamespace(page_size=PAGE, index_page_size=PAGE, index_head_dim=WIDTH)
        store(keys, ours, rows, PAGE)
        with interpreted(ACCESSOR) as accessor:
            accessor.SetKAndS.execute(geometry, buf=theirs, loc=rows, index_k=quantised, index_k_scale=scales)
        self.assertTrue(torch.equal(ours, theirs))

    def test_sglangs_own_kernels_read_the_same_keys_on_every_rank(self) -> None:
        group = Ranks(PoolKind.DSA, 2)
        chain = [3, 2, 6]
        self._pass(group, "one kernel for all", chain, slots_of(chain))
        pools: list[Any] = [group.whole, *group.shared]
        tokens = 2 * PAGE + 5
        request = (torch.tensor([tokens]), torch.tensor([chain], dtype=torch.int32), tokens, tokens)
        group.everywhere(lambda pool: index_pages(pool, 0))  # gathered here: the interpreter has one thread
        with interpreted(ACCESSOR) as accessor, mock.patch(ACCESSOR_IN_CACHE, accessor):
            read_by_rank = [pool.get_index_k_scale_buffer(0, *request) for pool in pools]
        self.assertEqual(group.reduce.calls, LAYERS + 1)
        for read in zip(*read_by_rank, strict=True):
            self.assertGreater(int(read[0].count_nonzero()), PAGE)
            self.assertTrue(all(torch.equal(found, read[0]) for found in read))
