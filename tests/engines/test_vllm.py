"""vLLM generates the same tokens with `--load-format penstock` as with its own loader. Each engine has a process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.spi import read_options

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ENGINE = """
import json, sys

arguments = json.loads(sys.argv[1])
if arguments.pop("install_compat", False):
    from penstock_hf import runai_streamer
    runai_streamer.install()

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=128, seed=0, **arguments,
    )
    greedy = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": [1, 5, 9, 200, 17, 33, 2, 8]}], greedy)
    print("TOKENS", json.dumps(list(answer.outputs[0].token_ids)))
"""


def run(directory: Path, environ: dict[str, str] | None = None, **arguments: Any) -> subprocess.CompletedProcess[str]:
    script = directory / "engine.py"
    script.write_text(ENGINE)
    environ = {
        **(os.environ if environ is None else environ),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    command = [sys.executable, str(script), json.dumps(arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)


def tokens(directory: Path, environ: dict[str, str] | None = None, **arguments: Any) -> list[int]:
    done = run(directory, environ, **arguments)
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, done.stderr[-4000:]
    found: list[int] = json.loads(lines[0].removeprefix("TOKENS "))
    return found


@pytest.fixture(scope="module")
def true_tokens(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    found = tokens(tmp_path_factory.mktemp("auto"), model=str(llama), load_format="auto")
    assert len(set(found)) > 4
    return found


def test_local_model_matches_tokens_from_default_loader(llama: Path, tmp_path: Path, true_tokens: list[int]) -> None:
    assert tokens(tmp_path, model=str(llama), load_format="penstock") == true_tokens


def test_sharded_model_with_options_matches_tokens_from_default_loader(
    sharded_llama: Path, tmp_path: Path, true_tokens: list[int]
) -> None:
    options = {"memory_bytes": "32M", "verify": False}
    arguments = {"load_format": "penstock", "model_loader_extra_config": options}
    assert tokens(tmp_path, model=str(sharded_llama), **arguments) == true_tokens


def test_tied_model_matches_tokens_from_default_loader(tied_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    true = tokens(tmp_path / "a", model=str(tied_llama), load_format="auto")
    assert tokens(tmp_path, model=str(tied_llama), load_format="penstock") == true


def test_object_store_model_matches_tokens_from_default_loader(
    s3_llama: str, s3_environment: dict[str, str], tmp_path: Path, true_tokens: list[int]
) -> None:
    assert tokens(tmp_path, s3_environment, model=s3_llama, load_format="penstock") == true_tokens


@pytest.mark.parametrize("place", ["local", "s3"])
def test_vllm_runai_loader_imports_compat_module(
    place: str, llama: Path, s3_llama: str, s3_environment: dict[str, str], tmp_path: Path, true_tokens: list[int]
) -> None:
    model = str(llama) if place == "local" else s3_llama
    arguments = {"load_format": "runai_streamer", "install_compat": True}
    assert tokens(tmp_path, s3_environment, model=model, **arguments) == true_tokens


def test_unknown_option_error_contains_its_name(llama: Path, tmp_path: Path) -> None:
    done = run(tmp_path, model=str(llama), load_format="penstock", model_loader_extra_config={"memroy_bytes": 1})
    assert done.returncode != 0
    assert "memroy_bytes" in done.stderr
    assert "memory_bytes" in done.stderr


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
