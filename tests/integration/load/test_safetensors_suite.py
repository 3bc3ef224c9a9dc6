"""safetensors' own tests on Penstock, with its patch and with every local file read by Penstock.

scripts/setup_safetensors_tests.sh downloads the tests, which are not part of this repository.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.long_running import long_running

SUITE = Path(__file__).parents[3] / ".cache" / "safetensors-tests"

if not (SUITE / "pin").exists():
    pytest.skip("safetensors' tests are not here: scripts/setup_safetensors_tests.sh", allow_module_level=True)
if importlib.metadata.version("safetensors") != "0.8.0":
    pytest.skip("the tests are those of safetensors 0.8.0", allow_module_level=True)

AS_INSTALLED = """
from penstock_hf.safetensors import install
install()
"""

ALL_BY_PENSTOCK = """
import os
import penstock_hf.safetensors as compat
import penstock.loader.safe_open as reader
for module in (compat, reader):
    module.network_file_system = lambda path: "TEST" if os.path.exists(path) else ""
compat._is_cached = reader.NetworkFile.is_cached = lambda file: False
compat.install()
"""

RUN = """
import sys, pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--basetemp", sys.argv[1], *sys.argv[2:]]))
"""

OTHER_TEXT = "tests/test_simple.py::ReadmeTestCase::test_numpy_slice"
"""It compares the text of an IndexError. Penstock raises the same error with a different text."""


def run(start: str, tmp_path: Path, *options: str) -> dict[str, int]:
    """Return how many tests of torch and numpy had each outcome."""
    (tmp_path / "suite").mkdir()
    # The suite writes files below `tests`.
    subprocess.run(["cp", "-r", SUITE / "tests", tmp_path / "suite"], check=True)
    files = [f"tests/test_{name}.py" for name in ("simple", "handle", "pt_comparison", "pt_model", "pread_backend")]
    if start == AS_INSTALLED:
        files += ["tests/test_threadable.py", "tests/test_multithreaded.py"]
    command = [sys.executable, "-c", start + RUN, str(tmp_path / "base"), *files, *options]
    done = subprocess.run(command, cwd=tmp_path / "suite", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return {outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])}


def test_safetensors_suite_passes_with_installed_patch(tmp_path: Path) -> None:
    found = run(AS_INSTALLED, tmp_path)
    assert found["passed"] == 66
    # Tests for other systems, and for devices that this machine lacks.
    assert found["skipped"] == 14


@long_running
def test_safetensors_suite_passes_with_penstock_reader(tmp_path: Path) -> None:
    found = run(ALL_BY_PENSTOCK, tmp_path, "--deselect", OTHER_TEXT)
    assert found["passed"] >= 60
    assert found["deselected"] == 1
