"""One machine's memory, counted once for all ranks that run on it.

SGLang's host pools ask the machine what is free, less a reserve, and take their share of it, each pool by itself: an
index beside the KV is not in that sum, nor are a control group's limit and the data-parallel copies of a server.
`refuse_too_large` judges the whole demand of all ranks at once. Nothing here imports SGLang.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from sglang.srt.mem_cache.layouts.errors import LayoutConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU_RESERVE_BYTES: Final = 1 << 30
"""What stays free where there is no accelerator. With one, SGLang's own reserve holds."""

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_CONTROL_GROUPS = Path("/proc/self/cgroup")
FRACTION_FLAG: Final = "--hicache-host-memory-fraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBudget:
    """Host memory of all ranks of this machine, as SGLang measured it once for ``--hicache-host-memory-fraction``."""

    fraction: float
    machine_bytes: int

    @property
    def flag(self) -> str:
        """The flag that decides the size, with its value."""
        return f"{FRACTION_FLAG} {self.fraction:g}"


def refuse_too_large(
    asked: str, *, rank_bytes: int, ranks: int, reserve_bytes: int, parts: str, budget: HostBudget | None = None
) -> None:
    """Raise `LayoutConfigError` where `ranks` on this machine, `rank_bytes` each, need more than it has left.

    `asked` are the flags with their values, `parts` what the bytes are for. With a `budget`, that is what is left.
    """
    left = max(available_bytes() - reserve_bytes, 0) if budget is None else budget.machine_bytes
    if ranks * rank_bytes > left:
        together = f"{ranks} ranks on this machine need" if ranks > 1 else "one rank needs"
        raise LayoutConfigError(
            f"{asked}: {together} {_gigabytes(ranks * rank_bytes)} of host memory for {parts} "
            f"({_gigabytes(rank_bytes)} a rank); must be at most the {_gigabytes(left)} that are left, "
            f"with {_gigabytes(reserve_bytes)} kept free"
        )


def ranks_on_this_machine(args: Any) -> int:  # noqa: ANN401  # a view of ServerArgs, or the published settings
    """Ranks of one server that share this machine's memory. SGLang spreads ranks evenly over its nodes."""
    copies = 1 if args.enable_dp_attention else int(args.dp_size)  # with DP attention, they share the ranks out
    return max(int(args.tp_size) * int(args.pp_size) * copies // int(args.nnodes), 1)


def available_bytes() -> int:
    """Bytes that are free on the machine, or below a control group's limit where that is less."""
    return min([psutil.virtual_memory().available, *_left_in_control_groups()])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accounts:
    """Where a version of control groups says what is used, how much may be, and what of it the kernel gives back."""

    limit: str
    used: str
    cached: str


_V1 = _Accounts(limit="memory.limit_in_bytes", used="memory.usage_in_bytes", cached="total_inactive_file")
_V2 = _Accounts(limit="memory.max", used="memory.current", cached="inactive_file")


def _left_in_control_groups() -> Iterator[int]:
    for folder, accounts in _own_folders():
        # No limit ("max"), or a group that is not mounted here.
        with suppress(OSError, ValueError):
            limit, used = (int((folder / name).read_text()) for name in (accounts.limit, accounts.used))
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(limit - used + int(statistics.get(accounts.cached, 0)), 0)


def _own_folders() -> Iterator[tuple[Path, _Accounts]]:
    """This process's memory groups, outer ones included: each has a limit of its own."""
    with suppress(OSError):
        for line in OWN_CONTROL_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, accounts = (CONTROL_GROUPS / "memory", _V1) if controllers else (CONTROL_GROUPS, _V2)
            folder = root / path.lstrip("/")
            # In a container the path may be the host's; its own group is then mounted at the root.
            yield from ((outer, accounts) for outer in (folder, *folder.parents) if outer.is_relative_to(root))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.4g} GB" if count < 1e12 else f"{count / 1e9:,.0f} GB"
