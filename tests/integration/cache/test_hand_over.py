"""Processed parameters are given to a cache, and the next process uses them without a loader or a copy."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.fork_server import ForkServer
from tests.support.keeper import KeeperProcess
from tests.support.tiny_models import save_llama, save_mixtral

import penstock
import penstock as ps
from penstock.cache import attached as attaching
from penstock.cache import engine_parameters as handing
from penstock.cache.attached import Attached
from penstock.cache.engine_parameters import HandOver
from penstock.errors import BudgetTooSmall, ConfigError, NotFound, OperationFailed, PlanError
from penstock.timing import Timing
from penstock_hf.transformers import from_pretrained

WIDTH = 512
ENGINE = """
import json, sys, torch
import penstock as ps
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range(8)])
attached = ps.cache.attach("finished")
attached.attach_into(model)
maps = [line for line in open("/proc/self/maps") if "memfd:penstock-arena" in line]
with torch.no_grad():
    answer = model(torch.ones(1, {width})).tolist()
print(json.dumps({{"answer": answer, "num_maps": len(maps), "path": attached.report.path}}))
"""
"""A process whose parameters only use the cache's memory."""


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setattr(attaching, "TIMING", Timing(lease_renew_s=0.1))
    yield directory
    gc.collect()
    shutil.rmtree(directory)


@pytest.fixture
def keeper(fork_server: ForkServer) -> Iterator[KeeperProcess]:
    with KeeperProcess(["--accept", "--memory-bytes", "64M"], fork_server=fork_server) as process:
        yield process


def make_model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)])


@torch.no_grad()
def answer(model: torch.nn.Module) -> torch.Tensor:
    found = model(torch.ones(1, WIDTH))
    assert isinstance(found, torch.Tensor)
    return found


def kept() -> list[tuple[str, str]]:
    return [(state.state, holder.name) for holder in ps.hub.status("finished").members for state in holder.holdings]


def test_next_process_attaches_same_memory(keeper: KeeperProcess) -> None:
    model = make_model()
    wanted, own, objects = answer(model), model[0].weight.data_ptr(), [id(p) for p in model.parameters()]
    attached = ps.cache.cache_parameters(model, "finished")
    assert attached.report.verified
    # The module's own memory is free, but its parameters are the same objects.
    assert model[0].weight.data_ptr() != own
    assert [id(p) for p in model.parameters()] == objects
    assert torch.equal(answer(model), wanted)
    # The process has left the fleet, so only the cache has the parameters.
    assert [state for state, _ in kept()] == ["whole"]
    command = [sys.executable, "-c", ENGINE.format(width=WIDTH)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert torch.equal(torch.tensor(found["answer"]), wanted)
    assert found["num_maps"] == 1
    assert found["path"].startswith("shm, mapped: ")


def test_cache_retains_parameters_after_engine_exit() -> None:
    model = make_model()
    with ps.cache.WeightCache(accept=True) as keeper:
        attached = ps.cache.cache_parameters(model, "finished")
        wanted = answer(model)
        del model
        attached.close()
        gc.collect()
        with torch.device("meta"):
            other = make_model()
        with ps.cache.attach("finished") as again:
            again.attach_into(other)
            assert torch.equal(answer(other), wanted)
            del other
        gc.collect()
        keeper.drop("finished", drain_s=5)
        assert keeper.models() == []
        # After a drop the cache accepts the model again.
        ps.cache.cache_parameters(make_model(), "finished").close()
        assert [model.model for model in keeper.models()] == ["finished"]


def test_tied_tensors_and_buffers_are_cached() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(32, 16)
            self.head = torch.nn.Linear(16, 32, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.rand(3, dtype=torch.float64))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    with ps.cache.WeightCache(accept=True) as keeper:
        model, other = Model(), Model()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        ps.cache.cache_parameters(model, "finished")
        assert model.head.weight is model.embed.weight
        assert keeper.models()[0].nbytes < 2 * model.embed.weight.nbytes
        ps.cache.attach("finished").attach_into(other)
        assert other.head.weight is other.embed.weight
        for module in (model, other):
            assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in state.items())
        del model, other, module
        gc.collect()


