"""The directories of Python packages in a tree, for the layouts `src/` and `packages/*/src/`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def source_roots(tree: Path = ROOT) -> list[Path]:
    """Return the directories that belong on `sys.path`. Raise FileNotFoundError if the tree has none."""
    found = [root for root in (tree / "src", *sorted(tree.glob("packages/*/src"))) if root.is_dir()]
    if not found:
        raise FileNotFoundError(f"{tree} has neither src/ nor packages/*/src/")
    return found


def modules(tree: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and the path of every module."""
    for root in source_roots(tree):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path
