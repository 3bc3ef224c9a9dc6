"""`load_into` fills each rank's shards of DTensor parameters, for any mesh and placement."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Partial

import penstock as ps
from penstock.errors import PlanError


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {"weight": torch.randn(7, 8), "bias": torch.randn(7), "big": torch.randn(900, 300), "one": torch.randn(1, 4)}


def check_rank(rank: int, size: int, directory: str) -> None:
    """Fill DTensors of several meshes and placements on one rank, and compare the local parts."""
    warnings.simplefilter("ignore")
    source, wanted = f"{directory}/source", whole()
    flat, square = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (2, size // 2))
    for mesh, placements in (
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (flat, [Replicate()]),
        (square, [Shard(0), Shard(1)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Shard(0)]),
    ):
        for options in ({}, {"verify": False}, {"group": dist.group.WORLD}):
            targets: dict[str, torch.Tensor] = {}
            for name, tensor in wanted.items():
                some = [p if not isinstance(p, Shard) or p.dim < tensor.ndim else Replicate() for p in placements]
                targets[name] = distribute_tensor(torch.zeros_like(tensor), mesh, some)
            report = ps.load_into(targets, source, **options)  # type: ignore[arg-type]
            for name, target in targets.items():
                assert isinstance(target, DTensor)
                mine = distribute_tensor(wanted[name], mesh, target.placements)
                assert torch.equal(target.to_local(), mine.to_local()), (name, placements)
            assert report.verified == ("verify" not in options)
    module = torch.nn.Linear(8, 7)
    fully_shard(module, mesh=flat)
    for dtype in (None, torch.float64):
        if dtype is not None:
            module.to(dtype)
        ps.load_into(module, source, names=["weight", "bias"], dtype=dtype)
        assert torch.equal(module.weight.full_tensor(), wanted["weight"].to(dtype or torch.float32))  # type: ignore[operator]
        assert torch.equal(module.bias.full_tensor(), wanted["bias"].to(dtype or torch.float32))  # type: ignore[operator]
    module.float()
    for refused in (ps.modules.load_in_background, lambda target, uri: ps.join("m").fetch(target, fallback=uri)):
        try:
            refused(module, f"{directory}/linear")
        except PlanError as error:
            assert "DTensor" in error.message and "load_into" in str(error.hint)
        else:
            raise AssertionError("not refused")
    try:
        ps.load_into({"one": DTensor.from_local(torch.zeros(1, 4), flat, [Partial()])}, source, names="one")
    except PlanError as error:
        assert "no rank has the values" in error.message
    else:
        raise AssertionError("not refused")


@pytest.mark.parametrize("size", [1, 4])
def test_each_rank_fills_its_shard(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "rt"))
    for name, tensors in (
        ("source", whole()),
        ("linear", {k: v for k, v in whole().items() if k in {"weight", "bias"}}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "m.safetensors")
        ps.manifest(tmp_path / name)
    if size == 1:
        module = torch.nn.Linear(8, 7)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        try:
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
            ps.load_into(module, tmp_path / "linear")
            assert torch.equal(module.weight.full_tensor(), whole()["weight"])  # type: ignore[operator]
        finally:
            dist.destroy_process_group()
        return
    outcomes = run_ranks(check_rank, size, str(tmp_path))
    assert [(outcome.ended, outcome.value) for outcome in outcomes] == [("returned", None)] * size
