from collections.abc import Callable
from enum import Enum
from typing import Any

class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"

class HookRegistry:
    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType = ...) -> None: ...
    @classmethod
    def apply_hooks(cls) -> None: ...