class TiedByMemory(torch.nn.Module):
    """Two parameter objects with the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = torch.nn.Parameter(self.embed.weight.data)
        self.flat = torch.nn.Parameter(self.embed.weight.data.view(-1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_sharing_memory_stay_tied_in_cache(device: str) -> None:
    with ps.cache.WeightCache(accept=True) as keeper:
        model = TiedByMemory()
        wanted, objects = model.embed.weight.detach().clone(), list(model.parameters())
        with torch.device(device):
            other = TiedByMemory()
        ps.cache.cache_parameters(model, "finished")
        assert keeper.models()[0].nbytes == wanted.nbytes
        assert all(a is b for a, b in zip(objects, model.parameters(), strict=True))
        ps.cache.attach("finished").attach_into(other)
        for module in (model, other):
            assert torch.equal(module.embed.weight, wanted)
            assert torch.equal(module.flat, wanted.view(-1))
            assert len({parameter.data_ptr() for parameter in module.parameters()}) == 1
            assert module.head.weight.shape == wanted.shape and module.head.weight.requires_grad
        del model, other, module, objects
        gc.collect()


def test_model_with_changing_tensors_is_not_cached() -> None:
    class Other(torch.nn.Linear):
        """A module whose second and later state dicts have an additional tensor."""

        num_states = 0

        def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            self.num_states += 1
            if self.num_states > 1:
                destination[prefix + "late"] = torch.zeros(2)

    with ps.cache.WeightCache(accept=True) as keeper:
        with pytest.raises(PlanError, match="late: the weight cache has no such tensor"):
            ps.cache.cache_parameters(Other(4, 4), "finished")
        assert keeper.models() == []


def test_caching_parameters_without_accepting_cache_raises_not_found() -> None:
    model = make_model()
    own = model[0].weight.data_ptr()
    with pytest.raises(NotFound, match="no weight cache on this host accepts"):
        ps.cache.cache_parameters(model, "finished")
    with ps.cache.WeightCache(), pytest.raises(NotFound, match="no weight cache on this host accepts"):
        ps.cache.cache_parameters(model, "finished")
    assert model[0].weight.data_ptr() == own


def test_full_cache_error_states_needed_bytes() -> None:
    model = make_model()
    own = model[0].weight.data_ptr()
    with ps.cache.WeightCache(accept=True, memory_bytes="1M") as keeper:
        for _ in range(2):
            with pytest.raises(BudgetTooSmall) as raised:
                ps.cache.cache_parameters(model, "finished")
            assert raised.value.minimum_bytes > 8 * WIDTH * WIDTH * 4
        assert keeper.models() == []
    assert model[0].weight.data_ptr() == own


def test_different_parameters_under_same_name_are_rejected() -> None:
    with ps.cache.WeightCache(accept=True) as keeper:
        first = ps.cache.cache_parameters(make_model(0), "finished")
        with pytest.raises(OperationFailed, match="already kept with different bytes"):
            ps.cache.cache_parameters(make_model(1), "finished")
        # Identical bytes are one model, however many processes submit them.
        second = ps.cache.cache_parameters(make_model(0), "finished")
        assert len(keeper.models()) == 1
        first.close()
        second.close()


def test_concurrent_engines_share_one_cached_copy() -> None:
    results: list[torch.Tensor] = []
    with ps.cache.WeightCache(accept=True) as keeper:
        # Create the models here, because threads share the seed.
        models = [make_model() for _ in range(3)]

        def engine() -> None:
            model = models.pop()
            attached = ps.cache.cache_parameters(model, "finished")
            results.append(answer(model))
            del model
            attached.close()

        threads = [threading.Thread(target=engine) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(keeper.models()) == 1
    assert len(results) == 3
    assert all(torch.equal(result, results[0]) for result in results)


def test_killed_engine_leaves_no_cached_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "4")
    code = (
        "import torch, penstock as ps; from penstock.cache import engine_parameters as h; import os, signal\n"
        "def ask(server, wanted, connection):\n"
        "    body = h.msgspec.msgpack.encode(wanted)\n"
        "    with h.ControlConnection(h.over_unix(str(server)), 'localhost') as control:\n"
        "        control.request('POST', '/v1/keep', body, timeout_s=5)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "h._ask = ask\n"
        "m = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)])\n"
        "h.cache_parameters(m, 'finished')\n"
    )
    with ps.cache.WeightCache(accept=True) as keeper:
        killed = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        deadline = time.monotonic() + 30
        while any(state.state != "whole" for member in ps.hub.status("finished").members for state in member.holdings):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        # The cache keeps either all verified bytes or no model.
        assert all(model.state == "kept" and model.tier == "host" for model in keeper.models())
        with ps.cache.cache_parameters(make_model(), "other"):
            assert "other" in [model.model for model in keeper.models()]


def test_engine_continues_after_cache_is_killed(keeper: KeeperProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    own, wanted = model[0].weight.data_ptr(), answer(model)
    real = handing._ask

    def ask(*arguments: Any) -> None:
        os.kill(keeper.process.pid, signal.SIGKILL)
        keeper.process.wait(timeout=30)
        real(*arguments)

    monkeypatch.setattr(handing, "_ask", ask)
    with pytest.raises(OperationFailed, match="does not respond"):
        ps.cache.cache_parameters(model, "finished")
    assert model[0].weight.data_ptr() == own
    assert torch.equal(answer(model), wanted)


def test_unsupported_parameters_are_refused() -> None:
    class Odd(torch.Tensor):
        pass

    with ps.cache.WeightCache(accept=True) as keeper:
        model = make_model()
        model[3].weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH).as_subclass(Odd))
        with pytest.raises(PlanError, match=r"3\.weight \(Odd\)"):
            ps.cache.cache_parameters(model, "finished")
        model = make_model()
        model[3].weight = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH).t())
        with pytest.raises(PlanError, match="not contiguous"):
            ps.cache.cache_parameters(model, "finished")
        with pytest.raises(ConfigError):
            ps.cache.cache_parameters(model, "")
        with pytest.raises(ConfigError):
            ps.cache.cache_parameters({}, "finished")  # type: ignore[arg-type]
        assert keeper.models() == []


def test_caching_request_without_offered_parameters_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "3")
    with ps.cache.WeightCache(accept=True) as keeper:
        server = handing._cache_of(torch.device("cpu"))
        wanted = HandOver(model="finished", revision="w1-" + "0" * 64, nbytes=100)
        with pytest.raises(OperationFailed, match="could not keep the parameters"):
            handing._ask(server, wanted, ps.ConnectionSettings())
        assert keeper.models() == []


def test_attach_to_corrupt_cache_without_engine_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "3")
    with ps.cache.WeightCache(accept=True) as keeper:
        ps.cache.cache_parameters(make_model(), "finished").close()
        gc.collect()
        (weights,) = keeper.member.weights
        weights.memory.rows[0][0] ^= 1
        with pytest.raises(ps.PenstockError):
            ps.cache.attach("finished", timeout_s=0.2)
        deadline = time.monotonic() + 30
        while keeper.models()[0].state != "lost":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(ps.IntegrityError):
            keeper.check()


@pytest.mark.parametrize("save", [save_llama, save_mixtral], ids=["llama", "merged experts"])
def test_transformers_parameters_are_attached_by_next_process(
    save: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.transformers")
    directory = save(tmp_path / "model")
    # Without digests a copy of the files would be a different model.
    ps.manifest(str(directory))
    true = transformers.AutoModelForCausalLM.from_pretrained(directory)
    prompt = torch.arange(6)[None]
    wanted = true.generate(prompt, max_new_tokens=4, do_sample=False)
    with ps.cache.WeightCache(accept=True) as keeper:
        for is_handed_over in (True, False):
            caplog.clear()
            model = from_pretrained(transformers.AutoModelForCausalLM, directory, weight_cache=True)
            assert ("handed over" in caplog.text) is is_handed_over
            assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), wanted)
            assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in true.state_dict().items())
            assert all(torch.equal(dict(model.named_buffers())[name], t) for name, t in true.named_buffers())
            assert not model.training
        # A different dtype is a different model.
        other = from_pretrained(transformers.AutoModelForCausalLM, directory, weight_cache=True, dtype=torch.float16)
        assert other.dtype == torch.float16
        assert len(keeper.models()) == 2
        # A user's configuration also makes a different model.
        config = transformers.AutoConfig.from_pretrained(directory)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 5000.0}
        for is_handed_over in (True, False):
            caplog.clear()
            from_pretrained(transformers.AutoModelForCausalLM, directory, weight_cache=True, config=config)
            assert ("handed over" in caplog.text) is is_handed_over
        assert len(keeper.models()) == 3
        # A copy in another directory is the same model.
        moved = shutil.copytree(directory, tmp_path / "elsewhere" / "model")
        caplog.clear()
        model = from_pretrained(transformers.AutoModelForCausalLM, moved, weight_cache=True)
        assert "handed over" not in caplog.text
        assert len(keeper.models()) == 3
        del model, other
        gc.collect()


def test_second_checkpoint_is_cached_under_same_name(tmp_path: Path) -> None:
    auto = transformers.AutoModelForCausalLM
    directories = [save_llama(tmp_path / str(seed), seed=seed) for seed in range(2)]
    with ps.cache.WeightCache(accept=True) as keeper:
        for _ in range(2):
            for directory in directories:
                state = from_pretrained(auto, directory, weight_cache="mine").state_dict()
                true = auto.from_pretrained(directory).state_dict()
                assert all(torch.equal(state[name], tensor) for name, tensor in true.items())
        assert len(keeper.models()) == 2
        assert all(model.model.startswith("mine.") for model in keeper.models())
        del state
        gc.collect()


def test_checkpoint_replaced_before_load_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    auto = transformers.AutoModelForCausalLM
    releases = [save_llama(tmp_path / str(seed), seed=seed) for seed in range(2)]
    for release in releases:
        ps.manifest(str(release))
    live = tmp_path / "live"

    def deploy(release: Path) -> None:
        shutil.rmtree(live, ignore_errors=True)
        shutil.copytree(release, live)

    def replaced(*arguments: Any, **named: Any) -> None:
        deploy(releases[1])
        raise NotFound("no cache has it")

    deploy(releases[0])
    with ps.cache.WeightCache(accept=True) as keeper:
        with monkeypatch.context() as patched:
            # Change the file between the check of the headers and the load.
            patched.setattr(penstock.cache, "attach", replaced)
            from_pretrained(auto, live, weight_cache=True)
        assert "the checkpoint changed during the load: model" in caplog.text
        assert not keeper.models()
        deploy(releases[0])
        state = from_pretrained(auto, live, weight_cache=True).state_dict()
        true = auto.from_pretrained(live).state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in true.items())
        del state
        gc.collect()


@pytest.mark.parametrize("step", ["attach", "attach_into"])
@pytest.mark.parametrize("kind", [ConfigError, PlanError])
def test_unusable_cache_falls_back_to_loading(
    step: str,
    kind: type[ps.PenstockError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A stored error would keep the model's frame and the lease alive, so create the error at each call.
    def fail(*arguments: Any, **named: Any) -> None:
        raise kind("the reason")

    auto = transformers.AutoModelForCausalLM
    directory = save_llama(tmp_path / "model")
    true = auto.from_pretrained(directory).state_dict()
    with ps.cache.WeightCache(accept=True) as keeper:
        from_pretrained(auto, directory, weight_cache=True)
        with monkeypatch.context() as patched:
            patched.setattr(penstock.cache if step == "attach" else Attached, step, fail)
            model = from_pretrained(auto, directory, weight_cache=True)
        assert "its cached parameters cannot be used: the reason" in caplog.text
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in true.items())
        del model
        gc.collect()
        # The attempt must leave no lease.
        keeper.drop(keeper.models()[0].model, drain_s=5)


def test_corrupt_transformers_parameters_are_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STALL_S", "3")
    auto = transformers.AutoModelForCausalLM
    directory = save_llama(tmp_path / "model")
    true = auto.from_pretrained(directory).state_dict()
    with ps.cache.WeightCache(accept=True) as keeper:
        from_pretrained(auto, directory, weight_cache=True)
        gc.collect()
        keeper.member.weights[0].memory.rows[0][0] ^= 1
        # The cache first searches for another source, which may be this process.
        for _ in range(2):
            state = from_pretrained(auto, directory, weight_cache=True).state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in true.items())
            del state
            gc.collect()


def test_missing_cache_is_logged_and_model_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = save_llama(tmp_path / "model")
    model = from_pretrained(transformers.AutoModelForCausalLM, directory, weight_cache="mine")
    assert model.model.embed_tokens.weight.numel()
    assert "are not cached for the next process" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("org/name", {}, "names on a hub"),
        ("", {"attn_implementation": "eager"}, "attn_implementation"),
        ("", {"device_map": "auto"}, "device_map"),
    ],
)
def test_unsupported_transformers_options_are_refused(
    name: str, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    place = name or save_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match=why):
        from_pretrained(transformers.AutoModelForCausalLM, place, weight_cache=True, **options)
