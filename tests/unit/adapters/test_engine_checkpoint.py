"""An engine's loader reads a checkpoint from storage with its options."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from penstock.spi import RankInfo, checkpoint, read_options  # noqa: E402 - after what it needs
from penstock.testing.checkpoints import write_llama  # noqa: E402


def test_checkpoint_is_read_with_all_storage_options(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", total_bytes=1 << 20, shards=1)
    files = [str(file) for file in (tmp_path / "llama").glob("*.safetensors")]
    options = read_options({"memory_bytes": "32M", "verify": False, "storage_options": {}, "fleet": False})
    place = RankInfo(rank=lambda: 0, device=lambda: "cpu", group=lambda: None)
    log = logging.getLogger("penstock.test")
    tensors = dict(checkpoint(files, None, options, place, model="llama", log=log, progress=False))
    assert sum(tensor.nbytes for tensor in tensors.values()) > 1 << 19
