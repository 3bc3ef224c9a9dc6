"""The staging of a load is released even if the system allows no more threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.support.pins import Pins

from penstock.config import Settings
from penstock.errors import ConfigError
from penstock.loader.session import Intake, _local_nbytes, resolve_device


@pytest.mark.parametrize("has_threads", [True, False])
def test_closing_session_unpins_staging(monkeypatch: pytest.MonkeyPatch, has_threads: bool) -> None:
    registrar = Pins()
    intake = Intake(Settings.read(), torch.device("cpu"))
    pool = intake.open_pool(registrar)
    pool.release(pool.acquire(stall_s=1))
    assert len(registrar.pinned) == 1

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    intake.close()
    for thread in threading.enumerate():
        if thread.name == "penstock-unpin":
            thread.join(5)
    assert registrar.pinned == set()


def test_size_of_local_weights_counts_files_and_directories(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    files = [directory / "a.safetensors", directory / "b.safetensors", directory / "config.json"]
    for index, file in enumerate(files):
        file.write_bytes(bytes(10 + index))
    assert _local_nbytes(str(directory)) == 21
    assert _local_nbytes([str(file) for file in files]) == 33
    assert _local_nbytes([str(files[0]), "s3://bucket/b.safetensors"]) == 0
    assert _local_nbytes(str(tmp_path / "absent")) == 0


@pytest.mark.parametrize("device", [0, 99, "cuda:99"])
def test_missing_gpu_error_contains_its_number(device: int | str) -> None:
    if torch.cuda.device_count() and device == 0:
        pytest.skip("this host has GPU 0")
    number = device if isinstance(device, int) else 99
    with pytest.raises(ConfigError, match=rf"device cuda:{number} does not exist, because there are \d+ CUDA devices"):
        resolve_device(device)


@pytest.mark.parametrize("device", [-1, True, "0", 0.0, None])
def test_invalid_device_raises(device: object) -> None:
    with pytest.raises(ConfigError, match="is not a valid device") as caught:
        resolve_device(device)
    assert "the number N of a GPU" in str(caught.value)
