"""What tests with processes of a fleet share."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fleet import Task, Worker, digests
from tests.support.fork_server import Forked, ForkServer
from tests.support.sync import SyncTask, SyncWorker
from tests.truth import by_safetensors

from penstock.cli.checkpoints import manifest
from penstock.errors import HubUnavailable
from penstock.hub.client import HubClient
from penstock.hub.local_hub import find_hub
from penstock.hub.messages import HoldingState
from penstock.jobs.workers import launch as launcher
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

SMALL = {
    "penstock.peer.local_weights.CHUNK_BYTES": 256 << 10,
    "penstock.hub.claims.MIN_PIECE_BYTES": MIB,
    "penstock.hub.claims.CLAIM_STALL_S": 5.0,
}
"""Weights of a few MiB have tens of chunks then."""
STALL_S = 10.0


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture
def launcher_fork_servers(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have launchers of this process fork workers from the tests' own fork server, which saves seconds of imports."""
    started = launcher.ForkServer
    monkeypatch.setattr(launcher, "ForkServer", lambda imports: fork_server.graft() if imports else started(imports))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 MiB in two shards, 32 chunks."""
    directory = tmp_path_factory.mktemp("made")
    write_llama(directory, total_bytes=8 * MIB, shards=2)
    return directory


@pytest.fixture(scope="session")
def sealed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with a manifest beside it."""
    directory = tmp_path_factory.mktemp("sealed") / "m"
    shutil.copytree(made, directory)
    manifest(str(directory))
    return directory


@pytest.fixture(scope="session")
def truth(made: Path) -> dict[str, torch.Tensor]:
    return by_safetensors(made)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes."""
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
    """A host of its own for the workers of one test: nobody else finds its hub."""

    def __init__(self, directory: Path, fork_server: ForkServer, stack: ExitStack) -> None:
        self.directory, self._fork_server, self._stack = directory, fork_server, stack
        self.environ = {"PENSTOCK_RUNTIME_DIR": str(directory), "PENSTOCK_STALL_S": str(STALL_S)}

    def start(self, constants: dict[str, float] | None = None, **task: Any) -> Worker:
        """A worker, killed at the end."""
        constants = {**SMALL, **(constants or {})}
        task["environ"] = {**self.environ, **task.get("environ", {})}
        return self._stack.enter_context(Worker(Task(constants=constants, **task), self._fork_server))

    def start_rank(self, side: str, **task: Any) -> SyncWorker:
        """A rank of a sync, its memory in arenas, so that `shm` reaches it."""
        options = {"arena": True, **task.pop("options", {})}
        environ = {**self.environ, **task.pop("environ", {})}
        return self._stack.enter_context(
            SyncWorker(SyncTask(side=side, options=options, environ=environ, **task), self._fork_server)
        )

    def start_ranks(self, side: str, world_size: int, **task: Any) -> list[SyncWorker]:
        """All ranks of a side, once they take part."""
        found = [self.start_rank(side, rank=rank, world_size=world_size, **task) for rank in range(world_size)]
        for one in found:
            one.say_until("joined")
        return found

    def start_at_once(self, count: int, **task: Any) -> list[Worker]:
        """Several that begin together."""
        workers = [self.start(is_held=True, **task) for _ in range(count)]
        for worker in workers:
            worker.say_until("ready")
        for worker in workers:
            worker.begin()
        return workers

    def start_hub(self) -> tuple[Forked, str]:
        """A hub's process, killed at the end, and its address."""
        url = f"unix://{self.directory}/own.sock"
        values = {"listen": url, "fresh": True, "beat_s": 0.5, "ttl_s": 5.0}
        hub = self._stack.enter_context(self._fork_server.fork("tests.support.fleet:hub", values))
        assert b"ready" in hub.stdout.readline()
        return hub, url

    def hub_url(self) -> str:
        """Where the host's hub is."""
        deadline = time.monotonic() + 30
        while (url := find_hub(self.directory)) is None:  # who hosted it has gone, and another takes over
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return url

    def hub(self) -> HubClient:
        """The host's hub, to be asked."""
        return self._stack.enter_context(HubClient.connect(self.hub_url(), timeout_s=2.0))

    def held(self, hub: HubClient | None = None) -> list[HoldingState]:
        """What all members hold now."""
        return [one for member in (hub or self.hub()).status().members for one in member.holdings]

    def wait_for(self, holds: Callable[[list[HoldingState]], bool], *, timeout_s: float = 30.0) -> None:
        """Return once what the members hold is so."""
        hub, deadline = self.hub(), time.monotonic() + timeout_s
        held: list[HoldingState] = []
        while True:
            try:
                held = self.held(hub)
                if holds(held):
                    return
            except HubUnavailable:
                hub = self.hub()
            assert time.monotonic() < deadline, held
            time.sleep(0.01)

    def wait_for_versions(self, versions: list[int], *, timeout_s: float = 30.0) -> None:
        """Return once the hub knows that subscribers have these versions."""
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
    """Members of this process are on it, too."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-host-", dir="/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        found = Host(directory, fork_server, stack)
        for name, value in found.environ.items():
            monkeypatch.setenv(name, value)
        for path, value in SMALL.items():
            monkeypatch.setattr(path, value)
        yield found


def reads_from_a_whole_holder(held: list[HoldingState]) -> bool:
    """The first holder is whole, so that the one with a part of it is the reader."""
    return any(one.state == "whole" for one in held) and any(one.state == "filling" and one.have for one in held)


def check(worker: Worker, truth: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Its report, once it has fetched the very bytes."""
    report = worker.say_until("fetched")
    assert worker.say_until("digests")["digests"] == digests(truth)
    assert sum(report["paths"].values()) == report["nbytes"] == sum(tensor.nbytes for tensor in truth.values())
    return report
