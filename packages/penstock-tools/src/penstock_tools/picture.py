"""Draws a prediction as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from penstock_convert.plan.simulate import LinkLoad, Prediction, Span

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
    """Return an SVG of a prediction: its timeline, and below it the load on each kind of link."""
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
    return _LEFT + (_WIDTH - _LEFT - 16) * (at_s / total_s if total_s else 0.0)


def _text(x: float, y: float, what: str, size: int = 12, *, bold: bool = False, end: bool = False) -> str:
    more = ' font-weight="bold"' if bold else ""
    more += ' text-anchor="end"' if end else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{_INK}"{more}>{escape(what)}</text>'


def _timeline(prediction: Prediction, lanes: list[str], top: int) -> Iterator[str]:
    """Yield the SVG elements of the spans, with one row for each lane."""
    for i, lane in enumerate(lanes):
        yield _text(_LEFT - 8, top + i * _LANE + 13, lane, 11, end=True)
    for span in prediction.timeline:
        yield _bar(span, top + lanes.index(span.lane) * _LANE, prediction.predicted_s)


def _bar(span: Span, y: float, total_s: float) -> str:
    a, b = _x(span.start_s, total_s), _x(span.stop_s, total_s)
    fill = _COLOURS.get(span.stage, "#64748b")
    title = escape(f"{span.stage}: {span.start_s:.4f} to {span.stop_s:.4f} s")
    # Draw short stages at least 0.6 points wide, or they would be invisible.
    shape = f'<rect x="{a:.2f}" y="{y + 3}" width="{max(b - a, 0.6):.2f}" height="{_LANE - 6}"'
    return f'{shape} fill="{fill}" fill-opacity="0.75"><title>{title}</title></rect>'


def _curve(load: LinkLoad, y: float, total_s: float) -> Iterator[str]:
    """Yield the SVG elements of a curve that shows the used share of these links over time."""
    step_s = total_s / len(load.load)
    # Draw steps instead of a line through the midpoints, because each value is a mean over its interval.
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
    """Yield the SVG elements of lines that divide the time into four equal parts, labelled in seconds."""
    for part in range(5):
        at_s = total_s * part / 4
        x = _x(at_s, total_s)
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{_INK}" stroke-opacity="0.15"/>'
        yield _text(x, bottom + 16, f"{at_s:.3f} s", 11, end=part == 4)
