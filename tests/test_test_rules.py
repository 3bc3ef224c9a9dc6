"""Tests give waiting times and limits as arguments, and use public names of the code under test.

`tests/test_rules_allowed.txt` lists the files that do not yet, with their number of places. A number only falls:
`python -m tests.test_test_rules` writes the lower ones.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
ALLOWED = TESTS / "test_rules_allowed.txt"
CONSTANT = re.compile(r"penstock\w*(\.\w+)+\.[A-Z][A-Z0-9_]+")
PRIVATE = re.compile(r"_(?!_|replace$|asdict$|fields$)\w*(?<!_)")
"""Without names of Python's own protocols, such as `_repr_html_` and `namedtuple._replace`."""
OVERWRITERS = {"setattr", "patch", "setitem"}


def overwritten_constants(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each dotted string that names a constant of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CONSTANT.fullmatch(node.value):
            yield node.lineno


def overwritten_names(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each other name of a module that a dotted string overwrites."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0]
        name = str(first.value) if isinstance(first, ast.Constant) else ""
        if called in OVERWRITERS and name.startswith("penstock") and not CONSTANT.fullmatch(name):
            yield node.lineno


def private_attributes(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each private attribute that is read or set on anything but `self`, `cls` or another library."""
    others = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if not (getattr(node, "module", None) or alias.name).startswith(("penstock", "tests"))
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not PRIVATE.fullmatch(node.attr):
            continue
        owner: ast.expr = node.value
        if isinstance(owner, ast.Name) and owner.id in {"self", "cls"}:
            continue
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if not (isinstance(owner, ast.Name) and owner.id in others):
            yield node.lineno


RULES = {"constant": overwritten_constants, "name": overwritten_names, "private": private_attributes}


def found() -> dict[tuple[str, str], list[int]]:
    """Return the lines that break a rule, by rule and file."""
    lines = {}
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for rule, find in RULES.items():
            if places := sorted(find(tree)):
                lines[rule, str(path.relative_to(ROOT))] = places
    return lines


def allowed() -> Counter[tuple[str, str]]:
    listed = Counter[tuple[str, str]]()
    for line in ALLOWED.read_text(encoding="utf-8").splitlines():
        rule, file, count = line.split()
        listed[rule, file] = int(count)
    return listed


def test_tests_have_no_new_rule_violations() -> None:
    listed = allowed()
    new = [
        f"{file}: {rule}, lines {lines}" for (rule, file), lines in found().items() if len(lines) > listed[rule, file]
    ]
    assert not new, "pass a value to the code under test, and use its public names"


def test_allowed_violations_list_has_no_stale_entries() -> None:
    places = found()
    stale = [
        f"{rule} {file} {count}"
        for (rule, file), count in allowed().items()
        if len(places.get((rule, file), ())) < count
    ]
    assert not stale, f"lower or remove these lines of {ALLOWED.name}"


@pytest.mark.parametrize(
    ("rule", "source", "count"),
    [
        ("constant", 'monkeypatch.setattr("penstock_hub.claims.STALL_S", 1)', 1),
        ("constant", 'SMALL = {"penstock_hub.claims.STALL_S": 1}', 1),
        ("constant", 'monkeypatch.setenv("PENSTOCK_STALL_S", "1")', 0),
        ("name", 'monkeypatch.setattr("penstock.peer.member.host_id", f)', 1),
        ("name", 'monkeypatch.setattr("penstock_hub.claims.STALL_S", 1)', 0),
        ("name", 'monkeypatch.setattr("os.sched_yield", f)', 0),
        ("private", "fetch._follow()", 1),
        ("private", "hub.store._folders.clear()", 1),
        ("private", "self._follow()", 0),
        ("private", "import os\nos._exit(1)", 0),
        ("private", "import torch\ntorch.cuda._sleep(1)", 0),
        ("private", "from vllm.platforms import current\ncurrent._backend", 0),
        ("private", "from penstock import loader\nloader._gather()", 1),
        ("private", "value.__dict__", 0),
        ("private", "report._repr_html_()", 0),
        ("private", "parts._replace(scheme='')", 0),
    ],
)
def test_each_rule_detects_its_violations(rule: str, source: str, count: int) -> None:
    assert len(list(RULES[rule](ast.parse(source)))) == count


def write_lower_counts() -> None:
    """Write the list again. A count never rises, and a new file never enters."""
    places = found()
    counts = {key: min(count, len(places.get(key, ()))) for key, count in allowed().items()}
    lines = [f"{rule} {file} {count}\n" for (rule, file), count in sorted(counts.items()) if count]
    ALLOWED.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_lower_counts()
