class Phase:
    ALL: tuple[str, ...]

class Backend:
    DISABLED: str
    FULL: str

class PhaseConfig:
    backend: str

class CudaGraphConfig:
    decode: PhaseConfig
    prefill: PhaseConfig

def with_phase(config: CudaGraphConfig, phase: str, **changes: object) -> CudaGraphConfig: ...
