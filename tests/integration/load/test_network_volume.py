"""safetensors files on a network volume have the bytes of a local file, and are read once in large reads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from tests.support.servers.network_volume import NetworkVolume, refusal

from penstock.errors import NotFound
from penstock.loader.safe_open import load_file, safe_open
from penstock.storage.network_files import NetworkFile, network_file_system
from penstock_hf.safetensors import installed

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

NAME = "model.safetensors"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tensors = {f"layers.{index}.weight": torch.randn(64, 64) for index in range(1500)}
    tensors |= {f"layers.{index}.norm": torch.randn(64).to(torch.float16) for index in range(1500)}
    safetensors.torch.save_file(tensors, directory / NAME, metadata={"format": "pt"})
    return directory


@pytest.fixture
def mounted(directory: Path, tmp_path: Path) -> Iterator[tuple[NetworkVolume, Path]]:
    volume = NetworkVolume(directory, tmp_path / "volume", latency_s=0.002)
    with volume as path:
        yield volume, path / NAME


def are_equal(tensors: dict[str, torch.Tensor], directory: Path) -> bool:
    theirs = safetensors.torch.load_file(directory / NAME)
    return tensors.keys() == theirs.keys() and all(torch.equal(tensors[name], theirs[name]) for name in theirs)


def test_network_volume_is_detected(mounted: tuple[NetworkVolume, Path], directory: Path) -> None:
    assert network_file_system(str(mounted[1])) == "FUSE"
    assert network_file_system(str(directory)) == ""
    assert network_file_system(str(directory / "none")) == ""


@pytest.mark.parametrize("order", ["keys", "offset_keys"])
def test_reading_tensors_singly_reads_each_byte_once(
    mounted: tuple[NetworkVolume, Path], directory: Path, order: str
) -> None:
    volume, path = mounted
    with installed(), safetensors.safe_open(path, framework="pt") as file:
        assert type(file) is safe_open
        tensors = {name: file.get_tensor(name) for name in getattr(file, order)()}
    assert are_equal(tensors, directory)
    assert volume.read_bytes() <= 1.05 * path.stat().st_size
    # The tensors own their memory, so they are writable even if the volume disappears.
    tensors["layers.0.weight"].fill_(1)


def test_load_file_reads_each_byte_once(mounted: tuple[NetworkVolume, Path], directory: Path) -> None:
    volume, path = mounted
    with installed():
        tensors = safetensors.torch.load_file(path)
    assert are_equal(tensors, directory)
    assert volume.read_bytes() <= 1.05 * path.stat().st_size
    assert are_equal(load_file(path), directory)


def test_numpy_arrays_match_local_file(mounted: tuple[NetworkVolume, Path], directory: Path) -> None:
    with installed():
        arrays = safetensors.numpy.load_file(mounted[1])
    assert are_equal({name: torch.from_numpy(array) for name, array in arrays.items()}, directory)


def test_reading_in_declared_order_reads_each_byte_once(mounted: tuple[NetworkVolume, Path], directory: Path) -> None:
    volume, path = mounted
    with safe_open(path) as file:
        order = sorted(file.keys(), key=lambda name: (int(name.split(".")[1]), name))
        file.expect(order)
        tensors = {name: file.get_slice(name)[:] for name in order}
        with pytest.raises(NotFound):
            file.expect(["none"])
    assert are_equal(tensors, directory)
    assert volume.read_bytes() <= 1.05 * path.stat().st_size


def test_cached_file_reads_nothing_from_volume(mounted: tuple[NetworkVolume, Path]) -> None:
    volume, path = mounted
    path.read_bytes()
    file = NetworkFile.open(str(path))
    is_cached = file.is_cached()
    file.close()
    if not is_cached:
        pytest.skip("this kernel does not say what is cached")
    before = volume.read_bytes()
    with installed():
        assert type(safetensors.safe_open(path, "pt")) is not safe_open
        load_file(path)
    assert volume.read_bytes() == before
