"""`safe_open` and `load_file` on a GPU match safetensors, for every dtype and many index forms."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")

import numpy as np  # noqa: E402 - after what it needs
from tests.support.tensor_file import write_file  # noqa: E402

from penstock.loader.safe_open import load_file, safe_open  # noqa: E402
from penstock.types import MIB, DType, bits_to_bytes  # noqa: E402
from penstock_hf.safetensors import installed  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

HELD = [d for d in DType if not d.startswith("F6")]
SHAPE = (5, 6, 8)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safe_open") / "all.safetensors"
    random = np.random.default_rng(0)

    def some(dtype: DType, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...], bytes]:
        nbytes = bits_to_bytes(int(np.prod(shape)), dtype)
        return dtype, shape, random.integers(0, 2 if dtype is DType.BOOL else 256, nbytes, dtype=np.uint8).tobytes()

    tensors = {f"t.{d}": some(d, SHAPE) for d in HELD}
    tensors |= {"scalar": some(DType.F32, ()), "none": some(DType.F16, (0, 3)), "odd": some(DType.U8, (3,))}
    tensors |= {"after.odd": some(DType.F32, (7,)), "big": some(DType.BF16, (3000, 5000))}
    tensors |= {"huge": some(DType.U8, (11_000, 10_000))}
    write_file(path, tensors)
    return path


def assert_same(mine: Any, true: Any) -> None:
    assert mine.device == true.device
    assert mine.dtype == true.dtype
    assert mine.shape == true.shape
    if mine.numel():
        flat = [t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (mine, true)]
        assert torch.equal(*flat)


@pytest.mark.parametrize("name", [*(f"t.{d}" for d in HELD), "scalar", "none", "odd", "after.odd", "big", "huge"])
@pytest.mark.parametrize("device", ["cuda", 0, "cuda:0"])
def test_get_tensor_matches_safetensors(file: Path, name: str, device: Any) -> None:
    with safe_open(file, "pt", device=device) as mine, safetensors.safe_open(file, "pt", device=device) as true:
        found = mine.get_tensor(name)
        assert_same(found, true.get_tensor(name))
        assert found.data_ptr() % max(found.element_size(), 1) == 0


@pytest.mark.parametrize(
    "index",
    [0, -1, np.s_[1:3], np.s_[::2], np.s_[:, 1:5:2], np.s_[..., 3], np.s_[2, :, 4:], (1, 2, 3), None, [0, 2],
     (slice(None), [1, 3]), np.s_[4:2], ...],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [d for d in HELD if d is not DType.F4])
def test_slices_match_safetensors(file: Path, dtype: DType, index: Any) -> None:
    try:
        true = safetensors.safe_open(file, "pt", device="cuda").get_slice(f"t.{dtype}")[index]
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"safetensors cannot: {error}")
    assert_same(safe_open(file, "pt", device="cuda").get_slice(f"t.{dtype}")[index], true)


def test_column_slice_in_big_tensor_matches_safetensors(file: Path) -> None:
    true = safetensors.safe_open(file, "pt", device="cuda").get_slice("big")[10:2990, 1234:4321]
    assert_same(safe_open(file, "pt", device="cuda").get_slice("big")[10:2990, 1234:4321], true)


def test_load_file_matches_safetensors(file: Path) -> None:
    true = safetensors.safe_open(file, "pt", device="cuda").get_tensors()
    mine = load_file(file, device="cuda")
    assert list(mine) == safe_open(file).offset_keys()
    for name, tensor in true.items():
        assert_same(mine[name], tensor)


LAYER_BYTES = 24 * MIB
NUM_LAYERS = 30


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose tensors are worth reading ahead."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{index}.weight": torch.randint(0, 256, (LAYER_BYTES,), dtype=torch.uint8, generator=generator)
        for index in range(NUM_LAYERS)
    }
    tensors |= {f"layers.{index}.norm": torch.rand(1000, generator=generator) for index in range(NUM_LAYERS)}
    path = tmp_path_factory.mktemp("layers") / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path


ORDERS = {
    "file order": lambda names: names,
    "reverse": lambda names: names[::-1],
    "every third": lambda names: names[::3],
    "whole file twice": lambda names: [*names, *names],
    "layer after layer": lambda names: sorted(names, key=lambda name: int(name.split(".")[1])),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("is_announced", [False, True])
def test_single_requests_match_safetensors(order: str, is_announced: bool, layers: Path) -> None:
    true = safetensors.torch.load_file(layers, device="cuda")
    with safe_open(layers, "pt", device="cuda") as file:
        names = ORDERS[order](file.offset_keys())
        if is_announced:
            file.expect(dict.fromkeys(names))
        for name in names:
            assert_same(file.get_tensor(name), true[name])


def test_reading_ahead_stays_within_device_memory(layers: Path) -> None:
    memory_bytes = 96 * MIB
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with safe_open(layers, "pt", device="cuda", memory_bytes=memory_bytes) as file:
        for name in file.offset_keys():
            file.get_tensor(name)
    # The tensor that the program holds, two that are partly read, and a block for the next are beside the limit.
    assert torch.cuda.max_memory_allocated() - before <= memory_bytes * 3 // 2 + 3 * LAYER_BYTES
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("is_large", [False, True])
def test_installed_safetensors_reads_large_files_through_penstock(is_large: bool, layers: Path, tmp_path: Path) -> None:
    path = layers
    if not is_large:
        path = tmp_path / "small.safetensors"
        safetensors.torch.save_file({"a": torch.arange(1000.0)}, path)
    true = safetensors.torch.load_file(path, device="cuda")
    with installed():
        mine = safetensors.torch.load_file(path, device="cuda")
        with safetensors.safe_open(path, "pt", device=0) as opened:
            assert isinstance(opened, safe_open) == is_large
    assert list(mine) == list(true)
    for name, tensor in true.items():
        assert_same(mine[name], tensor)
