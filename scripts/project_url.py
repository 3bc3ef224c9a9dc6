"""Writes the address of the repository into the metadata and pages of all packages, before a release.

    python scripts/project_url.py https://HOST/OWNER/penstock

Until then they contain `PLACEHOLDER`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "https://penstock.invalid/penstock"
"""Address of the repository while it has no public one. No host has a name in `.invalid` (RFC 2606)."""


def files_with(text: str, root: Path = ROOT) -> list[Path]:
    """Return the tracked files that contain a text, except this script and its test."""
    found = subprocess.run(["git", "-C", root, "grep", "-lF", text], capture_output=True, text=True, check=False)
    if found.returncode not in (0, 1):
        raise SystemExit(found.stderr)
    return [root / name for name in found.stdout.splitlines() if "project_url" not in name]


def write(address: str, root: Path = ROOT) -> list[Path]:
    """Replace the placeholder with an address; return the changed files."""
    changed = files_with(PLACEHOLDER, root)
    for path in changed:
        path.write_text(path.read_text().replace(PLACEHOLDER, address.rstrip("/")))
    return changed


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].startswith("https://"):
        raise SystemExit("usage: python scripts/project_url.py https://HOST/OWNER/penstock")
    changed = write(sys.argv[1])
    if not changed:
        raise SystemExit(f"no file has {PLACEHOLDER}: the address is written already")
    print(*(path.relative_to(ROOT) for path in changed), sep="\n")
