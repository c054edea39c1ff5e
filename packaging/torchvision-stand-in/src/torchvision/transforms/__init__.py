"""Stand-in for ``torchvision.transforms``: the interpolation modes are real, transforms raise."""

from __future__ import annotations

from torchvision._stand_in import unavailable_names
from torchvision.transforms import functional, v2
from torchvision.transforms._modes import InterpolationMode

__all__ = ["InterpolationMode", "functional", "v2"]
__getattr__ = unavailable_names(__name__, ("CenterCrop", "Compose", "Lambda", "Normalize", "Resize", "ToTensor"))
