"""Add a storage and an operation from outside the package, through public entry points only.

The extensions are a module in a directory of their own, as an installed package would be: nothing of Penstock is
patched, and no private name is used.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock
from penstock.errors import ConfigError
from penstock.storage import register_storage

VAULT = '''
import os
from pathlib import Path

import torch

from penstock.errors import NotFound
from penstock.jobs.operations.operation import as_it_is, one, specs_of
from penstock.storage import MemorySource, read_whole

ROOT = Path(os.environ["VAULT_ROOT"])


class VaultStorage:
    """Files of a directory, under names of the form vault://name."""

    def open(self, uri, *, settings, storage_options):
        path = self._path(uri)
        if not path.is_file():
            raise NotFound("no such object in the vault", uri=uri)
        source = MemorySource(path.read_bytes(), uri=uri)
        # Equal in every process: the workers of a conversion compare it with the coordinator's.
        source.identity = f"{path.stat().st_mtime_ns}"
        return source

    def list(self, uri, *, settings, storage_options):
        path = self._path(uri)
        if path.is_file():
            return [uri]
        found = sorted(path.iterdir()) if path.is_dir() else []
        if not found:
            raise NotFound("nothing in the vault", uri=uri)
        return [f"vault://{file.relative_to(ROOT)}" for file in found]

    def read_small(self, uri, *, settings, storage_options):
        try:
            return read_whole(self.open(uri, settings=settings, storage_options=storage_options))
        except NotFound:
            return None

    def _path(self, uri):
        return ROOT / uri.removeprefix("vault://")


class Negate:
    """Every tensor with its sign changed."""

    name = "negate"

    def recipes(self, sources):
        return [as_it_is(0, spec) for spec in specs_of(one(sources, self.name))]

    def run(self, recipe, start, stop, inputs):
        return [-inputs[0]]

    def config(self, config):
        return config
'''


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of two files in the vault, and its tensors by the format's own reader."""
    vault = tmp_path / "vault" / "model"
    vault.mkdir(parents=True)
    save_file({"a": torch.randn(300, 700)}, vault / "model-00001-of-00002.safetensors")
    save_file({"b": torch.randn(17).bfloat16()}, vault / "model-00002-of-00002.safetensors")
    return {name: tensor for file in vault.iterdir() for name, tensor in load_file(file).items()}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a package with an entry point for vault://, on the path of this process and of its children."""
    site = tmp_path / "site"
    information = site / "vault_storage-1.0.dist-info"
    information.mkdir(parents=True)
    (site / "vault_storage.py").write_text(VAULT)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vault-storage\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[penstock.storages]\nvault = vault_storage:VaultStorage\n")
    source = Path(penstock.__file__).resolve().parents[1]
    monkeypatch.setenv("VAULT_ROOT", str(tmp_path / "vault"))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{source}")
    return site


def run(code: str) -> str:
    """Run code in a process of its own, so that what it registers is gone with it."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_storage_registered_in_this_process(tensors, installed: Path, tmp_path: Path) -> None:
    # Without its entry point, so that only the registration can make the scheme known.
    (installed / "vault_storage-1.0.dist-info" / "entry_points.txt").unlink()
    run(
        "import penstock, safetensors.torch\n"
        "from penstock.storage import register_storage\n"
        "from vault_storage import VaultStorage\n"
        "register_storage('vault', VaultStorage)\n"
        f"safetensors.torch.save_file(dict(penstock.load('vault://model')), r'{tmp_path}/out.safetensors')"
    )
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_storage_and_an_operation_of_an_installed_package(tensors, installed: Path, tmp_path: Path) -> None:
    """The workers of a conversion are other processes: they know the storage by its entry point."""
    run(
        "import penstock\n"
        "word = {'op': 'function', 'function': 'vault_storage:Negate'}\n"
        f"penstock.convert('vault://model', r'{tmp_path}/out', operations=[word], workers=1)"
    )
    found = {
        name: tensor for file in (tmp_path / "out").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], -tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("scheme", ["file", "S3", "a b", "", "x://"])
def test_what_is_no_scheme_is_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match="not a URI scheme"):
        register_storage(scheme, object)


def test_a_scheme_has_one_storage() -> None:
    with pytest.raises(ConfigError, match="there is one"):
        register_storage("s3", object)


def test_an_unknown_scheme_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="no storage for nowhere://") as caught:
        penstock.load("nowhere://model")
    assert "s3://" in str(caught.value)
    assert "register_storage" in str(caught.value)
