"""Targets, dtypes, sizes and identities that a fetch fills or rejects."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.integration.conftest import Host, assert_fetched
from tests.support.compare import assert_same, bits, by_safetensors
from tests.support.every_dtype import every_dtype
from tests.support.fleet import digests
from tests.support.moe import write_moe

import penstock as ps
from penstock.errors import NotFound, PlanError
from penstock.hub.messages import WhyRequest
from penstock.types import MIB, DType


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.head = torch.nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def tied(tmp_path: Path) -> tuple[Path, Tied]:
    torch.manual_seed(3)
    model = Tied()
    torch.nn.init.normal_(model.norm.weight)
    parameters = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(parameters, tmp_path / "model.safetensors")
    return tmp_path, model


@pytest.mark.parametrize("fallback", [True, False])
def test_module_is_filled_in_place(host: Host, tied: tuple[Path, Tied], fallback: bool) -> None:
    path, truth = tied
    holder = host.start(fallback=str(path))
    holder.wait_for("digests")
    model = Tied()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with ps.join("m") as fleet:
        report = fleet.fetch(model, fallback=path if fallback else None)
    assert report.storage_bytes == 0 and report.nbytes == sum(report.nbytes_by_path.values())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert model.head.weight is model.embed.weight
    assert_same(model.state_dict(), truth.state_dict())


def test_fetch_rejects_overlapping_targets_and_notifies_autograd(host: Host, tmp_path: Path) -> None:
    save_file({"a": torch.ones(48), "b": torch.full((6,), 2.0)}, tmp_path / "m.safetensors")
    memory, weight = torch.zeros(60), torch.zeros(48, requires_grad=True)
    loss = (weight * weight).sum()
    with ps.join("m") as fleet:
        for fallback in (tmp_path, None):
            with pytest.raises(PlanError, match="share part of their memory"):
                fleet.fetch({"a": memory[:48], "b": memory[45:51]}, fallback=fallback)
        assert not memory.any()
        fleet.fetch({"a": weight, "b": memory[:6]}, fallback=tmp_path)
        assert memory[:6].tolist() == [2.0] * 6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_fetched_dict_is_filled_and_served(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(fallback=str(small_checkpoint))
    assert_fetched(holder, expected_tensors)
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected_tensors.items()}
    before = {name: tensor.data_ptr() for name, tensor in targets.items()}
    with ps.join("m") as fleet:
        fleet.fetch(targets)
        assert {name: tensor.data_ptr() for name, tensor in targets.items()} == before
        assert_same(targets, expected_tensors)
        holder.kill()
        late = assert_fetched(host.start(), expected_tensors)
        assert [path.partition(" <- ")[2] for path in late["paths"]] == [fleet.member.id[:8]]


def test_fetched_tensors_match_for_every_dtype(host: Host, tmp_path: Path) -> None:
    made = every_dtype(tmp_path / "model.safetensors", aligned=False, skip={DType.F6_E2M3, DType.F6_E3M2})
    first = host.start(fallback=str(tmp_path))
    first.wait_for("digests")
    weights: dict[str, torch.Tensor] = {}
    with ps.join("m") as fleet:
        report = fleet.fetch(weights)
    assert report.storage_bytes == 0
    assert_same(weights, ps.load(tmp_path))
    assert {name: bits(tensor)[2] for name, tensor in weights.items()} == {n: raw for n, (*_, raw) in made.items()}


def test_empty_tensors_are_fetched(host: Host, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(0, 8), "b": torch.zeros(0, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with ps.join("m") as one, ps.join("m") as other:
        first: dict[str, torch.Tensor] = {}
        second: dict[str, torch.Tensor] = {}
        one.fetch(first, fallback=tmp_path)
        report = other.fetch(second)
        assert_same(second, by_safetensors(tmp_path))
    assert report.nbytes == 0 and not report.nbytes_by_path


def test_large_and_many_small_tensors_are_fetched(host: Host, tmp_path: Path) -> None:
    write_moe(tmp_path, num_tensors=3000, tensor_bytes=1 << 10, shards=3)
    torch.manual_seed(1)
    save_file({"large": torch.randint(0, 255, (5 * MIB + 3,), dtype=torch.uint8)}, tmp_path / "large.safetensors")
    files = sorted(tmp_path.glob("*.safetensors"))
    truth = by_safetensors(tmp_path)
    with ps.join("m") as one, ps.join("m") as other:
        first: dict[str, torch.Tensor] = {}
        one.fetch(first, fallback=files)
        targets = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
        report = other.fetch(targets)
    assert_same(first, truth)
    assert_same(targets, truth)
    assert report.storage_bytes == 0 and report.num_tensors == 3001


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("role", {"variant": ps.Variant(role="draft")}),
        ("quantization", {"variant": ps.Variant(quantization={"bits": 8})}),
        ("dtype", {"variant": ps.Variant(dtype="F16")}),
        ("parallel", {"variant": ps.Variant(parallel={"tp": "1/2"})}),
        ("post_processing", {"variant": ps.Variant(post_processing="fused-qkv")}),
        ("engine", {"variant": ps.Variant(engine="vllm 0.11")}),
        ("device_capability", {"variant": ps.Variant(device_capability="9.0")}),
        ("revision", {"revision": "other"}),
    ],
)
def test_weights_with_different_identity_are_not_exchanged(
    host: Host, small_checkpoint: Path, expected_tensors, field: str, other: dict
) -> None:
    with ps.join("m") as holder, ps.join("m", **other) as reader:
        first: dict[str, torch.Tensor] = {}
        holder.fetch(first, fallback=small_checkpoint)
        weights: dict[str, torch.Tensor] = {}
        with pytest.raises(NotFound, match=field):
            reader.fetch(weights, timeout_s=0.0)
        assert not weights
        why = reader.member.hub.why(WhyRequest(model="m", identity=reader.identity))
        assert any(field in line for line in why.lines), why.lines
        report = reader.fetch(weights, fallback=small_checkpoint)
        assert list(report.nbytes_by_path) == [f"storage {small_checkpoint}"]
        assert digests(weights) == digests(expected_tensors)


def test_target_with_different_layout_is_refused(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    with ps.join("m") as holder, ps.join("m") as reader:
        first: dict[str, torch.Tensor] = {}
        holder.fetch(first, fallback=small_checkpoint)
        half = {name: torch.zeros_like(tensor) for name, tensor in list(expected_tensors.items())[::2]}
        with pytest.raises(NotFound, match="layout"):
            reader.fetch(half, timeout_s=0.0)
        with pytest.raises(PlanError):
            reader.fetch(half, fallback=small_checkpoint)
        assert not any(tensor.any() for tensor in half.values())


def test_fetches_of_several_models_stay_separate(
    host: Host, small_checkpoint: Path, expected_tensors, tmp_path: Path
) -> None:
    save_file({"d": torch.arange(9)}, tmp_path / "model.safetensors")
    with ps.join("m") as target, ps.join("m", variant=ps.Variant(role="draft")) as draft, ps.join("other") as other:
        got: list[dict[str, torch.Tensor]] = [{}, {}, {}]
        target.fetch(got[0], fallback=small_checkpoint)
        draft.fetch(got[1], fallback=tmp_path)
        other.fetch(got[2], fallback=small_checkpoint)
        with ps.join("m", variant=ps.Variant(role="draft")) as late:
            weights: dict[str, torch.Tensor] = {}
            late.fetch(weights)
            assert weights["d"].tolist() == list(range(9))
        with ps.join("m") as late:
            weights = {}
            late.fetch(weights)
            assert digests(weights) == digests(expected_tensors)


@pytest.mark.parametrize("same_name", [True, False])
def test_host_name_does_not_affect_transport_choice(
    host: Host, small_checkpoint: Path, monkeypatch, same_name: bool
) -> None:
    """Names are for people. Containers on many hosts may have the same name, and one host may have two."""
    names = itertools.count()
    monkeypatch.setattr("socket.gethostname", lambda: "node" if same_name else f"node{next(names)}")
    if same_name:
        monkeypatch.setattr("penstock.peer.member.host_id", lambda: f"host {next(names)}")
    with (
        ps.join("m", connection=ps.ConnectionSettings(listen="localhost:0")) as holder,
        ps.join("m", connection=ps.ConnectionSettings(listen="127.0.0.1:0")) as reader,
    ):
        holder.fetch({}, fallback=small_checkpoint)
        report = reader.fetch({})
        path = "http" if same_name else "shm"
        assert list(report.nbytes_by_path) == [f"{path} <- {holder.member.id[:8]}"]


def test_offered_tensors_are_fetched_until_fenced(host: Host) -> None:
    torch.manual_seed(2)
    tensors = {f"t{i}": torch.randn(300, 70) for i in range(5)}
    with ps.join("m") as one, ps.join("m") as other:
        key = one.offer(tensors)
        weights: dict[str, torch.Tensor] = {}
        report = other.fetch(weights)
        assert report.key == key
        assert_same(weights, tensors)
        one.fence()
        tensors["t0"].add_(1)
        with pytest.raises(NotFound), ps.join("m") as third:
            other.leave()
            third.fetch({}, timeout_s=0.0)


def test_fetched_bytes_do_not_depend_on_file_boundaries(host: Host, tmp_path: Path) -> None:
    torch.manual_seed(4)
    tensors = {f"t{i:02}": torch.randint(0, 9, (64 << 10,), dtype=torch.uint8) for i in range(12)}
    for name, count in (("one", 1), ("four", 4)):
        (tmp_path / name).mkdir()
        for i, names in enumerate(np.array_split(sorted(tensors), count)):
            save_file({str(n): tensors[str(n)] for n in names}, tmp_path / name / f"part-{i}.safetensors")
    manifests = {}
    with ps.join("m", revision="same") as one, ps.join("m", revision="same") as other:
        for fleet, name in ((one, "one"), (other, "four")):
            manifests[name] = weights = {}
            report = fleet.fetch(weights, fallback=sorted((tmp_path / name).glob("*.safetensors")))
        assert report.storage_bytes == 0
        assert_same(manifests["four"], tensors)


def test_tensors_outside_arenas_are_filled_through_shm(small_checkpoint: Path, expected_tensors) -> None:
    with ps.join("m") as holder, ps.join("m") as reader:
        holder.fetch({}, fallback=str(small_checkpoint))
        loose = {name: torch.zeros_like(tensor) for name, tensor in expected_tensors.items()}
        report = reader.fetch(loose)
        assert list(report.nbytes_by_path) == [f"shm <- {holder.member.id[:8]}"]
        assert_same(loose, expected_tensors)
        # It cannot offer them through shm, and does not claim to.
        assert all("shm" not in region for region in reader.member.weights[0].map().regions)
        third: dict[str, torch.Tensor] = {}
        holder.leave()
        with ps.join("m") as last:
            late = last.fetch(third)
        assert_same(third, expected_tensors)
        assert list(late.nbytes_by_path) == [f"http <- {reader.member.id[:8]}"]
