"""Every promise of the pages on security and on failures names a test that holds it, and the test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / "operate" / "security.md", ROOT / "docs" / "operate" / "failure-model.md"]
HEADING = "## Promises and their tests"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def rows(page: Path) -> list[str]:
    """Return the rows of the tables of promises of a page, without their heads."""
    _, _, section = page.read_text(encoding="utf-8").partition(f"{HEADING}\n")
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [line for line in lines if not line.startswith(("| promise", "|---"))]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_promise_names_existing_test(page: Path) -> None:
    promises = rows(page)
    assert len(promises) > 20
    missing = []
    for row in promises:
        named = NAMED.findall(row)
        assert named, f"no test is named: {row}"
        for path, name in named:
            file = ROOT / "tests" / path
            if not file.exists() or not re.search(rf"^ *def {name}\(", file.read_text(encoding="utf-8"), re.M):
                missing.append(f"{path}::{name}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_promises_are_unique(page: Path) -> None:
    promises = [row.split("|")[1].strip() for row in rows(page)]
    assert len(promises) == len(set(promises))
