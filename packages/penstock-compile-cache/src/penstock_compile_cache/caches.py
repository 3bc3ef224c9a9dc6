"""The caches in which compilers and engines keep compiled code, and the variables that say where they are.

In: a directory. Out: the variables that put every cache below it, and those caches whose programs read their variable
already, too early to be moved.
Not here: copying a cache (`bundle`).

Each cache is a directory below one `root`, so that a bundle of the root has the code of one configuration and nothing
else of the user's.
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
        name: of the directory below the root.
        variable: environment variable for its place.
        module: a module that reads the variable when it is imported; empty: it is read at each use.
        parts: directories in it that are copied; empty: all.
    """

    name: str
    variable: str
    module: str = ""
    parts: tuple[str, ...] = ()

    @property
    def is_read(self) -> bool:
        """True if this process has read the variable already."""
        return bool(self.module) and self.module in sys.modules


CACHES = (
    # Not `startup_plan` and `gpu_p2p_access_cache_*`, which are measurements of one machine, nor `assets`.
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
environ.py, the documentation of FlashInfer. Those of FlashInfer, DeepGEMM and SGLang were not tried."""

NAMES = frozenset(cache.name for cache in CACHES)


def variables(root: Path) -> dict[str, str]:
    """Return the environment variables that put each cache below `root`, but for those that were read already."""
    return {cache.variable: str(root / cache.name) for cache in CACHES if not cache.is_read}


def read_already() -> Sequence[str]:
    """Return the names of the caches whose programs are imported and stay where they are."""
    return [cache.name for cache in CACHES if cache.is_read]


def is_copied(parts: Sequence[str]) -> bool:
    """Return whether a file belongs to a bundle; `parts` are those of its path below the root."""
    cache = next((one for one in CACHES if one.name == parts[0]), None)
    if cache is None or len(parts) < 2:
        return False
    # Locks, and what a compiler is still writing: it renames a file, or Triton a directory `tmp.`, at the end.
    if parts[-1].endswith((".lock", ".tmp")) or parts[-1].startswith("."):
        return False
    if any(part in {"__pycache__", "locks"} or part.startswith("tmp.") for part in parts):
        return False
    return not cache.parts or parts[1] in cache.parts
