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


BF16_FORMATS = """
import sys
import torch
from penstock.transform.formats import FORMATS, outputs
from penstock.transform.fuse import KernelJob, fuse
from penstock.transform.quantize import quantise, torch_dtype
from penstock.types import Box, DType
device = torch.device("cuda", 0)
for form in FORMATS.values():
    for cols in (256, 48) if form.scaling != "none" and not form.whole_blocks else (256,) * (form.scaling != "none"):
        source = torch.randn(130, cols).bfloat16()
        parts = outputs(form, "w", DType.BF16, (130, cols), Box.full((130, cols)))
        out = tuple(torch.empty(part.shape, dtype=torch_dtype(part.dtype), device=device) for part in parts)
        fuse(form, [KernelJob(source=source.to(device), outputs=out)]).run()
        for got, expected in zip(out, quantise(form, source), strict=True):
            assert torch.equal(got.cpu().view(torch.uint8), expected.view(torch.uint8)), form.tag
print("triton" if "triton" in sys.modules else "copy")
"""

GATHER = """
import sys
import numpy as np, torch
from penstock.cuda.pack import gather
source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda:0")
target = torch.zeros_like(source)
at = np.arange(1000, dtype=np.int64) * 1000
nbytes = np.where(at % 3000 == 0, 999, 496).astype(np.uint64)
src, dst = source.data_ptr() + at + 3, target.data_ptr() + at + 3
gather(dst.astype(np.uint64), src.astype(np.uint64), nbytes, 0, torch.cuda.current_stream().cuda_stream)
expected = torch.zeros_like(source)
for start, count in zip(at + 3, nbytes.astype(int)):
    expected[start : start + count] = source[start : start + count]
assert torch.equal(target, expected)
print("triton" if "triton" in sys.modules else "copy")
"""

NEWER_DEVICE = """
import torch
torch.cuda.get_device_capability = lambda device=None: (99, 0)
"""

WITHOUT_WHEEL = """
from pathlib import Path
from penstock.cuda import kernel_cache
kernel_cache.SHIPPED = Path("/nonexistent")
"""


def used(home: Path, program: str = WITHOUT_WHEEL + DIGEST) -> str:
    """Return how a fresh process ran its kernels. It fails if the bytes differ."""
    environ = os.environ | {"HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


def copies(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "penstock" / "kernels").iterdir())


def test_first_process_in_new_home_uses_shipped_kernels(tmp_path: Path) -> None:
    assert used(tmp_path, DIGEST) == "copy"
    assert not (tmp_path / ".cache" / "penstock" / "kernels").exists()


def test_first_format_of_bf16_weights_uses_shipped_kernels(tmp_path: Path) -> None:
    assert used(tmp_path, BF16_FORMATS) == "copy"


def test_newer_device_runs_ptx_of_the_wheel(tmp_path: Path) -> None:
    assert used(tmp_path, NEWER_DEVICE + DIGEST) == "copy"


def test_short_copies_use_shipped_kernel(tmp_path: Path) -> None:
    assert used(tmp_path, GATHER) == "copy"


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
