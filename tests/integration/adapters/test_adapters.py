"""A LoRA adapter from PEFT syncs without its base: into PEFT's models, directories for engines, and merged weights."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.conftest import Host
from tests.integration.sync.test_models import together

import penstock as ps

transformers = pytest.importorskip("transformers", minversion="5.23")
peft = pytest.importorskip("peft", minversion="0.21")

from penstock_hf.adapter import AdapterDirectory, base_identity  # noqa: E402 - after what it needs
from penstock_hf.adapter import adapter_subscriber as plain_subscriber  # noqa: E402
from penstock_hf.lora_merge import merged_publisher, merging_subscriber  # noqa: E402
from penstock_hf.peft import (  # noqa: E402
    adapter_config,
    adapter_parameters,
    adapter_publisher,
    adapter_subscriber,
    adapter_tensors,
)
from penstock_rl.lora_server import SglangServer, VllmServer, serve_adapter  # noqa: E402

# PEFT 0.21 uses a name that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

PROMPT = torch.tensor([[1, 5, 9, 200, 17]])
MODULES = ["q_proj", "v_proj", "down_proj"]
ADAPTER_BYTES = 2 * 8 * ((64 + 64) + (64 + 32) + (96 + 64)) * 4


def base_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def model(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return the base with a random adapter."""
    chosen = {"r": 8, "lora_alpha": 16, "target_modules": MODULES} | options
    made = peft.get_peft_model(base_model(dtype), peft.LoraConfig(**chosen), autocast_adapter_dtype=False)
    return fill(made, seed)


