"""torch DCP: states with unusual containers, values, tensors and names are saved unchanged, or refused by name."""

from __future__ import annotations

import collections
import dataclasses
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.integration.dcp.test_dcp import ENVIRON, failure
from tests.support.ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException

import penstock
from penstock.errors import DestinationError, PenstockError, PlanError
from penstock_dcp import CheckpointReader, CheckpointWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable):UserWarning",
    "ignore:Sparse (CSR|invariant):UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
)


class Layers(list[Any]):
    """A subclass of list."""


def save(state: dict[str, Any], place: Path, *, in_background: bool, **options: Any) -> None:
    """Save a state. Raise the error of the first rank that failed."""
    writer = CheckpointWriter(place, **options)
    try:
        if in_background:
            dcp.async_save(state, storage_writer=writer).result()
        else:
            dcp.save(state, storage_writer=writer)
    except CheckpointException as error:
        raise failure(error) from error


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "UserDict": lambda tensor: collections.UserDict(x=tensor),
    "OrderedDict": lambda tensor: collections.OrderedDict(x=tensor),
    "defaultdict": lambda tensor: collections.defaultdict(int, x=tensor),
    "ChainMap": lambda tensor: collections.ChainMap({"x": tensor}),
    "proxy": lambda tensor: types.MappingProxyType({"x": tensor}),
    "ParameterDict": lambda tensor: torch.nn.ParameterDict({"x": tensor}),
    "nested": lambda tensor: {"x": Layers([collections.UserDict(y=Layers([tensor]))])},
    "list": lambda tensor: Layers([tensor]),
    "view": lambda tensor: {"x": tensor[2:4], "y": tensor.reshape(2, -1).t()},
}


@pytest.mark.parametrize("staging_bytes", [None, 0])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_background_save_captures_tensors_at_call(tmp_path: Path, kind: str, staging_bytes: int | None) -> None:
    tensor = torch.full((64,), 1.0)
    writer = CheckpointWriter(tmp_path / "checkpoint", staging_bytes=staging_bytes)
    saved = dcp.async_save({"w": CONTAINERS[kind](tensor)}, storage_writer=writer)
    tensor.fill_(7.0)
    saved.result()
    found = penstock.load(tmp_path / "checkpoint")
    assert found and all(bool((each == 1.0).all()) for each in found.values())


def test_background_save_captures_values_at_call(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    state: dict[str, Any] = {
        "seen": {1},
        "steps": [1, [2]],
        "of": Layers([1]),
        "rates": {"lr": [0.1]},
        "pair": ([1], 2),
    }
    saved = dcp.async_save(state, storage_writer=CheckpointWriter(place))
    state["seen"].add(99)
    state["steps"][1].append(99)
    state["of"].append(99)
    state["rates"]["lr"][0] = 9.0
    state["pair"][0].append(99)
    saved.result()
    loaded: dict[str, Any] = {"seen": set(), "steps": [], "of": [], "rates": {"lr": []}, "pair": ()}
    dcp.load(loaded, storage_reader=CheckpointReader(place))
    assert loaded == {"seen": {1}, "steps": [1, [2]], "of": [1], "rates": {"lr": [0.1]}, "pair": ([1], 2)}


def test_views_of_shared_memory_are_saved_separately(tmp_path: Path) -> None:
    values = torch.arange(4.0).to(torch.complex64) * (1 + 2j)
    state = {"z": values, "conjugate": values.conj(), "imag": values.conj().imag, "one": torch.arange(4.0)[::2][:1]}
    for name, in_background in (("foreground", False), ("background", True)):
        save(dict(state), tmp_path / name, in_background=in_background)
        found = penstock.load(tmp_path / name)
        assert all(torch.equal(found[key], tensor.resolve_conj().resolve_neg()) for key, tensor in state.items())


@dataclasses.dataclass
class Holder:
    """A user's class with a tensor."""

    w: torch.Tensor


Pair = collections.namedtuple("Pair", "a b")

REFUSED_VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda tensor: (tensor,),
    "namedtuple": lambda tensor: Pair(tensor, 1),
    "deque": lambda tensor: collections.deque([tensor]),
    "UserList": lambda tensor: collections.UserList([tensor]),
    "set": lambda tensor: {tensor},
    "dataclass": Holder,
    "object in a list": lambda tensor: [1, Holder(tensor)],
    "lock": lambda tensor: threading.Lock(),
    "numpy": lambda tensor: np.ones(3),
    "numpy scalar": lambda tensor: np.float32(3),
}


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", REFUSED_VALUES)
def test_error_names_unsupported_object(tmp_path: Path, kind: str, in_background: bool) -> None:
    state = {"fine": torch.ones(2), "odd": REFUSED_VALUES[kind](torch.ones(3))}
    with pytest.raises(PlanError) as caught:
        save(state, tmp_path / "checkpoint", in_background=in_background)
    assert caught.value.tensor == "odd"
    assert not (tmp_path / "checkpoint").exists()


