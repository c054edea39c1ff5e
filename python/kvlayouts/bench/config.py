"""What `kvlayouts bench` can measure, and how much of it a run does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvlayouts.common.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

BENCHES: Final = ("requests", "evict", "plan", "metadata", "deferred", "scale", "runs")
"""Names that ``--only`` takes, in the order in which they run."""

MIN_ROUNDS: Final = 5
TRACE_REQUESTS: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """One run. `rounds` is how often each timing is repeated, alternating; `quick` takes smaller inputs.

    Raises `InputError` for a name that is not in `BENCHES`, and fewer rounds than `MIN_ROUNDS`.
    """

    trace: Path
    only: tuple[str, ...] = BENCHES
    rounds: int = MIN_ROUNDS
    quick: bool = False

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in BENCHES:
                raise InputError(f"--only {name}: unknown; accepted: {', '.join(BENCHES)}")
        if self.rounds < MIN_ROUNDS:
            raise InputError(f"--rounds {self.rounds}: must be at least {MIN_ROUNDS}, for a median")

    @property
    def requests(self) -> int:
        """Requests of the trace to replay, if it has as many."""
        return 200 if self.quick else TRACE_REQUESTS

    @property
    def tree_sizes(self) -> tuple[int, ...]:
        """Leaves of the trees that are grown."""
        return (1_000, 10_000) if self.quick else (1_000, 10_000, 100_000, 1_000_000)
