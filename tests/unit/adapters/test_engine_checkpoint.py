"""An engine's loader reads a checkpoint from storage with its options."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from penstock.spi import RankInfo, checkpoint, prepare_checkpoint, read_options  # noqa: E402 - after what it needs
from penstock.testing.checkpoints import write_llama  # noqa: E402


def test_checkpoint_is_read_with_all_storage_options(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", total_bytes=1 << 20, shards=1)
    files = [str(file) for file in (tmp_path / "llama").glob("*.safetensors")]
    options = read_options({"memory_bytes": "32M", "verify": False, "storage_options": {}, "fleet": False})
    place = RankInfo(rank=lambda: 0, device=lambda: "cpu", group=lambda: None)
    log = logging.getLogger("penstock.test")
    tensors = dict(checkpoint(files, None, options, place, model="llama", log=log, progress=False))
    assert sum(tensor.nbytes for tensor in tensors.values()) > 1 << 19


@pytest.mark.parametrize(
    "options", [{"distributed": True}, {"weight_cache": "m"}, {"fleet": "m"}, {"hub": "http://h:1"}]
)
def test_other_readers_prepare_nothing(options: dict[str, Any]) -> None:
    def device() -> str:
        raise AssertionError("the device is not needed")

    prepare_checkpoint(options, device)


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"device": 1}])
def test_other_device_prepares_nothing(options: dict[str, Any]) -> None:
    before = threading.active_count()
    prepare_checkpoint(options, lambda: "cpu")
    assert threading.active_count() == before


def test_error_while_preparing_is_left_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    prepare_checkpoint({"memory_bytes": 1}, lambda: "cuda:99")
    for thread in threading.enumerate():
        if thread.name == "penstock-prepare":
            thread.join(20)
    assert not raised
