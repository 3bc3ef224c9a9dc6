"""Device memory of a cache in one pod is attached and fetched in another. Both share only the runtime directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.compare import by_safetensors
from tests.support.fleet import digests
from tests.support.keeper import KeeperProcess
from tests.support.pods import ROOT, Engine, EngineTask, Pod, inside, namespaces

from penstock.testing.checkpoints import write_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]

NBYTES = 300_000_000
LAST_S = 150.0
"""Seconds for each step. The first use of a device compiles kernels."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pods") / "llama"
    write_llama(directory, total_bytes=NBYTES)
    return directory


@pytest.fixture
def pods(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pod, Pod]:
    """Directories of the cache, which alone sees the checkpoint, and of the engine."""
    shared = tmp_path_factory.mktemp("run")
    shared.chmod(0o700)
    reasons = []
    # Some sandboxes permit namespaces, but not a new /proc.
    for has_proc in (True, False):
        near = Pod(shared=shared, mounts={llama: "model"}, has_proc=has_proc)
        if not (reason := near.refusal()):
            return near, Pod(shared=shared, has_proc=has_proc)
        reasons.append(reason)
    pytest.skip("; ".join(reasons))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, pods: tuple[Pod, Pod], segments: str) -> tuple[KeeperProcess, Engine]:
    near, far = pods
    engine = stack.enter_context(Engine(EngineTask(model="m", device="cuda:0", environ=far.environ), prefix=far.prefix))
    environ = {**near.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments}"}
    keeper = stack.enter_context(
        KeeperProcess(
            [f"{ROOT}/model", "--model", "m", "--device", "cuda:0"],
            prefix=near.prefix,
            environ=environ,
            timeout_s=LAST_S,
        )
    )
    ready = engine.wait_for("ready", timeout_s=LAST_S)
    theirs = namespaces(inside(keeper.process.pid))
    assert not set(theirs.values()) & set(ready["namespaces"].values())
    print("namespaces:", ready["namespaces"], theirs)
    return keeper, engine


@pytest.mark.alone
def test_pods_share_device_memory_through_file_descriptors(
    llama: Path, pods: tuple[Pod, Pod], stack: ExitStack
) -> None:
    keeper, engine = start(stack, pods, "True")
    wanted = digests(by_safetensors(llama))

    attached = engine.call("attach", timeout_s=LAST_S)
    print("attached:", attached)
    assert attached["verified"] and attached["path"].startswith("cuda_ipc, mapped: ")
    assert attached["device"] == "cuda:0" and attached["digests"] == wanted
    # The memory is the cache's: torch allocated almost nothing here, and as much is free as before.
    assert attached["allocated_bytes"] < NBYTES // 10
    assert attached["used_bytes"] < NBYTES // 2

    fetched = engine.call("fetch", timeout_s=LAST_S)
    print("fetched:", fetched)
    assert fetched["verified"] and fetched["digests"] == wanted
    assert [path.partition(" ")[0] for path in fetched["paths"]] == ["cuda_ipc"], fetched

    if os.geteuid() == 0:  # otherwise there is no other user
        stranger = engine.call("stranger", timeout_s=LAST_S)
        print("stranger:", stranger)
        assert stranger["error"] == "ConfigError" and "not a private directory of this user" in stranger["message"]
        names = {Path(path).name for path in stranger["answers"]}
        assert {"fds.sock", "peer.sock"} <= names
        assert not any(stranger["answers"].values())

    assert engine.call("check", timeout_s=LAST_S)["error"] == ""
    os.kill(inside(keeper.process.pid), signal.SIGKILL)
    keeper.process.wait(30)
    assert engine.call("check", timeout_s=LAST_S)["error"] == "PeerLost"


def test_missing_device_memory_descriptor_error_has_hint(pods: tuple[Pod, Pod], stack: ExitStack) -> None:
    """torch's default memory has only a handle, which names a process of the cache's PID namespace."""
    _, engine = start(stack, pods, "False")
    refused = engine.call("attempt", timeout_s=LAST_S)
    print("refused:", refused)
    assert refused["error"] == "ConfigError"
    assert "expandable_segments:True" in refused["message"]
