"""Turns the JSON lines of a run into the page that is committed under `benchmarks/results/`.

In: `load.jsonl` (first line: the machine; then one line a measurement). Out: Markdown.
Not here: measuring.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.load.loaders import PEERS
from benchmarks.load.rows import ROWS, Goal, Row

Sample = dict[str, Any]


def render(paths: Iterable[str]) -> str:
    """The page of one or several runs on the same kind of machine; a row is the last run's that has it."""
    machines: list[dict[str, Any]] = []
    rows: dict[str, list[Sample]] = {}
    for path in paths:
        head, *samples = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
        machines.append(head)
        rows |= {key: [s for s in samples if s["row"] == key] for key in {s["row"] for s in samples}}
    parts = ["# Load, beside its peers", "", *_machine(machines)]
    for key, row in ROWS.items():
        if key in rows:
            parts += [
                "",
                *_row(row if any(machine.get("topology") for machine in machines) else _on_cpu(row), rows[key]),
            ]
    skipped = [note for machine in machines for note in machine.get("skipped", [])]
    if skipped:
        parts += ["", "## Not measured", "", *(f"- {note}" for note in skipped)]
    return "\n".join(parts) + "\n"


def _on_cpu(row: Row) -> Row:
    title = row.title.replace("several GPUs", "CPU memory").replace("one GPU", "CPU memory")
    return replace(row, title=title, goals=row.cpu_goals)


def _machine(machines: list[dict[str, Any]]) -> list[str]:
    out = ["| | |", "|---|---|"]
    if machines:
        out += [f"| {name} | {value} |" for name, value in machines[0]["machine"].items()]
    for machine in machines:
        out.append(f"| command | `{machine['command']}` |")
    out.append(
        "| method | every measurement in a process of its own, loaders in turn within a round, the order rotated each"
        " round; from the call to all tensors usable on the device, allocation included, imports and CUDA start-up not;"
        " every byte of every tensor compared with safetensors outside the clock; ratios are of medians |"
    )
    topology = machines[0].get("topology") if machines else None
    return [*out, "", "```", topology, "```"] if topology else out


