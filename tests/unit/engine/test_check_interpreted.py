"""The device's leaf layout of a real checkpoint, in Triton's interpreter on the CPU.

The interpreter is chosen when a kernel is decorated, so the kernels run in a separate process.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import penstock

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CHILD = """
import sys
import numpy as np, torch
from penstock.config import Settings
from penstock.engine.check import Expected, _Layout
from penstock.errors import IntegrityError
from penstock.plan.schedule import plan_load
from penstock.storage.weight_set import open_weights
from penstock.types import Box

with open_weights(sys.argv[1], settings=Settings.read()) as weights:
    manifest = weights.manifest
raw = np.fromfile(sys.argv[1] + "/model.safetensors", np.uint8)
names = manifest.tensors.names
boxes = [Box(start=(1, 0), stop=(3, 5)) if name == "boxed" else None for name in names]
plan = plan_load(manifest.tensors, file_nbytes=[len(raw)], chunk_bytes=1 << 20, boxes=boxes)
assert plan.table.names == names
slabs = [np.zeros(nbytes + 16, np.uint8) for nbytes in plan.slab_nbytes.tolist()]
slabs = [slab[-slab.ctypes.data % 16 :] for slab in slabs]
for row, slab in enumerate(plan.row_slab.tolist()):
    if slab >= 0 and boxes[row] is None:
        at, offset, nbytes = int(plan.row_offset[row]), int(plan.table.offset[row]), int(plan.row_nbytes[row])
        slabs[slab][at : at + nbytes] = raw[offset : offset + nbytes]
expected = Expected(plan, manifest.leaves, manifest.leaf_bytes, ["here"])
everything = list(range(len(slabs)))
assert len(slabs) > 4

def layout(slabs_of):
    return _Layout(expected, slabs_of, [slabs[i].ctypes.data for i in slabs_of], torch.device("cpu"))

def check(of, which):
    ranges = of.ranges(which)
    for first, stop in ranges:
        of.digest(first, stop)
    for first, stop in ranges:
        of.results.compare(first, stop)
    return ranges

whole = layout(everything)
boxed = int(plan.row_slab[names.index("boxed")])
assert 0 < boxed < len(slabs) - 1
# The layout skips the leaves of the tensor with a region, so all other leaves are adjacent.
assert len(check(whole, everything)) == 1
assert check(whole, [boxed]) == []
for which in ([2, 0], [len(slabs) - 1, 1]):
    total = [sum(stop - first for first, stop in check(of, which)) for of in (whole, layout(which))]
    assert total[0] == total[1] > 0, which
for name in ("a", "b", "d", "f", "h", "z"):
    row = names.index(name)
    slab, at, nbytes = int(plan.row_slab[row]), int(plan.row_offset[row]), int(plan.row_nbytes[row])
    slabs[slab][at + nbytes - 1] ^= 4
    for of in (layout([slab]), layout([slab, len(slabs) - 1] if slab < 3 else [slab])):
        try:
            check(of, [slab])
        except IntegrityError as error:
            assert error.tensor == name
            offset, last = int(plan.table.offset[row]), (nbytes - 1) // manifest.leaf_bytes * manifest.leaf_bytes
            assert error.byte_range == (offset + last, offset + nbytes)
        else:
            raise AssertionError(name)
    slabs[slab][at + nbytes - 1] ^= 4
"""


def test_check_reports_exactly_the_differing_ranges(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    sizes = {"a": 4, "b": 70_001, "c": 0, "d": 239, "e": 300_000, "f": 1, "g": 1_300_003, "h": 70_000, "z": 17}
    tensors = {name: rng.integers(0, 256, n, np.uint8) for name, n in sizes.items()}
    tensors |= {"boxed": rng.integers(0, 256, (4, 300_000), np.uint8)}
    tensors |= {f"many.{i:02}": rng.integers(0, 256, 1_100_000 + i, np.uint8) for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    penstock.manifest(tmp_path)
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stderr
