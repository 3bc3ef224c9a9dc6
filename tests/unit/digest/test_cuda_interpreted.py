"""The CUDA digest kernels on the CPU, in Triton's interpreter: the same bits as the xxhash library.

The interpreter is chosen when a kernel is decorated, so the kernels are imported and run in a process of their own.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CHILD = """
import json, sys
import numpy as np, torch, xxhash
from penstock.digest import cuda

def differing(got, expected):
    return np.flatnonzero(got.numpy().view(np.uint64) != expected).tolist()

cases = json.load(sys.stdin)
data = torch.from_numpy(np.random.default_rng(7).integers(0, 256, 1 << 18, dtype=np.uint8))
raw = data.numpy().tobytes()
origin = -data.data_ptr() % 16
cpu = torch.device("cpu")
for name, rows, tuning in cases:
    offsets, lengths = (np.array(column, dtype=np.int64) for column in zip(*rows))
    offsets = offsets + origin
    expected = np.array([xxhash.xxh3_64_intdigest(raw[o : o + n]) for o, n in zip(offsets, lengths)], dtype=np.uint64)
    table = cuda.plan_leaves(data.data_ptr() + offsets, lengths, cpu, tuning=cuda.Tuning(**tuning))
    got = table.digest()
    wrong = [(int(offsets[i]), int(lengths[i])) for i in differing(got, expected)]
    assert not wrong, f"{name}: (offset, nbytes) {wrong[:8]}"
    ordered = cuda.OrderedLeaves(data.data_ptr() + offsets, lengths, cpu, tuning=cuda.Tuning(**tuning))
    third = len(lengths) // 3
    ordered.warm_up(out=torch.empty(len(lengths), dtype=torch.int64))
    for first, stop in ((0, len(lengths)), (third, 2 * third), (0, third), (third, third)):
        out = torch.full((len(lengths),), 5, dtype=torch.int64)
        ordered.digest(first, stop, out=out)
        assert not differing(out[first:stop], expected[first:stop]), f"{name}: {first} to {stop}"
        assert (out[:first] == 5).all() and (out[stop:] == 5).all(), f"{name}: rows beside {first} to {stop}"
into = np.arange(len(expected))[::-1].copy()
mirrored = cuda.plan_leaves(data.data_ptr() + offsets, lengths, cpu, into=into).digest()
assert not differing(mirrored, expected[::-1])
expected[2] ^= np.uint64(1 << 63)
assert differing(got, expected) == [2]
data[offsets[1]] ^= 1
assert differing(table.digest(), got.numpy().view(np.uint64)) == [1]
for bad in ([1, 0], [1]):
    try:
        cuda.plan_leaves(np.array([0, 16]), np.array(bad), cpu)
        raise AssertionError(f"lengths {bad} accepted")
    except ValueError:
        pass
    try:
        cuda.OrderedLeaves(np.array([0, 16]), np.array(bad), cpu)
        raise AssertionError(f"lengths {bad} accepted")
    except ValueError:
        pass
assert cuda.leaf_digests_cuda(np.empty(0, np.int64), np.empty(0, np.int64), cpu).shape == (0,)
"""

EDGES = [241, 255, 256, 257, 300, 960, 961, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 4096]
CASES = [
    ("every short length", [(0, n) for n in range(1, 241)], {}),
    ("short, unaligned", [(n % 23, n) for n in range(1, 241)], {}),
    ("long, aligned", [(0, n) for n in EDGES], {}),
    ("long, by 8", [(8, n) for n in EDGES], {}),
    ("long, unaligned", [(1 + n % 7, n) for n in EDGES], {}),
    ("64 KiB and about", [(16 * (n % 5), n) for n in (65535, 65536, 65537)] + [(3, 65536)], {}),
    ("several slabs, mixed", [(i * 16 + i % 3, n) for i, n in enumerate(EDGES * 2)], {"slab_blocks": 64}),
    (
        "uneven, cut into slabs, one longer than a slab",
        [(0, 1000), (16, 40000), (5, 300), (32, 9000), (48, 70000), (0, 241), (0, 100), (3, 33000)],
        {"slab_blocks": 16},
    ),
    ("uneven, aligned alone", [(0, 1000), (16, 70000), (32, 1000), (48, 1000), (64, 1000)], {"slab_blocks": 16}),
    ("nearly even, not sorted", [(0, 60000), (16, 64000), (32, 65536), (48, 9000), (64, 65000)], {"slab_blocks": 128}),
    ("small tiles", [(0, 9000), (9200, 100), (9301, 8000)], {"tile_blocks": 8, "tile_warps": 1, "finish_leaves": 8}),
]


# The cases take a minute of a core in total, which is too long for one test on a busy machine.
@pytest.mark.parametrize("part", range(3))
def test_interpreted_digests_match_xxhash(part: int) -> None:
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD],
        # Each part ends with the last case, in which the child then changes bytes.
        input=json.dumps([*CASES[part:-1:3], CASES[-1]]),
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
