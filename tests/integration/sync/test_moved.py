"""Tensors that are moved, cast, freed or replaced between versions are followed, or refused before a write."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from tests.integration.conftest import Host
from tests.integration.sync.test_models import halves, publishers, together
from torch import nn

import penstock as ps
from penstock.errors import ConfigError, PenstockError, PlanError
from penstock.spi.trainer_publisher import TrainerPublisher


@pytest.fixture
def stack(host: Host) -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Linear(48, 8))


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            tensor.fill_(value)


def has(module: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in module.parameters())


def assign_data(module: nn.Module) -> None:
    module[0].weight.data = module[0].weight.data.clone()


def offload_and_return(module: nn.Module) -> None:
    host = [parameter.data.clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.data = torch.empty(0)
    gc.collect()
    for parameter, values in zip(module.parameters(), host, strict=True):
        parameter.data = values


def load_by_assignment(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def replace_parameter(module: nn.Module) -> None:
    module[2].bias = nn.Parameter(torch.zeros(8))


def replace_layer(module: nn.Module) -> None:
    module[2] = nn.Linear(48, 8)


def replace_buffer(module: nn.Module) -> None:
    module[1].running_mean = module[1].running_mean.clone()


def cast_there_and_back(module: nn.Module) -> None:
    module.half().float()


def share_memory(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.share_memory_()


def resize_storage(module: nn.Module) -> None:
    storage = module[0].weight.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    module.taken = [torch.zeros(64 * 48) for _ in range(4)]
    storage.resize_(nbytes)


def transpose_in_memory(module: nn.Module) -> None:
    module[0].weight.data = module[0].weight.data.t().contiguous().t()


MOVES = [
    assign_data,
    offload_and_return,
    load_by_assignment,
    replace_parameter,
    replace_layer,
    replace_buffer,
    cast_there_and_back,
    share_memory,
    resize_storage,
    transpose_in_memory,
]


@pytest.mark.parametrize("replica", ["device", "cpu"])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_publisher_sends_parameters_after_they_move(stack: ExitStack, move: Callable[..., None], replica: str) -> None:
    trained, served = model(), model()
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot", snapshot_device=replica))
    subscriber = stack.enter_context(ps.subscriber("moved", served))
    for version in range(1, 5):
        fill(trained, version)
        publisher.publish(version)
        assert subscriber.update().version == version
        assert has(served, version)
        assert torch.equal(served[1].running_mean, trained[1].running_mean)
        if version < 4:
            move(trained)


@pytest.mark.parametrize("move", [assign_data, share_memory, replace_layer], ids=lambda move: move.__name__)
@pytest.mark.parametrize("side", ["publisher", "subscriber"])
def test_live_versions_sync_after_parameters_move(stack: ExitStack, move: Callable[..., None], side: str) -> None:
    trained, served = model(), model()
    publisher = stack.enter_context(ps.publisher("moved", trained))
    subscriber = stack.enter_context(ps.subscriber("moved", served))
    for version in range(1, 4):
        fill(trained, version)
        together([partial(publisher.publish, version), partial(subscriber.update, version, 10.0)])
        assert has(served, version)
        move(trained if side == "publisher" else served)


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_subscriber_fills_parameters_after_they_move(stack: ExitStack, move: Callable[..., None], mode: str) -> None:
    trained, served = model(), model()
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served, mode=mode))
    for version in range(1, 4):
        fill(trained, version)
        publisher.publish(version)
        assert subscriber.update().version == version
        assert has(served, version)
        move(served)


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_update_does_not_write_to_replaced_tensor(stack: ExitStack, mode: str) -> None:
    trained, served = {"w": torch.ones(4096)}, {"w": torch.zeros(4096)}
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served, mode=mode))
    publisher.publish(1)
    subscriber.update()
    former = served["w"]
    served["w"] = torch.zeros(4096)
    trained["w"].fill_(2)
    publisher.publish(2)
    subscriber.update()
    assert bool((served["w"] == 2).all())
    assert bool((former == 1).all())


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_moved_target_receives_live_version_again(stack: ExitStack, mode: str) -> None:
    trained, served = model(), model()
    fill(trained, 7)
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served, mode=mode))
    publisher.publish(1)
    subscriber.update()
    assert subscriber.update().nbytes == 0
    served[0].weight.data = torch.zeros(48, 64)
    report = subscriber.update()
    assert report.version == 1
    assert report.nbytes > 0
    assert has(served, 7)
    assert subscriber.update().nbytes == 0


def change_dtype(module: nn.Module) -> None:
    module.half()


def grow(module: nn.Module) -> None:
    module[2] = nn.Linear(48, 9)


def add_layer(module: nn.Module) -> None:
    module.append(nn.Linear(8, 8))


def drop_layer(module: nn.Module) -> None:
    del module[2]


def rename(module: nn.Module) -> None:
    module.add_module("other", module[2])
    delattr(module, "2")


@pytest.mark.parametrize("mode", ["snapshot", "live"])
@pytest.mark.parametrize(
    ("change", "named"),
    [(change_dtype, "0.bias"), (grow, "2.bias"), (add_layer, "3.bias"), (drop_layer, "2.bias"), (rename, "other.bias")],
)
def test_publish_after_tensor_layout_changes_is_refused(
    stack: ExitStack, change: Callable[..., None], named: str, mode: Any
) -> None:
    trained, served = model(), model()
    fill(trained, 1)
    publisher = stack.enter_context(ps.publisher("moved", trained, mode=mode))
    publisher.publish(1)
    change(trained)
    with pytest.raises(ConfigError, match="create a new one") as refused:
        publisher.publish(2)
    assert named in str(refused.value)
    assert not refused.value.mutated
    if mode == "snapshot":
        # The copy of the previous version remains readable.
        assert stack.enter_context(ps.subscriber("moved", served)).update().version == 1
        assert has(served, 1)


def free(layer: nn.Linear) -> None:
    layer.weight.untyped_storage().resize_(0)


def shrink(layer: nn.Linear) -> None:
    layer.weight.untyped_storage().resize_(16)


def to_meta(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.empty(48, 64, device="meta"))


@pytest.mark.parametrize("lose", [free, shrink, to_meta], ids=lambda lose: lose.__name__)
@pytest.mark.parametrize("mode", ["snapshot", "live"])
def test_publisher_with_freed_memory_is_refused(stack: ExitStack, lose: Callable[..., None], mode: Any) -> None:
    trained, served = model(), model()
    publisher = stack.enter_context(ps.publisher("moved", trained, mode=mode))
    publisher.publish(1)
    lose(trained[0])
    for _ in range(2):
        with pytest.raises(PenstockError) as refused:
            publisher.publish(2)
        assert refused.value.tensor == "0.weight"
        assert not refused.value.mutated
    trained[0].weight = nn.Parameter(torch.zeros(48, 64))
    fill(trained, 3)
    subscriber = stack.enter_context(ps.subscriber("moved", served))
    if mode == "live":
        together([lambda: publisher.publish(3), lambda: subscriber.update(3, 10.0)])
    else:
        publisher.publish(3)
        subscriber.update()
    assert has(served, 3)


@pytest.mark.parametrize("lose", [free, shrink, to_meta], ids=lambda lose: lose.__name__)
@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_target_with_freed_memory_is_refused(stack: ExitStack, lose: Callable[..., None], mode: str) -> None:
    trained, served = model(), model()
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served, mode=mode))
    publisher.publish(1)
    subscriber.update()
    lose(served[0])
    fill(trained, 2)
    publisher.publish(2)
    for _ in range(2):
        with pytest.raises(PlanError) as refused:
            subscriber.update()
        assert not refused.value.mutated
    served[0].weight = nn.Parameter(torch.zeros(48, 64))
    assert subscriber.update().version == 2
    assert has(served, 2)


def test_target_moved_after_stage_is_refused(stack: ExitStack) -> None:
    trained, served = model(), model()
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served))
    fill(trained, 1)
    publisher.publish(1)
    subscriber.stage()
    former = served[0].weight.data
    before = former.clone()
    served[0].weight.data = former.clone()
    with pytest.raises(ConfigError, match="moved since") as refused:
        subscriber.commit()
    assert not refused.value.mutated
    assert torch.equal(former, before)
    assert subscriber.update().version == 1
    assert has(served, 1)


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_target_moved_by_hook_is_refused(stack: ExitStack, mode: str) -> None:
    trained, served = model(), model()
    resumed: list[int] = []

    def wake(version: int) -> None:
        if version == 2:
            assign_data(served)

    hooks = ps.Hooks(before_pause=wake, after_resume=resumed.append)
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served, mode=mode, hooks=hooks))
    for version in (1, 2):
        fill(trained, version)
        publisher.publish(version)
        if version == 1:
            subscriber.update()
    with pytest.raises(ConfigError, match="moved since") as refused:
        subscriber.update()
    assert not refused.value.mutated
    assert has(served, 1)
    # The paused engine continues with the previous version.
    assert resumed == [1, 1]


def test_update_succeeds_after_allocated_target_tensors_move(stack: ExitStack) -> None:
    trained = {"w": torch.ones(64), "v": torch.ones(3, 5)}
    made: list[dict[str, torch.Tensor]] = []

    def allocate(published: Any) -> dict[str, torch.Tensor]:
        made.append({name: torch.zeros(tensor.shape) for name, tensor in published.items()})
        return made[-1]

    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", allocate))
    for version in (1, 2):
        publisher.publish(version)
        subscriber.update()
        (target,) = made
        assert torch.equal(target["w"], trained["w"])
        target["w"].data = torch.zeros(64)
        trained["w"].fill_(2)


def test_moved_buffer_outside_sync_does_not_fail_update(stack: ExitStack) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(32))
            self.register_buffer("angles", torch.arange(8.0), persistent=False)

    trained, served = Rotary(), Rotary()
    calls = recorded = 0

    def load(weights: Any) -> None:
        nonlocal calls
        calls += 1
        for _, tensor in weights:
            served.w.data.copy_(tensor)

    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served, load=load))
    for version in (1, 2, 3):
        with torch.no_grad():
            trained.w.fill_(version)
        publisher.publish(version)
        assert subscriber.update().version == version
        assert bool((served.w == version).all())
        recorded = recorded or calls
        served.angles = torch.arange(16.0 * version)
        trained.angles = torch.arange(16.0 * version)
    assert calls == recorded


def test_swapped_tensors_receive_correct_values(stack: ExitStack) -> None:
    # Regions and sizes stay, so only the registration distinguishes the plans.
    both = torch.zeros(2, 256)
    trained = {"a": both[0], "b": both[1]}
    served = {"a": torch.zeros(256), "b": torch.zeros(256)}
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served))
    for version in range(1, 5):
        trained["a"].fill_(version)
        trained["b"].fill_(-version)
        publisher.publish(version)
        subscriber.update()
        assert bool((served["a"] == version).all())
        assert bool((served["b"] == -version).all())
        trained["a"], trained["b"] = trained["b"], trained["a"]


@pytest.mark.parametrize("transforms", [None, "fp8-block128"])
@pytest.mark.parametrize("mode", ["snapshot", "live"])
def test_shards_moved_in_rank_memory_still_sync(stack: ExitStack, mode: str, transforms: str | None) -> None:
    # Blocks of 128 rows cross the edge between the ranks, so they exchange elements.
    values = torch.randn(300, 256)
    held = [halves({"a.weight": values, "b.weight": -values}, rank) for rank in range(2)]
    ranks = publishers(stack, held, mode=mode, transforms=transforms)
    served = {"a.weight": torch.zeros(300, 256), "b.weight": torch.zeros(300, 256)}
    subscriber = stack.enter_context(ps.subscriber("toy", served))
    for version in range(1, 5):
        for name, sign in (("a.weight", 1), ("b.weight", -1)):
            for rank in range(2):
                moved = held[rank][name].tensor
                if rank == version % 2:
                    moved.data = moved.data.clone()
                moved.copy_((sign * version * values).chunk(2)[rank])
        work = [partial(rank.publish, version) for rank in ranks]
        together([*work, partial(subscriber.update, version, 10.0)])
        assert torch.equal(served["a.weight"], version * values)
        assert torch.equal(served["b.weight"], -version * values)


def test_repeated_publish_calls_reuse_one_publisher(stack: ExitStack) -> None:
    sender = stack.enter_context(TrainerPublisher("moved", connection=ps.ConnectionSettings(), rank=(0, 1)))
    served = {"w": torch.zeros(64)}
    subscriber = stack.enter_context(ps.subscriber("moved", served))
    sources = set()
    for version in range(3):
        sender.publish({"w": torch.full((64,), float(version))})
        sources |= subscriber.update().sources.keys()
        assert bool((served["w"] == version).all())
    assert len(sources) == 1
    with pytest.raises(ConfigError, match="create a new one"):
        sender.publish({"w": torch.zeros(65)})


@pytest.mark.parametrize(
    ("make_params", "warns"),
    [
        (lambda module: module.state_dict(), True),
        (lambda module: module.state_dict(keep_vars=True), False),
        (lambda module: module, False),
        (lambda module: dict(module.named_parameters()), False),
    ],
    ids=["state dict", "variables", "module", "dict"],
)
def test_publishing_detached_state_dict_warns_once(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, make_params: Callable[..., Any], warns: bool
) -> None:
    trained = model()
    publisher = stack.enter_context(ps.publisher("moved", make_params(trained), mode="snapshot"))
    publisher.publish(1)
    publisher.publish(2)
    lines = [line for line in caplog.messages if "Pass the module instead" in line]
    assert len(lines) == warns
    # The dict does not show the module's new memory.
    fill(trained, 7)
    for parameter in trained.parameters():
        parameter.data = torch.full_like(parameter, 8)
    subscriber = stack.enter_context(ps.subscriber("moved", served := model(), strict=False))
    publisher.publish(3)
    subscriber.update()
    assert has(served, 7 if warns else 8)


HOLDER = """
import sys, torch, penstock as ps
from safetensors.torch import save_file
path = sys.argv[1]
save_file({"w": torch.arange(1 << 18, dtype=torch.float32)}, path)
with ps.join("held") as holder:
    target = {"w": torch.zeros(1 << 18)}
    holder.fetch(target, fallback=path)
    kept = target["w"]
    HOW
    junk = [torch.zeros(1 << 18) for _ in range(8)]
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        for _ in range(3):
            holder.check()
            __import__("time").sleep(1)
        print("served on")
    except ps.PenstockError as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("how", "ends"),
    [('target["w"].share_memory_()', "IntegrityError"), ('target["w"].data = torch.zeros(1 << 18)', "served on")],
)
def test_holder_moving_its_weights_keeps_serving(host: Host, tmp_path: Any, how: str, ends: str) -> None:
    path = tmp_path / "held.safetensors"
    code = HOLDER.replace("HOW", how)
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        with ps.join("held") as reader:
            target = {"w": torch.zeros(1 << 18)}
            reader.fetch(target, fallback=str(path))
            assert torch.equal(target["w"], torch.arange(1 << 18, dtype=torch.float32))
        output, _ = holder.communicate("\n", timeout=60)
    assert holder.returncode == 0
    assert output.strip() == ends
