"""Result of a simulation, as a value, and the meter by which every simulation records its links.

In: rates of flows over intervals. Out: a frozen `Prediction`: seconds, the limit, the bottleneck, loads, a timeline.
Not here: the simulations (`simulate_sync`, `simulate_fetch`), how flows share links (`flow`), the picture (`picture`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.plan.cluster import Links, Rates
from penstock.plan.flow import F64
from penstock.types import GB, I64

NUM_BINS = 80
"""Points of a link's load over time: what a picture shows and a table could still hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The seconds that one stage of the busiest member was at work; stages may overlap."""

    name: str
    member: str
    busy_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """Links of one kind: bytes over the busiest and all, how long the busiest needs at its rate, load over time."""

    name: str
    most_bytes: int
    total_bytes: int
    num_used: int
    busiest_s: float
    load: tuple[float, ...]
    """Share of the capacity of the links used, over `NUM_BINS` equal parts of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stage in one row of the timeline."""

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
    """Of the wire: the bytes of the busiest link at its full rate, no other cost."""
    bottleneck: str
    moved_bytes: int
    num_receivers: int
    first_s: float
    """When the first receiver was done."""
    median_s: float
    stages: tuple[Stage, ...]
    links: tuple[LinkLoad, ...]
    timeline: tuple[Span, ...]
    failed: tuple[str, ...] = ()
    """Members that died, and what came of it."""
    assumed: tuple[str, ...] = ()
    """Figures without a measurement."""

    @property
    def of_limit(self) -> float:
        """Fraction of the limit reached."""
        return self.limit_s / self.predicted_s if self.predicted_s else 1.0

    def off_by(self, measured_s: float) -> float:
        """Return the relative error: 0.1 is a tenth too long, -0.1 a tenth too short."""
        return self.predicted_s / measured_s - 1.0


def assumed(rates: Rates, used: Sequence[str]) -> tuple[str, ...]:
    """Return those of the figures used that are assumed, with the note on each."""
    return tuple(f"{name}: {where}" for name, where in rates.source if name in used and "assumed" in where)


class Meter:
    """Bytes over each link, and per kind of link its load over time."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.nbytes: F64 = np.zeros(len(links.capacity))
        self._steps: list[tuple[float, float]] = []
        self._carried: list[F64] = []
        self._starts = [start for start, _ in links.classes.values()]

    def add(self, start_s: float, stop_s: float, flows: I64, moved: F64) -> None:
        """Record that flows over these links moved these bytes between two moments."""
        if stop_s <= start_s or not len(flows):
            return
        carried = np.bincount(
            flows.reshape(-1), weights=np.repeat(moved, flows.shape[1]), minlength=len(self._links.capacity)
        )
        self.nbytes += carried
        self._steps.append((start_s, stop_s))
        # Without the last link, which is padding; kept by kind, since a simulation has thousands of steps and links.
        self._carried.append(np.add.reduceat(carried[:-1], self._starts))

    def limit_s(self, nominal: F64) -> float:
        """Return the least the busiest link takes at nominal capacities."""
        return float((self.nbytes / nominal).max(initial=0.0))

    def loads(self, total_s: float) -> tuple[LinkLoad, ...]:
        """Return the load of each kind of link that carried something."""
        edges = np.linspace(0.0, total_s, NUM_BINS + 1)
        steps = np.array(self._steps).reshape(-1, 2)
        carried = np.array(self._carried).reshape(-1, len(self._starts))
        kinds = []
        for kind, (name, (start, stop)) in enumerate(self._links.classes.items()):
            mine, capacity = self.nbytes[start:stop], self._links.capacity[start:stop]
            used = mine > 0
            if not used.any():
                continue
            most = int(mine.argmax())
            room = capacity[used].sum() * total_s / NUM_BINS
            load = _binned(steps, carried[:, kind], edges) / room if np.isfinite(room) else np.zeros(NUM_BINS)
            kinds.append(
                LinkLoad(
                    name=name,
                    most_bytes=round(mine[most]),
                    total_bytes=round(mine.sum()),
                    num_used=int(used.sum()),
                    busiest_s=float((mine / capacity).max()),
                    load=tuple(np.round(load, 4).tolist()),
                )
            )
        return tuple(kinds)


def _binned(steps: F64, carried: F64, edges: F64) -> F64:
    """Return bytes carried in each bin, each step's spread evenly over it."""
    # Interpolating the running sum spreads each step over the bins that it crosses, and loses no byte.
    at = np.concatenate(([0.0], np.cumsum(carried)))
    times = np.concatenate((steps[:1, 0], steps[:, 1]))
    return np.diff(np.interp(edges, times, at))


def bottleneck(stages: Sequence[Stage], loads: Sequence[LinkLoad], total_s: float, otherwise: str) -> str:
    """Return the stage or kind of link that was at work the longest; if none was for half of the time, the waiting."""
    ends = [(stage.busy_s, f"{stage.name} of {stage.member}") for stage in stages]
    ends += [(load.busiest_s, f"the busiest link: {load.name}, {load.most_bytes / GB:.2f} GB") for load in loads]
    busy_s, name = max(ends, default=(0.0, otherwise))
    # Under a half no stage explains the time: then waiting does, and naming a stage would mislead.
    share = busy_s / total_s if total_s else 0.0
    return f"{name} ({share:.0%} of the time)" if share >= 0.5 else f"{otherwise}; most at work: {name} ({share:.0%})"
