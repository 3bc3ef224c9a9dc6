"""One stream read by several threads, and loads where no thread can start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock.errors import Cancelled

NUM_TENSORS = 200


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({f"t{i:03}": torch.full((4096,), i) for i in range(NUM_TENSORS)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("copy", [True, False])
def test_concurrent_readers_share_stream_tensors(path: Path, copy: bool) -> None:
    got: list[tuple[str, int]] = []
    failed: list[BaseException] = []
    with penstock.stream(path, settings=penstock.ReadSettings(copy=copy)) as tensors:

        def work() -> None:
            try:
                for name, tensor in tensors:
                    got.append((name, int(tensor.sum())))
            except (ValueError, RuntimeError, penstock.PenstockError) as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert tensors.report.num_tensors == NUM_TENSORS
    assert not failed
    assert sorted(got) == [(f"t{i:03}", 4096 * i) for i in range(NUM_TENSORS)]


def test_closing_stream_stops_its_readers(path: Path) -> None:
    for _ in range(20):
        outcomes: list[str] = []
        tensors = penstock.stream(path, settings=penstock.ReadSettings(copy=True))
        first = threading.Event()

        def work(tensors: penstock.TensorStream = tensors, outcomes: list[str] = outcomes) -> None:
            try:
                for _ in tensors:
                    first.set()  # noqa: B023 - of this turn
                outcomes.append("end")
            except Cancelled:
                outcomes.append("cancelled")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        first.wait(30)
        tensors.close()
        for thread in threads:
            thread.join(30)
        assert len(outcomes) == 4


LIMITED = """
import os, resource, sys
import torch
import penstock
torch.set_num_threads(1)
penstock.load(sys.argv[1])
os.setresuid(65534, 65534, 65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
target = {f"t{i}": torch.zeros(1 << 20) for i in range(4)}
for do in (
    lambda: penstock.load(sys.argv[1], settings=penstock.ReadSettings(copy=True)),
    lambda: list(penstock.stream(sys.argv[1], settings=penstock.ReadSettings(copy=True))),
    lambda: penstock.load_into(target, sys.argv[1]),
):
    try:
        do()
    except penstock.PenstockError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user with too many processes")
def test_thread_limit_error_names_rlimit_nproc() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "model.safetensors"
        save_file({f"t{i}": torch.zeros(1 << 20) for i in range(4)}, path)
        path.chmod(0o644)
        command = [sys.executable, "-c", LIMITED, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("DestinationError cannot start a thread" in line for line in lines), done
    assert all("RLIMIT_NPROC 1" in line for line in lines)
    assert "Traceback" not in done.stderr
