"""torch DCP: all readers read checkpoints from `CheckpointWriter`. Saves may fail, be killed or be asynchronous."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.integration.dcp.test_dcp import ENVIRON, bits, failure, odd_state, sharded_model
from tests.support.ranks import run_ranks
from tests.support.servers.s3 import SwiftServer, Unavailable
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import penstock
from penstock.errors import ConfigError, DiskFull, PlanError
from penstock.storage.output import OutputSet
from penstock_dcp import CheckpointReader, CheckpointWriter
from penstock_dcp.staging import Staging

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def test_saved_values_of_every_kind_are_restored(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    writer = CheckpointWriter(place)
    dcp.save(odd_state(1), storage_writer=writer)
    report = penstock.verify(place)
    assert report.verified and report.revision == writer.revision
    state, reader = odd_state(2), CheckpointReader(place)
    dcp.load(state, storage_reader=reader)
    assert bits(state) == bits(odd_state(1)) and all(each.verified for each in reader.reports)
    # Without a state to fill, the planner builds it with the original nesting.
    dcp.save(odd_state(1), checkpoint_id=tmp_path / "own")
    theirs = _load_state_dict_from_keys(checkpoint_id=tmp_path / "own")
    assert bits(_load_state_dict_from_keys(storage_reader=reader)) == bits(theirs)


def test_saved_model_is_hugging_face_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    model = AutoModelForCausalLM.from_config(config)
    dcp.save(model.state_dict(), storage_writer=CheckpointWriter(tmp_path / "model"))
    config.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert bits(dict(again.state_dict())) == bits(dict(model.state_dict()))


def save_sharded(rank: int, world_size: int, place: str) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    model, optimizer = sharded_model(mesh)
    model(torch.full((2, 24), rank + 1.0)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    # Shard by columns too, with tensors larger than a digest's leaf, so that no rank has all bytes of a leaf.
    columns = torch.arange(300_000.0).reshape(300, 1000)
    state = {"model": weights, "optim": states, "columns": distribute_tensor(columns, mesh, [Shard(1)]), "step": 5}
    dcp.save(state, storage_writer=CheckpointWriter(place))
    return bits({name: tensor.full_tensor() for name, tensor in weights.items()})


def load_sharded(rank: int, world_size: int, place: str) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    results = []
    for reader in (CheckpointReader(place), HuggingFaceStorageReader(place)):
        model, optimizer = sharded_model(mesh)
        weights, _ = get_state_dict(model, optimizer)
        rows = distribute_tensor(torch.zeros(300, 1000), mesh, [Shard(0)])
        state = {"model": weights, "columns": rows}
        dcp.load(state, storage_reader=reader)
        assert torch.equal(rows.full_tensor(), torch.arange(300_000.0).reshape(300, 1000))
        results.append(bits(state))
    assert results[0] == results[1]
    state = {"optim": get_state_dict(*sharded_model(mesh))[1], "step": 0}
    dcp.load(state, storage_reader=CheckpointReader(place))
    assert state["step"] == 5
    return bits({name: tensor.full_tensor() for name, tensor in weights.items()})


def test_sharded_save_is_read_by_different_rank_count(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    saved = run_ranks(save_sharded, 4, str(place), environ=ENVIRON)
    assert [outcome.ended for outcome in saved] == ["returned"] * 4, saved
    assert penstock.verify(place).verified
    whole = load_file(place / "model.safetensors")
    assert bits({name: whole[f"model.{name}"] for name in saved[0].value}) == saved[0].value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]
    loaded = run_ranks(load_sharded, 2, str(place), environ=ENVIRON)
    assert [(outcome.ended, outcome.value) for outcome in loaded] == [("returned", saved[0].value)] * 2, loaded


def fail_or_die(rank: int, world_size: int, place: str, die: bool) -> Any:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(torch.full((64, 64), 2.0), mesh, [Shard(0)])}
    if rank == 1:

        def write(self: Any, file: int, offset: int, data: memoryview) -> None:
            if die:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ConfigError("a write that fails")

        OutputSet.write = write  # type: ignore[method-assign]
    try:
        dcp.save(state, storage_writer=CheckpointWriter(place, replace=True))
    except CheckpointException as error:
        return {rank: type(cause).__name__ for rank, (cause, _) in error.failures.items()}
    return None


@pytest.mark.parametrize("die", [False, True])
def test_interrupted_save_keeps_previous_checkpoint(tmp_path: Path, die: bool) -> None:
    place = tmp_path / "checkpoint"
    dcp.save({"w": torch.ones(64, 64)}, storage_writer=CheckpointWriter(place))
    before = penstock.verify(place).revision
    # A rank that lost another rank waits for the group's own timeout, so end it here.
    outcomes = run_ranks(fail_or_die, 2, str(place), die, environ=ENVIRON, timeout_s=25 if die else 60)
    if die:
        assert outcomes[1].ended == "died"
    else:
        assert [outcome.value for outcome in outcomes] == [{1: "ConfigError"}] * 2
    assert penstock.verify(place).revision == before
    # Its leftovers do not block the next save, which removes them.
    dcp.save({"w": torch.full((64, 64), 3.0)}, storage_writer=CheckpointWriter(place, replace=True))
    assert float(penstock.load(place)["w"].sum()) == 3 * 64 * 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


@pytest.mark.parametrize("fault", ["write", "publish", "room"])
def test_failed_save_does_not_affect_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    writer = CheckpointWriter(replace=True)

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise DiskFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(OutputSet, {"room": "allocate"}.get(fault, fault), fail)
        saved = dcp.async_save({"w": torch.ones(64)}, checkpoint_id=tmp_path / "1", storage_writer=writer)
        with pytest.raises(CheckpointException) as caught:
            saved.result()
    assert isinstance(failure(caught.value), DiskFull)
    if fault != "write":
        # The coordinator learns of the failure.
        assert not list(tmp_path.iterdir())
    dcp.async_save({"w": torch.ones(64)}, checkpoint_id=tmp_path / "2", storage_writer=writer).result()
    assert [path.name for path in tmp_path.iterdir()] == ["2"] and penstock.verify(tmp_path / "2").verified


def test_failed_staging_does_not_block_next_save(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoint")
    refused = dcp.async_save({"w": torch.ones(4), "meta": torch.ones(4, device="meta")}, storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        refused.result()
    assert isinstance(failure(caught.value), PlanError)
    begun = time.monotonic()
    dcp.async_save({"w": torch.ones(4)}, storage_writer=writer).result()
    assert time.monotonic() - begun < 10 and penstock.verify(tmp_path / "checkpoint").verified


def test_concurrent_saves_to_one_path_stay_separate(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"

    class Pausing(CheckpointWriter):
        """Run another complete save before this one writes."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            dcp.save({"w": torch.full((64, 64), 1.0)}, storage_writer=CheckpointWriter(place, replace=True))
            assert penstock.verify(place).verified
            return super().write_data(plan, planner)

    writer = Pausing(place, replace=True)
    dcp.save({"w": torch.full((64, 64), 2.0)}, storage_writer=writer)
    assert penstock.verify(place).revision == writer.revision
    assert float(penstock.load(place)["w"].sum()) == 2 * 64 * 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_unsupported_state_is_refused_before_replacing_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointWriter(place))
    before = penstock.verify(place).revision
    for state, kind, name in (
        ({"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex128)}, PlanError, "c"),
        ({"w": torch.ones(2), "o": {"x": object}}, PlanError, "o.x"),
    ):
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state, storage_writer=CheckpointWriter(place, replace=True))
        error = failure(caught.value)
        assert isinstance(error, kind) and error.tensor == name
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointWriter(place))
    assert isinstance(failure(caught.value), ConfigError)
    assert penstock.verify(place).revision == before


