"""Adds up the outcomes of rounds, and prints them as text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.harness import Outcome

COUNTED = (
    "wrong bytes",
    "torn version",
    "mixed fleet",
    "withdrawn version",
    "adapter on another base",
    "hang",
    "untyped error",
    "unexpected error",
    "storage factor",
    "bounded waits",
    "given to a stranger",
    "leaked descriptors",
    "leaked threads",
    "leaked memory",
    "leaked processes",
    "left files",
)
"""Kinds of violations that are printed even if there are none."""


def totals(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return all counts as plain values."""
    faults, results, violations = Counter[str](), Counter[str](), Counter[str]()
    for one in outcomes:
        faults.update(one.faults)
        results.update(one.results)
        violations.update(found.kind for found in one.violations)
    counted = [one for one in outcomes if one.weight_bytes]
    calm = [one for one in counted if not one.num_deaths]
    rough = [one for one in counted if one.num_deaths]
    return {
        "rounds": dict(sorted(Counter(one.kind for one in outcomes).items())),
        "num_rounds": len(outcomes),
        "num_faults": sum(faults.values()),
        "faults": dict(sorted(faults.items())),
        "results": dict(sorted(results.items())),
        "storage_factor_without_deaths": max((one.served_bytes / one.weight_bytes for one in calm), default=None),
        "storage_rounds_without_deaths": len(calm),
        "storage_factor_with_deaths": max(
            (max(0, one.served_bytes - one.allowed_bytes) / one.weight_bytes for one in rough), default=None
        ),
        "storage_rounds_with_deaths": len(rough),
        "violations": {kind: violations[kind] for kind in dict.fromkeys((*COUNTED, *violations))},
        "num_violations": sum(violations.values()),
        "seconds": sum(one.seconds for one in outcomes),
        "failed": [
            {
                "number": one.number,
                "kind": one.kind,
                "description": one.description,
                "violations": [{"kind": found.kind, "text": found.text} for found in one.violations],
                "kept": one.kept,
            }
            for one in outcomes
            if one.violations
        ],
    }


def lines(found: dict[str, Any], seed: int) -> list[str]:
    """Return the totals as text."""
    rounds = ", ".join(f"{count} {kind}" for kind, count in found["rounds"].items())
    written = [f"rounds              {found['num_rounds']} ({rounds})", f"faults              {found['num_faults']}"]
    written += [f"  {kind:<32} {count}" for kind, count in found["faults"].items()]
    written += [f"{kind:<34} {count}" for kind, count in found["results"].items()]
    for name in ("without", "with"):
        factor, count = found[f"storage_factor_{name}_deaths"], found[f"storage_rounds_{name}_deaths"]
        if factor is not None:
            less = ", less what the dead had read" if name == "with" else ""
            written.append(f"storage factor      {factor:.2f} at most {name} deaths{less} ({count} rounds)")
    written += [f"{kind:<19} {count}" for kind, count in found["violations"].items()]
    for one in found["failed"]:
        written.append(f"round {one['number']} ({one['kind']}): {one['description']}")
        written += [f"    {each['kind']}: {each['text']}" for each in one["violations"]]
        written.append(f"    again: make chaos ARGS='--seed {seed} --round {one['number']}'; output: {one['kept']}")
    return written
