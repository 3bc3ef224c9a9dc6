"""Versions from publishers' processes to subscribers' are bit-identical, in every mode, on all devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.support.sync import SyncTask, SyncWorker, expected_digest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def ranks(
    stack: ExitStack, directory: Path, side: str, first: int, *, on_host: bool = False, **task: object
) -> list[SyncWorker]:
    """Start two processes, each on a device or on the host. With two devices, the subscribers use them too."""
    environ = {"PENSTOCK_RUNTIME_DIR": str(directory), "PENSTOCK_STALL_S": "20"}
    found = []
    for rank in range(2):
        device = "cpu" if on_host else f"cuda:{(first + rank) % torch.cuda.device_count()}"
        one = SyncTask(side=side, rank=rank, world_size=2, device=device, environ=environ, **task)
        found.append(stack.enter_context(SyncWorker(one)))
    return found


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize(
    ("source", "snapshot_device", "target", "path"),
    [
        ("live", "device", "cuda", "cuda_ipc"),
        ("snapshot", "device", "cuda", "cuda_ipc"),
        ("snapshot", "cpu", "cuda", "pinned_shm"),
        ("live", "device", "cpu", "staged_cuda_ipc"),
        ("snapshot", "device", "cpu", "staged_cuda_ipc"),
    ],
)
def test_each_version_arrives_bit_identical(
    tmp_path: Path, stack: ExitStack, source: str, snapshot_device: str, target: str, path: str, mode: str
) -> None:
    publishers = ranks(
        stack, tmp_path, "publisher", 0, mode=source, options={"arena": True, "snapshot_device": snapshot_device}
    )
    subscribers = ranks(stack, tmp_path, "subscriber", 2, on_host=target == "cpu", dim=1, mode=mode)
    for one in publishers + subscribers:
        one.wait_for("joined", timeout_s=90)
    publishers[0].call("subscribers 2")
    for version in (3, 4, 9):
        for one in publishers:
            one.send(f"publish {version}")
        for one in subscribers:
            one.send(f"wait {version}")
            one.send("update")
        for one in subscribers:
            said = one.result("update")
            assert (said["version"], said["is_dirty"]) == (version, False)
            assert said["digests"] == expected_digest(one.task, version)
            assert said["nbytes"] == sum(said["sources"].values()) == 6 * 64 * 96
            assert path in said["path"]
        for one in publishers:
            said = one.result(f"publish {version}")
            assert not said["late"] and not said["failed"]
            assert len(said["committed"]) == (2 if source == "live" else 0)