def _by_loader(samples: list[Sample], field: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sample in samples:
        if field in sample and "error" not in sample:
            found.setdefault(sample["loader"], []).append(sample[field])
    return found


def ceiling(row: Row, samples: list[Sample]) -> tuple[float | None, str]:
    """The row's limit: of each shape tried the median, and of those the best."""
    if not row.limits:
        return None, ""
    shapes: dict[str, list[float]] = {}
    for sample in samples:
        if sample["loader"] == row.limits[0] and "error" not in sample:
            shapes.setdefault(sample["shape"], []).append(sample["gb_per_s"])
    if not shapes:
        return None, ""
    best = max(shapes, key=lambda shape: statistics.median(shapes[shape]))
    return statistics.median(shapes[best]), best


def _row(row: Row, samples: list[Sample]) -> list[str]:
    seconds = _by_loader(samples, "seconds")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    limit, shape = ceiling(row, samples)
    nbytes = samples[0]["nbytes"]
    first = next((s for s in samples if "num_tensors" in s), {})
    ranks = max((s["world_size"] for s in samples), default=1)
    out = [
        f"## {row.key}. {row.title}{f' ({ranks} ranks)' if ranks > 1 else ''}",
        "",
        f"{nbytes / 1e9:.1f} GB in {first.get('num_tensors', '?')} tensors, {samples[0].get('num_files', '?')} files"
        f" on {samples[0].get('file_system', '?')}; pages in cache before each load: {_resident(samples)}.",
        "",
    ]
    mine = min((medians[n] for n in row.loaders if n.startswith("penstock") and n in medians), default=None)
    out += [
        "| loader | n | median s | min-max s | GB/s | of the limit | penstock is |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(medians, key=lambda loader: medians[loader]):
        rate = nbytes / medians[name] / 1e9
        out.append(
            f"| {name} | {len(seconds[name])} | {medians[name]:.3f} | {min(seconds[name]):.3f}-{max(seconds[name]):.3f}"
            f" | {rate:.1f} | {f'{rate / limit:.2f}' if limit and row.key != 'f' else ''}"
            f" | {f'{medians[name] / mine:.2f}x' if mine else ''} |"
        )
    for name, rates in _by_loader(samples, "gb_per_s").items():
        if name.startswith("limit:"):
            shown = f" ({shape})" if row.limits and name == row.limits[0] else ""
            value = limit if limit is not None and name == row.limits[0] else statistics.median(rates)
            spread = f"{min(rates):.1f}-{max(rates):.1f}"
            out.append(f"| *{name.replace(':', ' ')}*{shown} | {len(rates)} | | | **{value:.1f}** ({spread}) | | |")
    if row.memory_bytes is not None:
        out += _memory(samples)
    out += _faults(samples)
    goals = [_goal(goal, row, samples, medians, limit) for goal in row.goals]
    return [*out, "", *goals]


def _resident(samples: list[Sample]) -> str:
    seen = [s["resident"] for s in samples if "resident" in s]
    return f"{min(seen):.0%}-{max(seen):.0%}" if seen else "not applicable"


def _memory(samples: list[Sample]) -> list[str]:
    out = ["", "| loader | growth of RSS, MB | growth of the host's used memory, MB |", "|---|---|---|"]
    used = _by_loader(samples, "used_growth_bytes")
    for name, values in _by_loader(samples, "rss_growth_bytes").items():
        system = f"{statistics.median(used[name]) / 1e6:.0f}" if name in used else ""
        out.append(f"| {name} | {max(values) / 1e6:.0f} | {system} |")
    return [
        *out,
        "",
        "RSS counts mapped file pages too, and not memory that the CUDA driver allocated; the host's used memory counts"
        " both the other way round (sampled every 5 ms).",
    ]


def _faults(samples: list[Sample]) -> list[str]:
    out: list[str] = []
    for name in dict.fromkeys(s["loader"] for s in samples):
        runs = [s for s in samples if s["loader"] == name]
        failed = [s for s in runs if "error" in s]
        if failed:
            out.append(f"- {name}: {len(failed)} of {len(runs)} failed: `{failed[0]['error'].splitlines()[-1][:200]}`")
        wrong = [s for s in runs if s.get("expected") and s["fingerprints"] != s["expected"]]
        if wrong:
            out.append(f"- {name}: **wrong bytes** in {len(wrong)} of {len(runs)} loads")
    loads = [s for s in samples if "seconds" in s]
    if loads and all(s["expected"] == s["fingerprints"] for s in loads):
        out.append(f"- bytes of all {len(loads)} loads equal to those of safetensors")
    return ["", *out]


def _goal(goal: Goal, row: Row, samples: list[Sample], medians: dict[str, float], limit: float | None) -> str:
    ours = [name for name in row.loaders if name.startswith("penstock") and name in medians]
    if goal.kind == "limit":
        return _verdict(f"digest kernel >= {goal.value:.0f} GB/s", limit, goal.value)
    if not ours:
        return "- goal not judged: penstock was not measured"
    seconds = medians[ours[-1]]
    rate = samples[0]["nbytes"] / seconds / 1e9
    if goal.kind == "rate":
        return _verdict(f">= {goal.value:g} GB/s", rate, goal.value)
    if goal.kind == "ceiling":
        return _verdict(f">= {goal.value:g} of the limit", rate / limit if limit else None, goal.value)
    if goal.kind == "growth":
        growth = max(_by_loader(samples, "rss_growth_bytes")[ours[-1]])
        return _verdict(f"host memory <= {goal.value / 1e6:.0f} MB", growth / 1e6, goal.value / 1e6, most=True)
    rivals = {name: medians[name] for name in goal.peers if name in medians}
    if not rivals:
        return f"- goal not judged: none of {', '.join(goal.peers)} was measured"
    best = min(rivals, key=lambda name: rivals[name])
    if goal.kind == "slowdown":
        return _verdict(f"<= {goal.value:g}x the time of {best}", seconds / rivals[best], goal.value, most=True)
    whom = "the best peer" if goal.peers == PEERS else best
    return _verdict(f">= {goal.value:g}x {whom} ({best})", rivals[best] / seconds, goal.value)


def _verdict(text: str, value: float | None, bound: float, *, most: bool = False) -> str:
    if value is None:
        return f"- goal {text}: not judged"
    reached = value <= bound if most else value >= bound
    return f"- goal {text}: {'reached' if reached else '**missed**'} ({value:.2f})"
