"""Copies of short runs on the CPU, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

WORK = """
import numpy as np, torch
from penstock.cuda.pack import plan_runs

chance = np.random.default_rng(3)
source = torch.from_numpy(chance.integers(0, 256, 400_000, np.uint8))
got, expected = torch.zeros(400_000, dtype=torch.uint8), torch.zeros(400_000, dtype=torch.uint8)
rows, at = [], 7
for nbytes in (1, 15, 16, 17, 16384, 16385, 40_001, 33, 70_000, 3, 5000):
    src = int(chance.integers(0, 300_000)) // 16 * 16 + (at % 16 if nbytes % 2 else 5)
    rows.append((got.data_ptr() + at, source.data_ptr() + src, nbytes))
    expected[at : at + nbytes] = source[src : src + nbytes]
    at += nbytes + int(chance.integers(0, 40))
plan = plan_runs(*np.array(rows, np.int64).T, torch.device("cpu"))
assert plan.launches[0]._constants["WIDTH"] == 16
plan.run()
assert torch.equal(got, expected)
"""


def test_gather_copies_every_byte_to_its_offset() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", WORK], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_empty_runs_need_no_launch() -> None:
    from penstock.cuda.pack import plan_runs

    for runs in (np.zeros(0, np.int64), np.zeros(3, np.int64)):
        assert plan_runs(runs, runs, runs, torch.device("cpu")).launches == ()
