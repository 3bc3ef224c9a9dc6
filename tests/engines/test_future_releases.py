"""An engine whose release lacks a name that the plug-in needs starts, with all features that do not need the name."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engines.releases import run_program, write_checkpoint

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LOADS = "--load-format penstock"


@dataclass(frozen=True)
class Engine:
    """The names that each part of a plug-in needs, and the parts that each request needs."""

    version: str
    needs: dict[str, list[str]]
    requests: dict[str, set[str]]
    registers: dict[str, list[str]]
    """By request, the names without which the engine cannot learn the name `penstock`, and raises its own error."""
    optional: str
    """Module that the plug-in does not need, although it needs the names of the module if there is one."""
    late: dict[str, str]
    """Parts that are registered by a request, with the request."""
    num_patched: int
    """Number of functions that the plug-in replaces."""

    def lacks(self, removed: str, names: Iterable[str]) -> bool:
        """Return whether an engine without a name or a module lacks one of the names."""
        removed = removed.removesuffix("()")
        if ":" not in removed:
            names = [name for name in names if not name.startswith(f"{self.optional}:")]
        return any(name == removed or name.startswith((f"{removed}.", f"{removed}:")) for name in names)

    def off(self, removed: str) -> set[str]:
        """Return the parts that an engine without a name or a module lacks."""
        parts = {part for part, names in self.needs.items() if self.lacks(removed, names)}
        return {part for part in parts if not self.lacks(removed, self.registers.get(self.late.get(part, ""), ()))}


_VLLM_LOADER = "vllm.model_executor.model_loader"
_VLLM_REGISTERS = [
    f"{_VLLM_LOADER}:{name}"
    # vLLM's function needs the two other names.
    for name in ("register_model_loader", "BaseModelLoader", "_LOAD_FORMAT_TO_MODEL_LOADER")
]
_TRANSFER = "vllm.distributed.weight_transfer"
_RELOAD = f"{_VLLM_LOADER}.reload"
_CORE = "vllm.v1.engine.core:EngineCore"
VLLM = Engine(
    version="0.34.0",
    needs={
        LOADS: [
            *_VLLM_REGISTERS,
            *(
                f"{_VLLM_LOADER}.default_loader:DefaultModelLoader.{name}"
                for name in (
                    "Source",
                    "_get_weights_iterator",
                    "_prepare_weights",
                    "download_model",
                    "load_model",
                    "load_weights",
                )
            ),
            f"{_VLLM_LOADER}.ep_weight_filter:should_skip_weight",
            "vllm.distributed:get_tp_group",
            "vllm.distributed:get_world_group",
            "vllm.envs",
            "vllm.platforms:current_platform",
        ],
        "models in object stores": ["vllm.config:VllmConfig", "vllm.transformers_utils.runai_utils"],
        "the weight-transfer backend": [
            "vllm.config:get_current_vllm_config",
            "vllm.config:set_current_vllm_config",
            "vllm.distributed:get_pp_group",
            "vllm.distributed:get_tp_group",
            "vllm.distributed:get_world_group",
            f"{_TRANSFER}:WeightTransferEngineFactory._registry",
            f"{_TRANSFER}:WeightTransferEngineFactory.register_engine",
            f"{_TRANSFER}.base:WeightTransferEngine.start_weight_update",
            f"{_TRANSFER}.base:WeightTransferEngine.new_step",
            f"{_TRANSFER}.base:WeightTransferInitInfo",
            f"{_TRANSFER}.base:WeightTransferUpdateInfo",
        ],
        "prefix caches by version": [
            f"{_CORE}.{name}"
            for name in ("add_request", "preprocess_add_request", "get_weight_version", "set_weight_version")
        ],
        "replies of all workers": ["vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc"],
        "phases of the start": ["vllm.v1.worker.worker_base:WorkerBase"],
        "functions that torch compiled ahead": ["vllm.compilation.decorators"],
        "compiled code of engines": [
            "vllm.config:VllmConfig.compute_hash",
            "vllm.platforms:current_platform",
            "vllm.v1.executor.abstract:Executor.compile_or_warm_up_model",
        ],
        "verified weights after a sleep": [
            f"{_CORE}.sleep",
            f"{_CORE}.resume_scheduler",
            "vllm.v1.worker.worker_base:WorkerBase",
        ],
        "names of the newest adapters": [
            f"vllm.entrypoints.openai.models.serving:OpenAIServingModels.{name}"
            for name in ("load_lora_adapter", "unload_lora_adapter")
        ],
        # Only engines that receive weights import these modules.
        "vLLM's reload of layers": [
            f"{_RELOAD}:initialize_layerwise_reload",
            f"{_RELOAD}:finalize_layerwise_reload",
            f"{_RELOAD}.layerwise:get_layerwise_info",
            f"{_RELOAD}.layerwise:make_online_process_loader",
            f"{_RELOAD}.meta:SKIP_TENSORS",
            f"{_RELOAD}.sanitize:restore_layer_refs",
            f"{_VLLM_LOADER}.weight_utils:default_weight_loader",
            "vllm.model_executor.layers.attention",
            "vllm.model_executor.layers.fused_moe.modular_kernel:FusedMoEExperts",
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        ],
    },
    requests={
        LOADS: {LOADS},
        "compiled code of engines": {LOADS, "compiled code of engines"},
        "verified weights after a sleep": {"verified weights after a sleep"},
        "the weight-transfer backend": {
            "the weight-transfer backend",
            "prefix caches by version",
            "replies of all workers",
            "vLLM's reload of layers",
        },
    },
    registers={
        LOADS: _VLLM_REGISTERS,
        "compiled code of engines": _VLLM_REGISTERS,
        "the weight-transfer backend": [
            f"{_TRANSFER}:WeightTransferEngineFactory._registry",
            f"{_TRANSFER}:WeightTransferEngineFactory.register_engine",
        ],
    },
    optional="vllm.entrypoints.openai.models.serving",
    late={"vLLM's reload of layers": "the weight-transfer backend"},
    num_patched=13,
)
_SGLANG_LOADER = "sglang.srt.model_loader.loader:DefaultModelLoader"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_HOOKS = ["sglang.srt.plugins.hook_registry:HookRegistry.register", "sglang.srt.plugins.hook_registry:HookType"]
_SGLANG_REGISTERS = [
    *_HOOKS,
    "sglang.srt.arg_groups.choices:LOAD_FORMAT_CHOICES",
    "sglang.srt.arg_groups.choices:add_load_format_choices",
    "sglang.srt.configs.load_config:LoadConfig._verify_load_format",
]
_URIS = [
    f"sglang.srt.arg_groups.{name}"
    for name in (
        "overrides:declare_resolution",
        "overrides:resolving_view",
        "resolution_hooks:register_resolution_hook",
    )
]
SGLANG = Engine(
    version="0.5.24",
    needs={
        LOADS: [*_SGLANG_REGISTERS, "sglang.srt.runtime_context:get_parallel"],
        "models at URIs": [*_URIS, "sglang.srt.environ:envs"],
        "verified weights after memory is released": [
            *_HOOKS,
            *(
                f"{_UPDATER}.{name}"
                for name in (
                    "_select_runners",
                    "release_memory_occupation",
                    "resume_memory_occupation",
                    "update_weights_from_disk",
                    "update_weights_from_distributed",
                    "update_weights_from_ipc",
                    "update_weights_from_tensor",
                )
            ),
            "sglang.srt.runtime_context:get_parallel",
        ],
        "--load-format runai_streamer by Penstock": ["sglang.srt.environ:envs"],
        # Only processes with this load format import these modules.
        "SGLang's loader": [
            *(
                f"{_SGLANG_LOADER}.{name}"
                for name in (
                    "Source",
                    "_filter_mtp_weights",
                    "_get_weights_iterator",
                    "_prepare_weights",
                    "download_model",
                    "load_model",
                )
            ),
            "sglang.srt.environ:envs",
            "sglang.srt.model_loader.weight_utils:maybe_add_mtp_safetensors",
        ],
    },
    requests={
        LOADS: {LOADS, "SGLang's loader"},
        "verified weights after memory is released": {"verified weights after memory is released"},
    },
    registers={LOADS: _SGLANG_REGISTERS, "verified weights after memory is released": _HOOKS},
    # The server's arguments have the same names.
    optional="sglang.srt.arg_groups.choices",
    late={"SGLang's loader": LOADS},
    num_patched=7,
)


@pytest.mark.parametrize(
    ("host", "engine"),
    [
        pytest.param(
            host,
            engine,
            # Each engine has an environment of its own.
            marks=pytest.mark.skipif(importlib.util.find_spec(host) is None, reason=f"{host} is not installed"),
        )
        for host, engine in (("vllm", VLLM), ("sglang", SGLANG))
    ],
    ids=["vllm", "sglang"],
)
def test_missing_name_disables_only_dependent_features(host: str, engine: Engine, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "checkpoint")
    checkpoint = str(tmp_path / "checkpoint")
    found = run_program("future_hosts.py", host, checkpoint, directory=tmp_path, plugins="penstock")
    assert not {case: answer["crash"] for case, answer in found.items() if "crash" in answer}
    grown = found.pop("every patched function has one more argument")
    assert grown["wrong"] == [] and len(grown["targets"]) == engine.num_patched, grown
    whole = found.pop("")
    assert whole["own"] == whole["asked"][LOADS] == tensors
    assert whole["missing"] == [] and len(whole["lines"]) == 1
    assert f"{host} {engine.version} was not tested" in whole["lines"][0]
    # A name of the table that the adapter no longer needs is no case.
    assert {name for names in engine.needs.values() for name in names} <= {case.removesuffix("()") for case in found}
    for case, answer in found.items():
        check(engine, case, answer, whole)


def check(engine: Engine, case: str, answer: Any, whole: Any) -> None:
    """Check what an engine without one name does."""
    off = engine.off(case)
    assert set(answer["missing"]) == off, case
    # Other users' engines behave as without the plug-in. `alone` is the answer of an engine without the plug-in.
    own = [whole["own"], answer.get("alone", {}).get("own")]
    assert answer["own"] in own, case
    removed = re.split(r"[:.]", case.removesuffix("()"))[-1] if ":" in case else case
    assert answer["lines"][0].startswith(whole["lines"][0]), case
    for part in off:
        (line,) = [line for line in answer["lines"] if f"{part} (" in line]
        assert line.count(f"{part} (") == 1 and removed in line and engine.version in line, (case, line)
    for request, outcome in answer["asked"].items():
        if engine.lacks(case, engine.registers.get(request, ())):
            assert isinstance(outcome, str), (case, request)
        elif off & engine.requests.get(request, {request}):
            assert outcome.startswith("ConfigError: "), (case, request, outcome)
            assert removed in outcome and engine.version in outcome, (case, request, outcome)
        else:
            assert outcome in [whole["asked"][request], *own], (case, request, outcome)
