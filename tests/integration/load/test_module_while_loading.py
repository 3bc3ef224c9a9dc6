"""Users close, load again, pickle, or assign to a module while `load_in_background` fills it."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.servers.http_server import Faults, RangeServer, Request

import penstock as ps
from penstock.errors import Cancelled, PenstockError, PlanError

WIDTH = 256
LAYERS = 8


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(400, WIDTH)
        self.hidden = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 400, bias=False)
        self.head.weight = self.embed.weight


class SlowServer(RangeServer):
    """A server that responds slowly to each request for tensors."""

    delay_s = 0.15

    def saw(self, request: Request) -> Faults:
        if request.method == "GET" and request.range and request.range[0] > 0:
            time.sleep(self.delay_s)
        return super().saw(request)


def layers(value: float) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.fixture
def ones(tmp_path: Path) -> Path:
    (tmp_path / "ones").mkdir()
    save_file(layers(1.0).state_dict(), tmp_path / "ones" / "model.safetensors")
    return tmp_path / "ones"


@pytest.fixture
def twos(tmp_path: Path) -> Path:
    (tmp_path / "twos").mkdir()
    save_file(layers(2.0).state_dict(), tmp_path / "twos" / "model.safetensors")
    return tmp_path / "twos"


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    state = {name: tensor for name, tensor in Tied().state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return tmp_path


def leave_by_error(loading: ps.modules.BackgroundLoad) -> None:
    with pytest.raises(ZeroDivisionError), loading:
        raise ZeroDivisionError


@pytest.mark.parametrize("close", [lambda loading: loading.close(), leave_by_error], ids=["close", "exit"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_closed_load_never_overwrites_next_load(
    ones: Path, twos: Path, close: Callable[[Any], None], with_manifest: bool
) -> None:
    if with_manifest:
        ps.manifest(twos)
    for delay_s in (0.05, 0.2):
        model, outcome = layers(0.0), list[BaseException | None]()

        def load_again(model: torch.nn.Module = model, outcome: list[BaseException | None] = outcome) -> None:
            try:
                model(torch.ones(WIDTH))
            except Cancelled:
                outcome.append(None)
            try:
                ps.load_into(model, twos)
            except PenstockError as error:
                outcome.append(error)

        with SlowServer(ones) as server:
            server.delay_s = 0.4
            loading = ps.modules.load_in_background(model, server.url + "/")
            other = threading.Thread(target=load_again)
            other.start()
            time.sleep(delay_s)
            close(loading)
            other.join(20)
            time.sleep(0.2)
        assert outcome == [None]
        assert all(bool((tensor == 2).all()) for tensor in model.state_dict().values())


def test_closing_from_progress_callback_aborts_load(ones: Path) -> None:
    model = layers(0.0)
    started = threading.Event()

    def close(done: int, total: int) -> None:
        assert started.wait(10)
        loading.close()

    loading = ps.modules.load_in_background(model, ones, progress=close)
    started.set()
    loading.close()
    loading.close()
    assert loading.done


def by_torch(module: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),  # noqa: S301
    "torch.save": by_torch,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_loading_module_stays_tied(tied: Path, how: str) -> None:
    for _ in range(3):
        model = Tied()
        parameter = model.embed.weight
        with SlowServer(tied) as server, ps.modules.load_in_background(model, server.url + "/") as loading:
            made = COPIES[how](model)
            loading.wait()
        assert made.head.weight is made.embed.weight
        assert model.head.weight is model.embed.weight is parameter
        assert torch.equal(made.head.weight, parameter)


def test_saved_parameters_load_with_weights_only_option(tied: Path) -> None:
    model = Tied()
    with SlowServer(tied) as server, ps.modules.load_in_background(model, server.url + "/"):
        file = io.BytesIO()
        torch.save(dict(model.named_parameters()), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        # The thread that saved the module uses it again, so the parameter is restored.
        assert torch.equal(saved["embed.weight"], model.embed.weight)
        assert type(model.head.weight) is torch.nn.Parameter


def test_parameters_replaced_during_load_are_not_overwritten(ones: Path) -> None:
    model = layers(0.0)
    mine = torch.nn.Parameter(torch.zeros(7, WIDTH))
    with SlowServer(ones) as server, ps.modules.load_in_background(model, server.url + "/") as loading:
        model[7].weight = mine
        model[6].bias = None
        del model[5].bias
        loading.wait()
    assert model[7].weight is mine and model[6].bias is None and not hasattr(model[5], "bias")
    assert bool((model[7].bias == 1).all())


def test_assigned_parameter_survives_failed_load(ones: Path, twos: Path) -> None:
    model = layers(0.0)
    mine = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with SlowServer(ones) as server, ps.modules.load_in_background(model, server.url + "/"):
        model[7].weight = mine
    assert model[7].weight is mine
    ps.load_into(model, twos)
    assert model[7].weight is mine and bool((mine == 2).all())


class WithExtra(torch.nn.Linear):
    """A layer with non-tensor state, or with a tensor that `set_extra_state` accepts."""

    def __init__(self, extra: Any) -> None:
        super().__init__(4, 4)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"step": 3}, torch.arange(3), None])
@pytest.mark.parametrize("verb", ["load_into", "load_in_background"])
def test_module_with_extra_state_is_filled(tmp_path: Path, extra: Any, verb: str) -> None:
    save_file({"weight": torch.full((4, 4), 2.0), "bias": torch.ones(4)}, tmp_path / "m.safetensors")
    model = WithExtra(extra)
    if verb == "load_in_background":
        with ps.modules.load_in_background(model, tmp_path) as loading:
            loading.wait()
    else:
        ps.load_into(model, tmp_path)
    assert bool((model.weight == 2).all()) and model.extra is extra


def test_strict_load_of_stored_extra_state_raises(tmp_path: Path) -> None:
    stored = {"weight": torch.full((4, 4), 2.0), "bias": torch.ones(4), "_extra_state": torch.arange(3)}
    save_file(stored, tmp_path / "m.safetensors")
    model = WithExtra({"step": 3})
    with pytest.raises(PlanError, match="_extra_state"):
        ps.load_into(model, tmp_path)
    ps.load_into(model, tmp_path, strict=False)
    assert model.extra == {"step": 3}
