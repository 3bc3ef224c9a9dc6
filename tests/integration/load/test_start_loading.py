"""A module that is used while its weights arrive waits where it must, and never computes with missing bytes."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tests.support.servers.http_server import Faults, RangeServer, Request
from tests.support.tiny_models import save_llama, save_mixtral

import penstock as ps
from penstock.errors import (
    Cancelled,
    ConfigError,
    DestinationError,
    IntegrityError,
    NotFound,
    PenstockError,
    PlanError,
    SourceError,
    SourceTruncated,
)
from penstock.loader.pending import LazyParameter
from penstock_hf.transformers import start_from_pretrained

WIDTH = 256
WAIT_S = 30.0


class Model(torch.nn.Module):
    """A model with a text part, defined first, and an image part. The files have a different order of names."""

    def __init__(self) -> None:
        super().__init__()
        self.text = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.head = torch.nn.Linear(WIDTH, 8)
        self.images = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor, *, images: bool = False) -> torch.Tensor:
        for layer in self.text:
            x = torch.relu(layer(x))
        return self.head(self.images(x) if images else x) * self.scale


class Gate(RangeServer):
    """A server that does not respond to requests for the tensors of some files while it is shut."""

    def __init__(self, directory: Path, holds: str) -> None:
        super().__init__(directory)
        self.opened = threading.Event()
        self._holds = holds

    def saw(self, request: Request) -> Faults:
        # Headers are read from the start of a file, before the load starts.
        if request.method == "GET" and self._holds in request.path and request.range and request.range[0] > 0:
            assert self.opened.wait(WAIT_S)
        return super().saw(request)


@pytest.fixture
def true() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def checkpoint(true: Model, tmp_path: Path) -> Path:
    """Write one file for the text part and one for the rest."""
    state, weight_map = true.state_dict(), {}
    for file, wanted in (("model-a.safetensors", False), ("model-b.safetensors", True)):
        part = {name: tensor for name, tensor in state.items() if name.startswith("images") is wanted}
        save_file(part, tmp_path / file)
        weight_map.update(dict.fromkeys(part, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    ps.manifest(str(tmp_path))
    return tmp_path


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, WIDTH)


def empty() -> Model:
    """Return a module whose parameters are NaN until they are filled, so that early use is visible."""
    model = Model()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(float("nan"))
    return model


@pytest.fixture(autouse=True)
def no_threads_stay() -> Iterator[None]:
    yield
    assert "penstock-loading" not in [thread.name for thread in threading.enumerate()]


@torch.no_grad()
def test_model_output_is_ready_before_last_byte_arrives(true: Model, checkpoint: Path, x: torch.Tensor) -> None:
    model = empty()
    with Gate(checkpoint, "model-b") as server, ps.modules.load_in_background(model, server.url + "/") as loading:
        assert torch.equal(model(x), true(x))
        assert not loading.done
        assert isinstance(model.images.weight, LazyParameter)
        server.opened.set()
        assert torch.equal(model(x, images=True), true(x, images=True))
        report = loading.wait()
    assert report.verified
    assert report.num_tensors == len(true.state_dict())


@torch.no_grad()
def test_layer_waits_for_its_bytes(true: Model, checkpoint: Path, x: torch.Tensor) -> None:
    model, answers = empty(), []
    with Gate(checkpoint, "model-a") as server, ps.modules.load_in_background(model, server.url + "/"):

        def ask() -> None:
            with torch.no_grad():
                answers.append(model(x))

        asking = threading.Thread(target=ask)
        asking.start()
        asking.join(0.3)
        assert asking.is_alive()
        assert answers == []
        server.opened.set()
        asking.join(WAIT_S)
    assert torch.equal(answers[0], true(x))


def test_loading_keeps_parameter_objects_and_addresses(true: Model, checkpoint: Path) -> None:
    model = empty()
    before = [(id(tensor), tensor.data_ptr()) for tensor in model.state_dict(keep_vars=True).values()]
    with ps.modules.load_in_background(model, str(checkpoint)) as loading:
        loading.wait()
        loading.wait()
    after = model.state_dict(keep_vars=True)
    assert [(id(tensor), tensor.data_ptr()) for tensor in after.values()] == before
    assert all(torch.equal(after[name], tensor) for name, tensor in true.state_dict().items())


def test_tensors_are_read_in_module_order(true: Model, tmp_path: Path) -> None:
    # In the order of names, which is the order in the file, the last layers come first.
    save_file(
        {f"{9 - int(name.split('.')[1])}.{name}": tensor for name, tensor in true.text.state_dict(prefix="t.").items()},
        tmp_path / "model.safetensors",
    )
    model = empty().text
    names = {f"{9 - layer}.t.{layer}.{kind}": f"{layer}.{kind}" for layer in range(6) for kind in ("weight", "bias")}
    place = model.state_dict(keep_vars=True)
    with ps.modules.load_in_background(model, str(tmp_path), rename=names, first=["3.*"]) as loading:
        loading.wait()
        order = loading._filled.order
    pointers = [tensor.data_ptr() for tensor in loading._matched.lines().tensors]
    named = {tensor.data_ptr(): name for name, tensor in place.items()}
    seen = [named[pointers[index]] for index in order]
    rest = [f"{layer}.{kind}" for layer in (0, 1, 2, 4, 5) for kind in ("weight", "bias")]
    assert seen == ["3.weight", "3.bias", *rest]


@torch.no_grad()
def test_missing_digests_raise_unless_allowed(true: Model, checkpoint: Path, x: torch.Tensor) -> None:
    (checkpoint / "penstock.manifest").unlink()
    model = empty()
    with pytest.raises(NotFound, match="used before they are verified"):
        ps.modules.load_in_background(model, str(checkpoint), verify=True)
    with ps.modules.load_in_background(model, str(checkpoint)) as loading:
        assert torch.equal(model(x), true(x))
        assert not loading.wait().verified


@torch.no_grad()
def test_corrupt_bytes_are_never_used_in_forward(true: Model, checkpoint: Path, x: torch.Tensor) -> None:
    path = checkpoint / "model-b.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound[:-5] + bytes([sound[-5] ^ 1]) + sound[-4:])
    model = empty()
    with ps.modules.load_in_background(model, str(checkpoint)) as loading:
        for _ in range(2):
            with pytest.raises(IntegrityError):
                model(x, images=True)
        with pytest.raises(IntegrityError) as raised:
            loading.wait()
        assert raised.value.mutated
        # Tensors that had arrived are unusable too, because the module is incomplete.
        with pytest.raises(IntegrityError):
            model.text[0](x)
        with pytest.raises(IntegrityError):
            model.state_dict()["scale"].item()
    # Another load completes the module.
    path.write_bytes(sound)
    ps.load_into(model, str(checkpoint))
    assert torch.equal(model(x, images=True), true(x, images=True))
    assert not any(isinstance(tensor, LazyParameter) for tensor in model.state_dict(keep_vars=True).values())


@torch.no_grad()
def test_failed_background_load_can_be_restarted(true: Model, checkpoint: Path, x: torch.Tensor) -> None:
    model = empty()
    own = [id(tensor) for tensor in model.parameters()]
    with RangeServer(checkpoint) as server:
        loading = ps.modules.load_in_background(model, server.url + "/", settings=ps.ReadSettings(memory_bytes="1M"))
        loading.close()
        with pytest.raises(Cancelled):
            model(x)
        with ps.modules.load_in_background(model, server.url + "/") as again:
            assert torch.equal(model(x, images=True), true(x, images=True))
            again.wait()
    assert [id(tensor) for tensor in model.parameters()] == own


@torch.no_grad()
@pytest.mark.parametrize("faults", [Faults(status=500), Faults(stall_after=0)], ids=["refuses", "stalls"])
def test_failed_source_raises_in_forward(
    checkpoint: Path, x: torch.Tensor, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RETRIES", "1")
    monkeypatch.setenv("PENSTOCK_STALL_S", "2")
    model = empty()
    with Gate(checkpoint, "model-a") as server, ps.modules.load_in_background(model, server.url + "/"):
        server.faults = faults
        server.opened.set()
        with pytest.raises(SourceError):
            model(x)


def test_changed_file_raises_in_forward(checkpoint: Path, x: torch.Tensor) -> None:
    (checkpoint / "penstock.manifest").unlink()
    model = empty()
    with Gate(checkpoint, "model-b") as server, ps.modules.load_in_background(model, server.url + "/") as loading:
        path = checkpoint / "model-b.safetensors"
        path.write_bytes(path.read_bytes())
        os.utime(path, (1, 1))
        server.opened.set()
        with pytest.raises((SourceError, SourceTruncated)):
            loading.wait()
        # The tensor was usable before.
        with pytest.raises(SourceError):
            model(x)


def test_close_aborts_background_load(checkpoint: Path, x: torch.Tensor) -> None:
    model = empty()
    with Gate(checkpoint, "model-a") as server:
        loading = ps.modules.load_in_background(model, server.url + "/")
        closing = threading.Timer(0.2, loading.close)
        closing.start()
        with pytest.raises(Cancelled, match="closed before its end"):
            model(x)
        server.opened.set()
        closing.join(WAIT_S)
        loading.close()
    with pytest.raises(Cancelled):
        model.text[0].weight.sum()
    assert model.text[0].weight.shape == (WIDTH, WIDTH)


@torch.no_grad()
def test_failed_thread_start_restores_module(
    true: Model, checkpoint: Path, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = empty()
    parameters = dict(module.named_parameters())
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "penstock-loading":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with pytest.raises(DestinationError, match="cannot start a thread"):
            ps.modules.load_in_background(module, checkpoint)
    assert all(found is parameters[name] for name, found in module.named_parameters())
    with ps.modules.load_in_background(module, checkpoint):
        assert torch.equal(module(x), true(x))


def test_second_load_into_loading_module_raises(checkpoint: Path) -> None:
    model = empty()
    with Gate(checkpoint, "model-b") as server, ps.modules.load_in_background(model, server.url + "/") as loading:
        for load in (ps.load_into, ps.modules.load_in_background):
            with pytest.raises(ConfigError, match="is still being loaded"):
                load(model, str(checkpoint))
        server.opened.set()
        loading.wait()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: model.state_dict()], ids=["deepcopy", "state_dict"])
def test_copy_of_loading_module_waits_for_load(true: Model, checkpoint: Path, copied: Any) -> None:
    model = empty()
    with Gate(checkpoint, "model-b") as server, ps.modules.load_in_background(model, server.url + "/"):
        threading.Timer(0.2, server.opened.set).start()
        made = copied(model)
    tensors = made.state_dict() if isinstance(made, torch.nn.Module) else made
    assert all(torch.equal(tensors[name], tensor) for name, tensor in true.state_dict().items())


@torch.no_grad()
def test_tied_and_strided_parameters_are_filled(tmp_path: Path, x: torch.Tensor) -> None:
    torch.manual_seed(1)
    true = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    save_file({f"{i}.weight": true[i].weight.detach().contiguous() for i in (0, 1)}, tmp_path / "m.safetensors")
    true[2].weight = true[0].weight
    model = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
    model[2].weight = model[0].weight
    model[1].weight = torch.nn.Parameter(torch.empty(WIDTH, WIDTH).t())
    with ps.modules.load_in_background(model, str(tmp_path)) as loading:
        for mine, other in zip(model, true, strict=True):
            # A product with a transposed matrix may add in a different order, so do not compare bits.
            torch.testing.assert_close(mine(x), other(x))
            assert torch.equal(mine.weight, other.weight)
        loading.wait()
    assert model[2].weight is model[0].weight


def test_forked_child_raises_instead_of_waiting(checkpoint: Path) -> None:
    model = empty()
    with Gate(checkpoint, "model-a") as server, ps.modules.load_in_background(model, server.url + "/"):
        child = os.fork()
        if child == 0:
            try:
                model.head.weight.sum()
            except ConfigError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        server.opened.set()


def test_target_with_mismatched_shape_raises_immediately(checkpoint: Path) -> None:
    model = empty()
    model.head = torch.nn.Linear(WIDTH, 9)
    with pytest.raises(PlanError) as raised:
        ps.modules.load_in_background(model, str(checkpoint))
    assert not raised.value.mutated
    assert not any(isinstance(tensor, LazyParameter) for tensor in model.parameters())
    with pytest.raises(PenstockError, match=r"torch\.nn\.Module"):
        ps.modules.load_in_background({}, str(checkpoint))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="globs"):
        ps.modules.load_in_background(model, str(checkpoint), first="head*")


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}], ids=["apart", "tied"])
def test_transformers_model_computes_during_load(tmp_path: Path, options: dict[str, Any]) -> None:
    directory = save_llama(tmp_path / "model", **options)
    ps.manifest(str(directory))
    true = transformers.AutoModelForCausalLM.from_pretrained(directory)
    prompt = torch.arange(7)[None]
    wanted = true.generate(prompt, max_new_tokens=4, do_sample=False)
    with (
        RangeServer(directory) as server,
        start_from_pretrained(transformers.AutoModelForCausalLM, server.url, verify=True) as loading,
    ):
        assert torch.equal(loading.module.generate(prompt, max_new_tokens=4, do_sample=False), wanted)
        loading.wait()
    mine = loading.module.state_dict(keep_vars=True)
    assert all(torch.equal(mine[name], tensor) for name, tensor in true.state_dict().items())
    assert not any(isinstance(tensor, LazyParameter) for tensor in mine.values())
    assert not loading.module.training


def test_model_needing_transformers_loader_raises(tmp_path: Path) -> None:
    directory = save_mixtral(tmp_path / "model")
    with pytest.raises(ConfigError, match="merged or split"):
        start_from_pretrained(transformers.AutoModelForCausalLM, directory)
    with pytest.raises(ConfigError, match="the name of a model on a hub"):
        start_from_pretrained(transformers.AutoModelForCausalLM, "org/name")


def test_dropped_module_is_freed_after_failed_load(checkpoint: Path) -> None:
    (checkpoint / "model-b.safetensors").write_bytes(b"broken" * 9)
    for place in (checkpoint / "model-a.safetensors", checkpoint):
        model = empty()
        gone = weakref.ref(model)
        with (
            contextlib.suppress(PenstockError),
            ps.modules.load_in_background(model, str(place), strict=False) as loading,
        ):
            loading.wait()
        del model
        loading = None
        gc.collect()
        assert gone() is None
