import msgspec
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_releases import SINCE_0_5_23

class ModelLayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    start_layer: int
    end_layer: int
    num_effective_layers: int

if SINCE_0_5_23:
    def resolve_layer_indices(*, model: object, model_config: ModelConfig, is_draft_worker: bool) -> ModelLayerInfo: ...

else:
    def resolve_layer_indices(
        *, model: object, model_config: ModelConfig, is_draft_worker: bool, spec_algorithm: SpeculativeAlgorithm
    ) -> ModelLayerInfo: ...
