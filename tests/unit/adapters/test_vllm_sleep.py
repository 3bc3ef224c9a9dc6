"""A worker that wakes has the same bytes, or reads its weights again, even with a vLLM without weight versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_vllm.sleep import protect_engine, protect_workers


def config(load_format: str = "penstock") -> Any:
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format),
        model_config=SimpleNamespace(enable_sleep_mode=True),
        weight_transfer_config=None,
    )


class WorkerBase:
    """A base class like vLLM's, whose constructor all workers call."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config


class Worker(WorkerBase):
    """A worker that stores the weights on the host during sleep. `damage` changes the restored weights."""

    device = torch.device("cpu")

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.started = {name: one.clone() for name, one in self.model.state_dict().items()}
        self.damage: Any = lambda: None
        self.calls: list[str] = []

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.calls.append(f"load {load_dummy_weights}")

    def sleep(self, level: int = 1) -> None:
        self.kept = {name: one.clone() for name, one in self.model.state_dict().items()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "weights" in tags:
            self.model.load_state_dict(self.kept)
            self.damage()

    def reload_weights(self) -> None:
        self.calls.append("reload")
        self.model.load_state_dict(self.started)

    def execute_model(self, value: torch.Tensor) -> Any:
        return self.model(value)


@pytest.fixture
def worker() -> Any:
    base = type("WorkerBase", (WorkerBase,), {"__init__": WorkerBase.__init__})
    protect_workers(base, "penstock")
    return type("CpuWorker", (Worker, base), {})(config())


def test_woken_worker_restores_original_weights(worker: Any) -> None:
    worker.load_model(load_dummy_weights=True)
    before = worker.execute_model(torch.ones(8))
    worker.sleep(1)
    with pytest.raises(RuntimeError, match="call /wake_up"):
        worker.execute_model(torch.ones(8))
    worker.wake_up()
    assert torch.equal(worker.execute_model(torch.ones(8)), before)
    assert worker.calls == ["load True"]


def test_weights_changed_during_sleep_are_reloaded(worker: Any) -> None:
    before = worker.execute_model(torch.ones(8))

    def damage() -> None:
        with torch.no_grad():
            worker.model[2].bias[3] += 1e-6

    worker.damage = damage
    worker.sleep(1)
    worker.wake_up()
    assert worker.calls == ["reload"]
    assert torch.equal(worker.execute_model(torch.ones(8)), before)


@pytest.mark.parametrize("tags", [[None], [["weights"], ["kv_cache"]]])
def test_damaged_buffers_are_restored_with_weights(worker: Any, tags: list[list[str] | None]) -> None:
    # The loader does not fill it, as a table of rotary embeddings.
    worker.model.register_buffer("table", torch.arange(8.0), persistent=False)

    def damage() -> None:
        with torch.no_grad():
            worker.model[2].bias.fill_(1.0)
            worker.model.table.fill_(float("nan"))

    worker.damage = damage
    worker.sleep(1)
    for each in tags:
        worker.wake_up(each)
    assert worker.model.table.tolist() == list(range(8))


class TransferEngine:
    """The part of a worker's weight transfer that a sleep uses. A version fills all parameters but `frozen`."""

    def __init__(self, worker: TransferWorker) -> None:
        self.installed, self.num_installed = 0, 1
        self.others_agree, self.num_received = True, 0
        self._worker = worker

    def fall_asleep(self) -> None:
        pass

    def not_installed(self) -> list[torch.nn.Parameter]:
        return [self._worker.model.frozen] if self.installed >= 0 else []

    def all_agree(self, is_so: bool) -> bool:
        return is_so and self.others_agree

    def install(self, version: int) -> None:
        self._worker.model.weight.data.fill_(version)
        self._worker.model.scalar.fill_(version)
        self.installed, self.num_installed = version, self.num_installed + 1

    def bring_back(self) -> None:
        self.num_received += 1
        self.install(self.installed)


class TransferWorker(WorkerBase):
    """A worker like vLLM's on a GPU: level 2 discards the parameters, and each tag maps its own memory."""

    device = torch.device("cpu")

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.model = torch.nn.Linear(4, 4, bias=False)
        self.model.frozen = torch.nn.Parameter(torch.full((4,), 9.0))
        self.model.register_buffer("scalar", torch.zeros(1))
        self.model.weight.data.zero_()
        self.num_reset = 0
        self.model_runner = SimpleNamespace(get_model=lambda: self.model, reset_lora_state=self.reset)
        self.weight_transfer_engine = TransferEngine(self)
        self.damage: Any = lambda: None
        self.fails_once = False
        self.copies: list[torch.Tensor | None] = []

    def reset(self) -> None:
        self.num_reset += 1

    def tensors(self) -> list[torch.Tensor]:
        return [self.model.weight.data, self.model.frozen.data, self.model.scalar]

    def sleep(self, level: int = 1) -> None:
        buffer = self.model.scalar
        self.copies = [one.clone() if level == 1 or one is buffer else None for one in self.tensors()]
        for one in self.tensors():
            one.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self.copies and (tags is None or "weights" in tags):
            for one, copy in zip(self.tensors(), self.copies, strict=True):
                if copy is not None:
                    one.copy_(copy)
            self.copies = []
            self.damage()
        if self.fails_once:
            self.fails_once = False
            raise RuntimeError("out of memory for the cache")

    def reload_weights(self) -> None:
        for one, value in zip(self.tensors(), (0.0, 9.0, 0.0), strict=True):
            one.fill_(value)

    def execute_model(self) -> list[float]:
        return [float(one.flatten()[0]) for one in self.tensors()]


def transfer_worker(*, is_sent: bool = True) -> Any:
    base = type("WorkerBase", (WorkerBase,), {"__init__": WorkerBase.__init__})
    protect_workers(base, "penstock")
    settings = config("auto" if is_sent else "penstock")
    settings.weight_transfer_config = SimpleNamespace(backend="penstock") if is_sent else None
    return type("GpuWorker", (TransferWorker, base), {})(settings)


WEIGHTS, CACHE = ["weights"], ["kv_cache"]


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [1, 2])
def test_version_between_two_sleeps_is_served_after_them(first: int, second: int) -> None:
    worker = transfer_worker()
    worker.sleep(first)
    worker.wake_up(WEIGHTS)
    worker.weight_transfer_engine.install(7)
    worker.sleep(second)
    worker.wake_up()
    assert worker.execute_model() == [7, 9, 7]
    assert worker.penstock_version_after_sleep() == "7"


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("second", [1, 2])
def test_second_sleep_before_first_wake_ended_loses_nothing(first: int, second: int) -> None:
    worker = transfer_worker()
    worker.weight_transfer_engine.install(3)
    worker.sleep(first)
    worker.wake_up(WEIGHTS)
    worker.sleep(second)
    worker.wake_up()
    assert worker.execute_model() == [3, 9, 3]
    assert worker.weight_transfer_engine.num_received == (max(first, second) == 2)


