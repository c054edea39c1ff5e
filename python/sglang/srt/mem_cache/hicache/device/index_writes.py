"""Index keys of a DSA model are stored on the ranks that keep their pages.

SGLang's indexer stores the keys of a batch in one of three ways, all with the slots of the batch: a kernel that
normalises, rotates, quantises and stores; one that quantises and stores; or, where these cannot be compiled, the
pool's own setter. The kernels take the pool's buffer and a tensor of slots, and no method of the pool lies between.
But the two methods of the indexer that choose a way take the slots as an argument. Our hooks on them pass rows::

    Indexer                       this module              pool
    _fused_k_prepare_and_store ─▶ slots become rows ─▶ get_index_k_with_scale_buffer: this rank's buffer ─▶ kernel
    _store_index_k_cache       ─▶ (once, if nested)   set_index_k_scale_buffer: rows as they are

So SGLang's own kernel writes the bytes into this rank's buffer, as it does for KV; keys of other ranks' pages go to
the padding page. Every rank has the keys of all tokens of the batch here: under prefill context parallelism the
indexer has gathered them from the ranks that computed them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

from .shared_pools import LayoutDSATokenToKVPool

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def store_keys(
    original: Callable[..., None],
    indexer: Indexer,
    forward_batch: ForwardBatch,
    layer_id: int,
    key: torch.Tensor,
    *,
    act_quant: Any = None,  # noqa: ANN401  # SGLang's
    out_cache_loc: torch.Tensor | None = None,
) -> None:
    """Around `_store_index_k_cache`: quantise `key`, ``[tokens, width]``, and store it."""

    def store(slots: torch.Tensor | None) -> None:
        original(indexer, forward_batch, layer_id, key, act_quant=act_quant, out_cache_loc=slots)

    _store_rows(store, forward_batch, layer_id, out_cache_loc)


def prepare_and_store_keys(
    original: Callable[..., None],
    indexer: Indexer,
    key_raw: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    layer_id: int,
    act_quant: Any,  # noqa: ANN401  # SGLang's
    out_cache_loc: torch.Tensor | None = None,
) -> None:
    """Around `_fused_k_prepare_and_store`: normalise, rotate, quantise and store `key_raw`, ``[tokens, width]``."""

    def store(slots: torch.Tensor | None) -> None:
        original(indexer, key_raw, positions, forward_batch, layer_id, act_quant, out_cache_loc=slots)

    _store_rows(store, forward_batch, layer_id, out_cache_loc)


def _store_rows(
    store: Callable[[torch.Tensor | None], None],
    forward_batch: ForwardBatch,
    layer_id: int,
    out_cache_loc: torch.Tensor | None,
) -> None:
    pool = get_token_to_kv_pool()
    if not isinstance(pool, LayoutDSATokenToKVPool) or pool.writes_index_rows:
        store(out_cache_loc)
        return
    rows = pool.index_rows(forward_batch.out_cache_loc if out_cache_loc is None else out_cache_loc)
    with pool.writing_index_rows(layer_id):
        store(rows)
