import msgspec
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

class ModelLayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    start_layer: int
    end_layer: int
    num_effective_layers: int

def resolve_layer_indices(
    *, model: object, model_config: ModelConfig, is_draft_worker: bool, spec_algorithm: SpeculativeAlgorithm
) -> ModelLayerInfo: ...
