"""Checks the installed packages for known vulnerabilities with `pip-audit`, and says if that was not possible.

The exit code is 1 for any vulnerability. `bandit` checks the source itself. `pip-audit` alone reports "No known
vulnerabilities found" when the service knows none of the packages, as with a package index without that service. So
this script counts how many packages were looked up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LAST_S = 90.0
"""Time limit for all lookups in seconds. 112 packages take 8 s, and `make check` should stay below two minutes."""
UNREACHABLE = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "SSLError", "ServiceError", "Could not connect")
"""Parts of the text that `pip-audit` 2.x writes to stderr if the service does not answer."""


def look_up(directory: str) -> tuple[list[dict[str, Any]], str]:
    """Return the packages as `pip-audit` reports them, or an empty list and the reason."""
    out = Path(directory, "audit.json")
    command = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--progress-spinner", "off"]
    command += ["--format", "json", "--output", str(out)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LAST_S, check=False)
    except subprocess.TimeoutExpired:
        return [], f"ConnectTimeout: no result in {LAST_S:g} s"
    if not out.exists():
        return [], ended.stderr.strip() or f"exit code {ended.returncode}"
    packages: list[dict[str, Any]] = json.loads(out.read_text())["dependencies"]
    return packages, ""


def main() -> int:
    """Print the findings and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--required", action="store_true", help="fail where the service is not reachable")
    required = parser.parse_args().required
    with tempfile.TemporaryDirectory() as directory:
        packages, reason = look_up(directory)
    audited = [one for one in packages if "skip_reason" not in one]
    if not audited:
        if reason and not any(word in reason for word in UNREACHABLE):
            print(f"pip-audit failed: {reason}")
            return 1
        why = reason.splitlines()[-1] if reason else f"it knows none of the {len(packages)} installed packages"
        print(f"pip-audit: vulnerability service not reachable, skipped: {why}")
        return int(required)
    vulnerable = [(one, vulnerability) for one in audited for vulnerability in one["vulns"]]
    for one, vulnerability in vulnerable:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}")
    unknown = sorted(one["name"] for one in packages if "skip_reason" in one)
    print(f"pip-audit: {len(audited)} packages looked up, {len(vulnerable)} vulnerabilities", end="")
    print(f"; not known to the service: {', '.join(unknown)}" if unknown else "")
    return int(bool(vulnerable))


if __name__ == "__main__":
    sys.exit(main())
