"""Finds unused code with `vulture`, and compares it with the committed list of code that only looks unused.

The list is scripts/dead_code_allowed.txt. The exit code is 1 for any finding, and for names on the list that are used
or gone. `ruff` finds unused imports and local variables. In the core, in `penstock_convert` and in `penstock_hub`,
except for `testing`, only uses in the packages count, because code that only tests call is dead. For `testing`, uses in
the whole repository count. Exported names count as used.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from penstock.exports import MODULES, PUBLIC, SPI

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "packages/penstock/src/penstock"
CONVERT = "packages/penstock-convert/src/"
HUB = "packages/penstock-hub/src/"
ALLOWED = Path(__file__).with_name("dead_code_allowed.txt")
FINDING = re.compile(
    rf"(?P<root>{PACKAGE}/|{CONVERT}|{HUB})"
    r"(?P<path>\S+):(?P<line>\d+): (?P<what>unused (\S+ )?\S+ '(?P<name>\w+)'|unreachable.*)"
)
ADAPTERS = tuple(sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("packages/penstock-*/src")))
TESTING = ("testing/", "penstock_convert/testing.py")
USERS = ("tests", "benchmarks", "scripts", "examples")


def find(*arguments: str) -> list[re.Match[str]]:
    """Return vulture's findings in the three packages."""
    command = [sys.executable, "-m", "vulture", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if ended.returncode not in {0, 3}:  # 3: something was found
        raise SystemExit(f"vulture failed: {ended.stderr.strip() or ended.stdout.strip()}")
    return [match for line in ended.stdout.splitlines() if (match := FINDING.match(line))]


def main() -> int:
    """Print the dead code and the unnecessary entries of the list. Return the exit code."""
    lines = (line.partition("#")[0].strip() for line in ALLOWED.read_text().splitlines())
    allowed = {line for line in lines if line}
    found = find(PACKAGE, *ADAPTERS, "--exclude", "*/testing/*,*/penstock_convert/testing.py")
    found += [match for match in find(PACKAGE, *ADAPTERS, *USERS) if match["path"].startswith(TESTING)]
    exported = {*PUBLIC, *SPI, *(name for names in MODULES.values() for name in names), "__dir__"}
    dead = {
        f"{match['path']}:{match['name'] or match['what']}": match for match in found if match["name"] not in exported
    }
    for key in sorted(dead.keys() - allowed):
        match = dead[key]
        place = f"{match['root']}{match['path']}:{match['line']}"
        print(f"{place}: {match['what']}: delete it, or allow {key} with a reason")
    for key in sorted(allowed - dead.keys()):
        print(f"{ALLOWED.name}: {key} is used or gone: delete the line")
    print(f"vulture: {len(dead)} names without a use in the package, {len(dead.keys() & allowed)} of them allowed")
    return int(dead.keys() != allowed)


if __name__ == "__main__":
    sys.exit(main())
