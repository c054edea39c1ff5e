from contextlib import AbstractContextManager

class EnvBool:
    def override(self, value: bool | None) -> AbstractContextManager[None]: ...

class Envs:
    SGLANG_USE_HND_KVCACHE: EnvBool

envs: Envs
