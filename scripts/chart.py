"""Draws the chart in the README and writes its table: five measured rows, each from one run on one machine.

The rows are from the `.jsonl` files that the benchmarks wrote. The chart is `chart-light.svg` and `chart-dark.svg` in
`docs/assets`. With `--check` the script changes nothing, and exits with 1 if a picture or the README's table differs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGET = ROOT / "docs" / "assets"
README = ROOT / "README.md"
WIDTH, ROW, TOP, LABEL, BAR = 980, 74, 46, 330, 300
"""Sizes in pixels: width of the picture, height of a row and of the head, width of the labels and of the longest
bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A median with its spread, in seconds."""

    name: str
    median_s: float
    low_s: float
    high_s: float
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A task that Penstock and the best other tool did in the same run."""

    work: str
    where: str
    penstock: Timing
    other: Timing
    page: str


def timing(name: str, seconds: Iterable[float]) -> Timing:
    """Return the median and the spread of repetitions."""
    values = sorted(seconds)
    median = statistics.median(values)
    return Timing(name=name, median_s=median, low_s=values[0], high_s=values[-1], num=len(values))


def records(name: str) -> list[dict[str, Any]]:
    """Return the lines of a results file."""
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def slowest_rank(answers: Sequence[dict[str, Any]], field: str) -> float:
    """Return the time after which the last rank was done."""
    return max(float(answer[field]) for answer in answers)


def from_pretrained_row() -> Row:
    """Return a model of transformers from a hub, with and without Penstock."""
    lines = {line["row"]: line for line in records("h200x1_202611/from_pretrained.jsonl")}

    def found(name: str, row: str) -> Timing:
        line = lines[row]
        low_s, high_s = line["spread_s"]
        return Timing(name=name, median_s=line["median_s"], low_s=low_s, high_s=high_s, num=line["n"])

    return Row(
        work="from_pretrained: 4.3 GB from a hub",
        where="1 x H200, empty local cache",
        penstock=found("Penstock", "transformers, hub, penstock"),
        other=found("transformers alone", "transformers, hub, stock"),
        page="h200x1_202611/from_pretrained.md",
    )


def load_row() -> Row:
    """Return a load from memory to a GPU in new processes, next to the fastest other loader, from the newest run."""
    runs = [line for line in records("h200x1_202612/doors.jsonl") if line["door"] == "load"]
    ways = [line["ways"] for line in runs if "instanttensor" in line["ways"]][-1]
    return Row(
        work="Load: 14 GB into one GPU, imports included",
        where="1 x H200, new processes, from tmpfs",
        penstock=timing("Penstock", ways["penstock"]["total"]),
        other=timing("InstantTensor", ways["instanttensor"]["total"]),
        page="h200x1_202612/doors.md",
    )


def cold_row() -> Row:
    """Return four workers that start at the same time, as a fleet and separately."""
    lines = records("h200x4_202611/fetch-cold.jsonl")
    fetches = [slowest_rank(line["said"], "wall_s") for line in lines if "'fallback'" in line["arguments"]]
    loads = [
        slowest_rank(line["said"], "seconds")
        for line in lines
        if line["asked"] == "load" and len(line["ranks"]) == 4 and "part" not in line["arguments"]
    ]
    return Row(
        work="Cold start: 31 GB into each of 4 GPUs",
        where="4 x H200, from tmpfs",
        penstock=timing("Penstock fleet", fetches),
        other=timing("four separate loads", loads),
        page="h200x4_202611/fetch.md",
    )


def sync_row() -> Row:
    """Return a version from two trainer ranks to two inference ranks, next to NCCL's broadcast."""
    lines = {line.get("row"): line for line in records("h200x4_202611/sync.jsonl")}
    return Row(
        work="Sync: 64 GB from trainer to engine",
        where="4 x H200, NVLink, 2 ranks to 2 ranks",
        penstock=timing("Penstock", [version["wall_s"] for version in lines["llama, live, direct"]["steady"]]),
        other=timing("NCCL broadcast", lines["broadcast llama packed"]["seconds"]),
        page="h200x4_202611/sync.md",
    )


