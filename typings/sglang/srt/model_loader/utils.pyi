import torch
from sglang.srt.configs.model_config import ModelConfig

def get_model_architecture(model_config: ModelConfig) -> tuple[type[torch.nn.Module], str]: ...
