"""Plug-ins of engines: an engine starts without the unsupported parts, and errors name a missing feature."""

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
    "vllm/__init__.py": "__version__ = '0.33.1'\n",
    "vllm/compilation/__init__.py": "",
    "vllm/compilation/decorators.py": "def _try_load_aot_compiled_fn(model, path): return path\n",
    "vllm/config.py": (
        "get_current_vllm_config = set_current_vllm_config = None\n"
        "class VllmConfig:\n    compute_hash = None\n"
        "    def try_verify_and_update_config(self): return 'own'\n"
    ),
    "vllm/envs.py": "",
    "vllm/platforms.py": "current_platform = None\n",
    "vllm/transformers_utils/__init__.py": "",
    "vllm/transformers_utils/runai_utils.py": "runai_pull_files = runai_list_safetensors = None\n",
    "vllm/distributed/__init__.py": "get_pp_group = get_tp_group = get_world_group = None\n",
    "vllm/distributed/weight_transfer/base.py": (
        "WeightTransferInitInfo = WeightTransferUpdateInfo = None\n"
        "class WeightTransferEngine:\n    def start_weight_update(self): pass\n"
    ),
    "vllm/distributed/weight_transfer/__init__.py": (
        "class WeightTransferEngineFactory:\n    _registry = {}\n    @classmethod\n"
        "    def register_engine(cls, name, module, kind): cls._registry[name] = module, kind\n"
    ),
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": (
        "_LOAD_FORMAT_TO_MODEL_LOADER = {}\n"
        "def register_model_loader(name):\n"
        "    return lambda loader: _LOAD_FORMAT_TO_MODEL_LOADER.setdefault(name, loader)\n"
    ),
    "vllm/model_executor/model_loader/ep_weight_filter.py": "should_skip_weight = None\n",
    "vllm/model_executor/model_loader/default_loader.py": (
        "class DefaultModelLoader:\n    def __init__(self, load_config): pass\n"
        "    def load_model(self, vllm_config, *rest): return 'a model'\n"
        "    def _get_weights_iterator(self, source): pass\n"
        "    Source = _prepare_weights = download_model = load_weights = None\n"
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
        "    def collective_rpc(self, method, timeout=None, args=(), kwargs=None): return method\n"
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
        "    def __init__(self): self.lora_requests = {}\n"
        "    async def load_lora_adapter(self, request): pass\n"
        "    async def unload_lora_adapter(self, request): pass\n"
    ),
}
SGLANG = {
    "sglang/__init__.py": "__version__ = '0.5.23'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/environ.py": (
        "class envs:\n    SGLANG_CACHE_DIR = None\n"
        "    class SGLANG_PLUGINS:\n        get = staticmethod(lambda: None)\n"
    ),
    "sglang/srt/runtime_context.py": "get_exec = get_model = get_parallel = None\n",
    "sglang/srt/arg_groups/__init__.py": "",
    "sglang/srt/arg_groups/choices.py": (
        "LOAD_FORMAT_CHOICES = []\ndef add_load_format_choices(names): LOAD_FORMAT_CHOICES.extend(names)\n"
    ),
    "sglang/srt/arg_groups/overrides.py": "declare_resolution = resolving_view = None\n",
    "sglang/srt/arg_groups/resolution_hooks.py": "def register_resolution_hook(name): return lambda hook: hook\n",
    "sglang/srt/configs/__init__.py": "",
    "sglang/srt/configs/load_config.py": "class LoadConfig:\n    def _verify_load_format(self): pass\n",
    "sglang/srt/managers/__init__.py": "",
    "sglang/srt/managers/scheduler_components/__init__.py": "",
    "sglang/srt/managers/scheduler_components/weight_updater.py": (
        "class SchedulerWeightUpdaterManager:\n"
        "    def _select_runners(self): pass\n"
        "    def release_memory_occupation(self, request): pass\n"
        "    def resume_memory_occupation(self, request): pass\n"
        "    def update_weights_from_disk(self, request): pass\n"
        "    def update_weights_from_distributed(self, request): pass\n"
        "    def update_weights_from_tensor(self, request): pass\n"
        "    def update_weights_from_ipc(self, request): pass\n"
    ),
    "sglang/srt/plugins/__init__.py": "",
    "sglang/srt/plugins/hook_registry.py": (
        "class HookType:\n    AROUND = 1\nclass HookRegistry:\n    register = staticmethod(lambda *rest: None)\n"
    ),
}
LOAD_FORMAT_NEEDS = ("choices", "load_config", "hook_registry", "runtime_context")
"""Modules of SGLang that the load format needs."""

