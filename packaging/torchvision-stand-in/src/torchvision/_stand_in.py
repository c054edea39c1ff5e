"""Names that can be imported and not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


class TorchvisionStandInError(RuntimeError):
    """An image function was used where only the stand-in for torchvision is installed."""


class Unavailable:
    """A name of torchvision's that raises :class:`TorchvisionStandInError` when called or looked into."""

    def __init__(self, qualified_name: str) -> None:
        self._qualified_name = qualified_name

    def _refuse(self) -> NoReturn:
        raise TorchvisionStandInError(
            f"{self._qualified_name} was used, but the installed torchvision is a stand-in that only makes imports "
            "work; install a torchvision release that matches this torch build"
        )

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # inspection (copy, inspect, doctest) asks for these and expects AttributeError
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return f"<stand-in for {self._qualified_name}>"


def unavailable_names(module: str, names: tuple[str, ...]) -> Callable[[str], Unavailable]:
    """Return a module ``__getattr__`` (PEP 562) that serves ``names`` and knows no others."""

    def module_getattr(name: str) -> Unavailable:
        if name in names:
            return Unavailable(f"{module}.{name}")
        raise AttributeError(f"the stand-in for torchvision has no {module}.{name}")

    return module_getattr
