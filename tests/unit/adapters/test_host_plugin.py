"""Plug-ins of engines: an engine starts whatever its version lacks; a missing feature is refused by name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.spi.host_plugin import HostPlugin

VLLM = {
    "vllm/__init__.py": "",
    "vllm/envs.py": "",
    "vllm/compilation/__init__.py": "",
    "vllm/compilation/decorators.py": "def _try_load_aot_compiled_fn(model, path): return path\n",
    "vllm/config.py": "class VllmConfig:\n    def try_verify_and_update_config(self): return 'own'\n",
    "vllm/transformers_utils/__init__.py": "",
    "vllm/transformers_utils/runai_utils.py": "runai_pull_files = runai_list_safetensors = None\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer.py": (
        "class WeightTransferEngineFactory:\n    _registry = {}\n    @classmethod\n"
        "    def register_engine(cls, name, module, kind): cls._registry[name] = module, kind\n"
    ),
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": (
        "_LOAD_FORMAT_TO_MODEL_LOADER = {}\n"
        "def register_model_loader(name):\n"
        "    return lambda loader: _LOAD_FORMAT_TO_MODEL_LOADER.setdefault(name, loader)\n"
    ),
    "vllm/model_executor/model_loader/default_loader.py": (
        "class DefaultModelLoader:\n    def __init__(self, load_config): pass\n"
        "    def load_model(self, vllm_config, *rest): return 'a model'\n"
    ),
    "vllm/v1/__init__.py": "",
    "vllm/v1/engine/__init__.py": "",
    "vllm/v1/engine/core.py": (
        "class EngineCore:\n"
        "    def __init__(self, vllm_config): self.vllm_config = vllm_config\n"
        "    def sleep(self, level=1): return level\n"
        "    def resume_scheduler(self): return 'resumed'\n"
        "    def preprocess_add_request(self, request): return request, 0\n"
        "    def add_request(self, request, wave=0): return request\n"
        "    def set_weight_version(self, version): self.version = version\n"
        "    def get_weight_version(self): return self.version\n"
    ),
    "vllm/v1/executor/__init__.py": "",
    "vllm/v1/executor/abstract.py": (
        "class Executor:\n"
        "    def __init__(self, vllm_config): self.vllm_config = vllm_config\n"
        "    def compile_or_warm_up_model(self): return 'warm'\n"
    ),
    "vllm/v1/executor/multiproc_executor.py": (
        "class MultiprocExecutor:\n"
        "    def __init__(self, vllm_config): self.vllm_config = vllm_config\n"
        "    def collective_rpc(self, method, args=()): return method, args\n"
    ),
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/worker_base.py": (
        "class WorkerBase:\n    def __init__(self, vllm_config): self.vllm_config = vllm_config\n"
    ),
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/openai/__init__.py": "",
    "vllm/entrypoints/openai/models/__init__.py": "",
    "vllm/entrypoints/openai/models/serving.py": (
        "class OpenAIServingModels:\n"
        "    async def load_lora_adapter(self, request): pass\n"
        "    async def unload_lora_adapter(self, request): pass\n"
    ),
}
SGLANG = {
    "sglang/__init__.py": "",
    "sglang/version.py": "__version__ = '0.5.23'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/environ.py": "class envs:\n    class SGLANG_PLUGINS:\n        get = staticmethod(lambda: None)\n",
    "sglang/srt/arg_groups/__init__.py": "",
    "sglang/srt/arg_groups/choices.py": (
        "LOAD_FORMAT_CHOICES = []\ndef add_load_format_choices(names): LOAD_FORMAT_CHOICES.extend(names)\n"
    ),
    "sglang/srt/arg_groups/resolution_hooks.py": "def register_resolution_hook(name): return lambda hook: hook\n",
    "sglang/srt/plugins/__init__.py": "",
    "sglang/srt/plugins/hook_registry.py": (
        "class HookType:\n    AROUND = 1\nclass HookRegistry:\n    register = staticmethod(lambda *rest: None)\n"
    ),
}

CHILD = """
import importlib, json, logging, os, sys
from types import SimpleNamespace
from penstock_sglang import plugin as sglang
from penstock_vllm import plugin as vllm

entry, cases = sys.argv[1], json.loads(sys.argv[2])
if entry == "vllm:register":
    import penstock_hf.runai_streamer  # once for all children

def look(module, *names):
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    for name in names:
        found = getattr(found, name, None)
    return found

def answer(module, owner, name):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("penstock").addHandler(handler)
    look("vllm.entrypoints.openai.models.serving")
    if name:
        delattr(look(module, *filter(None, [owner])), name)
    elif module:
        sys.modules[module] = None
    host, _, function = entry.partition(":")
    register = getattr({"vllm": vllm, "sglang": sglang}[host], function)
    try:
        register()
        register()
    except BaseException as error:
        return {"raised": f"{type(error).__name__}: {error}"}
    own = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    sleep = look("vllm.v1.engine.core", "EngineCore", "sleep")
    call = look("vllm.v1.executor.multiproc_executor", "MultiprocExecutor", "collective_rpc")
    loaders = look("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER")
    return {
        "lines": lines,
        "sleep": sleep and sleep(SimpleNamespace(vllm_config=own), 2),
        "call": call and call(SimpleNamespace(vllm_config=own), "name", (1,)),
        "load": "penstock" in (loaders or look("sglang.srt.arg_groups.choices", "LOAD_FORMAT_CHOICES") or ()),
    }

