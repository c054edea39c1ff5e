from array import array
from dataclasses import dataclass

from sglang.srt.sampling.sampling_params import SamplingParams

@dataclass(kw_only=True)
class ReqKvInfo:
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    kv_allocated_len: int = 0

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
    def set_extend_range(self, start: int, end: int) -> None: ...