CHILD = """
import importlib, importlib.metadata, json, logging, os, sys, types
from types import SimpleNamespace

group, name, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
# As the host finds it.
(point,) = importlib.metadata.entry_points(group=group, name=name)
register = point.load()
if name == "penstock" and group.startswith("vllm"):
    import penstock_hf.runai_streamer  # once for all children
host = group.partition(".")[0]

def look(module, *names):
    try:
        found = importlib.import_module(module)
    except ImportError:
        return None
    for name in names:
        found = getattr(found, name, None)
    return found

def record(files):
    # Each module and class of the host notes the names that are looked for in it while the plug-in is registered.
    used = set()

    class Module(types.ModuleType):
        def __getattribute__(self, name):
            if not name.startswith("__") or name == "__version__":
                used.add((object.__getattribute__(self, "__name__"), "", name))
            return super().__getattribute__(name)

    class Class(type):
        def __getattribute__(cls, name):
            if not name.startswith("__") or name == "__version__":
                used.add((type.__getattribute__(cls, "__module__"), type.__getattribute__(cls, "__qualname__"), name))
            return super().__getattribute__(name)

    for file in files:
        module = importlib.import_module(file)
        for name, found in list(vars(module).items()):
            if isinstance(found, type) and found.__module__ == file:
                fields = {k: v for k, v in vars(found).items() if k not in ("__dict__", "__weakref__")}
                setattr(module, name, Class(name, (), fields))
        module.__class__ = Module
    used.clear()
    register()
    names = {case for case in used if f"{case[0]}.{case[2]}" not in sys.modules}
    # An import statement does not look for a submodule that is imported already: all of them count as used.
    return sorted(names) + [(file, "", "") for file in files]

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
        "load": "penstock" in (loaders or look("sglang.srt.arg_groups.choices", "LOAD_FORMAT_CHOICES") or ())
        and "--load-format penstock" not in sys.modules[register.__module__].PLUGIN.missing,
    }

results = []
for case in cases:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        with open(writer, "w") as file:
            file.write(json.dumps(record(case["record"]) if isinstance(case, dict) else answer(*case)))
        os._exit(0)
    os.close(writer)
    results.append(json.loads(open(reader).read()))
    os.waitpid(pid, 0)
print(json.dumps(results))
"""


Case = tuple[str, str, str]
"""A module, a class in it or "", and a removed attribute. Without an attribute, the module is removed."""


def run_register(tree: dict[str, str], directory: Path, entry: str, cases: list[Any]) -> Any:
    """Call a plug-in by its entry point, in a separate process for each case."""
    for name, text in tree.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH"), *sys.path])])
    command = [sys.executable, "-c", CHILD, *entry.split(":"), json.dumps(cases)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": path}, cwd=directory
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def used_by(tree: dict[str, str], directory: Path, entry: str) -> list[Case]:
    """Return every module, class and attribute of a host that a plug-in accesses during its registration."""
    files = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in tree]
    (found,) = run_register(tree, directory, entry, [{"record": files}])
    return [(module, owner, name) for module, owner, name in found]


def exists(case: Case, tree: dict[str, str]) -> bool:
    """Return whether the host has the name at all, because a plug-in may check for names."""
    module, _, name = case
    path = module.replace(".", "/")
    text = tree.get(f"{path}.py", tree.get(f"{path}/__init__.py", ""))
    return not name or name in text