@pytest.mark.parametrize("staging_bytes", [None, "64K", "0"])
def test_async_save_captures_state_at_call(tmp_path: Path, staging_bytes: str | None) -> None:
    place = tmp_path / "checkpoint"
    writer = CheckpointWriter(place, replace=True, staging_bytes=staging_bytes)
    weight = torch.zeros(512, 512)
    state = {"w": weight, "tied": weight, "small": torch.zeros(10), "step": 0}
    for step in range(1, 4):
        weight.fill_(step)
        state["small"].fill_(step)
        state["step"] = step
        saved = dcp.async_save(state, storage_writer=writer)
        # Training goes on.
        weight.zero_()
        state["small"].zero_()
        saved.result()
        loaded = {"w": torch.zeros(512, 512), "small": torch.zeros(10), "step": 0}
        dcp.load(loaded, storage_reader=CheckpointReader(place))
        assert bits(loaded) == bits(
            {"w": torch.full((512, 512), step * 1.0), "small": torch.full((10,), step * 1.0), "step": step}
        )
    arena = writer._arena.numel()
    # Tied weights are written once, or the allowed values and no more.
    assert arena == {None: weight.nbytes + 64, "64K": 64 << 10, "0": 0}[staging_bytes]
    writer.close()


def test_failed_async_save_lets_training_continue(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    place.mkdir()
    (place / "something").touch()
    writer = CheckpointWriter(place, staging_bytes=0)
    saved = dcp.async_save({"w": torch.ones(4)}, storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        saved.result()
    assert isinstance(failure(caught.value), ConfigError)
    assert isinstance(writer, Staging)


def test_checkpoint_is_saved_to_object_store(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        SwiftServer.check()
    except Unavailable as error:
        pytest.skip(str(error))
    with SwiftServer(tmp_path_factory.mktemp("swift")) as server:
        options = server.storage_options
        server.make_bucket("models")
        uri = "s3://models/checkpoint"
        dcp.save(odd_state(1), storage_writer=CheckpointWriter(uri, scratch=tmp_path, storage_options=options))
        state = odd_state(2)
        reader = CheckpointReader(uri, storage_options=options)
        dcp.load(state, storage_reader=reader)
        assert bits(state) == bits(odd_state(1)) and all(report.verified for report in reader.reports)
        assert not list(tmp_path.iterdir())
        with pytest.raises(CheckpointException) as caught:
            dcp.save(odd_state(1), storage_writer=CheckpointWriter(uri, scratch=tmp_path, storage_options=options))
        assert isinstance(failure(caught.value), ConfigError)


def test_save_writes_into_empty_mount_point(small_disk: Any) -> None:
    disk = small_disk(16 << 20)
    dcp.save({"w": torch.full((64, 64), 2.0)}, storage_writer=CheckpointWriter(disk))
    assert penstock.verify(disk).verified and float(penstock.load(disk)["w"][0, 0]) == 2.0
    assert not [path.name for path in (*disk.iterdir(), *disk.parent.iterdir()) if path.name.startswith(".")]
    # Another directory cannot replace it, which is reported before anything is written.
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointWriter(disk, replace=True))
    assert isinstance(failure(caught.value), ConfigError) and "mount point" in str(failure(caught.value))
    assert penstock.verify(disk).verified


def test_save_keeps_unrelated_files(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointWriter(place))
    (place / "notes.txt").write_text("precious")
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.zeros(2)}, storage_writer=CheckpointWriter(place, replace=True))
    assert "notes.txt" in str(failure(caught.value)) and (place / "notes.txt").exists()
    (place / "notes.txt").unlink()
    dcp.save({"w": torch.zeros(2)}, storage_writer=CheckpointWriter(place, replace=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"]


def test_relative_path_is_not_read_as_repository_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointWriter("run/step-0"))
    dcp.save({"w": torch.ones(2)}, checkpoint_id="other/step-1", storage_writer=CheckpointWriter(Path("run/step-2")))
    assert [penstock.verify(place).verified for place in (tmp_path / "run/step-0", tmp_path / "other/step-1")] == [
        True
    ] * 2
