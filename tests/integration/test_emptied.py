"""A module's memory given back before a snapshot of its process, and the same bytes at the same addresses after it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock as ps
from penstock.errors import ConfigError, IntegrityError, NotFound

WIDTH = 1024


def made() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)])
    model.register_buffer("scale", torch.full((3,), 2.0))
    model.register_buffer("scratch", torch.full((WIDTH,), 3.0), persistent=False)
    return model


@torch.no_grad()
def answer(model: torch.nn.Module) -> torch.Tensor:
    found = model(torch.ones(1, WIDTH))
    assert isinstance(found, torch.Tensor)
    return found


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's memory that have pages now."""
    start, stop, inside, found = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(bound, 16) for bound in head.split("-"))
            inside = low < stop and start < high
        elif inside and head == "Rss:":
            found += int(line.split()[1]) << 10
    return found


@pytest.fixture
def model() -> torch.nn.Sequential:
    return made()


@pytest.fixture
def checkpoint(model: torch.nn.Sequential, tmp_path: Path) -> str:
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return str(tmp_path)


def test_the_memory_is_given_back_and_refilled_in_place(model: torch.nn.Sequential, checkpoint: str) -> None:
    wanted, before = answer(model), {name: t.data_ptr() for name, t in model.state_dict().items()}
    objects = [id(parameter) for parameter in model.parameters()]
    resident = resident_bytes(model[0].weight)
    emptied = ps.empty_module(model)
    assert emptied.freed_bytes > 0.95 * 8 * WIDTH * WIDTH * 4
    assert emptied.freed_bytes + emptied.kept_bytes == sum(t.nbytes for t in made().state_dict().values())
    assert model.scratch.eq(3).all()
    for _ in range(2):
        with pytest.raises(ConfigError, match="given back for a snapshot"):
            answer(model)
    report = emptied.refill(checkpoint)
    assert report is not None and report.num_tensors == 17
    assert torch.equal(answer(model), wanted)
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == before
    assert [id(parameter) for parameter in model.parameters()] == objects
    assert resident_bytes(model[0].weight) >= min(resident, WIDTH * WIDTH * 4)


def test_a_process_that_is_made_of_the_snapshot(model: torch.nn.Sequential, checkpoint: str) -> None:
    """A fork is a snapshot whose restore has the addresses of the original."""
    wanted, address = answer(model), model[3].weight.data_ptr()
    emptied = ps.empty_module(model)
    child = os.fork()
    if child == 0:
        status = 1
        # Torch's threads do not survive a fork: a child that waits for one would wait for ever.
        signal.alarm(60)
        torch.set_num_threads(1)
        try:
            tensors = ps.load_file(f"{checkpoint}/model.safetensors")
            emptied.refill(lambda targets: [targets[name].copy_(tensor) for name, tensor in tensors.items()])
            status = 0 if model[3].weight.data_ptr() == address and model[3].weight.equal(made()[3].weight) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(ConfigError):
        answer(model)
    emptied.refill(checkpoint)
    assert torch.equal(answer(model), wanted)


def test_other_weights_are_refused(model: torch.nn.Sequential, checkpoint: str, tmp_path: Path) -> None:
    wanted = answer(model)
    state = model.state_dict()
    other = {name: tensor.clone() for name, tensor in state.items()}
    other["5.weight"][7, 7] += 1
    (tmp_path / "other").mkdir()
    save_file(other, tmp_path / "other" / "model.safetensors")
    emptied = ps.empty_module(model)
    with pytest.raises(IntegrityError, match=r"1 tensors are not what they were: 5\.weight") as raised:
        emptied.refill(str(tmp_path / "other"))
    assert raised.value.mutated
    with pytest.raises(NotFound):
        emptied.refill(str(tmp_path / "none"))
    with pytest.raises(IntegrityError, match="17 tensors"):
        emptied.refill(lambda targets: [tensor.fill_(float("nan")) for tensor in targets.values()])
    with pytest.raises(ConfigError):
        answer(model)
    emptied.refill(checkpoint)
    assert torch.equal(answer(model), wanted)


def test_tied_strided_and_shared_memory(tmp_path: Path) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
    model[1].weight = model[0].weight
    model[2].weight = torch.nn.Parameter(torch.rand(WIDTH, WIDTH).t())
    model[3].weight = torch.nn.Parameter(torch.rand(WIDTH, WIDTH).share_memory_())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "1.weight"}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    emptied = ps.empty_module(model)
    # The shared one has its values in other processes, too; the strided one is left as it is.
    assert 0.9 * WIDTH * WIDTH * 4 < emptied.freed_bytes <= WIDTH * WIDTH * 4
    emptied.refill(str(tmp_path))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert model[1].weight is model[0].weight


def test_from_a_fleet(model: torch.nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "r"))
    wanted = answer(model)
    with ps.join("m") as holder:
        holder.offer(made())
        emptied = ps.empty_module(model)
        with ps.join("m") as fleet:
            emptied.refill(fleet.fetch)
            assert torch.equal(answer(model), wanted)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError):
        ps.empty_module({})  # type: ignore[arg-type]
