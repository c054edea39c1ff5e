from array import array
from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_releases import SINCE_0_5_23

@dataclass(kw_only=True)
class ReqKvInfo:
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    kv_allocated_len: int = 0
    @property
    def holds_kv(self) -> bool: ...

class Req:
    origin_input_ids: array[int]
    output_ids: array[int]
    full_untruncated_fill_ids: array[int]
    last_node: object
    extra_key: str | None
    kv_rotation_base: int | None
    kv: ReqKvInfo
    def __init__(
        self, rid: str, origin_input_text: str, origin_input_ids: array[int], sampling_params: SamplingParams
    ) -> None: ...
    if not SINCE_0_5_23:
        def set_extend_range(self, start: int, end: int) -> None: ...
    def get_fill_ids(self) -> array[int]: ...

class ScheduleBatch:
    reqs: list[Req]
    prefix_lens: list[int]
    seq_lens_cpu: torch.Tensor
    tree_cache: BasePrefixCache
