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
