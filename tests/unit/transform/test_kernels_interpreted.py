"""The transform kernels on the CPU, in Triton's interpreter: the bits of the reference.

The interpreter is chosen when a kernel is decorated, so the kernels are imported and run in a process of their own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from penstock.transform.geometry import FORMATS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

CHILD = """
import sys, torch
from penstock.testing.transform_suite import check_kernels
from penstock.transform.geometry import format_of

for tag in sys.argv[1:]:
    assert check_kernels(format_of(tag), torch.device("cpu")) >= 20
"""

TAGS = sorted(FORMATS)


@pytest.mark.parametrize("tags", [TAGS[:6], TAGS[6:9], TAGS[9:12], TAGS[12:]], ids=lambda tags: tags[0])
def test_same_bits_as_the_reference(tags: list[str]) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *tags],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert child.returncode == 0, child.stderr[-3000:]
