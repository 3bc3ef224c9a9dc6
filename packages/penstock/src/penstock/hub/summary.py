"""A fleet's status in a few lines, and its failures as lines, for `Status.summary` and `penstock status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Plain = Mapping[str, Any]
"""A struct from `messages` as plain JSON values. `messages` imports this module, so its types cannot be imported
here."""

MAX_FAILURES = 5
"""Maximum number of failures that are shown."""


def summary_of(status: Plain) -> str:
    """Describe the status in a few lines: members, weights by model, syncs by name, conversions and failures."""
    members = status["members"]
    num_hosts = len({member["host"] for member in members})
    who = f"{_count(len(members), 'member')} on {_count(num_hosts, 'host')}" if members else "no members"
    jobs = (f"conversion {job['state']['name']}: {job['state']['phase']}" for job in status["jobs"])
    return "\n".join([who, *_weights(members), *_syncs(members), *jobs, *failure_lines(status["failures"])])


def _weights(members: Sequence[Plain]) -> Iterator[str]:
    states: dict[str, Counter[str]] = {}
    for member in members:
        for holding in member["holdings"]:
            states.setdefault(holding["identity"]["model"], Counter())[holding["state"]] += 1
    for model, counts in sorted(states.items()):
        yield f"{model}: {', '.join(f'{count} {state}' for state, count in sorted(counts.items()))}"


def _syncs(members: Sequence[Plain]) -> Iterator[str]:
    versions: dict[tuple[str, str], list[int]] = {}
    for member in members:
        for state in member["syncs"]:
            versions.setdefault((state["name"], state["side"]), []).append(state["version"])
    for (name, side), found in sorted(versions.items()):
        held_text = ", ".join("no version" if version < 0 else f"version {version}" for version in sorted(set(found)))
        yield f"sync {name}: {_count(len(found), side)} with {held_text}"


def failure_lines(failures: Sequence[Plain]) -> list[str]:
    """Return a line for each of the newest failures, and a line with the number of older failures."""
    lines = [
        f"failed {failure['age_s']:.0f} s ago: {failure['verb']} {failure['model']} at {failure['member'][:8]} "
        f"{failure['name']}: {failure['error']}: {failure['message']}"
        for failure in failures[:MAX_FAILURES]
    ]
    more = len(failures) - MAX_FAILURES
    return lines + ([f"and {_count(more, 'earlier failure')} within the last hour"] if more > 0 else [])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
