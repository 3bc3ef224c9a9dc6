"""vLLM over a keeper's finished parameters: the tokens of its own loading, and no loading for the second engine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.test_vllm import run, tokens
from tests.support.keeper import KeeperProcess

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
FINISHED = {"load_format": "penstock", "model_loader_extra_config": {"finished": True}}


@pytest.fixture
def keeper() -> Iterator[KeeperProcess]:
    with KeeperProcess(["--accept", "--memory-bytes", "256M"]) as process:
        yield process


@pytest.mark.parametrize("name", ["llama", "tied_llama"])
def test_the_second_engine_loads_nothing(
    name: str, keeper: KeeperProcess, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    llama: Path = request.getfixturevalue(name)
    (tmp_path / "true").mkdir()
    true = tokens(tmp_path / "true", model=str(llama), load_format="auto")
    for said, unsaid in (("handed over", "finished parameters"), ("finished parameters", "handed over")):
        done = run(tmp_path, model=str(llama), **FINISHED)
        assert str(true) in done.stdout, done.stderr[-4000:]
        log = done.stdout + done.stderr
        assert said in log and unsaid not in log
    # Other values of the same shapes are another model.
    (other,) = llama.glob("*.safetensors")
    data = bytearray(other.read_bytes())
    data[-200:] = bytes(reversed(data[-200:]))
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in llama.iterdir():
        (changed / file.name).write_bytes(bytes(data) if file == other else file.read_bytes())
    done = run(tmp_path, model=str(changed), **FINISHED)
    assert "handed over" in done.stdout + done.stderr


def test_ranks_have_parameters_of_their_own(keeper: KeeperProcess, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "true").mkdir()
    true = tokens(tmp_path / "true", model=str(llama), load_format="auto")
    environ = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for said in ("handed over", "finished parameters"):
        done = run(tmp_path, environ, model=str(llama), tensor_parallel_size=2, **FINISHED)
        assert str(true) in done.stdout, done.stderr[-4000:]
        assert (done.stdout + done.stderr).count(said) >= 2


def test_without_a_keeper_it_loads_and_says_so(llama: Path, tmp_path: Path) -> None:
    done = run(tmp_path, model=str(llama), **FINISHED)
    assert "TOKENS" in done.stdout, done.stderr[-4000:]
    assert "are not kept for the next engine" in done.stdout + done.stderr
