"""torch DCP on one GPU: states on the device and on the host, loaded from both formats and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.integration.dcp.test_dcp import bits

import penstock
from penstock.testing.checkpoints import write_llama
from penstock_dcp import CheckpointReader, CheckpointWriter

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")]
DEVICE = "cuda:0"


def state_of(seed: int) -> dict[str, Any]:
    """Return a model on the GPU and its optimizer, whose steps are on the host."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 64)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(1, 256, device=DEVICE)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": seed,
        "transposed": torch.randn(64, 32, device=DEVICE).t(),
    }


def on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return {name: on_host(part) for name, part in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("own", [True, False])
def test_state_dict_on_two_devices_is_restored(own: bool, tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "checkpoint") if own else CheckpointWriter(tmp_path / "checkpoint")
    saved = state_of(1)
    dcp.save(saved, storage_writer=writer)
    state, reader = state_of(2), CheckpointReader(tmp_path / "checkpoint")
    places = {name: tensor.data_ptr() for name, tensor in state["model"].items()}
    dcp.load(state, storage_reader=reader)
    assert bits(on_host(state)) == bits(on_host(saved))
    assert {name: tensor.data_ptr() for name, tensor in state["model"].items()} == places
    assert {report.device for report in reader.reports} == {"cpu", DEVICE}
    assert own or all(report.verified for report in reader.reports)


def test_hugging_face_checkpoint_is_loaded_sliced_and_cast(tmp_path: Path) -> None:
    write_llama(tmp_path, num_layers=1, hidden=256, fp8=False, shards=2)
    whole = penstock.load(tmp_path)
    state = {
        name: torch.zeros(tensor.shape, dtype=torch.float32 if "norm" in name else tensor.dtype, device=DEVICE)
        for name, tensor in whole.items()
    }
    dcp.load(state, storage_reader=CheckpointReader(tmp_path))
    assert all(torch.equal(tensor.cpu(), whole[name].to(tensor.dtype)) for name, tensor in state.items())


@pytest.mark.parametrize("staging_bytes", [None, "128K"])
def test_async_save_stages_tensors_from_device(staging_bytes: str | None, tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "checkpoint", replace=True, staging_bytes=staging_bytes)
    for seed in (1, 2):
        state = state_of(seed)
        expected = bits(on_host(state))
        saved = dcp.async_save(state, storage_writer=writer)
        for tensor in state["model"].values():
            tensor.zero_()
        saved.result()
        again = state_of(3)
        dcp.load(again, storage_reader=CheckpointReader(tmp_path / "checkpoint"))
        assert bits(on_host(again)) == expected
    writer.close()
