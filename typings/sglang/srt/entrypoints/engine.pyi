from asyncio import AbstractEventLoop
from typing import Any

class Engine:
    loop: AbstractEventLoop
    def __init__(self, **kwargs: Any) -> None: ...  # noqa: ANN401
    def flush_cache(self) -> Any: ...  # noqa: ANN401
    def shutdown(self) -> None: ...
