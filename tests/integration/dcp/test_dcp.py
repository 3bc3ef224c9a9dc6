"""torch DCP: `CheckpointReader` reads checkpoints from torch's own writers bit for bit like torch's readers."""

from __future__ import annotations

import copy
import enum
import io
import json
import os
import pickle
import re
import shutil
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tests.support.ranks import run_ranks
from tests.support.servers.http_server import RangeServer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import penstock
from penstock.errors import (
    FormatError,
    IntegrityError,
    NotFound,
    PenstockError,
    PlanError,
    SourceChanged,
    SourceTruncated,
)
from penstock.testing.checkpoints import write_llama
from penstock_dcp import CheckpointReader, local_files

# DCP warns in every call without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ENVIRON = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def bits(value: Any) -> Any:
    """Return a value for comparisons that is equal if every bit is."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [bits(part) for part in value]
    return type(value), value


def odd_state(seed: int) -> dict[str, Any]:
    """Return a model, its optimizer, and values of every kind that DCP stores."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": seed,
        "nothing": None,
        "ordered": OrderedDict(a=1, b=[1, (3.5, True)]),
        "bytes": b"\x00\xff" * seed,
        "dtype": torch.float16,
        "size": torch.Size([seed, 2]),
        "set": {seed},
        "large": -(1 << 70) * seed,
        "transposed": (torch.arange(12.0).reshape(3, 4) * seed).t(),
        "bf16": torch.full((7, 3), seed, dtype=torch.bfloat16),
        "fp8": torch.full((4, 4), seed).to(torch.float8_e4m3fn),
        "u16": torch.full((3,), seed, dtype=torch.uint16),
        "scalar": torch.tensor(5.0 * seed),
        "empty": torch.zeros(0, 3),
    }


def failure(error: CheckpointException, rank: int = 0) -> PenstockError:
    cause = error.failures[rank][0]
    assert isinstance(cause, PenstockError), cause
    return cause


def load_raises(state: dict[str, Any], reader: CheckpointReader) -> PenstockError:
    """Return the error of a load, after checking that it left every tensor unchanged."""
    before = bits(state)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader)
    assert bits(state) == before
    return failure(caught.value)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in DCP's own format."""
    place = tmp_path_factory.mktemp("own") / "checkpoint"
    dcp.save(odd_state(1), checkpoint_id=place)
    return place


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama") / "model"
    write_llama(place, num_layers=1, hidden=128, fp8=False, shards=2)
    return place


