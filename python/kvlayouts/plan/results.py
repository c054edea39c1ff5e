"""What a plan found, layout by layout, and its JSON form. Tokens are logical, bytes physical."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import log2
from typing import TYPE_CHECKING, Final

from kvlayouts.common.trace import trace_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlayouts.common.trace import Trace
    from kvlayouts.plan.settings import PlanConfig
    from kvlayouts.plan.simulation import SimulatedHits

KNEE_SHARE: Final = 0.01
"""Twice the host memory for less than this much of the prompt tokens does not pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """The hit shares with `host_pages` on each rank, which is `machine_host_bytes` for the ranks of one machine."""

    host_pages: int
    machine_host_bytes: int
    hits: SimulatedHits

    @property
    def device_share(self) -> float:
        """Share of the prompt tokens that the device serves."""
        return self.hits.device_hit_tokens / self.hits.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """One layout's figures. `restore_seconds` is None where the prefix does not fit on the device.

    `restore_bytes` and the two `..._bytes_per_rank` are those of the rank with most.
    """

    lanes: int
    device_capacity_tokens: int
    host_capacity_tokens: int
    hits: SimulatedHits
    restore_bytes: int
    restore_seconds: float | None
    backed_up_bytes_per_rank: int
    loaded_bytes_per_rank: int
    sweep: tuple[SweepPoint, ...] = ()

    @property
    def knee(self) -> SweepPoint | None:
        """The first point of the sweep from which on twice the memory adds less than `KNEE_SHARE`; None if no such."""
        for number, point in enumerate(self.sweep[:-1]):
            if all(
                gain_of_doubling(here, further) < KNEE_SHARE
                for here, further in zip(self.sweep[number:], self.sweep[number + 1 :], strict=False)
            ):
                return point
        return None


def gain_of_doubling(less: SweepPoint, more: SweepPoint) -> float:
    """What of the hit share doubling the memory adds between two points of a sweep."""
    return (more.hits.hit_share - less.hits.hit_share) / log2(more.machine_host_bytes / less.machine_host_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was found: figures of the layouts that can be, and why the others cannot."""

    layouts: Mapping[str, LayoutPlan]
    refused: Mapping[str, str]
    distinct_pages: int
    seconds: float


def to_json(config: PlanConfig, trace: Trace, plan: Plan) -> dict[str, object]:
    """The plan as plain JSON values: `trace`, `config` with the sizes that follow from it, `layouts`, `refused`."""
    return {
        "trace": {**trace_json(trace), "distinct_pages": plan.distinct_pages},
        "config": _config_json(config),
        "layouts": {name: _layout_json(layout) for name, layout in plan.layouts.items()},
        "refused": dict(plan.refused),
        "seconds": plan.seconds,
    }


def _config_json(config: PlanConfig) -> dict[str, object]:
    model = asdict(config.model) | {"kind": config.model.kind.value, "bytes_per_token": config.model.bytes_per_token}
    derived = {
        "group_kind": config.group_kind.value,
        "device_bytes": config.device_bytes,
        "host_bytes": config.host_bytes,
        "machine_host_bytes": config.machine_host_bytes,
        "machine_budget_bytes": config.machine_budget_bytes,
        "fits_machine": config.fits_machine,
    }
    return asdict(config) | {"options": dict(config.options), "model": model} | derived


def _layout_json(layout: LayoutPlan) -> dict[str, object]:
    knee = layout.knee
    return asdict(layout) | {
        "hits": _hits_json(layout.hits),
        "sweep": [
            {"host_pages": point.host_pages, "machine_host_bytes": point.machine_host_bytes} | _hits_json(point.hits)
            for point in layout.sweep
        ],
        "knee_machine_host_bytes": knee.machine_host_bytes if knee is not None else None,
    }


def _hits_json(hits: SimulatedHits) -> dict[str, object]:
    return asdict(hits) | {"hit_share": hits.hit_share}
