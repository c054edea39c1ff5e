"""Stand-in for ``torchvision.transforms.v2.functional``: image functions raise."""

from __future__ import annotations

from torchvision._stand_in import unavailable_names
from torchvision.transforms._modes import InterpolationMode

__all__ = ["InterpolationMode"]
__getattr__ = unavailable_names(
    __name__,
    ("center_crop", "crop", "normalize", "pad", "pil_to_tensor", "resize", "to_pil_image", "to_tensor"),
)