@pytest.mark.parametrize("level", [1, 2])
def test_version_sent_after_failed_wake_is_served(level: int) -> None:
    worker = transfer_worker()
    worker.fails_once = True
    worker.sleep(level)
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.wake_up()
    worker.weight_transfer_engine.install(7)
    worker.wake_up()
    assert worker.execute_model() == [7, 9, 7]


def test_damaged_copy_of_other_worker_makes_all_workers_receive() -> None:
    worker = transfer_worker()
    worker.weight_transfer_engine.install(3)
    worker.weight_transfer_engine.others_agree = False
    worker.sleep(1)
    worker.wake_up()
    assert worker.weight_transfer_engine.num_received == 1
    assert worker.execute_model() == [3, 9, 3]


def test_damaged_copy_resets_adapters_and_restores_what_no_version_fills() -> None:
    worker = transfer_worker()
    worker.weight_transfer_engine.install(3)
    worker.damage = lambda: [one.fill_(-1.0) for one in worker.tensors()]
    worker.sleep(1)
    worker.wake_up(WEIGHTS)
    worker.wake_up(CACHE)
    assert worker.execute_model() == [3, 9, 3]
    assert worker.num_reset == 1
    worker.damage = lambda: None
    worker.sleep(1)
    worker.wake_up()
    assert worker.num_reset == 1


def test_parameters_that_nobody_kept_are_not_served() -> None:
    worker = transfer_worker()
    engine = worker.weight_transfer_engine
    # The engine joins its sync only after the sleep.
    engine.installed, engine.num_installed = -1, 0
    worker.sleep(2)
    worker.wake_up(WEIGHTS)
    engine.install(1)
    with pytest.raises(RuntimeError, match="1 parameters were lost in the sleep"):
        worker.wake_up(CACHE)
    with pytest.raises(RuntimeError, match="call /wake_up"):
        worker.execute_model()
    worker.sleep(1)
    with pytest.raises(RuntimeError, match="1 parameters were lost in the sleep"):
        worker.wake_up()
    worker.reload_weights()
    engine.install(1)
    assert worker.execute_model() == [1, 9, 1]


def test_weights_that_others_fill_between_tags_stay() -> None:
    worker = transfer_worker(is_sent=False)
    worker.sleep(2)
    worker.wake_up(WEIGHTS)
    for one in worker.tensors():
        one.fill_(5.0)
    worker.wake_up(CACHE)
    assert worker.execute_model() == [5, 5, 5]
    worker.sleep(1)
    worker.wake_up(WEIGHTS)
    worker.sleep(1)
    worker.wake_up()
    assert worker.execute_model() == [5, 5, 5]


def test_buffer_from_forward_pass_is_restored(worker: Any) -> None:
    # vLLM converts some tables of rotary embeddings in the first forward pass, in inference mode.
    with torch.inference_mode():
        worker.model.register_buffer("table", torch.arange(8.0).half(), persistent=False)

    def damage() -> None:
        with torch.inference_mode():
            worker.model.table.fill_(0)
        with torch.no_grad():
            worker.model[2].bias.fill_(1.0)

    worker.damage = damage
    worker.sleep(1)
    worker.wake_up()
    assert worker.model.table.tolist() == list(range(8))


@pytest.mark.parametrize("load_format", ["penstock", "auto"])
def test_engine_without_weight_versions_can_sleep(load_format: str) -> None:
    class Core:
        """A class like the engine core of vLLM 0.26."""

        def __init__(self) -> None:
            self.vllm_config = config(load_format)
            self.model_executor = SimpleNamespace(sleeping_tags=set[str]())

        def sleep(self, level: int = 1, mode: str = "abort") -> None:
            self.model_executor.sleeping_tags = {"weights"}

        def resume_scheduler(self) -> str:
            return "resumed"

    protect_engine(Core, "penstock")
    core = Core()
    core.sleep(1)
    if load_format == "penstock":
        with pytest.raises(RuntimeError, match="engine is asleep"):
            core.resume_scheduler()
    core.model_executor.sleeping_tags = set()
    assert core.resume_scheduler() == "resumed"
