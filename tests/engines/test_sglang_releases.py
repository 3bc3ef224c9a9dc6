"""The plug-in registers with the real modules of several SGLang releases, and never raises (`host_releases`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.engines.host_releases import print_row, register_with

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    # Its environment has most of the packages that SGLang imports.
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

PARTS = {
    "0.5.15": (),
    "0.5.17": ("loads",),
    "0.5.19": ("loads",),
    "0.5.21": ("loads", "uris", "sleeps"),
    "0.5.23": ("loads", "uris", "sleeps"),
}
"""The parts that each release supports."""


@pytest.mark.parametrize("release", PARTS)
def test_plugin_registers_with_real_sglang(release: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_file({"a": torch.ones(4), "b": torch.zeros(2, 3)}, checkpoint / "model.safetensors")
    found = register_with("sglang", release, tmp_path, checkpoint)
    print_row(found, ("loads", "uris", "sleeps"))
    assert (found["version"], found["errors"]) == (release, [])
    assert [part for part in ("loads", "uris", "sleeps") if found[part]] == list(PARTS[release])
    # The loader reads through this release's own default loader.
    assert found["tensors"] == (["a", "b"] if found["loads"] else [])
    # One line names the parts that are off.
    assert len(found["lines"]) == (len(PARTS[release]) < 3)
