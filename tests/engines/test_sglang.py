"""SGLang's own loaders give the same parameters with `--load-format penstock` and with the default format, on the CPU.

SGLang finds the plug-in through its entry point, both in the process that resolves arguments and in a spawned one that
loads.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engines.sglang_loads import DEVICE, environment
from tests.support.servers.hugging_face import HuggingFaceServer

import penstock as ps
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

PROGRAM = Path(__file__).with_name("sglang_loads.py")


Case = tuple[str, str, dict[str, Any], str | None]
"""Model, load format, extra configuration, and a path to update the live model from."""


def write_plan(directory: Path, cases: Mapping[str, Case]) -> Path:
    plan = directory / "cases.json"
    plan.write_text(
        json.dumps(
            [
                {
                    "arguments": [
                        *("--model-path", path, "--load-format", load_format),
                        *("--model-loader-extra-config", json.dumps(extra)),
                    ],
                    "out": str(directory / f"{name}.pt"),
                    "update": update,
                }
                for name, (path, load_format, extra, update) in cases.items()
            ]
        )
    )
    return plan


@contextmanager
def published(model: Path, name: str) -> Iterator[None]:
    """Publish a model's weights as version 0 from two ranks, which have half of the rows each."""
    whole = load_file(model / "model.safetensors")
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            rows = {key: slice(len(value) * rank // 2, len(value) * (rank + 1) // 2) for key, value in whole.items()}
            shards = {
                key: ps.Shard(
                    tensor=value[rows[key]].clone().to(DEVICE),
                    global_shape=tuple(value.shape),
                    offset=(rows[key].start, *(0 for _ in value.shape[1:])),
                )
                for key, value in whole.items()
            }
            ranks.append(stack.enter_context(ps.publisher(name, shards, mode="snapshot", rank=(rank, 2))))
        for publisher in ranks:
            publisher.publish(0)
        yield


@pytest.fixture(scope="module")
def done(
    llama: Path, sharded_llama: Path, make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return what one launcher and its spawned process did for all cases, because importing SGLang takes longest."""
    directory = tmp_path_factory.mktemp("sglang")
    runtime = directory / "run"
    runtime.mkdir(mode=0o700)
    broken = directory / "broken"
    broken.mkdir()
    for file in llama.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    other = make_llama(tmp_path_factory.mktemp("other"), seed=1)
    cases: dict[str, Case] = {
        "default": (str(llama), "auto", {}, None),
        "local": (str(llama), "penstock", {}, None),
        "shards": (str(sharded_llama), "penstock", {"memory_bytes": "32M", "verify": False}, None),
        "uri": ("hf://org/llama", "penstock", {}, None),
        "fleet": (str(llama), "penstock", {"fleet": "replicas"}, None),
        "no keeper": (str(llama), "penstock", {"weight_cache": "llama"}, None),
        "broken": (str(broken), "penstock", {}, None),
        "runai": (str(sharded_llama), "runai_streamer", {}, None),
        "updated": (str(other), "penstock", {"fleet": "replicas"}, str(llama)),
        "updated by URI": (str(other), "penstock", {}, "hf://org/llama"),
        "not updated": (str(llama), "penstock", {}, str(broken)),
        "updated by sync": (str(other), "penstock", {}, "sync://policy/0"),
        "not updated by sync": (str(llama), "penstock", {}, "sync://policy"),
    }
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PENSTOCK_RUNTIME_DIR", str(runtime))
        stack.enter_context(published(llama, "policy"))
        hub = stack.enter_context(
            HuggingFaceServer({"org/llama": {file.name: file.read_bytes() for file in llama.iterdir()}})
        )
        environ = {**os.environ, **environment(directory, hub.url)}
        process = subprocess.run(
            [sys.executable, str(PROGRAM), str(write_plan(directory, cases))],
            env=environ,
            capture_output=True,
            text=True,
            timeout=580,
        )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
    states = {name: torch.load(directory / f"{name}.pt") for name in cases}
    return {"states": states, "log": process.stdout + process.stderr, "cache": directory / "cache"}


def assert_equal(state: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> None:
    assert "error" not in state, state
    assert state.keys() == true.keys()
    for name, tensor in true.items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    "case",
    [
        *("local", "shards", "uri", "fleet", "no keeper", "runai", "updated", "updated by URI", "not updated"),
        *("updated by sync", "not updated by sync"),
    ],
)
def test_parameters_match_default_loader(case: str, done: dict) -> None:
    true = done["states"]["default"]
    assert len(true) == 15
    assert_equal(done["states"][case], true)


def test_sglang_update_returns_success_or_failure_reason(done: dict) -> None:
    said = [line for line in done["log"].splitlines() if line.startswith("UPDATED ")]
    assert [".pt True" in line for line in said] == [True, True, False, True, False]
    assert "SourceTruncated" in said[2] or "broken/model.safetensors" in said[2], said[2]
    assert "the path does not name a sync version" in said[4], said[4]


def test_truncated_file_error_names_file(done: dict) -> None:
    error = done["states"]["broken"]["error"]
    assert error.startswith("SourceTruncated"), error
    assert "broken/model.safetensors" in error


def test_model_uri_resolves_to_directory_without_weights(done: dict) -> None:
    resolved = [json.loads(line[9:]) for line in done["log"].splitlines() if line.startswith("RESOLVED ")]
    (uri,) = [one for one in resolved if Path(one["model_path"]).is_relative_to(done["cache"])]
    assert uri["served_model_name"] == "llama"
    assert uri["load_format"] == "penstock"
    assert (Path(uri["model_path"]) / "config.json").is_file()
    assert not list(Path(uri["model_path"]).glob("*.safetensors"))


def test_log_reports_missing_cache_and_runai_module(done: dict) -> None:
    assert "not attached to llama in the weight cache" in done["log"]
    assert "RUNAI penstock_hf.runai_streamer" in done["log"]


def test_sglang_schedulers_load_weights_through_entry_points(llama: Path, tmp_path: Path) -> None:
    """The processes are SGLang's own schedulers. Without Run:ai's package, only the entry point provides its names."""
    assert importlib.util.find_spec("runai_model_streamer") is None
    files = {file.name: file.read_bytes() for file in llama.iterdir()}
    with ExitStack() as stack:
        store = stack.enter_context(HuggingFaceServer({"org/llama": files}))
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-"))
        fleet_hub = HubThread(Directory(MemoryStore(), fresh=True), bind(f"unix://{runtime}/own.sock", Auth()))
        fleet_hub.start()
        stack.callback(fleet_hub.stop)
        environ = {
            **os.environ,
            **environment(tmp_path, store.url),
            "PENSTOCK_RUNTIME_DIR": runtime,
            "PENSTOCK_HUB": fleet_hub.url,
        }
        cases: dict[str, Case] = {
            "first": ("hf://org/llama", "penstock", {}, None),
            "runai": (str(llama), "runai_streamer", {}, None),
        }
        log = stack.enter_context((tmp_path / "log").open("w+"))
        schedulers = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(write_plan(tmp_path, cases)), "--schedulers"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        stack.callback(schedulers.kill)
        assert schedulers.stdout is not None
        ready = 0
        for line in schedulers.stdout:
            ready += line == "READY ready\n"
            if ready == len(cases):
                break
        assert ready == len(cases), (tmp_path / "log").read_text()[-6000:]
        weights = len(files["model.safetensors"])
        assert weights <= store.storage.num_bytes_sent < weights + 65536
        # Only a member of a fleet logs this.
        assert "because no member had these chunks" in (tmp_path / "log").read_text()
        schedulers.communicate(timeout=120)
