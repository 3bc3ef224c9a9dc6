"""The plug-in reads a checkpoint with the real modules of each release of SGLang."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.engines.releases import SGLANG, documented, row_of, run_release, write_checkpoint

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    # Its environment has most of the packages that SGLang imports.
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]


@pytest.mark.parametrize("release", SGLANG)
def test_release_reads_same_bits(release: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "checkpoint")
    found = run_release("sglang", release, tmp_path, tmp_path / "checkpoint")
    row = row_of(release, SGLANG[release], {part: found[part] for part in ("loads", "uris", "sleeps")}, found["off"])
    assert (found["errors"], found["tensors"]) == ([], tensors)
    # One line names the parts that are off.
    assert len(found["lines"]) == bool(found["off"])
    assert all(part in found["lines"][0] for part in found["off"])
    assert documented("sglang")[release] == row
