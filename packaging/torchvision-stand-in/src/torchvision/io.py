"""Stand-in for ``torchvision.io``: reading and decoding images raises."""

from __future__ import annotations

from torchvision._stand_in import unavailable_names

__getattr__ = unavailable_names(__name__, ("ImageReadMode", "VideoReader", "decode_image", "decode_jpeg", "read_image"))
