from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

# Answers with the resolved value of every field of ServerArgs.
def resolving_view(server_args: ServerArgs) -> Any: ...  # noqa: ANN401
def model_config_of(server_args: ServerArgs) -> ModelConfig: ...
