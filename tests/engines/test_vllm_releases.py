"""The plug-in registers with the real modules of several vLLM releases, and never raises (`host_releases`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.host_releases import print_row, register_with

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

pytest.importorskip("torch")

RELEASES = ("0.20.2", "0.24.0", "0.28.0", "0.32.0")
COMPLETE = ("0.28.0", "0.32.0")
"""Releases that support every part."""


@pytest.mark.parametrize("release", RELEASES)
def test_plugin_registers_with_real_vllm(release: str, tmp_path: Path) -> None:
    found = register_with("vllm", release, tmp_path, tmp_path)
    print_row(found, ("loads", "transfers", "sleeps"))
    assert found["version"] == release
    assert found["loads"] and found["transfers"] and found["sleeps"]
    # One line names the parts that are off.
    assert len(found["lines"]) == (release not in COMPLETE)
