from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.radix_cache import TreeNode
from sglang_releases import SINCE_0_5_23

if SINCE_0_5_23:
    class KvEventLoraNames: ...

class KVCacheEventRecorder:
    enabled: bool
    if SINCE_0_5_23:
        def __init__(
            self,
            *,
            enabled: bool,
            page_size: int,
            dynamo_format: bool = False,
            lora_names: KvEventLoraNames | None = None,
        ) -> None: ...
    else:
        def __init__(self, *, enabled: bool, page_size: int) -> None: ...
    def record_store(
        self, node: TreeNode, medium: StorageMedium | None = None, *, session_id: str | None = None
    ) -> None: ...
    def record_remove(self, node: TreeNode, medium: StorageMedium | None = None) -> None: ...
    def record_all_cleared(self) -> None: ...
