from enum import Enum
from typing import ClassVar

class PlatformEnum(Enum):
    OOT = ...

class DeviceMixin:
    _enum: ClassVar[PlatformEnum]
    device_name: ClassVar[str]
    device_type: ClassVar[str]
    def is_pin_memory_available(self, device: object = None) -> bool: ...
