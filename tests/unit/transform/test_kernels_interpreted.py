"""The transform kernels in Triton's interpreter give the bits of the reference.

The interpreter is chosen when a kernel is decorated, so the kernels run in a separate process.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from tests.support.long_running import long_running

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CHILD = """
import sys, torch
from tests.support.transform_suite import check_kernels
from penstock.transform.formats import format_of

shapes = ((1, 16), (3, 32), (130, 32), (2, 3, 5, 32), (16,), (7, 0))
for tag in sys.argv[1:]:
    assert check_kernels(format_of(tag), torch.device("cpu"), shapes) >= 12, tag
"""

# The interpreter is slow, so each branch of the kernels runs once. tests/gpu runs all combinations.
TAGS = [
    ["cast:BF16", "cast:F8_E5M2", "mxfp8", "mxfp8-floor", "nvfp4"],
    ["fp8-block128", "fp8-block1x128-ue8m0"],
    pytest.param(["fp8-channel"], marks=long_running),
]


@pytest.mark.parametrize("tags", TAGS, ids=lambda tags: tags[0])
def test_kernels_are_bit_identical_to_reference(tags: list[str]) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *tags],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert child.returncode == 0, child.stderr[-3000:]
