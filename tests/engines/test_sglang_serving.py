"""SGLang's server answers the same with `--load-format penstock` as with its default loader, after loads and updates.

On a CPU, SGLang computes with torch's own operations. `tests/gpu/engines` runs these tests with its kernels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engines.device import ON_GPU
from tests.engines.sglang_server import SglangServer, answer, request, serving
from tests.engines.test_sglang import published
from tests.support.keeper import KeeperProcess

import penstock as ps

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

PROMPT = [1, *range(7, 100, 4)]
ROUNDING = 1e-3 if not ON_GPU else 0.05
"""Limit for log-probabilities of the same weights in different batches. On a GPU they are computed in BF16."""


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Llama with a manifest, so that its loads are verified."""
    directory = shutil.copytree(llama, tmp_path_factory.mktemp("verified") / "llama")
    ps.manifest(str(directory))
    return directory


@pytest.fixture(scope="module")
def other(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("other"), seed=5)


@pytest.fixture(scope="module")
def true(
    model: Path, other: Path, runtime: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[int], list[float]]]:
    """Return the answers of a server whose weights SGLang's default loader read, when it started and for an update."""
    with serving(model, runtime, tmp_path_factory.mktemp("auto"), "--load-format", "auto") as server:
        found = {"model": server.generate(PROMPT)}
        server.update(str(other), "auto")
        found["other"] = server.generate(PROMPT)
    assert len({tuple(tokens) for tokens, _ in found.values()}) == 2
    return found


@pytest.fixture(scope="module")
def server(model: Path, runtime: str, true: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """Start a member of a fleet, after `true`, so that only one engine starts at a time."""
    arguments = ["--load-format", "penstock", "--model-loader-extra-config", json.dumps({"fleet": "sgl"})]
    with serving(model, runtime, tmp_path_factory.mktemp("server"), *arguments, memory_saver=True) as server:
        yield server


def assert_same(found: tuple[list[int], list[float]], true: tuple[list[int], list[float]]) -> None:
    assert found[0] == true[0]
    assert max(abs(a - b) for a, b in zip(found[1], true[1], strict=True)) < ROUNDING


def test_server_answers_as_with_default_loader(server: SglangServer, true: dict) -> None:
    assert_same(server.generate(PROMPT), true["model"])
    assert "not verified" not in server.log.read_text()


def test_updates_under_load_fail_no_request(
    server: SglangServer,
    model: Path,
    other: Path,
    true: dict,
    runtime: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: pytest.RecordProperty,
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", runtime)
    done, failures, answers = threading.Event(), [], [0, 0]

    def ask(client: int) -> None:
        while not done.is_set():
            status, said = server.ask("/generate", **request(PROMPT, 16))
            # A request has the tokens of one version, never of two.
            if status != 200 or answer(said)[0] not in (true["model"][0], true["other"][0]):
                failures.append(said)
            answers[client] += 1

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(2)]
    for client in clients:
        client.start()
    try:
        # Two ranks publish the shards of version 0.
        with published(other, "first"), published(model, "second"):
            for name, weights in (("first", "other"), ("second", "model"), ("first", "other"), ("second", "model")):
                began = time.monotonic()
                server.update(f"sync://{name}/0", "penstock")
                record_property(f"update_s_{name}", round(time.monotonic() - began, 4))
                assert_same(server.generate(PROMPT), true[weights])
    finally:
        done.set()
        for client in clients:
            client.join(120)
    assert not failures
    assert min(answers) > 2


def test_released_memory_is_restored_with_same_answers(server: SglangServer, other: Path, true: dict) -> None:
    server.update(str(other), "penstock")
    for _ in range(2):
        server.post("/release_memory_occupation")
        server.post("/resume_memory_occupation")
        assert_same(server.generate(PROMPT), true["other"])
    server.post("/release_memory_occupation", tags=["kv_cache", "weights"])
    server.post("/resume_memory_occupation", tags=["weights"])
    server.post("/resume_memory_occupation", tags=["kv_cache"])
    assert_same(server.generate(PROMPT), true["other"])


def test_checkpoint_with_flipped_bit_is_refused(
    server: SglangServer, model: Path, other: Path, true: dict, tmp_path: Path
) -> None:
    server.update(str(model), "penstock")
    # No member of the fleet has these weights, so they are read from the file.
    spoilt = shutil.copytree(other, tmp_path / "spoilt")
    ps.manifest(str(spoilt))
    with (spoilt / "model.safetensors").open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    status, said = server.ask("/update_weights_from_disk", model_path=str(spoilt), load_format="penstock")
    assert (status, "differs from its digest" in said) == (400, True), said
    assert_same(server.generate(PROMPT), true["model"])


@pytest.mark.parametrize("source", ["fleet", "weight_cache"])
def test_second_replica_answers_as_first(
    source: str, server: SglangServer, model: Path, true: dict, runtime: str, tmp_path: Path
) -> None:
    server.update(str(model), "penstock")
    with ExitStack() as stack:
        if source == "weight_cache":
            environ = {"PENSTOCK_RUNTIME_DIR": runtime}
            stack.enter_context(KeeperProcess([str(model), "--model", "sgl"], environ=environ, timeout_s=180))
        arguments = ["--load-format", "penstock", "--model-loader-extra-config", json.dumps({source: "sgl"})]
        second = stack.enter_context(serving(model, runtime, tmp_path / "second", *arguments))
        assert_same(second.generate(PROMPT), true["model"])
        log = second.log.read_text()
        if source == "weight_cache":
            assert "not attached" not in log
        else:
            paths = next(line for line in log.splitlines() if "paths: " in line)
            assert "storage" not in paths
