from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from transformers import PretrainedConfig

ParserT = TypeVar("ParserT", bound=type[ModelConfigParserBase])

class ModelConfigParserBase:
    def parse(
        self, model: str | Path, trust_remote_code: bool, revision: str | None = None, **kwargs: Any
    ) -> PretrainedConfig: ...

def register_model_config_parser(name: str) -> Callable[[ParserT], ParserT]: ...
def get_model_config_parser(name: str) -> ModelConfigParserBase: ...
