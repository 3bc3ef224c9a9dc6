"""Constructors do no I/O: `open`, `join`, `start`, `bind` and `map` do. The rule is that of `scripts.shape`."""

from __future__ import annotations

import ast

from scripts import shape
from scripts.source_roots import ROOT

SOURCE = """
class A:
    def __init__(self):
        self._begin()

    def _begin(self):
        self.file = B.open()
"""


def test_constructors_do_no_io() -> None:
    found = [
        f"{module.name}.{node.name}: {', '.join(calls)}"
        for module in shape.read_tree(ROOT)
        for node in module.classes()
        if (calls := shape.io_calls(node))
    ]
    assert not found, f"move the I/O to a classmethod `open`, `join`, `start`, `bind` or `map`: {found}"


def test_rule_detects_io_in_constructors() -> None:
    node = ast.parse(SOURCE).body[0]
    assert isinstance(node, ast.ClassDef)
    assert shape.io_calls(node) == ["B.open"]
