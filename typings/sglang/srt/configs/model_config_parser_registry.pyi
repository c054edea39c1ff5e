from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

class ModelConfigParserBase:
    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> PretrainedConfig: ...

def register_model_config_parser(name: str) -> Callable[[type[ModelConfigParserBase]], type[ModelConfigParserBase]]: ...
def get_model_config_parser(name: str) -> ModelConfigParserBase: ...
