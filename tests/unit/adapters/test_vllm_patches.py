"""Requests are salted, an executor stays in sync after a failed call, and workers report the phases of their start."""

from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import phases
from penstock.phases import BootRecord
from penstock_vllm.patches import (
    add_weight_version,
    load_functions_of_torch,
    name_newest_adapter,
    receive_all_replies,
    report_phases,
    run_updates_in_engine,
    salt_of,
    salt_requests,
)


class Request:
    """A request with vLLM's block hashes, which depend on its salt."""

    def __init__(self, salt: str | None, num_computed_tokens: int = 0) -> None:
        self.cache_salt, self.num_computed_tokens = salt, num_computed_tokens
        self.block_hashes: list[str] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"block of {self.cache_salt}")


def make_core(backend: str | None) -> Any:
    """Return a class like vLLM's engine core with salting, and an instance."""

    class Core:
        def __init__(self) -> None:
            config = None if backend is None else SimpleNamespace(backend=backend)
            self.vllm_config = SimpleNamespace(weight_transfer_config=config)
            self.scheduler = SimpleNamespace(requests={})
            self.version = "default"

        def preprocess_add_request(self, request: Any) -> Any:
            return Request(request.cache_salt), 0

        def add_request(self, request: Any, request_wave: int = 0) -> None:
            self.scheduler.requests[id(request)] = request

        def set_weight_version(self, weight_version: str) -> None:
            self.version = weight_version

        def get_weight_version(self) -> str:
            return self.version

    salt_requests(Core, "penstock")
    salt_requests(Core, "penstock")
    return Core()


def asked(core: Any, salt: str | None) -> Request:
    made, _ = core.preprocess_add_request(SimpleNamespace(cache_salt=salt))
    assert isinstance(made, Request)
    return made


def test_cache_salt_differs_per_version_and_client() -> None:
    salts = {salt_of(own, version) for own in (None, "a", "b") for version in ("1", "2")}
    assert len(salts) == 6
    assert salt_of(salt_of("a", "1"), "2") == salt_of("a", "2")


def test_running_request_keeps_cache_salt_after_weight_update() -> None:
    core = make_core("penstock")
    waiting, running, late = asked(core, "a"), asked(core, None), asked(core, None)
    core.add_request(waiting)
    core.add_request(running, 0)
    running.num_computed_tokens = 16
    old = running.cache_salt
    core.set_weight_version("2")
    core.add_request(late)  # Created before the version, and added after it.
    assert waiting.cache_salt == salt_of("a", "2")
    assert late.cache_salt == salt_of(None, "2")
    assert running.cache_salt == old == salt_of(None, "default")
    for request in (waiting, late, running):
        assert request.block_hashes == [f"block of {request.cache_salt}"]


def test_engine_with_different_transfer_backend_is_not_patched() -> None:
    for backend in (None, "nccl"):
        core = make_core(backend)
        one = asked(core, "a")
        core.add_request(one)
        core.set_weight_version("2")
        assert one.cache_salt == "a"


class CoreWithoutVersion:
    """An engine core like vLLM's before 0.27, whose workers fail an update to version 13."""

    def __init__(self, backend: str) -> None:
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
        self.scheduler = SimpleNamespace(requests={})

    def preprocess_add_request(self, request: Any) -> Any:
        return Request(request.cache_salt), 0

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.requests[id(request)] = request

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[str]:
        if method == "update_weights" and 13 in [info["version"] for info in (*args, *(kwargs or {}).values())]:
            raise RuntimeError("not received")
        return [method]

    def update(self, version: int) -> None:
        self.collective_rpc("start_weight_update")
        self.collective_rpc("update_weights", kwargs={"update_info": {"version": version}})
        self.collective_rpc("finish_weight_update")


@pytest.mark.parametrize("backend", ["penstock", "nccl"])
def test_core_without_version_salts_by_installed_version(backend: str) -> None:
    class Core(CoreWithoutVersion):
        get_weight_version: Any

    for _ in range(2):
        add_weight_version(Core, "penstock")
        salt_requests(Core, "penstock")
    core = Core(backend)
    waiting = asked(core, "a")
    core.add_request(waiting)
    core.update(5)
    with pytest.raises(RuntimeError, match="not received"):
        core.update(13)
    is_ours = backend == "penstock"
    assert core.get_weight_version() == ("5" if is_ours else "default")
    assert waiting.cache_salt == asked(core, "a").cache_salt == (salt_of("a", "5") if is_ours else "a")
    core.collective_rpc("update_weights", args=({"version": 6},))
    assert core.get_weight_version() == ("5" if is_ours else "default")  # received, but not installed
    core.collective_rpc("finish_weight_update")
    assert core.get_weight_version() == ("6" if is_ours else "default")


