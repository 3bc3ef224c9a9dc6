"""Loading to one GPU equals safetensors, for every verb, dtype, box and size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open as theirs_open
from safetensors.torch import load_file, save_file
from tests.support import compare
from tests.support.compare import bits, by_safetensors
from tests.support.every_dtype import every_dtype
from tests.support.moe import write_moe
from tests.support.servers.http_server import RangeServer
from tests.support.shards import shard_box

import penstock
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB, Box

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
assert_same = partial(compare.assert_same, device=DEVICE)


def torch_holds(name: str) -> bool:
    """Names of `every_dtype` whose dtype torch has, which excludes the six-bit dtypes."""
    return not name.startswith("f6")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    write_llama(directory, num_layers=3, hidden=1024, shards=3)
    return directory


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return tensors of one to four dims, with odd sizes."""
    path = tmp_path_factory.mktemp("stacked") / "model.safetensors"
    torch.manual_seed(0)
    shapes = {
        "experts": (8, 96, 130),
        "wide": (512, 4096),
        "tall": (4096, 516),
        "four": (2, 6, 34, 66),
        "bias": (4098,),
    }
    save_file({name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}, path)
    return path


def empty_like(wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(tensor, device=DEVICE) for name, tensor in wanted.items()}


def load_by(verb: str, path: Path, wanted: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Load the same weights by each of the public verbs."""
    if verb == "load":
        return dict(penstock.load(path, device=DEVICE, **options))
    if verb == "stream":
        with penstock.stream(path, device=DEVICE, **options) as tensors:
            return dict(tensors)
    if verb == "load_into":
        found = empty_like(wanted)
        addresses = {name: tensor.data_ptr() for name, tensor in found.items()}
        penstock.load_into(found, path, **options)
        assert {name: tensor.data_ptr() for name, tensor in found.items()} == addresses
        return found
    with penstock.safe_open(path, framework="pt", device=DEVICE) as file:
        return {name: file.get_tensor(name) for name in file.keys() if name in wanted}  # noqa: SIM118


VERBS = ["load", "stream", "load_into", "safe_open"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
def test_tensors_of_every_dtype_are_loaded(tmp_path: Path, verb: str, aligned: bool) -> None:
    path = tmp_path / "model.safetensors"
    made = {name: row for name, row in every_dtype(path, aligned=aligned).items() if torch_holds(name)}
    with theirs_open(path, framework="pt") as file:
        wanted = {name: file.get_tensor(name) for name in made}
    options = {} if verb == "safe_open" else {"names": torch_holds}
    found = load_by(verb, path, wanted, **options)
    assert_same(found, wanted)
    assert {name: bits(tensor)[2] for name, tensor in found.items()} == {name: row[2] for name, row in made.items()}


@pytest.mark.parametrize("verb", VERBS[:3])
def test_sharded_checkpoint_is_loaded(sharded: Path, verb: str) -> None:
    wanted = by_safetensors(sharded)
    assert_same(load_by(verb, sharded, wanted), wanted)


def test_repeated_loads_return_equal_tensors(sharded: Path) -> None:
    wanted = by_safetensors(sharded)
    for _ in range(3):
        assert_same(penstock.load(sharded, device=DEVICE), wanted)


def test_concurrent_loads_return_equal_tensors(sharded: Path) -> None:
    wanted = by_safetensors(sharded)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: penstock.load(sharded, device=DEVICE), range(4)):
            assert_same(found, wanted)


def test_device_without_index_selects_current_device(sharded: Path) -> None:
    assert_same(penstock.load(sharded, device="cuda", names="*norm*"), only(by_safetensors(sharded), "norm"))


def only(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if part in name}


@pytest.mark.gpus(2)
def test_load_to_non_current_device_succeeds(sharded: Path) -> None:
    found = penstock.load(sharded, device="cuda:1")
    assert torch.cuda.current_device() == 0
    assert_same(found, by_safetensors(sharded), device="cuda:1")


def test_names_option_reads_only_selected_tensors(sharded: Path) -> None:
    found = penstock.load(sharded, device=DEVICE, names="*layers.1.*")
    wanted = only(by_safetensors(sharded), ".layers.1.")
    assert_same(found, wanted)
    assert found.report.read_bytes < 1.2 * sum(tensor.nbytes for tensor in wanted.values()) + MIB


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_load_tensor_parallel_shards(stacked: Path, dim: int, rank: int) -> None:
    whole = load_file(stacked)
    boxes = {name: shard_box(tuple(t.shape), dim, rank, 2) for name, t in whole.items() if t.ndim > dim}
    wanted = {
        name: tensor[tuple(map(slice, boxes[name].start, boxes[name].stop))] if name in boxes else tensor
        for name, tensor in whole.items()
    }
    for options in ({}, {"settings": penstock.ReadSettings(memory_bytes=4 * MIB)}):
        assert_same(penstock.load(stacked, device=DEVICE, boxes=boxes, **options), wanted)


def test_inner_and_empty_slices_are_loaded(stacked: Path) -> None:
    whole = load_file(stacked)
    boxes = {
        "experts": Box(start=(3, 17, 5), stop=(6, 80, 128)),
        "wide": Box(start=(100, 1), stop=(101, 4095)),
        "bias": Box(start=(7,), stop=(7,)),
    }
    found = penstock.load(stacked, device=DEVICE, boxes=boxes)
    wanted = whole | {name: whole[name][tuple(map(slice, box.start, box.stop))] for name, box in boxes.items()}
    assert_same(found, wanted)


@pytest.mark.parametrize("verb", VERBS[:3])
def test_tensor_larger_than_staging_pool_is_loaded(tmp_path: Path, verb: str) -> None:
    torch.manual_seed(1)
    wanted = {"a": torch.randint(0, 255, (3,), dtype=torch.uint8), "large": torch.randn(24 * MIB // 4 + 77)}
    save_file(wanted, tmp_path / "model.safetensors")
    settings = penstock.ReadSettings(memory_bytes=4 * MIB)
    assert_same(load_by(verb, tmp_path / "model.safetensors", wanted, settings=settings), wanted)


def test_thousands_of_small_tensors_are_loaded(tmp_path: Path) -> None:
    write_moe(tmp_path, num_tensors=3000, tensor_bytes=10_000, shards=2)
    wanted = by_safetensors(tmp_path)
    assert_same(penstock.load(tmp_path, device=DEVICE), wanted)


def test_streamed_tensors_have_file_order_and_separate_memory(sharded: Path) -> None:
    wanted, order, kept = by_safetensors(sharded), [], {}
    for path in sorted(sharded.glob("*.safetensors")):
        with theirs_open(path, framework="pt") as file:
            order += file.offset_keys()
    with penstock.stream(sharded, device=DEVICE, settings=penstock.ReadSettings(memory_bytes=32 * MIB)) as tensors:
        for name, tensor in tensors:
            kept[name] = tensor
    assert list(kept) == order
    assert_same(kept, wanted)


def test_load_into_keeps_addresses_and_ties(sharded: Path) -> None:
    wanted = by_safetensors(sharded)
    module = torch.nn.Module()
    names = {name: name.replace(".", "_") for name in wanted}
    for name, tensor in wanted.items():
        kind = torch.nn.Parameter(torch.empty_like(tensor, device=DEVICE), requires_grad=False)
        module.register_parameter(names[name], kind)
    addresses = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    report = penstock.load_into(module, sharded, rename=names.__getitem__)
    assert report.nbytes == sum(tensor.nbytes for tensor in wanted.values())
    assert {name: parameter.data_ptr() for name, parameter in module.named_parameters()} == addresses
    assert_same({name: getattr(module, names[name]).data for name in wanted}, wanted)


def test_load_into_refuses_wrong_shape_before_writing(stacked: Path) -> None:
    targets = empty_like(load_file(stacked))
    for tensor in targets.values():
        tensor.fill_(3)
    targets["wide"] = torch.empty(512, 4095, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(penstock.PlanError) as caught:
        penstock.load_into(targets, stacked)
    assert "wide" in str(caught.value)
    assert not caught.value.mutated
    assert bool((targets["tall"] == 3).all())


def test_safe_open_slices_match_safetensors(stacked: Path) -> None:
    whole = load_file(stacked)
    with penstock.safe_open(stacked, framework="pt", device=DEVICE) as file:
        assert bits(file.get_slice("wide")[3:77, 5:]) == bits(whole["wide"][3:77, 5:])
        assert bits(file.get_slice("experts")[2, :, ::3]) == bits(whole["experts"][2, :, ::3])
        assert bits(file.get_slice("tall")[-1]) == bits(whole["tall"][-1])
        assert file.get_slice("tall")[:4].device == torch.device(DEVICE)


def test_http_source_loads_to_device(sharded: Path) -> None:
    with RangeServer(sharded) as server:
        uris = [f"{server.url}/{path.name}" for path in sorted(sharded.glob("*.safetensors"))]
        assert_same(penstock.load(uris, device=DEVICE), by_safetensors(sharded))
