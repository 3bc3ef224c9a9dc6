"""The plug-in reads checkpoints and receives versions with the real modules of each release of vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.engines.releases import VLLM, documented, row_of, run_release, write_checkpoint

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    # Its environment has most of the packages that vLLM imports.
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

OLDER = ("0.20.2",)


@pytest.mark.parametrize("release", VLLM)
def test_release_reads_and_receives_same_bits(release: str, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "checkpoint")
    found = run_release("vllm", release, tmp_path, tmp_path / "checkpoint")
    received = found.get("received", {"versions": [], "trainer": False})
    parts = {"load": found["loads"], "transfer": found["transfers"], "trainer": received["trainer"]}
    row = row_of(release, VLLM[release], parts | {"sleep": found["sleeps"]}, found["off"])
    assert found["tensors"] == found["own"] == tensors
    # The engine's version, the bits, and the version by which the prefix cache is salted.
    num_versions = 2 * (received["trainer"] + found["transfers"])
    assert received["versions"] == [[True, True, True]] * num_versions
    assert found["transfers"] == (release not in OLDER)
    if found["transfers"]:
        assert received["engine"] == "PenstockWeightTransferEngine"
        assert "not subscribed to a sync" in received["refused"]
    # One line names the parts that are off, and a release that is older than the tested ones.
    assert len(found["lines"]) == (release in OLDER or bool(found["off"]))
    assert all(part in found["lines"][0] for part in found["off"])
    assert documented("vllm")[release] == row
