"""Common parts of the simulations: fair sharing of links, the meter that records them, the result, and its picture.

In: which links flows cross, and what they move over which intervals. Out: rates; a frozen `Prediction`: seconds, the
limit, the bottleneck, loads, a timeline; the text of an SVG that stands alone.
Not here: which flows there are and when (`simulate_sync`, `simulate_fetch`, `simulate_convert`), the links of a cluster
(`cluster`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from penstock.plan.cluster import ClusterLinks, Rates
from penstock.types import GB, I64

F64 = npt.NDArray[np.float64]


def fair_rates(links: I64, capacity: F64, bound: F64 | None = None) -> F64:
    """Return the bytes per second of each flow where links are shared max-min fairly.

    Args:
        links: [num_flows, width] the links it crosses, a link at most once; a link of infinite capacity bounds nothing.
        capacity: of each link.
        bound: largest rate of each flow; None: no flow has one.

    Cost: linear in flows for each round; rounds are the levels of rates there are.
    """
    # A flow's share is the least of what its links have left for each of their flows. A link that gives all of its
    # flows their least is full at those rates, whatever the others do; all such links are settled at once.
    num_flows, num_links = len(links), len(capacity)
    rates = np.zeros(num_flows)
    open_flows = np.arange(num_flows)
    left = capacity.astype(np.float64).copy()
    while len(open_flows):
        mine = links[open_flows]
        users = np.bincount(mine.reshape(-1), minlength=num_links)
        share = np.full(num_links, np.inf)
        used = users > 0
        # Subtracting rates can leave a full link a rounding error below zero.
        share[used] = np.maximum(left[used], 0.0) / users[used]
        least = share[mine].min(axis=1)
        if bound is not None:
            least = np.minimum(least, bound[open_flows])
        assert np.isfinite(least).all(), "a flow that nothing bounds"
        # The least any flow of a link gets: where that is the link's own share, the link is settled.
        lowest = np.full(num_links, np.inf)
        # Column by column: `minimum.at` over a flat index would need the values repeated for each link.
        for column in mine.T:
            np.minimum.at(lowest, column, least)
        # With a tolerance: rounding must not leave a link a hair above its share, and the loop with a round for each
        # flow.
        settled = used & (lowest >= share * (1 - 1e-12))
        done = settled[mine].any(axis=1)
        if bound is not None:
            # A bound is a link of one flow: settled where no link would give less.
            done |= least >= bound[open_flows]
        fixed = open_flows[done]
        rates[fixed] = least[done]
        for column in mine[done].T:
            np.subtract.at(left, column, least[done])
        open_flows = open_flows[~done]
    return rates


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
        """Return the fraction of the limit that is reached."""
        return self.limit_s / self.predicted_s if self.predicted_s else 1.0

    def off_by(self, measured_s: float) -> float:
        """Return the relative error: 0.1 is a tenth too long, -0.1 a tenth too short."""
        return self.predicted_s / measured_s - 1.0


def assumed(rates: Rates, used: Sequence[str]) -> tuple[str, ...]:
    """Return those of the figures used that are assumed, with the note on each."""
    return tuple(f"{name}: {where}" for name, where in rates.source if name in used and "assumed" in where)


class Meter:
    """A record of the bytes over each link, and of the load of each kind of link over time."""

    def __init__(self, links: ClusterLinks) -> None:
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
        """Return the least time that the busiest link takes at nominal capacities."""
        return float((self.nbytes / nominal).max(initial=0.0))

    def loads(self, total_s: float) -> tuple[LinkLoad, ...]:
        """Return the load of each kind of link that carried something."""
        # Only the links that carried something count as capacity: a ring over two nodes must not look idle beside a
        # thousand others.
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


_WIDTH, _LEFT, _LANE, _LOAD, _GAP = 960, 190, 18, 64, 14
_INK, _FAINT = "#1f2933", "#e4e7eb"
_COLOURS = {
    "transform": "#8b5cf6",
    "ask": "#cbd2d9",
    "post": "#f59e0b",
    "wire": "#2563eb",
    "digest": "#10b981",
    "flip": "#ef4444",
    "fetch": "#2563eb",
    "place": "#f59e0b",
    "compute": "#8b5cf6",
    "send": "#10b981",
}


def svg(prediction: Prediction) -> str:
    """Return the picture of a prediction: its timeline, and below it the load of each kind of link."""
    lanes = list(dict.fromkeys(span.lane for span in prediction.timeline))
    top = 74
    loads = top + len(lanes) * _LANE + 24
    height = loads + len(prediction.links) * (_LOAD + _GAP) + 34
    body = [
        _text(12, 22, f"{prediction.kind}: {prediction.what}", 15, bold=True),
        _text(
            12,
            42,
            f"{prediction.predicted_s:.3f} s predicted, {prediction.limit_s:.3f} s the limit of the wire "
            f"({prediction.of_limit:.0%})",
        ),
        _text(12, 60, prediction.bottleneck),
        *_timeline(prediction, lanes, top),
        *(
            line
            for i, load in enumerate(prediction.links)
            for line in _curve(load, loads + i * (_LOAD + _GAP), prediction.predicted_s)
        ),
        *_axis(prediction.predicted_s, top, height - 24),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="white"/>', *body, "</svg>", ""])


def _x(at_s: float, total_s: float) -> float:
    """Return the place of a moment on the axis of time."""
    return _LEFT + (_WIDTH - _LEFT - 16) * (at_s / total_s if total_s else 0.0)


def _text(x: float, y: float, what: str, size: int = 12, *, bold: bool = False, end: bool = False) -> str:
    more = ' font-weight="bold"' if bold else ""
    more += ' text-anchor="end"' if end else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{_INK}"{more}>{escape(what)}</text>'


def _timeline(prediction: Prediction, lanes: list[str], top: int) -> Iterator[str]:
    """Yield the spans, a row for each lane."""
    for i, lane in enumerate(lanes):
        yield _text(_LEFT - 8, top + i * _LANE + 13, lane, 11, end=True)
    for span in prediction.timeline:
        yield _bar(span, top + lanes.index(span.lane) * _LANE, prediction.predicted_s)


def _bar(span: Span, y: float, total_s: float) -> str:
    a, b = _x(span.start_s, total_s), _x(span.stop_s, total_s)
    fill = _COLOURS.get(span.stage, "#64748b")
    title = escape(f"{span.stage}: {span.start_s:.4f} to {span.stop_s:.4f} s")
    # At least 0.6 of a point wide: a short stage would not be drawn at all.
    shape = f'<rect x="{a:.2f}" y="{y + 3}" width="{max(b - a, 0.6):.2f}" height="{_LANE - 6}"'
    return f'{shape} fill="{fill}" fill-opacity="0.75"><title>{title}</title></rect>'


def _curve(load: LinkLoad, y: float, total_s: float) -> Iterator[str]:
    """Yield the share of these links that is in use, over time."""
    step_s = total_s / len(load.load)
    # Steps, not a line through the middles: each value is a mean over its part of the time.
    points = [(_x(0.0, total_s), y + _LOAD)]
    for i, share in enumerate(load.load):
        level = y + _LOAD * (1 - min(share, 1.0))
        points += [(_x(i * step_s, total_s), level), (_x((i + 1) * step_s, total_s), level)]
    points.append((_x(total_s, total_s), y + _LOAD))
    width = _WIDTH - _LEFT - 16
    yield f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_LOAD}" fill="{_FAINT}"/>'
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    yield f'<polygon points="{path}" fill="#2563eb" fill-opacity="0.7"/>'
    yield _text(_LEFT - 8, y + 26, load.name, 12, end=True)
    yield _text(_LEFT - 8, y + 44, f"{load.num_used} in use", 11, end=True)


def _axis(total_s: float, top: float, bottom: float) -> Iterator[str]:
    """Yield four equal parts of the time as lines, with their seconds."""
    for part in range(5):
        at_s = total_s * part / 4
        x = _x(at_s, total_s)
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{_INK}" stroke-opacity="0.15"/>'
        yield _text(x, bottom + 16, f"{at_s:.3f} s", 11, end=part == 4)
