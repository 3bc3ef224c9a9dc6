"""Draw the chart of the README: five measured rows as SVG, in a light and a dark version.

In: the `.jsonl` files that the benchmarks wrote. Out: `chart-light.svg` and `chart-dark.svg` in `docs/assets`; with
`--check` exit 1 if they differ from what would be drawn.
Not here: the measurements (`benchmarks/`), the tables (`docs/benchmarks.md`).
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
WIDTH, ROW, TOP, LABEL, BAR = 980, 74, 46, 330, 300
"""Pixels: the picture, a row, the head, the labels' column, the longest bar."""


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
    """A task, done by Penstock and by an alternative, in the same run where `other` does not say otherwise."""

    work: str
    where: str
    penstock: Timing
    other: Timing


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


def cold_row() -> Row:
    """Return four workers that start at once: a fetch together, beside a load by each."""
    lines = records("h200x4_202611/fetch-cold.jsonl")
    fetches = [slowest_rank(line["said"], "wall_s") for line in lines if "'fallback'" in line["arguments"]]
    loads = [
        slowest_rank(line["said"], "seconds")
        for line in lines
        if line["asked"] == "load" and len(line["ranks"]) == 4 and "part" not in line["arguments"]
    ]
    return Row(
        work="Cold start: 31 GB to each of 4 GPUs",
        where="4 x H200, from tmpfs, every byte verified",
        penstock=timing("penstock fetch", fetches),
        other=timing("4 separate loads", loads),
    )


def fetch_row() -> Row:
    """Return one holder to three receivers, beside NCCL's broadcast."""
    lines = records("h200x4_202611/fetch-to-three.jsonl")
    # The first fetch of a process connects to its peers.
    fetches = [slowest_rank(line["said"], "wall_s") for line in lines if line["asked"] == "fetch"][1:]
    # NCCL was not measured again since an earlier run.
    earlier = records("h200x4_202611/fetch.jsonl")
    ranks = next(line["said"] for line in earlier if line.get("asked") == "broadcast")
    broadcasts = [max(times) for times in zip(*ranks, strict=True)]
    return Row(
        work="Fetch: 60 GB from 1 GPU to 3 others",
        where="4 x H200, NVLink",
        penstock=timing("penstock, verified", fetches),
        other=timing("NCCL broadcast, not verified, an earlier run", broadcasts),
    )


def sync_row(work: str, ours: str, theirs: str, other: str) -> Row:
    """Return a version from two trainer ranks to two inference ranks, beside NCCL's broadcast."""
    lines = {line.get("row"): line for line in records("h200x4_202611/sync.jsonl")}
    return Row(
        work=work,
        where="4 x H200, NVLink, 2 trainers to 2 engines",
        penstock=timing("penstock, verified", [version["wall_s"] for version in lines[ours]["steady"]]),
        other=timing(other, lines[theirs]["seconds"]),
    )


def convert_row() -> Row:
    """Return a quantisation on four GPUs, beside a torch script on one."""

    def last(name: str, case: str) -> dict[str, Any]:
        """Return the last record of a case."""
        return [line for line in records(name) if (line["work"], line["case"]) == ("fp8-block128", case)][-1]

    both = [
        Timing(name=name, median_s=line["seconds"], low_s=line["low"], high_s=line["high"], num=line["num"])
        for name, line in (
            ("penstock, 4 GPUs", last("h200x4_202611/convert.jsonl", "penstock")),
            # Of a run on two: the script had a part of the bytes in the other.
            ("torch script, 1 GPU, an earlier run", last("h200x2_202611/convert.jsonl", "torch script")),
        )
    ]
    return Row(work="Convert: 69 GB BF16 to FP8", where="4 x H200, tmpfs", penstock=both[0], other=both[1])


def rows() -> list[Row]:
    """Return the rows of the chart."""
    return [
        cold_row(),
        fetch_row(),
        sync_row(
            "Sync: 64 GB BF16, live", "llama, live, direct", "broadcast llama packed", "NCCL broadcast, not verified"
        ),
        sync_row(
            "Sync: 32 GB in 30,000 expert tensors",
            "moe, live, direct",
            "broadcast moe packed",
            "NCCL broadcast, packed, not verified",
        ),
        convert_row(),
    ]


def seconds(value: float) -> str:
    """Return a time as text, with one unit."""
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def draw(found: Sequence[Row], *, ink: str, faint: str, ours: str, theirs: str) -> str:
    """Return the picture. The bars of a row share a scale; rows do not."""
    height = TOP + ROW * len(found) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Seconds, lower is better; median, lowest and highest of each run</title>",
        f'<text x="0" y="20" fill="{ink}" font-size="15" font-weight="600">Seconds, lower is better</text>',
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
            text = f"{seconds(bar.median_s)}  {bar.name} (n={bar.num})"
            parts.append(
                f'<text x="{max(high, LABEL + width) + 8:.1f}" y="{top + 14}" fill="{ink}">{escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """Write or check both versions."""
    found = rows()
    pictures = {
        "chart-light.svg": draw(found, ink="#1f2328", faint="#59636e", ours="#0d9488", theirs="#afb8c1"),
        "chart-dark.svg": draw(found, ink="#e6edf3", faint="#9198a1", ours="#2dd4bf", theirs="#57606a"),
    }
    if "--check" in sys.argv:
        stale = [name for name, text in pictures.items() if (TARGET / name).read_text(encoding="utf-8") != text]
        for name in stale:
            print(f"docs/assets/{name} differs from the results: run python scripts/chart.py", file=sys.stderr)
        return int(bool(stale))
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in pictures.items():
        (TARGET / name).write_text(text, encoding="utf-8")
    for row in found:
        print(f"{row.work}: {seconds(row.penstock.median_s)} beside {seconds(row.other.median_s)} ({row.other.name})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
