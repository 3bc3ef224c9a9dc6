"""Run test files in groups beside each other, divided by their recorded durations.

    python -m scripts.run_tests                 every file that needs no engine
    python -m scripts.run_tests --quick         files without processes of a fleet, each below QUICK_FILE_S
    python -m scripts.run_tests tests/unit      the files of some folders

In: `tests/durations.json`, which `python -m scripts.durations` writes. Out: the worst exit status of the groups.
The first group prints as it runs. The others print after it.

Tests between processes wait more than they compute. So there are more groups than cores.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.source_roots import ROOT

DURATIONS = ROOT / "tests" / "durations.json"
LOGS = ROOT / ".cache"
ENGINES = ROOT / "tests" / "engines"
BEFORE = "before"
"""Name in the recorded durations of the command that one group begins with."""
UNKNOWN_S = 15.0
"""Assumed seconds for a file without a recorded duration."""
QUICK_ROOTS = ("tests/unit", "tests/wire", "tests/api", "tests/hostile", "tests/conformance")
"""Folders for `--quick`, in addition to the files directly in `tests`."""
QUICK_FILE_S = 10.0
WHOLE = ("tests/integration/", "tests/benchmarks/", "tests/chaos/")
"""Folders whose tests run in a separate pytest process, without unit tests."""
NO_TESTS = 5
"""The exit status of pytest if nothing was collected. It is no failure if the options deselect a group's files."""


@dataclass
class Group:
    """Files that run one after another, with their expected seconds."""

    files: list[str] = field(default_factory=list)
    seconds: float = 0.0
    before: str = ""

    def add(self, file: str, seconds: float) -> None:
        self.files.append(file)
        self.seconds += seconds


def recorded() -> dict[str, float]:
    """Return the recorded seconds by file."""
    seconds: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return seconds


def test_files(paths: Iterable[str]) -> list[str]:
    """Return the test files at or below paths, without those of the engines, relative to the tree."""
    found = set[Path]()
    for path in map(ROOT.joinpath, paths):
        found.update(path.rglob("test_*.py") if path.is_dir() else [path])
    return sorted(str(file.relative_to(ROOT)) for file in found if ENGINES not in file.parents)


def quick_files(durations: Mapping[str, float]) -> list[str]:
    """Return the files of the quick run. A file without a recorded duration belongs to it."""
    top = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("test_*.py")]
    return [file for file in test_files([*QUICK_ROOTS, *top]) if durations.get(file, 0.0) <= QUICK_FILE_S]


def divide(files: Iterable[str], durations: Mapping[str, float], count: int, before: str = "") -> list[Group]:
    """Divide files into at most `count` groups.

    The longest file comes first, each into the group with the fewest seconds.
    """
    groups = [Group() for _ in range(count)]
    if before:
        groups[-1].before, groups[-1].seconds = before, durations.get(BEFORE, UNKNOWN_S)
    for file in sorted(files, key=lambda file: (-durations.get(file, UNKNOWN_S), file)):
        min(groups, key=lambda group: group.seconds).add(file, durations.get(file, UNKNOWN_S))
    for group in groups:
        group.files.sort()
    return [group for group in groups if group.files or group.before]


def command_of(group: Group, number: int) -> str:
    """Return the shell command for a group, which runs its parts in order. Its status is the last failure's, or 0."""
    parts = ["status=0"]
    if group.before:
        parts.append(f"{{ {group.before}; }} || status=$?")
    # Tests of whole journeys leave members and threads until the process ends, but unit tests count threads.
    whole = [file for file in group.files if file.startswith(WHOLE)]
    for kind, files in (("whole", whole), ("unit", [file for file in group.files if file not in whole])):
        if files:
            report = LOGS / f"tests-{number}-{kind}.xml"
            pytest = [sys.executable, "-m", "pytest", "-m", "not engines"]
            pytest += ["-o", "junit_family=xunit1", f"--junitxml={report}", *files]
            parts.append(f"{shlex.join(pytest)} || {{ code=$?; [ $code = {NO_TESTS} ] || status=$code; }}")
    return "; ".join([*parts, "exit $status"])


def run(groups: list[Group]) -> int:
    """Run all groups at once. Return the worst status."""
    LOGS.mkdir(exist_ok=True)
    for old in LOGS.glob("tests-*.xml"):
        old.unlink()
    started = list[tuple[subprocess.Popen[bytes], Path | None]]()
    for number, group in enumerate(groups):
        command = ["bash", "-c", command_of(group, number)]
        if number == 0:
            started.append((subprocess.Popen(command, cwd=ROOT), None))
            continue
        log = LOGS / f"tests-{number}.log"
        with log.open("wb") as output:
            started.append((subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT), log))
    worst = 0
    for process, log in started:
        status = process.wait()
        if log is not None:
            print(log.read_text(encoding="utf-8", errors="replace"), end="", flush=True)
        worst = max(worst, abs(status))
    return worst


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["tests"], help="files and folders (default: tests)")
    parser.add_argument("--quick", action="store_true", help="files that need no server and take some seconds at most")
    parser.add_argument("--groups", type=int, default=4, metavar="N", help="pytest processes at once (default: 4)")
    parser.add_argument("--before", default="", metavar="COMMAND", help="a command that one of the groups begins with")
    parser.add_argument("--list", action="store_true", help="print the groups and run nothing")
    asked = parser.parse_args(arguments)
    durations = recorded()
    files = quick_files(durations) if asked.quick else test_files(asked.paths)
    groups = divide(files, durations, asked.groups, asked.before)
    if asked.list:
        for number, group in enumerate(groups):
            print(f"group {number}: {len(group.files)} files, {group.seconds:.0f} s", *group.files, sep="\n  ")
        return 0
    return run(groups)


if __name__ == "__main__":
    sys.exit(main())
