"""vLLM generates the same tokens with `--load-format penstock` as with its own loader."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.device import ON_GPU, vllm_environ, vllm_options
from tests.engines.vllm_engines import Answer, EngineProcess
from tests.support.keeper import KeeperProcess

import penstock as ps
from penstock.errors import ConfigError
from penstock.spi import read_options

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

RUNAI = """
import json, sys

from penstock_hf import runai_streamer
runai_streamer.install()

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(**json.loads(sys.argv[1]))
    greedy = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 9, 200, 17, 33, 2, 8]}], greedy)
    print("TOKENS", json.dumps(list(answer.outputs[0].token_ids)))
"""


@pytest.fixture(scope="module")
def engines(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with EngineProcess(tmp_path_factory.mktemp("engines"), PENSTOCK_RUNTIME_DIR=runtime) as engines:
        yield engines


@pytest.fixture(scope="module")
def default(engines: EngineProcess, llama: Path) -> Answer:
    """Return the answer of an engine that vLLM's default loader filled."""
    found = engines.start(model=str(llama), load_format="auto")
    assert len(set(found.tokens)) > 4, found.error
    return found


def test_local_model_matches_tokens_from_default_loader(engines: EngineProcess, llama: Path, default: Answer) -> None:
    assert engines.start(model=str(llama), load_format="penstock").same(default)


def test_checkpoint_with_flipped_bit_is_refused(
    engines: EngineProcess, llama: Path, default: Answer, tmp_path: Path
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    ps.manifest(str(model))
    assert engines.start(model=str(model), load_format="penstock").same(default)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    # vLLM's own loader does not notice.
    assert not engines.start(model=str(model), load_format="auto").error
    assert engines.start(model=str(model), load_format="penstock").error.startswith("IntegrityError")


@pytest.mark.parametrize("kind", ["compiled", "experts", "fp8"])
def test_kind_of_model_matches_default_loader(
    kind: str, engines: EngineProcess, make_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(make_model(kind))
    options = {"dtype": "bfloat16", "enforce_eager": kind != "compiled"}
    default = engines.start(model=model, load_format="auto", **options)
    assert len(set(default.tokens)) > 4, default.error
    assert engines.start(model=model, load_format="penstock", **options).same(default)


def test_model_in_weight_cache_matches_default_loader(
    engines: EngineProcess, llama: Path, default: Answer, runtime: str
) -> None:
    with KeeperProcess([str(llama), "--model", "llama"], environ={"PENSTOCK_RUNTIME_DIR": runtime}, timeout_s=180):
        options = {"weight_cache": "llama"}
        found = engines.start(model=str(llama), load_format="penstock", model_loader_extra_config=options)
    assert found.same(default)
    assert "not attached" not in found.log


def test_sleeping_engine_wakes_with_same_answer(engines: EngineProcess, sharded_llama: Path, default: Answer) -> None:
    # vLLM's CPU workers keep the weights, and vLLM refuses the mode.
    options = {"enable_sleep_mode": True} if ON_GPU else {}
    found = engines.start(sleeps=(1, 2, 1), model=str(sharded_llama), load_format="penstock", **options)
    assert found.same(default), found.error


def test_sharded_model_with_options_matches_tokens_from_default_loader(
    engines: EngineProcess, sharded_llama: Path, default: Answer
) -> None:
    options = {"memory_bytes": "32M", "verify": False}
    found = engines.start(model=str(sharded_llama), load_format="penstock", model_loader_extra_config=options)
    assert found.same(default)


def test_tied_model_matches_tokens_from_default_loader(engines: EngineProcess, tied_llama: Path) -> None:
    default = engines.start(model=str(tied_llama), load_format="auto")
    assert len(default.tokens) == 24
    assert engines.start(model=str(tied_llama), load_format="penstock").same(default)


def test_object_store_model_matches_tokens_from_default_loader(
    s3_llama: str, s3_environment: dict[str, str], tmp_path: Path, default: Answer
) -> None:
    with EngineProcess(tmp_path / "engine", **s3_environment) as engines:
        assert engines.start(model=s3_llama, load_format="penstock").same(default)


@pytest.mark.parametrize("place", ["local", "s3"])
def test_vllm_runai_loader_imports_compat_module(
    place: str, llama: Path, s3_llama: str, s3_environment: dict[str, str], tmp_path: Path, default: Answer
) -> None:
    script = tmp_path / "engine.py"
    script.write_text(RUNAI)
    options = vllm_options(model=str(llama) if place == "local" else s3_llama, load_format="runai_streamer")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(options)],
        env=vllm_environ(tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0", **s3_environment),
        capture_output=True,
        text=True,
        timeout=580,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-4000:]
    assert tuple(json.loads(lines[0].removeprefix("TOKENS "))) == default.tokens


def test_unknown_option_error_contains_its_name(engines: EngineProcess, llama: Path) -> None:
    options = {"memroy_bytes": 1}
    error = engines.start(model=str(llama), load_format="penstock", model_loader_extra_config=options).error
    assert "memroy_bytes" in error
    assert "memory_bytes" in error


@pytest.mark.parametrize(
    "extra", [[], {"verify": "yes"}, {"memory_bytes": "lots"}, {"storage_options": 3}, {"distributed": 1}]
)
def test_wrong_option_type_is_refused(extra: Any) -> None:
    with pytest.raises(ConfigError):
        read_options(extra)


def test_vllm_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "penstock"]
    assert found.value == "penstock_vllm.plugin:register"
