"""The compiled kernels in the wheel, without a device. tests/gpu runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("triton")

from scripts import kernels

from penstock.cuda import kernel_cache
from penstock.cuda.kernel_cache import StoredKernel

COMPILE = """
import sys
import msgspec
from scripts import kernels
shape, types = next((shape, types) for shape, types in kernels.launched(90).items() if shape[1] == sys.argv[1])
sys.stdout.buffer.write(msgspec.msgpack.encode(kernels.compiled(shape, types, 90)))
"""


def test_shipped_kernels_are_compiled_from_current_source() -> None:
    assert list(kernels.stale()) == []


@pytest.mark.parametrize("name", ["short_leaves", "copy_tiles"])
def test_recompiled_kernel_has_shipped_parameters(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILE, name]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=120, check=True)
    copy = msgspec.msgpack.decode(done.stdout, type=StoredKernel)
    shipped = kernel_cache.shipped_kernels((9, 0))[copy.file]
    for field in ("symbol", "parameter_bits", "num_threads", "shared_bytes"):
        assert getattr(shipped, field) == getattr(copy, field)
