from collections.abc import Callable

from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod as AttnForwardMethod,
)

class AttentionBackendRegistry:
    @classmethod
    def register(cls, backend_name: str, handler_func: Callable[[object, object], AttnForwardMethod]) -> None: ...
