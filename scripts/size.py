"""The size table: every source file with its lines and its longest function; marks what is past the budget.

In: the tree. Out: a table on stdout; exit 0 always, for the budget is there to be noticed.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

FILE_LINES = 700
FUNCTION_LINES = 100
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSize:
    """A row of the table."""

    path: str
    num_lines: int
    longest: str
    longest_lines: int

    @property
    def mark(self) -> str:
        """Return the budget that the file exceeds, if any."""
        past = ["file"] * (self.num_lines > FILE_LINES) + ["function"] * (self.longest_lines > FUNCTION_LINES)
        return "past: " + ", ".join(past) if past else ""


def measure(path: Path) -> FileSize:
    """Lines of a file, and its longest function (decorators not counted)."""
    text = path.read_text(encoding="utf-8")
    functions = [
        (node.end_lineno - node.lineno + 1, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    longest_lines, longest = max(functions, default=(0, ""))
    return FileSize(
        path=path.relative_to(ROOT).as_posix(),
        num_lines=text.count("\n"),
        longest=longest,
        longest_lines=longest_lines,
    )


def main() -> int:
    """Print the table."""
    folders = sys.argv[1:] or ["src/penstock"]
    rows = [measure(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    print(f"{'file':<48} {'lines':>6}  {'longest function':<34} {'lines':>5}")
    for row in rows:
        print(f"{row.path:<48} {row.num_lines:>6}  {row.longest:<34} {row.longest_lines:>5}  {row.mark}".rstrip())
    past = sum(bool(row.mark) for row in rows)
    print(
        f"{len(rows)} files, {sum(row.num_lines for row in rows)} lines, {past} past the budget of "
        f"{FILE_LINES} lines a file and {FUNCTION_LINES} a function"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