LOADER_NEEDS = ("vllm.envs", "vllm.model_executor", "vllm.platforms", "get_tp_group", "get_world_group")
"""Modules and functions of vLLM that the load format needs."""
LOADER_PACKAGES = {("vllm", "", ""), ("vllm.distributed", "", "")}
NOT_NEEDED = {
    # A version of vLLM without these functions needs no change.
    "_try_load_aot_compiled_fn",
    "runai_list_safetensors",
    "runai_pull_files",
    "try_verify_and_update_config",
}


def test_vllm_missing_one_patched_function_still_starts(tmp_path: Path) -> None:
    lacking = [case for case in used_by(VLLM, tmp_path, "vllm.general_plugins:penstock") if exists(case, VLLM)]
    assert len(lacking) > 40
    whole, *found = run_register(VLLM, tmp_path, "vllm.general_plugins:penstock", [("", "", ""), *lacking])
    assert whole == {"lines": [], "sleep": 2, "call": ["name", [1]], "load": True}
    silent = set()
    for case, answer in zip(lacking, found, strict=True):
        # One line names all missing parts, however often vLLM calls the plug-in.
        assert "raised" not in answer and len(answer["lines"]) <= 1, (case, answer)
        if not answer["lines"]:
            silent.add(case)
            continue
        named = "was not tested" if case[2] == "__version__" else case[2] or "ModuleNotFoundError"
        assert named in answer["lines"][0], (case, answer)
        is_loader = case[0].startswith(LOADER_NEEDS) or case[2] in LOADER_NEEDS or case in LOADER_PACKAGES
        assert answer["load"] == (not is_loader), (case, answer)
        # Engines that do not use Penstock get their own calls, whatever arguments their version has.
        assert answer["sleep"] in (2, None) and answer["call"] in (["name", [1]], None)
    # Only one process has the HTTP routes.
    routes = {case[0] for case in lacking if case[0].startswith("vllm.entrypoints") and not case[2]}
    assert {case[2] or case[0] for case in silent} <= NOT_NEEDED | routes


@pytest.mark.parametrize("entry", ["sglang.srt.plugins:penstock", "sglang.srt.plugins:penstock_runai"])
def test_sglang_missing_one_patched_function_still_starts(entry: str, tmp_path: Path) -> None:
    lacking = [case for case in used_by(SGLANG, tmp_path, entry) if exists(case, SGLANG)]
    used = {module for module, _, name in lacking if name}
    whole, *found = run_register(SGLANG, tmp_path, entry, [("", "", ""), *lacking])
    assert (whole["lines"], whole["load"]) == ([], entry.endswith(":penstock"))
    for case, answer in zip(lacking, found, strict=True):
        assert "raised" not in answer and len(answer["lines"]) <= 1, (case, answer)
        is_used = any(f"{module}.".startswith(f"{case[0]}.") for module in used)
        assert len(answer["lines"]) == is_used, (case, answer)
        # The load format works without the parts for URIs and for released memory.
        needed = [module for module in used if module.endswith(LOAD_FORMAT_NEEDS)]
        is_needed = case[2] != "__version__" and any(f"{module}.".startswith(f"{case[0]}.") for module in needed)
        assert answer["load"] == (whole["load"] and not is_needed), (case, answer)


def test_requesting_unavailable_feature_raises_config_error(caplog: pytest.LogCaptureFixture) -> None:
    plugin = HostPlugin("no-such-engine", tested=("1", "2"), log=lambda: logging.getLogger("penstock.test"))
    done: list[str] = []

    def fail() -> None:
        raise OSError("libcudart.so.99 is missing")

    for _ in range(2):
        plugin.register({"sleep": fail, "loads": lambda: done.append("loads")})
    assert done == ["loads"] and len(caplog.records) == 1
    plugin.require("loads", feature="--load-format")
    # Another entry point of the same package registers its parts later.
    plugin.register({"conversions": lambda: done.append("conversions")})
    with pytest.raises(ConfigError) as caught:
        plugin.require("sleep", feature="--enable-sleep-mode")
    assert "libcudart.so.99" in str(caught.value) and "no-such-engine 2" in str(caught.value.hint)
