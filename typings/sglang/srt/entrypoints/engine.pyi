from asyncio import AbstractEventLoop
from typing import Any

class Engine:
    loop: AbstractEventLoop
    server_args_class: Any
    def __init__(self, **kwargs: Any) -> None: ...  # noqa: ANN401
    def flush_cache(self) -> Any: ...  # noqa: ANN401
    def shutdown(self) -> None: ...