def convert_row() -> Row:
    """Return a merge of three checkpoints, next to a PyTorch script."""
    lines = {line["case"]: line for line in records("h200x1_202611/convert.jsonl")}

    def found(name: str, case: str) -> Timing:
        line = lines[case]
        return Timing(name=name, median_s=line["seconds"], low_s=line["low"], high_s=line["high"], num=line["num"])

    return Row(
        work="Convert: merge three models, 51 GB",
        where="1 x H200, tmpfs to tmpfs",
        penstock=found("Penstock", "penstock"),
        other=found("PyTorch script", "torch script"),
        page="h200x1_202611/convert.md",
    )


def rows() -> list[Row]:
    """Return the rows of the chart and of the table."""
    return [from_pretrained_row(), load_row(), cold_row(), sync_row(), convert_row()]


def duration(value: float) -> str:
    """Return a time as text, with one unit."""
    if value < 0.25:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"


def table(found: Sequence[Row]) -> str:
    """Return the README's table: one number for Penstock, one for the other tool, one ratio, one link."""
    lines = ["| work | Penstock | fastest alternative | times as fast | results |", "|---|---|---|---|---|"]
    for row in found:
        ratio = row.other.median_s / row.penstock.median_s
        lines.append(
            f"| {row.work} | {duration(row.penstock.median_s)} | {row.other.name}: {duration(row.other.median_s)} "
            f"| {ratio:.1f} | [{row.where}](benchmarks/results/{row.page}) |"
        )
    return "\n".join(lines) + "\n"


def draw(found: Sequence[Row], *, ink: str, faint: str, ours: str, theirs: str) -> str:
    """Return the picture. The bars of a row share a scale, and rows do not."""
    height = TOP + ROW * len(found) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Time, lower is better; median, lowest and highest of each run</title>",
        f'<text x="0" y="20" fill="{ink}" font-size="15" font-weight="600">Time, lower is better</text>',
        f'<text x="{LABEL}" y="20" fill="{faint}">bar: median; line: lowest to highest; own scale for each row</text>',
    ]
    for index, row in enumerate(found):
        y = TOP + index * ROW
        longest = max(row.penstock.high_s, row.other.high_s)
        parts.append(f'<text x="0" y="{y + 20}" fill="{ink}" font-weight="600">{escape(row.work)}</text>')
        parts.append(f'<text x="0" y="{y + 38}" fill="{faint}">{escape(row.where)}</text>')
        for place, (bar, colour) in enumerate(((row.penstock, ours), (row.other, theirs))):
            top, width = y + 6 + place * 26, bar.median_s / longest * BAR
            low, high = (LABEL + value / longest * BAR for value in (bar.low_s, bar.high_s))
            parts.append(f'<rect x="{LABEL}" y="{top}" width="{width:.1f}" height="18" rx="2" fill="{colour}"/>')
            parts.append(f'<path d="M{low:.1f} {top + 9}H{high:.1f}" stroke="{ink}" stroke-width="1.5"/>')
            text = f"{duration(bar.median_s)}  {bar.name} (n={bar.num})"
            parts.append(
                f'<text x="{max(high, LABEL + width) + 8:.1f}" y="{top + 14}" fill="{ink}">{escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """Write or check both pictures, and print or check the table."""
    found = rows()
    pictures = {
        "chart-light.svg": draw(found, ink="#1f2328", faint="#59636e", ours="#0d9488", theirs="#afb8c1"),
        "chart-dark.svg": draw(found, ink="#e6edf3", faint="#9198a1", ours="#2dd4bf", theirs="#57606a"),
    }
    if "--check" in sys.argv:
        stale = [name for name, text in pictures.items() if (TARGET / name).read_text(encoding="utf-8") != text]
        for name in stale:
            print(f"docs/assets/{name} differs from the results: run python scripts/chart.py", file=sys.stderr)
        if table(found) not in README.read_text(encoding="utf-8"):
            print("the table in README.md differs from the results: run python scripts/chart.py", file=sys.stderr)
            return 1
        return int(bool(stale))
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in pictures.items():
        (TARGET / name).write_text(text, encoding="utf-8")
    print(table(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
