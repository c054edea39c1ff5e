"""NOT torchvision: a stand-in whose names can be imported and raise when used (see README.md beside it)."""

from __future__ import annotations

from torchvision import io, ops, transforms
from torchvision._stand_in import TorchvisionStandInError

__version__ = "0.28.0+standin"
__all__ = ["TorchvisionStandInError", "io", "ops", "transforms"]