results = []
for case in cases:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(answer(*case)).encode())
        os._exit(0)
    os.close(writer)
    results.append(json.loads(open(reader).read()))
    os.wait()
print(json.dumps(results))
"""


def run_register(tree: dict[str, str], directory: Path, entry: str, cases: list[tuple[str, str, str]]) -> Any:
    """Call a plug-in in a process for each case: with a module, or an attribute of a module or class, taken away."""
    for name, text in tree.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH"), *sys.path])])
    command = [sys.executable, "-c", CHILD, entry, json.dumps(cases)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": path}, cwd=directory
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CORE, EXECUTOR = "vllm.v1.engine.core", "vllm.v1.executor.abstract"
LACKING = [
    *[(CORE, "EngineCore", name) for name in ("preprocess_add_request", "add_request", "get_weight_version")],
    *[(CORE, "EngineCore", name) for name in ("set_weight_version", "sleep", "resume_scheduler")],
    (CORE, "", "EngineCore"),
    (EXECUTOR, "Executor", "compile_or_warm_up_model"),
    (EXECUTOR, "", "Executor"),
    ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor", "collective_rpc"),
    ("vllm.v1.executor.multiproc_executor", "", "MultiprocExecutor"),
    ("vllm.v1.worker.worker_base", "", "WorkerBase"),
    ("vllm.distributed.weight_transfer", "WeightTransferEngineFactory", "_registry"),
    ("vllm.distributed.weight_transfer", "WeightTransferEngineFactory", "register_engine"),
    ("vllm.distributed.weight_transfer", "", "WeightTransferEngineFactory"),
    ("vllm.model_executor.model_loader", "", "register_model_loader"),
    ("vllm.model_executor.model_loader.default_loader", "", "DefaultModelLoader"),
    ("vllm.config", "", "VllmConfig"),
    ("vllm.entrypoints.openai.models.serving", "OpenAIServingModels", "load_lora_adapter"),
    ("vllm.entrypoints.openai.models.serving", "", "OpenAIServingModels"),
    *[(name, "", "") for name in (CORE, EXECUTOR, "vllm.distributed", "vllm.model_executor", "vllm.compilation")],
    *[(name, "", "") for name in ("vllm.transformers_utils", "vllm.v1", "vllm")],
]


def test_vllm_lacking_anything_starts(tmp_path: Path) -> None:
    whole, *found = run_register(VLLM, tmp_path, "vllm:register", [("", "", ""), *LACKING])
    assert whole == {"lines": [], "sleep": 2, "call": ["name", [1]], "load": True}
    for case, answer in zip(LACKING, found, strict=True):
        # One line for all that is missing, however often vLLM calls the plug-in.
        assert "raised" not in answer and len(answer["lines"]) == 1, (case, answer)
        assert (case[2] or "ModuleNotFoundError") in answer["lines"][0]
        assert answer["load"] == (not case[0].startswith("vllm.model_executor") and case[0] != "vllm"), (case, answer)
        # Engines that do not use Penstock get their own calls, whatever arguments their version has.
        assert answer["sleep"] in (2, None) and answer["call"] in (["name", [1]], None)


def test_sglang_lacking_anything_starts(tmp_path: Path) -> None:
    choices, hooks = "sglang.srt.arg_groups.choices", "sglang.srt.plugins.hook_registry"
    lacking = [
        ("sglang.version", "", "__version__"),
        (choices, "", "LOAD_FORMAT_CHOICES"),
        (choices, "", "add_load_format_choices"),
        ("sglang.srt.arg_groups.resolution_hooks", "", "register_resolution_hook"),
        (hooks, "HookRegistry", "register"),
        (hooks, "HookType", "AROUND"),
        *[(name, "", "") for name in (choices, hooks, "sglang.srt", "sglang")],
    ]
    whole, *found = run_register(SGLANG, tmp_path, "sglang:register", [("", "", ""), *lacking])
    assert (whole["lines"], whole["load"]) == ([], True)
    for case, answer in zip(lacking, found, strict=True):
        assert "raised" not in answer and len(answer["lines"]) == 1 and not answer["load"], (case, answer)


def test_sglang_without_its_settings_starts(tmp_path: Path) -> None:
    settings = "sglang.srt.environ"
    lacking = [(settings, "", "envs"), (settings, "envs", "SGLANG_PLUGINS"), (settings, "", "")]
    for answer in run_register(SGLANG, tmp_path, "sglang:register_runai", lacking):
        assert "raised" not in answer and len(answer["lines"]) == 1, answer


def test_untried_sglang_starts_without_penstock(tmp_path: Path) -> None:
    tree = {**SGLANG, "sglang/version.py": "__version__ = '0.6.0'\n"}
    [answer] = run_register(tree, tmp_path, "sglang:register", [("", "", "")])
    assert "raised" not in answer and not answer["load"]
    assert "0.6.0" in answer["lines"][0] and "0.5.23" in answer["lines"][0]


def test_missing_part_is_refused_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    plugin = HostPlugin("no-such-engine", supported="Engine 2", log=lambda: logging.getLogger("penstock.test"))
    done: list[str] = []

    def fail() -> None:
        raise OSError("libcudart.so.99 is missing")

    for _ in range(2):
        plugin.register({"sleep": fail, "loads": lambda: done.append("loads")})
    assert done == ["loads"] and len(caplog.records) == 1
    plugin.require("loads", feature="--load-format")
    with pytest.raises(ConfigError) as caught:
        plugin.require("sleep", feature="--enable-sleep-mode")
    assert "libcudart.so.99" in str(caught.value) and "Engine 2" in str(caught.value.hint)
