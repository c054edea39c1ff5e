from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

class Indexer:
    def _fused_k_prepare_and_store(
        self,
        key_raw: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        layer_id: int,
        act_quant: Any,  # noqa: ANN401
        out_cache_loc: torch.Tensor | None = None,
    ) -> None: ...
    def _store_index_k_cache(
        self,
        forward_batch: ForwardBatch,
        layer_id: int,
        key: torch.Tensor,
        *,
        act_quant: Any = None,  # noqa: ANN401
        out_cache_loc: torch.Tensor | None = None,
    ) -> None: ...
    @staticmethod
    def _get_index_k_read_buffer(pool: Any, layer_id: int) -> torch.Tensor: ...  # noqa: ANN401
