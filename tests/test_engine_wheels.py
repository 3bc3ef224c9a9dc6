"""`scripts/engine_wheels/wheels.py` prunes wheels, and makes an environment that finds the packages of its machine."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "engine_wheels" / "wheels.py"


def run(*arguments: object) -> None:
    subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], check=True, timeout=60)


def write_wheel(path: Path, **files: str) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if name.endswith("ptxas") else 0o644) << 16
            wheel.writestr(info, text)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    directory = tmp_path / "wheels"
    directory.mkdir()
    triton = {"triton/__init__.py": "", "triton/bin/ptxas": "tool", "triton/bin/ptxas-blackwell": "tool"}
    write_wheel(directory / "triton-3.8.0-cp312-cp312-linux.whl", **triton)
    other = {"other-1.data/purelib/other/__init__.py": "NAME = 'bundle'", "other-1.data/scripts/tool": ""}
    write_wheel(directory / "other-1-py3-none-any.whl", **other, **{"other-1.dist-info/METADATA": "Name: other"})
    return directory


def test_pruned_wheels_install_without_unneeded_files(wheels: Path, tmp_path: Path) -> None:
    run("prune", wheels)
    run("install", wheels, tmp_path / "site")
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {"triton/__init__.py", "triton/bin/ptxas", "other/__init__.py", "other-1.dist-info/METADATA"}
    assert (tmp_path / "site" / "triton" / "bin" / "ptxas").stat().st_mode & 0o111


def test_linked_environment_finds_bundle_torch_and_tree(wheels: Path, tmp_path: Path) -> None:
    run("install", wheels, tmp_path / "site")
    torch = tmp_path / "torch"
    (torch / "torch_layer").mkdir(parents=True)
    (torch / "torch_layer" / "__init__.py").touch()
    run("link", tmp_path / "site", ROOT, torch)
    program = f"""
import importlib.metadata, site
site.addsitedir({str(tmp_path / "site")!r})
import other, penstock, torch_layer, pytest
assert penstock.__file__.startswith({str(ROOT)!r}), penstock.__file__
print(other.NAME, *(point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")))
"""
    # The machine's packages are those of the interpreter that ran `link`.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split()[0] == "bundle", done.stderr
    assert "penstock" in done.stdout.split()