@pytest.mark.parametrize("backend", ["penstock", "nccl"])
def test_worker_with_own_steps_leaves_updates_to_engine(backend: str) -> None:
    steps: list[str] = []

    class Base:
        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))

    class OldWorker(Base):
        """A worker like vLLM 0.24's, which removes the model's weights when an update starts."""

        def __init__(self) -> None:
            super().__init__()
            self.weight_transfer_engine = SimpleNamespace(
                start_weight_update=lambda: steps.append("engine starts"),
                finish_weight_update=lambda: steps.append("engine installs"),
            )
            self._weight_update_active = False

        def load_model(self) -> None: ...

        def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
            if self._weight_update_active:
                raise RuntimeError("an update is active")
            self._weight_update_active = True
            steps.append("weights removed" if is_checkpoint_format else "started")

        def finish_weight_update(self) -> None:
            self._weight_update_active = False
            steps.append("finished")

    for _ in range(2):
        run_updates_in_engine(Base, "penstock")
    worker = OldWorker()
    worker.start_weight_update(is_checkpoint_format=True)
    worker.finish_weight_update()
    ours = ["started", "engine starts", "engine installs", "finished"]
    assert steps == (ours if backend == "penstock" else ["weights removed", "finished"])
    if backend == "penstock":
        # An update that the engine refuses leaves no open update.
        engine, worker.weight_transfer_engine = worker.weight_transfer_engine, SimpleNamespace()
        with pytest.raises(AttributeError):
            worker.start_weight_update()
        worker.weight_transfer_engine = engine
        worker.start_weight_update()


class Queue:
    """A worker's replies in a queue like vLLM's message queue."""

    def __init__(self) -> None:
        self.answers: deque[tuple[bool, str]] = deque()

    def dequeue(self, timeout: float | None = None) -> tuple[bool, str]:
        return self.answers.popleft()


class Executor:
    """An executor like vLLM 0.32's, which raises at the first failed worker."""

    def __init__(self, backend: str, workers: int) -> None:
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))
        self.response_mqs = [Queue() for _ in range(workers)]
        self.is_failed = False

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: tuple[str, ...] = (), **_: Any
    ) -> list[str]:
        if self.is_failed:
            raise RuntimeError("executor failed")
        queues = self.response_mqs
        for number, queue in enumerate(queues):
            inner = getattr(queue, "_queue", queue)
            inner.answers.append((method != f"fail {number}" and method != "fail", f"{method} {number}"))
        found = []
        for queue in queues:
            is_good, text = queue.dequeue(timeout=timeout)
            if not is_good:
                raise RuntimeError(text)
            found.append(text)
        return found


@pytest.mark.parametrize("which", ["fail", "fail 0", "fail 1", "fail 2"])
def test_rpc_after_failed_rpc_receives_its_own_responses(which: str) -> None:
    class Mine(Executor):
        pass

    one = Mine("penstock", 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="fail"):
            Executor.collective_rpc(one, which)
    if which != "fail 2":  # Without the patch, vLLM reads the previous call's reply.
        with pytest.raises((RuntimeError, AssertionError)):
            assert Executor.collective_rpc(one, "next") == ["next 0", "next 1", "next 2"]

    receive_all_replies(Mine, "penstock")
    receive_all_replies(Mine, "penstock")
    one = Mine("penstock", 3)
    queues = one.response_mqs
    for _ in range(2):
        with pytest.raises(RuntimeError, match="fail"):
            one.collective_rpc(which)
    assert one.collective_rpc("next") == ["next 0", "next 1", "next 2"]
    assert one.response_mqs is queues


def test_rpc_that_was_not_sent_is_not_awaited() -> None:
    class Mine(Executor):
        pass

    receive_all_replies(Mine, "penstock")
    one = Mine("penstock", 2)
    one.is_failed = True
    with pytest.raises(RuntimeError, match="executor failed"):
        one.collective_rpc("next")
    other = Mine("nccl", 2)
    with pytest.raises(RuntimeError, match="fail 0"):
        other.collective_rpc("fail")
    assert len(other.response_mqs[1].answers) == 1


class WorkerBase:
    """A base class like vLLM's. Each platform's worker calls its constructor, and has its own methods."""

    def __init__(self, vllm_config: Any) -> None:
        self.load_config = SimpleNamespace(load_format=vllm_config)


class Worker(WorkerBase):
    def __init__(self, vllm_config: Any, fails: str = "") -> None:
        super().__init__(vllm_config=vllm_config)
        self.fails, self.done = fails, list[str]()

    def init_device(self) -> None:
        self.step("init_device")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.step("load_model")

    def determine_available_memory(self) -> int:
        self.step("determine_available_memory")
        return 7

    def initialize_from_config(self, config: Any) -> None:
        self.step("initialize_from_config")

    def compile_or_warm_up_model(self) -> float:
        self.step("compile_or_warm_up_model")
        return 0.5

    def step(self, name: str) -> None:
        if name == self.fails:
            raise RuntimeError("out of memory")
        self.done.append(name)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> BootRecord:
    fresh = BootRecord()
    monkeypatch.setattr(phases, "_record", fresh)
    return fresh


