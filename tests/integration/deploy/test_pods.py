"""Pods on one node share memory only through the runtime directory that they mount."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.integration.conftest import SMALL_CHUNKS
from tests.support.fleet import Task, Worker, digests
from tests.support.keeper import KeeperProcess
from tests.support.pods import ROOT, Engine, EngineTask, Pod, arenas, inside, namespaces
from tests.support.sync import SyncTask, SyncWorker, expected_digest

from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pods")
    directory.chmod(0o700)
    reason = Pod(shared=directory).refusal()
    if reason:
        pytest.skip(reason)
    return directory


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_engine_reads_cache_in_another_pod(
    shared: Path, small_checkpoint: Path, expected_tensors: dict[str, torch.Tensor], stack: ExitStack
) -> None:
    pod = Pod(shared=shared)
    engine = stack.enter_context(Engine(EngineTask(model="m", environ=pod.environ), prefix=pod.prefix))
    nearby = Pod(shared=shared, mounts={small_checkpoint: "model"})
    keeper = stack.enter_context(
        KeeperProcess([f"{ROOT}/model", "--model", "m"], prefix=nearby.prefix, environ=nearby.environ)
    )
    ready = engine.wait_for("ready")
    theirs = inside(keeper.process.pid)
    assert not set(namespaces(theirs).values()) & set(ready["namespaces"].values())
    assert (ready["pid"], ready["processes"]) == (1, 1)

    attached = engine.call("attach")
    assert attached["verified"] and attached["path"].startswith("shm, mapped: ")
    assert attached["digests"] == digests(expected_tensors)
    assert attached["arenas"] and set(attached["arenas"]) <= arenas(theirs)

    fetched = engine.call("fetch")
    assert fetched["verified"] and not fetched["faults"]
    assert [path.partition(" ")[0] for path in fetched["paths"]] == ["shm"], fetched
    assert fetched["digests"] == digests(expected_tensors)

    elsewhere = engine.call("elsewhere")
    assert elsewhere["error"] == "NotFound" and "no hub runs on this host" in elsewhere["message"]

    if os.geteuid() == 0:  # else there is no other user to be
        stranger = engine.call("stranger")
        assert stranger["error"] == "ConfigError" and "not a private directory of this user" in stranger["message"]
        names = {Path(path).name.partition("-")[0] for path in stranger["answers"]}
        assert {"fds.sock", "peer.sock", "data.sock", "hub"} <= names
        assert not any(stranger["answers"].values()), stranger

    assert engine.call("check")["error"] == ""
    os.kill(theirs, signal.SIGKILL)
    keeper.process.wait(30)
    assert engine.call("check")["error"] == "PeerLost"


def test_weights_sync_between_two_pods(shared: Path, stack: ExitStack) -> None:
    pod = Pod(shared=shared)
    ranks = [
        stack.enter_context(
            SyncWorker(SyncTask(side=side, mode=mode, options={"arena": True}, environ=pod.environ), prefix=pod.prefix)
        )
        for side, mode in (("publisher", "live"), ("subscriber", "direct"))
    ]
    publisher, subscriber = ranks
    for rank in ranks:
        rank.wait_for("joined")
    publisher.call("subscribers 1")
    for version in (1, 2):
        publisher.send(f"publish {version}")
        subscriber.call(f"wait {version}")
        updated = subscriber.call("update")
        assert updated["digests"] == expected_digest(subscriber.task, version)
        assert "shm" in updated["path"] and "http" not in updated["path"]
        assert publisher.result(f"publish {version}")["committed"] == [subscriber.events["joined"]["member"]]


@pytest.mark.parametrize("has_pids", [True, False], ids=["pids of their own", "one PID namespace"])
def test_pods_without_shared_directory_use_network(
    has_pids: bool,
    shared: Path,
    small_checkpoint: Path,
    expected_tensors: dict[str, torch.Tensor],
    stack: ExitStack,
    tmp_path: Path,
) -> None:
    """They have one network here, as pods on one node reach each other's addresses.

    With one PID namespace they report the same host, and only the socket shows that they share no memory.
    """
    token = tmp_path / "token"
    token.write_text(TOKEN)
    auth = Auth.of(token_file=token)
    hub = HubThread(Directory(MemoryStore(), fresh=True), bind("127.0.0.1:0", auth), auth)
    hub.start()
    stack.callback(hub.stop)
    pod = Pod(mounts={small_checkpoint: "model"}, has_network=False, has_pids=has_pids, has_proc=has_pids)
    connection = {"token": TOKEN, "listen": "127.0.0.1:0"}
    workers = [
        stack.enter_context(
            Worker(
                Task(
                    hub=hub.url, fallback=fallback, connection=connection, environ=pod.environ, constants=SMALL_CHUNKS
                ),
                prefix=pod.prefix,
            )
        )
        for fallback in (f"{ROOT}/model", None)
    ]
    for worker in workers:
        assert worker.wait_for("digests")["digests"] == digests(expected_tensors)
    fetched = workers[1].events["fetched"]
    assert [path.partition(" ")[0] for path in fetched["paths"]] == ["http"], fetched
