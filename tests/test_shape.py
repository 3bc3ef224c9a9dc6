"""The rules of the shape table, each on a few lines of source."""

from __future__ import annotations

import ast
from pathlib import Path

from scripts import shape

TREE = {
    "packages/penstock/src/penstock/__init__.py": '__all__ = ["load", "Part"]\nfrom penstock.a import load\n',
    "packages/penstock/src/penstock/a.py": '''"""Doc.

Not code.
"""
# Not code either.
import socket
from penstock import b
STALL_S = 0.5
BEAT_S, TRIES = 60 * 60, 3
LINK_GB_PER_S, LEASE_TTL_S = 3.0, 15

class Part:
    def __init__(self, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, *, key):
        self._begin()

    def _begin(self):
        self.socket = socket.create_connection(("h", 1))

class Later:
    def __init__(self):
        self.start = lambda: open("f")
''',
    "packages/penstock/src/penstock/b.py": "class Part:\n    def __init__(self):\n        self.a = 1\n",
    "packages/penstock-vllm/src/penstock_vllm/__init__.py": "from penstock.a import load\n",
}


def written(root: Path) -> dict[str, shape.Row]:
    for name, text in TREE.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {row.measure: row for row in shape.rows(shape.read_tree(root))}


def test_size_table_reports_counts_and_rule_violations(tmp_path: Path) -> None:
    table = written(tmp_path)
    assert table["lines of penstock (code), modules"].value == "26 (18), 3"
    assert table["exported names, times each is written"].offenders == ["   2 load", "   1 Part"]
    assert table["public class names with several meanings"].offenders == ["Part: penstock.a, penstock.b"]
    assert table["functions with more than 10 parameters"].offenders == ["  11 penstock.a.Part.__init__"]
    assert table["pauses in seconds at the top of modules"].offenders == ["penstock.a.STALL_S", "penstock.a.BEAT_S"]
    assert table["constructors with I/O"].offenders == ["penstock.a.Part: socket.create_connection"]
    assert table["adapter modules (lines)"].value == "1 (1)"
    assert table["core modules that adapters import"].offenders == ["   1 penstock.a"]
    assert table["modules that one other module imports"].offenders == ["penstock.b <- penstock.a"]


def test_attribute_count_excludes_fields_of_frozen_dataclasses() -> None:
    fields = "\n".join(f"    a{number}: int" for number in range(25))
    frozen, plain = (ast.parse(f"@dataclass({flag})\nclass A:\n{fields}\n").body[0] for flag in ("frozen=True", ""))
    assert isinstance(frozen, ast.ClassDef) and isinstance(plain, ast.ClassDef)
    assert (len(shape.attributes_of(frozen)), len(shape.attributes_of(plain))) == (0, 25)