@torch.no_grad()
def fill(made: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    for tensor in adapter_tensors(made).values():
        tensor.copy_(torch.randn(tensor.shape) * 0.1)
    return made


@torch.no_grad()
def logits(made: Any) -> torch.Tensor:
    return made(PROMPT).logits


def test_peft_model_receives_only_adapter_tensors(host: Host) -> None:
    trained, served, other_alpha = model(1), model(2), model(2, lora_alpha=32)
    base = {name: one.clone() for name, one in served.state_dict().items() if "lora_" not in name}
    with (
        adapter_publisher("a", trained, base="b1") as publisher,
        adapter_subscriber("a", served, base="b1") as subscriber,
        adapter_subscriber("a", other_alpha, base="b1") as unlike,
        adapter_subscriber("a", model(2, r=4), base="b1") as smaller,
    ):
        for version in (1, 2, 3):
            fill(trained, version)
            publisher.publish(version)
            report = subscriber.update()
            assert (report.version, report.version_bytes) == (version, ADAPTER_BYTES)
            assert torch.equal(logits(served), logits(trained))
        assert subscriber.config["lora_alpha"] == 16 and sorted(subscriber.config["target_modules"]) == sorted(MODULES)
        with pytest.raises(ps.PlanError, match="lora_alpha: published 16, here 32"):
            unlike.update()
        with pytest.raises(ps.PlanError, match=r"r: published 8, here 4|lora_A"):
            smaller.update()
        assert torch.equal(logits(other_alpha), logits(model(2, lora_alpha=32)))
    assert all(torch.equal(one, base[name]) for name, one in served.state_dict().items() if name in base)


def test_compiled_model_receives_adapter(host: Host) -> None:
    trained, served = model(1), model(2)
    compiled = torch.compile(trained, backend="eager"), torch.compile(served, backend="eager")
    assert adapter_tensors(compiled[0]).keys() == adapter_tensors(trained).keys()
    with (
        adapter_publisher("a", compiled[0], base="b1") as publisher,
        adapter_subscriber("a", compiled[1], base="b1") as subscriber,
    ):
        publisher.publish(1)
        assert subscriber.update().version_bytes == ADAPTER_BYTES
        assert torch.equal(logits(served), logits(trained))


def test_adapter_for_different_base_is_rejected(host: Host) -> None:
    trained, served = model(1), model(2)
    before = {name: one.clone() for name, one in adapter_tensors(served).items()}
    bases = ["b1", "b2"]
    with (
        adapter_publisher("a", trained, base=lambda: bases[0]) as publisher,
        adapter_subscriber("a", served, base=lambda: bases[1]) as subscriber,
        ps.subscriber("a", before, strict=False) as plain,
    ):
        publisher.publish(1)
        with pytest.raises(
            ps.errors.BaseMismatch, match="for the base 'b1', but this receiver has the base 'b2'"
        ) as caught:
            subscriber.update()
        assert (caught.value.expected, caught.value.found, caught.value.mutated) == ("b1", "b2", False)
        assert torch.equal(logits(served), logits(model(2))) and subscriber.version == -1
        bases[1] = "b1"
        subscriber.stage()
        bases[1] = "b3"  # the receiver's base moved after the version was staged
        with pytest.raises(ps.errors.BaseMismatch):
            subscriber.commit()
        assert torch.equal(logits(served), logits(model(2)))
        bases[:] = "b3", "b3"
        publisher.publish(2)
        assert subscriber.update().version == 2 and subscriber.base == "b3"
        assert plain.update().version == 2  # the tensors, for who asks for no adapter
    with (
        ps.publisher("whole", {"w": torch.zeros(4)}, mode="snapshot") as whole,
        plain_subscriber("whole", base="b1") as subscriber,
    ):
        whole.publish(1)
        with pytest.raises(ps.PlanError, match="no base and no configuration"):
            subscriber.update()


def test_synced_base_is_identified_by_version(host: Host) -> None:
    trained, served = model(1), model(2)
    base = dict(base_model().state_dict())
    received = {name: torch.zeros_like(one) for name, one in base.items()}
    with (
        ps.publisher("base", base, mode="snapshot") as bases,
        ps.subscriber("base", received) as here,
        adapter_publisher("a", trained, base=bases) as publisher,
        adapter_subscriber("a", served, base=here) as subscriber,
    ):
        with pytest.raises(ps.ConfigError, match="adapter's base has no version yet"):
            publisher.publish(1)
        bases.publish(4)
        publisher.publish(1)
        with pytest.raises(
            ps.errors.BaseMismatch, match=r"for the base 'base:4 run=.*', but this receiver has the base 'none'"
        ):
            subscriber.update()
        report = here.update()
        assert base_identity(report) == base_identity(here) == base_identity(bases)
        assert base_identity(here).startswith("base:4 run=")
        assert subscriber.update().version == 1
    with pytest.raises(ps.ConfigError, match="base is 7"):
        base_identity(7)  # type: ignore[arg-type]


def test_base_from_restarted_trainer_is_rejected(host: Host) -> None:
    trained, served = model(1), model(2)
    base = {"w": torch.zeros(4)}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(ps.publisher("base", base, mode="snapshot"))
        first.publish(4)
        here = stack.enter_context(ps.subscriber("base", {"w": torch.ones(4)}))
        here.update()
        old = base_identity(first)
        publisher = stack.enter_context(adapter_publisher("a", trained, base=lambda: old))
        by_object = stack.enter_context(adapter_subscriber("a", served, base=here))
        by_text = stack.enter_context(adapter_subscriber("a", model(2), base="base:4"))
        publisher.publish(1)
        assert by_object.update().version == by_text.update().version == 1
    with contextlib.ExitStack() as stack:
        second = stack.enter_context(ps.publisher("base", base, mode="snapshot"))
        report = second.publish(4)
        assert base_identity(report) == base_identity(second) != old
        publisher = stack.enter_context(adapter_publisher("a", trained, base=second))
        publisher.publish(2)
        receiver = stack.enter_context(adapter_subscriber("a", served, base=lambda: old))
        with pytest.raises(ps.errors.BaseMismatch) as caught:
            receiver.update()
        assert (caught.value.expected, caught.value.found) == (base_identity(second), old)


def merge_one_layer(made: Any) -> None:
    next(layer for layer in made.modules() if hasattr(layer, "lora_A")).merge()


def scale(made: Any, factor: float = 2.0) -> None:
    next(layer for layer in made.modules() if hasattr(layer, "lora_A")).scale_layer(factor)


def replace_adapter(made: Any) -> None:
    made.set_adapter("other")
    made.delete_adapter("default")
    made.add_adapter("default", peft.LoraConfig(r=8, lora_alpha=16, target_modules=MODULES))
    made.set_adapter("default")


def move(made: Any) -> None:
    parameter = next(one for name, one in made.named_parameters() if "lora_A" in name)
    parameter.data = parameter.data.clone()


CHANGES: dict[str, Any] = {
    "merged": lambda made: made.merge_adapter(),
    "merged safely": lambda made: made.merge_adapter(safe_merge=True),
    "one layer merged": merge_one_layer,
    "another merged": lambda made: made.merge_adapter(["other"]),
    "scaled": scale,
    "unloaded": lambda made: made.merge_and_unload(),
    "configured": lambda made: setattr(made.peft_config["default"], "lora_alpha", 99),
}
UNUSED: dict[str, Any] = {
    "disabled": lambda made: made.base_model.disable_adapter_layers(),
    "another active": lambda made: made.set_adapter("other"),
    "two active": lambda made: made.base_model.set_adapter(["default", "other"]),
}


def model_of_two(seed: int) -> Any:
    made = model(seed)
    made.add_adapter("other", peft.LoraConfig(r=8, target_modules=MODULES))
    return made


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("publish", [adapter_publisher, merged_publisher])
def test_publishing_changed_adapter_layers_raises(host: Host, publish: Any, change: Any) -> None:
    trained = model_of_two(1)
    options = {"base": "b1"} if publish is adapter_publisher else {}
    with publish("a", trained, **options) as publisher:
        publisher.publish(1)
        change(trained)
        with pytest.raises(ps.PlanError) as caught:
            publisher.publish(2)
        assert not caught.value.mutated and publisher.publisher.version == 1


def load_by_assignment(made: Any) -> None:
    made.load_state_dict({name: tensor.clone() for name, tensor in made.state_dict().items()}, assign=True)


def offload_and_return(made: Any) -> None:
    host = [parameter.data.clone() for parameter in made.parameters()]
    for parameter in made.parameters():
        parameter.data = torch.empty(0)
    for parameter, values in zip(made.parameters(), host, strict=True):
        parameter.data = values


MOVES: dict[str, Any] = {
    "data": move,
    "replaced": replace_adapter,
    "assigned": load_by_assignment,
    "offloaded": offload_and_return,
    "cast": lambda made: made.half().float(),
    "shared": lambda made: made.share_memory(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("mode", ["snapshot", "live"])
def test_adapter_syncs_after_trainer_or_engine_memory_moves(host: Host, mode: Any, move: Any) -> None:
    trained, served = model_of_two(1), model_of_two(2)
    with (
        adapter_publisher("a", trained, base="b1", mode=mode) as publisher,
        adapter_subscriber("a", served, base="b1", mode="direct" if mode == "live" else "staged") as subscriber,
    ):
        for version in range(1, 6):
            fill(trained, version)
            if mode == "live":
                together([partial(publisher.publish, version), partial(subscriber.update, version, 10.0)])
            else:
                publisher.publish(version)
                subscriber.update()
            here = adapter_tensors(served)
            assert all(torch.equal(here[name], one) for name, one in adapter_tensors(trained).items())
            assert all(here[name].data_ptr() == one.data_ptr() for name, one in subscriber.tensors.items())
            move((trained, served)[version % 2])


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_adapter_is_merged_again_after_model_moves(host: Host, move: Any) -> None:
    trained = model_of_two(1)
    whole = {name: torch.zeros_like(one) for name, one in base_model().state_dict().items()}
    with merged_publisher("m", trained) as publisher, ps.subscriber("m", whole) as subscriber:
        for version in range(1, 4):
            fill(trained, version)
            with torch.no_grad():
                trained.get_base_model().model.norm.weight.fill_(version)
            publisher.publish(version)
            subscriber.update()
            true = merged_by_peft(trained)
            assert all(torch.allclose(one, true[name], atol=1e-6) for name, one in whole.items())
            move(trained)


def test_casting_adapter_is_allowed_but_casting_base_raises(host: Host) -> None:
    trained = model(1)
    whole = {name: torch.zeros_like(one) for name, one in base_model().state_dict().items()}
    with merged_publisher("m", trained) as publisher, ps.subscriber("m", whole) as subscriber:
        publisher.publish(1)
        for parameter in adapter_parameters(trained).values():
            parameter.data = parameter.data.bfloat16()
        fill(trained, 2)
        publisher.publish(2)
        subscriber.update()
        for parameter in adapter_parameters(trained).values():
            parameter.data = parameter.data.float()
        true = merged_by_peft(trained)
        assert all(torch.allclose(one, true[name], atol=1e-6) for name, one in whole.items())
        name = "model.layers.0.self_attn.q_proj.weight"
        for layer in trained.get_base_model().model.layers:
            layer.self_attn.half()
        with pytest.raises(ps.ConfigError, match="changed their dtype") as caught:
            publisher.publish(3)
        assert caught.value.tensor is not None and caught.value.tensor.startswith(name[:14])
        assert not caught.value.mutated
        subscriber.update()
        assert torch.equal(whole[name], whole[name].float()) and subscriber.version == 2


@pytest.mark.parametrize("part", ["lora_A", "q_proj.base_layer", "norm"])
@pytest.mark.parametrize("publish", [adapter_publisher, merged_publisher])
def test_freed_model_memory_is_rejected(host: Host, publish: Any, part: str) -> None:
    trained = model(1)
    options = {"base": "b1"} if publish is adapter_publisher else {}
    parameter = next(one for name, one in trained.named_parameters() if part in name)
    with publish("a", trained, **options) as publisher:
        publisher.publish(1)
        values = parameter.data.clone()
        parameter.untyped_storage().resize_(0)
        if publish is adapter_publisher and part != "lora_A":
            # Only the adapter is published.
            assert publisher.publish(2).version == 2
            return
        for _ in range(2):
            with pytest.raises(ps.PlanError) as caught:
                publisher.publish(2)
            assert not caught.value.mutated and publisher.publisher.version == 1
        parameter.data = values
        assert publisher.publish(2).version == 2


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("change", [*CHANGES.values(), *UNUSED.values()], ids=[*CHANGES, *UNUSED])
def test_receiver_with_different_adapter_layers_raises(host: Host, change: Any, mode: Any) -> None:
    trained, served = model(1), model_of_two(2)
    with (
        adapter_publisher("a", trained, base="b1") as publisher,
        adapter_subscriber("a", served, base="b1", mode=mode) as subscriber,
    ):
        publisher.publish(1)
        subscriber.update()
        change(served)
        before = logits(served)
        fill(trained, 3)
        publisher.publish(2)
        with pytest.raises(ps.PlanError) as caught:
            subscriber.update()
        assert not caught.value.mutated and subscriber.version == 1
        assert torch.equal(logits(served), before)


def test_restored_adapter_layers_receive_updates(host: Host) -> None:
    trained, served = model(1), model_of_two(2)
    whole = {name: torch.zeros_like(one) for name, one in base_model().state_dict().items()}
    with (
        adapter_publisher("a", trained, base="b1") as publisher,
        merged_publisher("m", trained) as source,
        ps.subscriber("m", whole) as merged,
        adapter_subscriber("a", served, base="b1") as subscriber,
    ):
        for made in (trained, served):
            made.merge_adapter()
            made.unmerge_adapter()
            scale(made, 2.0)
            scale(made, 0.5)
        served.set_adapter("other")
        served.set_adapter("default")
        publisher.publish(1)
        source.publish(1)
        subscriber.update()
        merged.update()
        assert torch.allclose(logits(served), logits(trained), atol=1e-4)


def test_staged_version_is_refused_after_merge(host: Host) -> None:
    trained, served = model(1), model(2)
    with (
        adapter_publisher("a", trained, base="b1") as publisher,
        adapter_subscriber("a", served, base="b1") as subscriber,
    ):
        publisher.publish(1)
        subscriber.stage()
        served.merge_adapter()
        with pytest.raises(ps.PlanError, match="merged default"):
            subscriber.commit()
        served.unmerge_adapter()
        subscriber.update()
        assert torch.allclose(logits(served), logits(trained), atol=1e-4)


def test_model_with_scaled_adapter_is_rejected(host: Host) -> None:
    made = model(1)
    scale(made)
    for make in (adapter_publisher, adapter_subscriber):
        with pytest.raises(ps.PlanError, match="scaled by 4"):
            make("a", made, base="b1")
    with pytest.raises(ps.PlanError, match="scaled by 4"):
        merged_publisher("a", made)


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_publisher_restarted_with_different_adapter_rank_is_rejected(host: Host, mode: Any) -> None:
    with (
        adapter_subscriber("a", model(2), base="b1", mode=mode) as subscriber,
        plain_subscriber("a", base="b1", mode=mode) as other,
    ):
        with adapter_publisher("a", model(1), base="b1") as publisher:
            publisher.publish(1)
            subscriber.update()
            other.update()
        # The old process stays listed for a while, and other receivers still have its version.
        with adapter_publisher("a", model(1, r=4), base="b1") as publisher:
            publisher.publish(2)
            with pytest.raises(ps.PlanError, match="lora_A"):
                subscriber.update()
            assert subscriber.version == 1 and other.update().version == 2


def test_adapter_directory_loads_in_peft_with_equal_logits(host: Host, tmp_path: Path) -> None:
    trained = model(1)
    with (
        adapter_publisher("team/a", trained, base="b1") as publisher,
        plain_subscriber("team/a", base="b1") as received,
        AdapterDirectory(received, tmp_path, keep=2) as files,
    ):
        with pytest.raises(ps.ConfigError, match="no version"):
            files.write()
        written = []
        for version in (1, 2, 3):
            fill(trained, version)
            publisher.publish(version)
            received.update()
            written.append(files.write())
            assert files.write() == written[-1]
            loaded = peft.PeftModel.from_pretrained(base_model(), written[-1])
            assert torch.equal(logits(loaded), logits(trained))
        assert [path.exists() for path in written] == [False, True, True]
        # No partial file remains.
        assert len(list(written[-1].parent.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


class Engine:
    """An engine in memory that serves the directories that it has read."""

    def __init__(self) -> None:
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.refuses = ""

    def load(self, name: str, directory: Path) -> None:
        from safetensors.torch import load_file

        if self.refuses:
            raise ps.errors.DestinationError(self.refuses)
        self.adapters[name] = load_file(directory / "adapter_model.safetensors")

    def unload(self, name: str) -> None:
        del self.adapters[name]


def test_engine_lists_each_adapter_version_separately(host: Host) -> None:
    trained, engine, bases = model(1), Engine(), ["b1"]
    with (
        adapter_publisher("a", trained, base=lambda: bases[0]) as publisher,
        serve_adapter("a", engine, base=lambda: bases[0], served_name="policy") as served,
    ):
        for version in (1, 2, 3):
            fill(trained, version)
            publisher.publish(version)
            served.update()
            assert (served.name, served.version) == (f"policy@{version}", version)
            found = engine.adapters[served.name]
            assert all(torch.equal(found[name], one) for name, one in adapter_tensors(trained).items())
        assert list(engine.adapters) == ["policy@2", "policy@3"]
        engine.refuses = "no room"
        publisher.publish(4)
        with pytest.raises(ps.errors.DestinationError, match="no room"):
            served.update()
        assert served.version == 3
        engine.refuses = ""
        served.update()
        assert list(engine.adapters) == ["policy@3", "policy@4"]
        # The engine's base changes, so it must not serve an adapter for the old base.
        bases[0] = "b2"
        assert not served.check_base()
        assert (engine.adapters, served.version) == ({}, -1)
        publisher.publish(5)
        served.update()
        assert list(engine.adapters) == ["policy@5"]
    assert engine.adapters == {}


@pytest.fixture
def routes() -> Iterator[tuple[str, list[tuple[str, Any]], list[int]]]:
    """Yield a server's URL, its requests, and the status of its next responses."""
    asked: list[tuple[str, Any]] = []
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, body))
            status = answers.pop(0) if answers else 200
            said = json.dumps({"success": status == 200, "error_message": "rank too large"}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked, answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_server_routes_match_vllm_and_sglang(routes: tuple[str, list[tuple[str, Any]], list[int]]) -> None:
    """The routes match vLLM 0.32 and SGLang 0.5.23. `make test-engines` runs vLLM's."""
    url, asked, answers = routes
    for server, prefix in ((VllmServer(url), "/v1"), (SglangServer(url), "")):
        server.load("p@1", Path("/there"))
        server.unload("p@1")
        assert asked == [
            (f"{prefix}/load_lora_adapter", {"lora_name": "p@1", "lora_path": "/there"}),
            (f"{prefix}/unload_lora_adapter", {"lora_name": "p@1"}),
        ]
        answers.append(400)
        with pytest.raises(ps.errors.DestinationError, match=r"returned 400 .* p@2: .*rank too large"):
            server.load("p@2", Path("/there"))
        asked.clear()
    with pytest.raises(ps.errors.DestinationError, match="did not respond"):
        VllmServer("http://127.0.0.1:9").load("p@1", Path("/there"))


def merged_by_peft(trained: Any) -> dict[str, torch.Tensor]:
    import copy

    return dict(copy.deepcopy(trained).merge_and_unload().state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_at_source_matches_merge_at_receiver(host: Host, dtype: torch.dtype) -> None:
    trained, here = model(1, dtype), base_model(dtype)
    whole = {name: torch.zeros_like(one) for name, one in here.state_dict().items()}
    start = {name: one.clone() for name, one in trained.state_dict().items() if "lora_" not in name}
    pauses: list[int] = []
    hooks = ps.Hooks(before_pause=pauses.append)
    with (
        merged_publisher("whole", trained, mode="snapshot") as source,
        ps.subscriber("whole", whole) as receiver,
        adapter_publisher("a", trained, base="b1") as publisher,
        merging_subscriber("a", here, base="b1", hooks=hooks, pristine="cpu") as merging,
    ):
        places = {name: one.data_ptr() for name, one in here.state_dict().items()}
        for version in range(1, 7):
            fill(trained, version)
            source.publish(version)
            publisher.publish(version)
            receiver.update()
            merging.update()
            true = merged_by_peft(trained)
            state = here.state_dict()
            tolerance = 1e-6 if dtype is torch.float32 else 2e-2
            for name, one in true.items():
                assert torch.equal(whole[name], state[name])  # one implementation
                assert torch.allclose(state[name].float(), one.float(), atol=tolerance, rtol=tolerance), name
            assert torch.allclose(logits(here), logits(trained), atol=0.05 if dtype is torch.bfloat16 else 1e-4)
        assert pauses == [1, 2, 3, 4, 5, 6]
        # Rounding errors do not accumulate: the sixth version equals a merge into a fresh base.
        fresh = base_model(dtype)
        with merging_subscriber("a", fresh, base="b1") as other:
            other.update()
        assert all(torch.equal(one, here.state_dict()[name]) for name, one in fresh.state_dict().items())
        assert {name: one.data_ptr() for name, one in here.state_dict().items()} == places
        merging.restore()
        assert all(torch.equal(one, here.state_dict()[name]) for name, one in base_model(dtype).state_dict().items())
    assert all(torch.equal(one, start[name]) for name, one in trained.state_dict().items() if name in start)


def test_externally_changed_merged_weights_are_refused(host: Host) -> None:
    trained, here, bases = model(1), base_model(), ["b1"]
    with (
        adapter_publisher("a", trained, base=lambda: bases[0]) as publisher,
        merging_subscriber("a", here, base=lambda: bases[0]) as merging,
    ):
        publisher.publish(1)
        merging.update()
        with torch.no_grad():
            here.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
        publisher.publish(2)
        with pytest.raises(
            ps.errors.BaseMismatch, match=r"1 merged weights have changed .*layers\.0\.self_attn\.q_proj"
        ):
            merging.update()
        assert (merging.version, merging.is_dirty) == (1, False)
        # The caller announces a new base. Its values are the ones that are merged into.
        fresh = base_model()
        here.load_state_dict(fresh.state_dict())
        bases[0] = "b2"
        publisher.publish(3)
        merging.update()
        assert torch.allclose(logits(here), logits(trained), atol=1e-4)


def test_merging_into_moved_model_succeeds(host: Host) -> None:
    trained, here = model(1), base_model()
    with (
        adapter_publisher("a", trained, base="b1") as publisher,
        merging_subscriber("a", here, base="b1") as merging,
    ):
        for version in range(1, 4):
            fill(trained, version)
            publisher.publish(version)
            merging.update()
            assert torch.allclose(logits(here), logits(trained), atol=1e-4)
            if version == 1:
                for parameter in here.parameters():
                    parameter.data = parameter.data.clone()
            else:
                here.load_state_dict({name: one.clone() for name, one in here.state_dict().items()}, assign=True)
        here.model.layers[0].self_attn.q_proj.weight.untyped_storage().resize_(0)
        publisher.publish(4)
        with pytest.raises(ps.PlanError, match="q_proj") as refused:
            merging.update()
        assert not refused.value.mutated
        assert merging.version == 3


def test_unmergeable_adapters_are_refused(host: Host) -> None:
    with pytest.raises(ps.ConfigError, match="DoRA"):
        merged_publisher("a", model(1, use_dora=True))
    with pytest.raises(ps.ConfigError, match="LlamaForCausalLM has no adapter 'default'"):
        adapter_publisher("a", base_model(), base="b1")
    with pytest.raises(ps.ConfigError, match="no adapter 'other', its adapters are: default"):
        adapter_tensors(model(1), "other")
    assert adapter_config(model(1))["inference_mode"] is True
