"""Fixtures for tests that start processes of a fleet."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.compare import by_safetensors
from tests.support.fleet import Task, Worker, digests
from tests.support.fork_server import Forked, ForkServer
from tests.support.sync import SyncTask, SyncWorker

from penstock.cli.checkpoints import manifest
from penstock.errors import HubUnavailable
from penstock.hub.client import HubClient
from penstock.hub.local_hub import find_hub
from penstock.hub.messages import HoldingState
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_convert.workers import launch as launcher

SMALL_CHUNKS = {
    "penstock.holding.weight_layout.CHUNK_BYTES": 256 << 10,
    "penstock_hub.claims.MIN_PIECE_BYTES": MIB,
    "penstock_hub.claims.CLAIM_STALL_S": 5.0,
}
"""Constants with which weights of a few MiB have tens of chunks."""
STALL_S = 10.0


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture
def launcher_fork_servers(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of launchers from the tests' fork server, which saves seconds of imports."""
    start = launcher.ForkServer.start
    replacement = SimpleNamespace(start=lambda imports: fork_server.graft() if imports else start(imports))
    monkeypatch.setattr(launcher, "ForkServer", replacement)


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint of 8 MiB in two shards, which has 32 chunks."""
    directory = tmp_path_factory.mktemp("made")
    write_llama(directory, total_bytes=8 * MIB, shards=2)
    return directory


@pytest.fixture(scope="session")
def checkpoint_with_manifest(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the small checkpoint and write its manifest."""
    directory = tmp_path_factory.mktemp("sealed") / "m"
    shutil.copytree(small_checkpoint, directory)
    manifest(str(directory))
    return directory


@pytest.fixture(scope="session")
def expected_tensors(small_checkpoint: Path) -> dict[str, torch.Tensor]:
    return by_safetensors(small_checkpoint)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that mounts a file system of the given size in bytes."""
    libc, mounted = ctypes.CDLL(None, use_errno=True), list[Path]()

    def mount(nbytes: int) -> Path:
        where = tmp_path / f"disk{len(mounted)}"
        where.mkdir()
        if libc.mount(b"none", str(where).encode(), b"tmpfs", 0, f"size={nbytes}".encode()):
            pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")
        mounted.append(where)
        return where

    yield mount
    for where in mounted:
        libc.umount2(str(where).encode(), 2)


class Host:
    """A simulated host for the workers of one test. Other tests cannot find its hub in its private directory."""

    def __init__(self, directory: Path, fork_server: ForkServer, stack: ExitStack) -> None:
        self.directory, self._fork_server, self._stack = directory, fork_server, stack
        self.environ = {"PENSTOCK_RUNTIME_DIR": str(directory), "PENSTOCK_STALL_S": str(STALL_S)}

    def start(self, constants: dict[str, float] | None = None, **task: Any) -> Worker:
        """Start a worker, which is killed at the end of the test."""
        constants = {**SMALL_CHUNKS, **(constants or {})}
        task["environ"] = {**self.environ, **task.get("environ", {})}
        return self._stack.enter_context(Worker(Task(constants=constants, **task), self._fork_server))

    def start_rank(self, side: str, **task: Any) -> SyncWorker:
        """Start a rank of a sync. Its memory is in arenas, so that the `shm` transport can read it."""
        options = {"arena": True, **task.pop("options", {})}
        environ = {**self.environ, **task.pop("environ", {})}
        return self._stack.enter_context(
            SyncWorker(SyncTask(side=side, options=options, environ=environ, **task), self._fork_server)
        )

    def start_ranks(self, side: str, world_size: int, **task: Any) -> list[SyncWorker]:
        """Start all ranks of a side and wait until they have joined."""
        found = [self.start_rank(side, rank=rank, world_size=world_size, **task) for rank in range(world_size)]
        for one in found:
            one.wait_for("joined")
        return found

    def start_together(self, count: int, **task: Any) -> list[Worker]:
        """Start several workers that begin their tasks together."""
        workers = [self.start(waits_for_input=True, **task) for _ in range(count)]
        for worker in workers:
            worker.wait_for("ready")
        for worker in workers:
            worker.proceed()
        return workers

    def start_hub(self) -> tuple[Forked, str]:
        """Start a hub process, which is killed at the end, and return it with its address."""
        url = f"unix://{self.directory}/own.sock"
        values = {"listen": url, "fresh": True, "beat_s": 0.5, "ttl_s": 5.0}
        hub = self._stack.enter_context(self._fork_server.fork("tests.support.fleet:run_hub_process", values))
        assert b"ready" in hub.stdout.readline()
        return hub, url

    def hub_url(self) -> str:
        """Return the address of the host's hub."""
        deadline = time.monotonic() + 30
        while (url := find_hub(self.directory)) is None:  # The hosting process has ended, and another one takes over.
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return url

    def hub(self) -> HubClient:
        """Return a client of the host's hub."""
        return self._stack.enter_context(HubClient.connect(self.hub_url(), timeout_s=2.0))

    def holdings(self, hub: HubClient | None = None) -> list[HoldingState]:
        """Return the holdings of all members."""
        return [one for member in (hub or self.hub()).status().members for one in member.holdings]

    def wait_for_holdings(self, is_reached: Callable[[list[HoldingState]], bool], *, timeout_s: float = 30.0) -> None:
        """Wait until the holdings of the members satisfy the condition."""
        hub, deadline = self.hub(), time.monotonic() + timeout_s
        holdings: list[HoldingState] = []
        while True:
            try:
                holdings = self.holdings(hub)
                if is_reached(holdings):
                    return
            except HubUnavailable:
                hub = self.hub()
            assert time.monotonic() < deadline, holdings
            time.sleep(0.01)

    def wait_for_versions(self, versions: list[int], *, timeout_s: float = 30.0) -> None:
        """Wait until the hub knows that subscribers have these versions."""
        hub, deadline = self.hub(), time.monotonic() + timeout_s
        while True:
            syncs = [sync for member in hub.status().members for sync in member.syncs]
            found = sorted(sync.version for sync in syncs if sync.side == "subscriber")
            if found == versions:
                return
            assert time.monotonic() < deadline, found
            time.sleep(0.01)


@pytest.fixture
def host(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Create a simulated host, and put members of this process on it too."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-host-", dir="/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        found = Host(directory, fork_server, stack)
        for name, value in found.environ.items():
            monkeypatch.setenv(name, value)
        for path, value in SMALL_CHUNKS.items():
            monkeypatch.setattr(path, value)
        yield found


def has_reader_of_whole_holder(holdings: list[HoldingState]) -> bool:
    """Return whether a whole holder exists and a reader has received a part."""
    has_part = any(one.state == "filling" and one.have for one in holdings)
    return has_part and any(one.state == "whole" for one in holdings)


def assert_fetched(worker: Worker, truth: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Wait for the fetch of a worker, compare its tensors, and return its report."""
    report = worker.wait_for("fetched")
    assert worker.wait_for("digests")["digests"] == digests(truth)
    assert sum(report["paths"].values()) == report["nbytes"] == sum(tensor.nbytes for tensor in truth.values())
    return report
