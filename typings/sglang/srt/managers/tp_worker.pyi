from sglang.srt.managers.cache_controller import LayerDoneCounter

class TpModelWorker:
    def register_hicache_layer_transfer_counter(self, counter: LayerDoneCounter) -> None: ...
