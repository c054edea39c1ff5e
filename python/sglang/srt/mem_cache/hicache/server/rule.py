"""One rule about a setting of SGLang's beside a layout strategy, and conditions that several rules share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .facts import ServerFacts


class Answer(Enum):
    """What happens when a row applies."""

    REFUSED = "refused"
    WARNED = "works, with a warning"


class Scope(Enum):
    """Which strategies a row concerns."""

    ANY = "any strategy"
    PEERS = "strategies that share pages out, on the device or on the host"
    SHARDED = "strategies that share pages out on the device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row: `setting` as the user writes it, `why` it matters and the `remedy`, each a phrase."""

    setting: str
    applies: Callable[[ServerFacts], bool]
    why: str
    remedy: str
    answer: Answer = Answer.REFUSED
    scope: Scope = Scope.ANY

    def message(self, asked: str) -> str:
        """One line that names both settings."""
        verb = "does not go together with" if self.answer is Answer.REFUSED else "with"
        return f"{asked} {verb} {self.setting}: {self.why}; {self.remedy}"


def is_set(field: str) -> Callable[[ServerFacts], bool]:
    """Whether a field of SGLang's settings is given and true."""
    return lambda facts: bool(getattr(facts.args, field))


def is_set_here(field: str) -> Callable[[ServerFacts], bool]:
    """As `is_set`, for a field that only some releases have."""

    def asked(facts: ServerFacts) -> bool:
        from ..seam.server_flags import FIELDS  # loads SGLang, which a command without a model does not need

        return field in FIELDS and bool(getattr(facts.args, field))

    return asked


def is_above_one(field: str) -> Callable[[ServerFacts], bool]:
    """Whether a field that counts ranks asks for more than one."""
    return lambda facts: getattr(facts.args, field) > 1
