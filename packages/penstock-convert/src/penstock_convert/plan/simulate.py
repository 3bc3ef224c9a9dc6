"""Results of a simulation: stages, loads of links, and the complete prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types import GB
from penstock_convert.plan.cluster import Rates

NUM_BINS = 80
"""Number of points in the curve of a link's load over time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Busy time of a stage in seconds, on the member where the stage was busiest. Stages may overlap in time."""

    name: str
    member: str
    busy_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """Bytes and load of all links of one kind.

    Attributes:
        most_bytes: bytes that the busiest link transfers.
        busiest_s: time in seconds that the busiest link requires at its full rate.
        load: fraction of the capacity that was used in each of `NUM_BINS` equal time intervals.
    """

    name: str
    most_bytes: int
    total_bytes: int
    num_used: int
    busiest_s: float
    load: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stage in one row of the timeline."""

    lane: str
    stage: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The result of one simulated run. Equal inputs and seeds give equal predictions."""

    kind: str
    what: str
    predicted_s: float
    limit_s: float
    """Time in seconds that the busiest link takes for its bytes at its full rate, without any other cost."""
    bottleneck: str
    moved_bytes: int
    num_receivers: int
    first_s: float
    """Time at which the first receiver finished."""
    median_s: float
    stages: tuple[Stage, ...]
    links: tuple[LinkLoad, ...]
    timeline: tuple[Span, ...]
    failed: tuple[str, ...] = ()
    """Members that died, with the consequences."""
    assumed: tuple[str, ...] = ()
    """Figures that were assumed and not measured."""

    @property
    def of_limit(self) -> float:
        """Return the fraction of the network's limit that the run reaches."""
        return self.limit_s / self.predicted_s if self.predicted_s else 1.0

    def off_by(self, measured_s: float) -> float:
        """Return the relative error. 0.1 means that the prediction is 10 % too long, and -0.1 that it is 10 % too
        short."""
        return self.predicted_s / measured_s - 1.0


def assumed(rates: Rates, used: Sequence[str]) -> tuple[str, ...]:
    """Return the figures in `used` that are assumed instead of measured, each with its source."""
    return tuple(f"{name}: {where}" for name, where in rates.source if name in used and "assumed" in where)


def bottleneck(stages: Sequence[Stage], loads: Sequence[LinkLoad], total_s: float, otherwise: str) -> str:
    """Return the stage or kind of link that was busy for the longest time, or `otherwise` if all were mostly idle."""
    ends = [(stage.busy_s, f"{stage.name} of {stage.member}") for stage in stages]
    ends += [(load.busiest_s, f"the busiest link: {load.name}, {load.most_bytes / GB:.2f} GB") for load in loads]
    busy_s, name = max(ends, default=(0.0, otherwise))
    # If every stage was busy for less than half of the time, waiting explains the duration.
    share = busy_s / total_s if total_s else 0.0
    return f"{name} ({share:.0%} of the time)" if share >= 0.5 else f"{otherwise}; most at work: {name} ({share:.0%})"
