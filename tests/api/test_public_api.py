"""The public API and the command line are frozen in `public_api.txt`, which a reviewer sees change.

After a change on purpose: `python -m scripts.api --write`.
"""

from __future__ import annotations

import ast

from scripts import api


def test_public_api_matches_snapshot() -> None:
    assert api.report().splitlines() == api.SNAPSHOT.read_text(encoding="utf-8").splitlines()


def test_documented_names_exist() -> None:
    assert [line for line in api.below() if line.endswith("not found")] == []


def test_class_description_includes_inherited_members_and_defaults() -> None:
    lines = api.describe("Cancelled", "penstock.errors", api.names_in("penstock.errors")["Cancelled"])
    assert "    .blame: ClassVar[Blame] = 'config'" in lines
    assert any(line.startswith("    .__init__(message: str, *, mutated: bool=False") for line in lines)


def test_signature_omits_only_self() -> None:
    tree = ast.parse("class A:\n def a(self): ...\n def b(self, x: int=1, *, y=2) -> str: ...\n")
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert [api.signature(node, is_method=True) for node in methods] == ["()", "(x: int=1, *, y=2) -> str"]