def freed() -> torch.Tensor:
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(3))


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


REFUSED_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "jagged": jagged,
    "meta": lambda: torch.empty(3, device="meta"),
    "freed": freed,
    "fake": fake,
    "complex128": lambda: torch.ones(3, dtype=torch.complex128),
    "int4": lambda: torch.ones(4, dtype=torch.uint8).view(torch.int4),
}


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("kind", REFUSED_TENSORS)
def test_tensor_without_bytes_is_refused(tmp_path: Path, kind: str, in_background: bool) -> None:
    with pytest.raises(PlanError) as caught:
        save(
            {"fine": torch.ones(2), "odd": REFUSED_TENSORS[kind]()},
            tmp_path / "checkpoint",
            in_background=in_background,
        )
    assert caught.value.tensor == "odd"
    assert not (tmp_path / "checkpoint").exists()


def test_background_save_refuses_nested_and_lazy_tensors(tmp_path: Path) -> None:
    # In the foreground torch's own planner raises before it calls the writer.
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for odd in (nested, torch.nn.LazyLinear(3).weight, torch.ones(3, 3).to_mkldnn()):
        with pytest.raises(PlanError):
            save({"odd": odd}, tmp_path / "checkpoint", in_background=True)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
@pytest.mark.parametrize("value", [7, torch.ones(3)], ids=["value", "tensor"])
def test_invalid_tensor_name_keeps_old_checkpoint(tmp_path: Path, value: Any, name: str, in_background: bool) -> None:
    place = tmp_path / "checkpoint"
    save({"w": torch.ones(3)}, place, in_background=False)
    with pytest.raises(PlanError) as caught:
        save({name: value, "w": torch.zeros(3)}, place, in_background=in_background, replace=True)
    assert caught.value.tensor == name and not caught.value.mutated
    assert penstock.verify(place).verified and float(penstock.load(place)["w"][0]) == 1.0
    assert list(tmp_path.iterdir()) == [place]


def test_unusual_tensor_names_are_restored(tmp_path: Path) -> None:
    names = ["", "a\0b", "a\nb", 'a"b\\', "../x", "\U0001f600", "x" * 5000]
    save({name: torch.full((2,), float(row)) for row, name in enumerate(names)}, tmp_path / "it", in_background=True)
    found = penstock.load(tmp_path / "it")
    assert [float(found[name][0]) for name in names] == [float(row) for row in range(len(names))]


@pytest.mark.parametrize("at", [0, 20, None])
def test_corrupt_new_files_keep_old_checkpoint(tmp_path: Path, at: int | None) -> None:
    place = tmp_path / "checkpoint"
    save({"w": torch.ones(64)}, place, in_background=False)

    class Damaging(CheckpointWriter):
        """Writes to a disk that loses data before the checkpoint is published."""

        def finish(self, metadata: Any, results: Any) -> None:
            [file] = [file for file in tmp_path.glob("*/model.safetensors") if file.parent != place]
            with file.open("r+b") as stream:
                if at is None:
                    stream.truncate(100)
                else:
                    stream.seek(at)
                    stream.write(b"\0\0\0\0")
            super().finish(metadata, results)

    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.zeros(64)}, storage_writer=Damaging(place, replace=True))
    error = failure(caught.value)
    assert isinstance(error, PenstockError) and (at is None or isinstance(error, DestinationError)), error
    assert penstock.verify(place).verified and float(penstock.load(place)["w"][0]) == 1.0


def save_with_one_odd_rank(rank: int, world_size: int, place: str) -> Any:
    state = {f"w{rank}": torch.ones(4), f"odd{rank}": freed() if rank == 1 else torch.ones(2)}
    try:
        dcp.async_save(state, storage_writer=CheckpointWriter(place)).result(timeout=60)
    except CheckpointException as error:
        return {number: (type(cause).__name__, cause.tensor) for number, (cause, _) in error.failures.items()}
    return None


def test_invalid_state_on_one_rank_fails_all_ranks(tmp_path: Path) -> None:
    outcomes = run_ranks(save_with_one_odd_rank, 2, str(tmp_path / "checkpoint"), environ=ENVIRON)
    assert [outcome.value for outcome in outcomes] == [{1: ("PlanError", "odd1")}] * 2
    assert not (tmp_path / "checkpoint").exists()
