"""The caches in which compilers and engines store compiled code, and the environment variables for their paths.

Each cache is a directory below one `root`, so that a bundle of the root contains only the code for one configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A cache of one program.

    Attributes:
        name: name of the directory below the root.
        variable: environment variable for the path of the cache.
        module: module that reads the variable when it is imported. Empty if the program reads the variable at each use.
        parts: directories of the cache that are copied. Empty if all directories are copied.
    """

    name: str
    variable: str
    module: str = ""
    parts: tuple[str, ...] = ()

    @property
    def is_read(self) -> bool:
        """Whether this process has already read the variable, so that the cache can no longer be moved."""
        return bool(self.module) and self.module in sys.modules


CACHES = (
    # `startup_plan`, `gpu_p2p_access_cache_*` and `assets` are excluded, because they are measurements of one machine.
    Cache(
        name="vllm",
        variable="VLLM_CACHE_ROOT",
        parts=("torch_compile_cache", "deep_gemm", "flashinfer_autotune_cache", "modelinfos"),
    ),
    Cache(name="inductor", variable="TORCHINDUCTOR_CACHE_DIR"),
    Cache(name="triton", variable="TRITON_CACHE_DIR"),
    Cache(name="flashinfer", variable="FLASHINFER_WORKSPACE_BASE", module="flashinfer"),
    Cache(name="deep_gemm", variable="DG_JIT_CACHE_DIR", module="deep_gemm"),
    Cache(name="sglang_deep_gemm", variable="SGLANG_DG_CACHE_DIR", module="deep_gemm"),
)
"""Source: vLLM 0.32 envs.py and utils/deep_gemm.py, torch 2.13 cache_dir_utils.py, Triton knobs.py, SGLang's
environ.py, and the documentation of FlashInfer. The entries for FlashInfer, DeepGEMM and SGLang are untested."""

NAMES = frozenset(cache.name for cache in CACHES)


def variables(root: Path) -> dict[str, str]:
    """Return the environment variables that place the caches below `root`, except variables that were already read."""
    return {cache.variable: str(root / cache.name) for cache in CACHES if not cache.is_read}


def read_already() -> Sequence[str]:
    """Return the names of the caches that cannot be moved, because their programs are already imported."""
    return [cache.name for cache in CACHES if cache.is_read]


def is_copied(parts: Sequence[str]) -> bool:
    """Return whether a file belongs in a bundle. `parts` are the components of the file's path below the root."""
    cache = next((one for one in CACHES if one.name == parts[0]), None)
    if cache is None or len(parts) < 2:
        return False
    # Skip locks and unfinished files. Compilers rename finished files, and Triton renames its directory `tmp.*`.
    if parts[-1].endswith((".lock", ".tmp")) or parts[-1].startswith("."):
        return False
    if any(part in {"__pycache__", "locks"} or part.startswith("tmp.") for part in parts):
        return False
    return not cache.parts or parts[1] in cache.parts
