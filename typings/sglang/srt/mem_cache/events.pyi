from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.radix_cache import TreeNode

class KVCacheEventRecorder:
    enabled: bool
    def record_store(
        self, node: TreeNode, medium: StorageMedium | None = None, *, session_id: str | None = None
    ) -> None: ...
    def record_remove(self, node: TreeNode, medium: StorageMedium | None = None) -> None: ...
    def record_all_cleared(self) -> None: ...
