from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.managers.cache_controller import LayerDoneCounter

class TpModelWorker:
    ps: ParallelState
    def register_hicache_layer_transfer_counter(self, counter: LayerDoneCounter) -> None: ...
