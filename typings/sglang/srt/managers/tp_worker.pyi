from sglang.srt.managers.cache_controller import LayerDoneCounter
from sglang_releases import SINCE_0_5_23

if not SINCE_0_5_23:
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState

class TpModelWorker:
    if not SINCE_0_5_23:
        ps: ParallelState
    def register_hicache_layer_transfer_counter(self, counter: LayerDoneCounter) -> None: ...