def empty_like(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        state |= {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    return state


def test_loaded_dcp_checkpoint_matches_torch_reader(own: Path) -> None:
    mine, theirs = odd_state(2), odd_state(2)
    dcp.load(mine, storage_reader=CheckpointReader(own))
    dcp.load(theirs, checkpoint_id=own)
    assert bits(mine) == bits(theirs)
    assert bits(mine) == bits(odd_state(1))


class OlderPickler(pickle.Pickler):
    """Writes members of enums as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_metadata_pickled_by_older_python_is_read(own: Path, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    shutil.copytree(own, place)
    metadata = pickle.loads((place / ".metadata").read_bytes())  # noqa: S301
    written = io.BytesIO()
    OlderPickler(written, 4).dump(metadata)
    assert b"getattr" in written.getvalue()
    (place / ".metadata").write_bytes(written.getvalue())
    state = odd_state(2)
    dcp.load(state, storage_reader=CheckpointReader(place))
    assert bits(state) == bits(odd_state(1))


def test_each_target_tensor_is_written_once(own: Path) -> None:
    state = odd_state(2)
    before = {name: tensor.data_ptr() for name, tensor in state["model"].items()}
    reader = CheckpointReader(own)
    dcp.load(state, storage_reader=reader)
    assert {name: tensor.data_ptr() for name, tensor in state["model"].items()} == before
    tensors = reader.reports[-1]
    # Small tensors lie between the records of their archives, which are read rather than skipped.
    assert tensors.nbytes <= tensors.read_bytes <= sum(f.stat().st_size for f in own.glob("*.distcp"))


def test_hugging_face_checkpoint_matches_torch_reader(llama: Path) -> None:
    mine, theirs = empty_like(llama), empty_like(llama)
    reader = CheckpointReader(llama)
    dcp.load(mine, storage_reader=reader)
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(llama)))
    assert bits(mine) == bits(theirs)
    assert not reader.reports[0].verified and "no manifest" in reader.reports[0].why


def test_state_with_overlapping_tensors_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.full((48,), 3.0), "b": torch.ones(6)}, tmp_path / "m.safetensors")
    memory = torch.zeros(60)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"a": memory[:48], "b": memory[45:51]}, storage_reader=CheckpointReader(tmp_path))
    assert isinstance(raised.value.failures[0][0], PlanError) and not memory.any()
    weight = torch.ones(48, requires_grad=True)
    loss = (weight * weight).sum()
    dcp.load({"a": weight.detach(), "b": memory[:6]}, storage_reader=CheckpointReader(tmp_path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_casts_and_strided_tensors_match_torch_reader(llama: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    shape = empty_like(llama)[name].shape
    results = []
    for reader in (CheckpointReader(llama), HuggingFaceStorageReader(str(llama))):
        state = {name: torch.zeros(shape[1], shape[0], dtype=torch.float32).t()}
        dcp.load(state, storage_reader=reader)
        results.append(bits(state))
    assert results[0] == results[1]
    error = load_raises({name: torch.zeros(shape)}, CheckpointReader(llama, cast=False))
    assert isinstance(error, PlanError) and error.tensor == name


def test_manifest_verification_detects_corruption(llama: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(llama, place)
    penstock.manifest(place)
    reader = CheckpointReader(place)
    dcp.load(empty_like(place), storage_reader=reader)
    assert reader.reports[0].verified
    file = sorted(place.glob("*.safetensors"))[0]
    raw = bytearray(file.read_bytes())
    raw[-10] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(empty_like(place), storage_reader=CheckpointReader(place))
    error = failure(caught.value)
    assert isinstance(error, IntegrityError) and error.mutated and file.name in str(error)


def odd_targets(directory: Path) -> dict[str, torch.Tensor]:
    """Return targets for direct reads and targets for copies, such as strided ones or ones with a different dtype."""
    state: dict[str, torch.Tensor] = empty_like(directory)
    for number, (name, tensor) in enumerate(sorted(state.items())):
        if number % 3 == 1:
            state[name] = tensor.float()
        elif number % 3 == 2 and tensor.ndim == 2:
            state[name] = torch.zeros_like(tensor.t()).t()
    return state


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("is_cold", [False, True])
def test_local_checkpoint_loads_into_all_kinds_of_targets(
    llama: Path, threads: str, is_cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_FETCH_THREADS", threads)
    monkeypatch.setattr(local_files, "_THREAD_BYTES", 1 << 10)
    mine, theirs = odd_targets(llama), odd_targets(llama)
    dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(llama)))
    if is_cold:
        for file in llama.glob("*.safetensors"):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reader = CheckpointReader(llama)
    dcp.load(mine, storage_reader=reader)
    assert bits(mine) == bits(theirs)
    (report,) = reader.reports
    assert report.read_bytes == report.nbytes and "mmap" in {file.path for file in report.files}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_truncated_checkpoint_error_names_file(llama: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(llama, place)
    name = "model.layers.0.self_attn.q_proj.weight"
    file = next(file for file in place.glob("*.safetensors") if name in load_file(file))

    class Cutting(DefaultLoadPlanner):
        """Truncate the file after all files were opened and checked."""

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            os.truncate(file, 4096)
            return super().resolve_tensor(read_item)

    target = torch.zeros(empty_like(llama)[name].shape, dtype=dtype)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({name: target}, storage_reader=CheckpointReader(place), planner=Cutting())
    error = failure(caught.value)
    assert isinstance(error, SourceTruncated | SourceChanged) and error.uri == str(file)
    assert error.mutated or not target.any()


def test_digest_mismatch_leaves_cast_target_unchanged(llama: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(llama, place)
    penstock.manifest(place)
    name = "model.layers.0.self_attn.q_proj.weight"
    file = next(file for file in place.glob("*.safetensors") if name in load_file(file))
    raw = file.read_bytes()
    at = raw.index(load_file(file)[name].view(torch.uint8).numpy().tobytes())
    file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    target = torch.zeros(empty_like(llama)[name].shape)
    error = load_raises({name: target}, CheckpointReader(place))
    assert isinstance(error, IntegrityError) and error.tensor == name and not error.mutated


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_checkpoint_is_loaded_over_http(kind: str, request: pytest.FixtureRequest) -> None:
    place: Path = request.getfixturevalue(kind)
    with RangeServer(place) as server:
        if kind == "own":
            state, expected = odd_state(2), odd_state(1)
        else:
            state, expected = empty_like(place), penstock.load(place)
        dcp.load(state, storage_reader=CheckpointReader(server.url))
        assert bits(state) == bits(dict(expected))
        # No byte of a body or description is requested twice, except the first byte of each file.
        assert server.num_bytes_sent < 1.1 * sum(f.stat().st_size for f in place.iterdir()) + (64 << 10)


def sharded_model(mesh: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    # 30 rows over 4 ranks make shards of different sizes, and some ranks have no part of the last bias.
    model = torch.nn.Sequential(torch.nn.Linear(24, 30), torch.nn.Linear(30, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save_sharded(rank: int, world_size: int, place: str, hugging_face: str) -> Any:
    model, optimizer = sharded_model(init_device_mesh("cpu", (world_size,)))
    model(torch.full((2, 24), rank + 1.0)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states, "rng": torch.tensor([7])}, checkpoint_id=place)
    dcp.save(dict(weights), storage_writer=HuggingFaceStorageWriter(hugging_face, save_distributed=True))
    return bits({name: tensor.full_tensor() for name, tensor in weights.items()})


def load_sharded(rank: int, world_size: int, place: str, hugging_face: str) -> Any:
    """Load model and optimizer with both readers, then columns of each matrix from both formats."""
    results = []
    for reader in (CheckpointReader(place), dcp.FileSystemReader(place)):
        model, optimizer = sharded_model(init_device_mesh("cpu", (world_size,)))
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": states, "rng": torch.tensor([0])}
        dcp.load(state, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        results.append(bits([state, optimizer.state_dict()]))
    assert results[0] == results[1]
    mesh = init_device_mesh("cpu", (world_size,))
    for uri, prefix in ((place, "model."), (hugging_face, "")):
        columns = {}
        readers = (CheckpointReader(uri), HuggingFaceStorageReader(uri) if not prefix else dcp.FileSystemReader(uri))
        for reader in readers:
            state = {
                f"{prefix}0.weight": distribute_tensor(torch.zeros(30, 24), mesh, [Shard(1)]),
                f"{prefix}1.bias": distribute_tensor(torch.zeros(3), mesh, [Replicate()]),
            }
            dcp.load(state, storage_reader=reader)
            columns[type(reader)] = bits(state)
        assert len(set(map(str, columns.values()))) == 1 and len(columns) == 2
    return bits({name: tensor.full_tensor() for name, tensor in weights.items()})


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Any]:
    """Write a checkpoint from 4 ranks in DCP's format and one in safetensors. Return the model's bits."""
    root = tmp_path_factory.mktemp("sharded")
    places = str(root / "own"), str(root / "hf")
    outcomes = run_ranks(save_sharded, 4, *places, environ=ENVIRON)
    assert [outcome.ended for outcome in outcomes] == ["returned"] * 4, outcomes
    return *places, outcomes[0].value


@pytest.mark.parametrize("world_size", [2, 1])
def test_resharding_matches_torch_readers(sharded: tuple[str, str, Any], world_size: int) -> None:
    own, hugging_face, expected = sharded
    outcomes = run_ranks(load_sharded, world_size, own, hugging_face, environ=ENVIRON)
    assert [(outcome.ended, outcome.value) for outcome in outcomes] == [("returned", expected)] * world_size


def load_half(rank: int, world_size: int, url: str) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(4) for part in "qo"]
    state = {
        name: DTensor.from_local(torch.zeros(256, 512, dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False)
        for name in names
    }
    reader = CheckpointReader(url)
    dcp.load(state, storage_reader=reader)
    return reader.reports[0].read_bytes, sum(tensor.to_local().nbytes for tensor in state.values())


def test_each_rank_reads_only_its_bytes(tmp_path: Path) -> None:
    write_llama(tmp_path, num_layers=4, hidden=512, vocab=512, fp8=False, shards=1)
    with RangeServer(tmp_path) as server:
        outcomes = run_ranks(load_half, 2, server.url, environ=ENVIRON)
    # A matrix has 512 KiB, so between the halves of two neighbours lies the same amount for the other rank.
    assert [outcome.value for outcome in outcomes] == [(8 << 18, 8 << 18)] * 2


def load_damaged(rank: int, world_size: int, place: str) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"model.0.weight": distribute_tensor(torch.zeros(30, 24), mesh, [Shard(0)])}
    try:
        dcp.load(state, storage_reader=CheckpointReader(place))
    except CheckpointException as error:
        causes = {r: (type(e).__name__, getattr(e, "uri", "")) for r, (e, _) in error.failures.items()}
        return causes, float(state["model.0.weight"].to_local().abs().sum())
    return None


def test_missing_shard_on_one_rank_fails_all_ranks(sharded: tuple[str, str, Any], tmp_path: Path) -> None:
    place = tmp_path / "own"
    shutil.copytree(sharded[0], place)
    missing = place / "__3_0.distcp"
    missing.unlink()
    outcomes = run_ranks(load_damaged, 2, str(place), environ=ENVIRON)
    # Rank 0 needs only the first half. It learns of the failure too, before it reads a byte.
    assert [outcome.value for outcome in outcomes] == [({1: ("NotFound", str(missing))}, 0.0)] * 2


def test_corrupt_dcp_checkpoint_raises_before_writing(own: Path, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"

    def damaged() -> Path:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(own, place)
        return next(place.glob("*.distcp"))

    body = damaged()
    body.unlink()
    error = load_raises(odd_state(2), CheckpointReader(place))
    assert isinstance(error, NotFound) and error.uri == str(body)

    body = damaged()
    with body.open("r+b") as file:
        file.truncate(body.stat().st_size // 2)
    error = load_raises(odd_state(2), CheckpointReader(place))
    assert isinstance(error, SourceTruncated) and error.uri == str(body)

    # The dtype in the file differs from the metadata.
    damaged()
    metadata = place / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"\x8c\x07float32", b"\x8c\x05int32", 1))
    raw = bytearray(metadata.read_bytes())
    raw[3:11] = struct.pack("<Q", len(raw) - 11)
    metadata.write_bytes(raw)
    error = load_raises(odd_state(2), CheckpointReader(place))
    assert isinstance(error, FormatError) and "torch.float32" in str(error) and error.uri is not None

    body = damaged()
    body.write_bytes(bytes(body.stat().st_size))
    error = load_raises(odd_state(2), CheckpointReader(place))
    assert isinstance(error, FormatError) and error.uri == str(body)

    damaged()
    (place / ".metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    error = load_raises(odd_state(2), CheckpointReader(place))
    assert isinstance(error, FormatError) and "posix.system" in str(error) and str(error.uri).endswith(".metadata")


class Runs:
    """A value whose pickle executes code."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_checkpoint_with_pickled_code_is_rejected(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    state = {"weight": torch.ones(3), "hook": Runs(str(mark))}
    dcp.save(dict(state), checkpoint_id=tmp_path / "checkpoint")
    mark.unlink(missing_ok=True)
    target = {"weight": torch.zeros(3), "hook": 0}
    error = load_raises(target, CheckpointReader(tmp_path / "checkpoint"))
    assert isinstance(error, FormatError) and error.tensor == "hook" and not mark.exists()
    # The original reader executes it.
    dcp.load(target, checkpoint_id=tmp_path / "checkpoint")
    assert mark.exists()


def test_corrupt_hugging_face_checkpoint_raises_before_writing(llama: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    state = empty_like(llama)
    shutil.copytree(llama, place)
    first, second = sorted(place.glob("*.safetensors"))
    kept = second.read_bytes()
    second.unlink()
    error = load_raises(copy.deepcopy(state), CheckpointReader(place))
    assert isinstance(error, NotFound) and error.uri == str(second)
    second.write_bytes(kept[:-1])
    error = load_raises(copy.deepcopy(state), CheckpointReader(place))
    assert isinstance(error, SourceTruncated) and error.uri == str(second)
    assert isinstance(load_raises(state, CheckpointReader(tmp_path / "nowhere")), NotFound)
    del first


@pytest.mark.parametrize(
    "info",
    ["{", "[]", "{}", '{"w": {"saved_offsets": [-1, 0]}}', '{"w": {"saved_offsets": [0]}}', '{"w": 3}',
     '{"w": {"saved_offsets": [9223372036854775807, 0]}}', '{"w": {"saved_offsets": [2, 0]}}'],
)  # fmt: skip
def test_hostile_sharding_metadata_is_rejected(info: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 2)}, tmp_path / "a.safetensors", metadata={"DCP_SHARDING_INFO": info})
    error = load_raises({"w": torch.zeros(4, 2)}, CheckpointReader(tmp_path))
    assert isinstance(error, FormatError) and str(tmp_path) in str(error.uri)


def test_missing_tensor_shard_error_names_tensor(sharded: tuple[str, str, Any], tmp_path: Path) -> None:
    place = tmp_path / "hf"
    shutil.copytree(sharded[1], place)
    sorted(place.glob("*.safetensors"))[1].unlink()
    error = load_raises({"0.weight": torch.zeros(30, 24)}, CheckpointReader(place))
    assert isinstance(error, FormatError) and error.tensor is not None and json.dumps("missing")[1:-1] in str(error)


def test_documented_dcp_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_llama(tmp_path / "llama", num_layers=1, hidden=64, vocab=256, fp8=False, shards=2)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[3] / "docs" / "train" / "dcp.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        exec(compile(block, str(page), "exec"), names)
    assert bits(dict(names["model"].state_dict())) == bits(dict(penstock.load("llama")))
    assert penstock.verify("step-2000").revision == penstock.verify("step-1000").revision
    assert "NotFound" in capsys.readouterr().out
