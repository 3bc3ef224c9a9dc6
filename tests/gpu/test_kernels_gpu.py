"""Compiled kernels that are stored for later processes, which use them without Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.gpu

DIGEST = """
import sys
import numpy as np, torch, xxhash
from penstock.digest import cuda
device = torch.device("cuda", 0)
host = np.arange(1 << 20, dtype=np.uint64).view(np.uint8)
memory = torch.from_numpy(host).to(device)
nbytes = np.array([1, 7, 100, 240, 241, 1024, 65536, 1 << 20, 12345])
offsets = np.array([0, 16, 64, 128, 512, 1024, 4096, 8192, 13])
got = cuda.leaf_digests_cuda(memory.data_ptr() + offsets, nbytes, device).cpu().numpy().view(np.uint64)
view = memoryview(host)
assert got.tolist() == [xxhash.xxh3_64_intdigest(view[o : o + n]) for o, n in zip(offsets.tolist(), nbytes.tolist())]
print("triton" if "triton" in sys.modules else "copy")
"""

FORMATS = """
import sys
import torch
from tests.support.transform_suite import check_kernels
from penstock.transform.formats import format_of
for tag in ("fp8-block128", "fp8-channel", "cast:F16", "nvfp4"):
    assert check_kernels(format_of(tag), torch.device("cuda", 0), ((130, 32), (16,))) > 2, tag
print("triton" if "triton" in sys.modules else "copy")
"""


def used(home: Path, program: str = DIGEST) -> str:
    """Return how a fresh process ran its kernels. It fails if the bytes differ."""
    environ = os.environ | {"HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


def copies(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "penstock" / "kernels").iterdir())


def test_second_process_reuses_stored_kernels(tmp_path: Path) -> None:
    assert used(tmp_path) == "triton"
    assert len(copies(tmp_path)) == 4
    assert used(tmp_path) == "copy"
    for copy in copies(tmp_path):
        copy.write_bytes(copy.read_bytes()[:100])
    assert used(tmp_path) == "triton"
    assert used(tmp_path) == "copy"


def test_format_kernels_are_stored_on_disk(tmp_path: Path) -> None:
    assert used(tmp_path, FORMATS) == "triton"
    assert used(tmp_path, FORMATS) == "copy"


def test_kernel_file_writable_by_others_is_ignored(tmp_path: Path) -> None:
    used(tmp_path)
    for copy in copies(tmp_path):
        copy.chmod(0o666)
    assert used(tmp_path) == "triton"
