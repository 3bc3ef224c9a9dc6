"""Write the metadata of this tree's packages, so that an interpreter finds their entry points without installing them.

python scripts/entry_points.py DIRECTORY      DIRECTORY belongs on PYTHONPATH, with the packages' source directories
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def write_metadata(directory: Path) -> None:
    """Write a `.dist-info` directory for each package."""
    for file in sorted(PACKAGES.glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        info = directory / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        groups = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
        lines = [
            line
            for group, points in groups.items()
            for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_metadata(Path(sys.argv[1]))