@pytest.fixture
def worker_class() -> type[Worker]:
    base = type("WorkerBase", (WorkerBase,), {"__init__": WorkerBase.__init__})
    report_phases(base, "penstock")
    report_phases(base, "penstock")
    return type("CpuWorker", (Worker, base), {})


def test_worker_reports_startup_phases_until_warm(worker_class: type[Worker], record: BootRecord) -> None:
    worker = worker_class("penstock")
    worker.init_device()
    worker.load_model(load_dummy_weights=False)
    assert worker.determine_available_memory() == 7
    now = record.snapshot()
    assert now is not None
    # This includes the time between two steps, in which the engine core computes the size of the cache.
    assert (now.state, now.phase) == ("starting", "start")
    worker.initialize_from_config({})
    assert worker.compile_or_warm_up_model() == 0.5
    now = record.snapshot()
    assert now is not None and now.ready
    names = ["start", "init device", "load model", "profile memory", "allocate cache", "warm up"]
    assert [phase.name for phase in now.phases] == names
    # A serving worker may have to warm up again.
    worker.compile_or_warm_up_model()
    again = record.snapshot()
    assert again is not None and len(again.phases) == len(names)
    assert worker.done.count("compile_or_warm_up_model") == 2


def test_failed_worker_reports_failed_startup_phase(worker_class: type[Worker], record: BootRecord) -> None:
    worker = worker_class("penstock", fails="compile_or_warm_up_model")
    worker.init_device()
    with pytest.raises(RuntimeError):
        worker.compile_or_warm_up_model()
    now = record.snapshot()
    assert now is not None and now.error is not None
    assert (now.state, now.phase, now.error.error) == ("failed", "warm up", "RuntimeError: out of memory")


def test_worker_with_different_load_format_reports_no_phases(worker_class: type[Worker], record: BootRecord) -> None:
    worker_class("auto").compile_or_warm_up_model()
    assert record.snapshot() is None


class Models:
    """A table of adapters like vLLM's. Each adapter is loaded and unloaded by its name."""

    def __init__(self) -> None:
        self.lora_requests: dict[str, Any] = {}

    async def load_lora_adapter(self, request: Any, base_model_name: str | None = None) -> Any:
        if "refused" in request.lora_path:
            return SimpleNamespace(error=request.lora_path)
        self.lora_requests[request.lora_name] = request
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> Any:
        del self.lora_requests[request.lora_name]
        return "Success"


def test_unversioned_adapter_name_serves_newest_version() -> None:
    name_newest_adapter(Models)
    name_newest_adapter(Models)
    models = Models()

    def request(name: str, path: str = "/dev/shm/penstock-adapters-1/x") -> Any:
        return SimpleNamespace(lora_name=name, lora_path=path)

    def names() -> dict[str, str]:
        return {name: one.lora_name for name, one in models.lora_requests.items()}

    asyncio.run(models.load_lora_adapter(request("p@1")))
    asyncio.run(models.load_lora_adapter(request("p@2")))
    assert names() == {"p@1": "p@1", "p@2": "p@2", "p": "p@2"}
    asyncio.run(models.load_lora_adapter(request("p@3", "/dev/shm/penstock-adapters-1/refused")))
    asyncio.run(models.load_lora_adapter(request("other@3", "/adapters/theirs")))
    assert names() == {"p@1": "p@1", "p@2": "p@2", "p": "p@2", "other@3": "other@3"}
    asyncio.run(models.unload_lora_adapter(request("p@1")))
    assert names()["p"] == "p@2"
    asyncio.run(models.unload_lora_adapter(request("p@2")))
    assert names() == {"other@3": "other@3"}


@pytest.mark.parametrize(("load_format", "is_loaded"), [("penstock", True), ("auto", False)])
def test_ahead_of_time_compiled_functions_are_loaded(
    monkeypatch: pytest.MonkeyPatch, load_format: str, is_loaded: bool
) -> None:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    monkeypatch.delattr(BundledAOTAutogradSerializableCallable, "finalize_loading", raising=False)

    def compiled() -> int:
        return 7

    vars(compiled)["serialize"] = None
    function = BundledAOTAutogradSerializableCallable(compiled)

    def load(model: Any, path: str) -> Any:
        """Like vLLM's."""
        try:
            function.finalize_loading(model.vllm_config)
        except AttributeError:
            return None
        return function

    decorators = SimpleNamespace(_try_load_aot_compiled_fn=load)
    for _ in range(2):
        load_functions_of_torch(decorators, "penstock")
    model = SimpleNamespace(vllm_config=SimpleNamespace(load_config=SimpleNamespace(load_format=load_format)))
    loaded = decorators._try_load_aot_compiled_fn(model, "path")
    assert (loaded is function and loaded() == 7) if is_loaded else loaded is None
    monkeypatch.delattr(BundledAOTAutogradSerializableCallable, "finalize_loading", raising=False)
    load_functions_of_torch(SimpleNamespace(), "penstock")  # This vLLM lacks the function.
