"""Digests of strips are those of their packed runs, on a device as on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.digest.strip import Strips, strip_digests
from penstock.errors import PlanError


def reference(memory: np.ndarray, at: int, run: int, rows: int, pitch: int, leaf_bytes: int) -> int:
    data = b"".join(memory[at + i * pitch : at + i * pitch + run].tobytes() for i in range(rows))
    leaves = [xxhash.xxh3_64_intdigest(data[i : i + leaf_bytes]) for i in range(0, len(data), leaf_bytes)]
    if len(leaves) == 1:
        return leaves[0]
    return xxhash.xxh3_64_intdigest(b"".join(leaf.to_bytes(8, "little") for leaf in leaves))


def strips(*rows: tuple[int, int, int, int]) -> Strips:
    at, run_bytes, num_rows, pitch = np.array(rows, np.int64).reshape(-1, 4).T
    return Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 500), st.integers(1, 300), st.integers(1, 20), st.integers(0, 90)), max_size=6
    ),
    leaf_bytes=st.sampled_from([16, 64, 100, 1024]),
)
def test_strip_digest_matches_packed_bytes(rows: list[tuple[int, int, int, int]], leaf_bytes: int) -> None:
    memory = np.random.default_rng(7).integers(0, 256, 10_000, np.uint8)
    wanted = [(at, run, count, run + gap) for at, run, count, gap in rows]
    made = strips(*wanted)
    made.check(len(memory))
    got = strip_digests(memory, made, leaf_bytes=leaf_bytes)
    assert got.tolist() == [reference(memory, *one, leaf_bytes) for one in wanted]


@pytest.mark.parametrize(
    "row",
    [(0, 0, 1, 0), (0, 1, 0, 1), (-1, 4, 1, 4), (97, 4, 1, 4), (0, 10, 11, 10), (0, 4, 1 << 40, 1 << 40), (0, 4, 9, 2)],
)
def test_strip_outside_memory_is_refused(row: tuple[int, int, int, int]) -> None:
    with pytest.raises(PlanError, match="strip 1"):
        strips((0, 100, 1, 0), row).check(100)


WORK = """
import numpy as np, torch
from penstock.cuda import pack as pack_cuda
from penstock.digest.strip import Strips, strip_digests
from penstock.digest.cuda import plan_strips

chance = np.random.default_rng(3)
memory = chance.integers(0, 256, 300_000, np.uint8)
base = torch.from_numpy(memory)
shift = -base.data_ptr() % 16
rows = [(0, 4096, 9, 8192), (16, 32, 700, 64), (5, 7, 300, 11), (8, 12, 500, 20), (64, 40_000, 1, 0),
        (1, 5000, 3, 5000), (32, 20_000, 5, 30_000), (3, 1, 40, 3), (0, 16, 1, 16)]
at, run, num, pitch = np.array(rows, np.int64).T
made = Strips(at=at + shift, run_bytes=run, num_rows=num, pitch=pitch)
made.check(len(memory))
wanted = strip_digests(memory, made, leaf_bytes=8192)
scratch = torch.empty(40_000, dtype=torch.uint8)
table = plan_strips(base.data_ptr(), made, torch.device("cpu"), scratch, leaf_bytes=8192)
assert (table.digest().numpy().view(np.uint64) == wanted).all()
memory[shift + 32 + 2 * 30_000] ^= 1
wrong = table.digest().numpy().view(np.uint64) != wanted
assert wrong.tolist() == (strip_digests(memory, made, leaf_bytes=8192) != wanted).tolist() and wrong[6]

out, expected = torch.zeros(300_000, dtype=torch.uint8), torch.zeros(300_000, dtype=torch.uint8)
to, mine = -out.data_ptr() % 16, []
for row, (one, length, count, apart) in enumerate(rows):
    mine.append((to, length + (0, 16, 4)[row % 3]))
    for i in range(count):
        there = shift + one + i * apart
        expected[to + i * mine[-1][1] :][:length] = base[there : there + length]
    to += count * mine[-1][1] + 16 - (count * mine[-1][1]) % 16
dst, dst_pitch = np.array(mine, np.int64).T
columns = (dst + out.data_ptr(), made.at + base.data_ptr(), run, num, dst_pitch, pitch)
pack_cuda.plan_copy(*columns, torch.device("cpu")).run()
assert torch.equal(out, expected)
"""


def test_interpreted_kernels_match_numpy_digests() -> None:
    """Triton's interpreter runs the kernels. tests/gpu runs them on devices."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", WORK], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
