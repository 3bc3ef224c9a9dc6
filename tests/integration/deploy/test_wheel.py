"""The wheel, installed into a clean environment: it has all its files, and works without extras."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support.tensor_file import write_file

from penstock.types import DType

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False, env=environ, cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", directory, ".")
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip("the build needs hatchling from a package index, which does not answer here")
    assert done.returncode == 0, done.stderr
    (built,) = directory.glob("penstock-*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "penstock").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == files
    assert "penstock/hub/assets/index.html" in packed


def test_a_clean_environment_runs_it(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", environment).returncode == 0
    done = run(sys.executable, ROOT / "scripts" / "install.py", environment, wheel)
    if done.returncode and ("No solution found" in done.stderr or "connect" in done.stderr.lower()):
        pytest.skip("no package index answers here")
    assert done.returncode == 0, done.stderr
    write_file(tmp_path / "model.safetensors", {"w": (DType.F32, (2, 3), bytes(24))})
    penstock = environment / "bin" / "penstock"
    done = run(penstock, "version")
    assert done.returncode == 0 and "torch" in done.stdout and "not installed" in done.stdout
    assert run(penstock, "manifest", tmp_path / "model.safetensors").returncode == 0
    done = run(penstock, "verify", tmp_path / "model.safetensors")
    assert done.returncode == 0, done.stderr
    # What needs an extra names packages that pip finds.
    done = run(penstock, "hub")
    assert done.returncode == 2 and "pip install '" in done.stderr, (done.returncode, done.stderr)
    assert "'starlette" in done.stderr and "'uvicorn" in done.stderr, done.stderr
