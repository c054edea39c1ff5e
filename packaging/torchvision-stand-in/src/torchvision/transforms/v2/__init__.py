"""Stand-in for ``torchvision.transforms.v2``: transforms raise."""

from __future__ import annotations

from torchvision._stand_in import unavailable_names
from torchvision.transforms._modes import InterpolationMode
from torchvision.transforms.v2 import functional

__all__ = ["InterpolationMode", "functional"]
__getattr__ = unavailable_names(__name__, ("Compose", "Normalize", "Resize"))
