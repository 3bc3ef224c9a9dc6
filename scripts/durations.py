"""Records the duration of each test file:

`python -m scripts.durations [.cache/tests-0-unit.xml ...]`, after `make test`.

It reads JUnit reports, by default those of `scripts.run_tests`, and writes `tests/durations.json`. Files without a
report keep their seconds. Files that no longer exist are removed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from scripts.run_tests import BEFORE, DURATIONS, LOGS, recorded
from scripts.source_roots import ROOT


def read(reports: Iterable[Path]) -> dict[str, float]:
    """Return the seconds for each test file in the reports, including fixtures."""
    seconds = defaultdict[str, float](float)
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if file := case.get("file"):
                seconds[file] += float(case.get("time", "0"))
    return seconds


def main(arguments: list[str]) -> int:
    reports = [Path(argument) for argument in arguments] or sorted(LOGS.glob("tests-*.xml"))
    if not reports:
        print(f"{LOGS} has no reports of test runs: run `make test` first", file=sys.stderr)
        return 2
    merged = {**recorded(), **read(reports)}
    kept = {file: round(merged[file], 1) for file in sorted(merged) if file == BEFORE or (ROOT / file).is_file()}
    DURATIONS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    print(f"{DURATIONS.relative_to(ROOT)}: {len(kept)} files, {sum(kept.values()):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
