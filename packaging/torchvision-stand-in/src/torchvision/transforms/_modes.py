"""The names of interpolation modes, which other libraries read while they are imported."""

from __future__ import annotations

from enum import Enum


class InterpolationMode(Enum):
    """How a resize would fill in pixels; nothing here resizes."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
