"""Release and resume the memory of a model in SGLang, as its scheduler does. `test_sglang_sleep` runs this.

    python sglang_sleeps.py MODEL OTHER GONE

The scheduler's weight manager, the updater and the model are SGLang's own, on the CPU. SGLang's memory saver does
nothing there, so this program destroys the weights while they are released.
"""

import multiprocessing
import sys
from types import SimpleNamespace
from typing import Any

import torch
from tests.engines.sglang_loads import loader, resolve, updater_of

from penstock.errors import PenstockError


def manager_of(model: Any, config: Any) -> tuple[Any, Any]:
    """Return SGLang's weight manager for a model, and its updater."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    updater = updater_of(model, config)
    # The worker has only what the manager needs.
    runner = SimpleNamespace(model=model, weight_updater=updater)
    worker = SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)])
    manager = SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=None,
        memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
        flush_cache=lambda **_: True,
        is_fully_idle=lambda **_: True,
        scheduler=SimpleNamespace(
            _engine_paused=False, disaggregation_mode=None, record_weight_version_change=lambda **_: None
        ),
    )
    return manager, updater


def run(arguments: Any, other: str, gone: str) -> None:
    from sglang.srt.managers.io_struct import (
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
        UpdateWeightFromDiskReqInput,
    )

    config, load = loader(0, arguments)
    model = load()
    manager, updater = manager_of(model, config)

    def state() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def poison() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))

    def is_same(one: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(value, one[name]) for name, value in model.state_dict().items())

    def release(*tags: str) -> None:
        manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags) or None))

    def resume(*tags: str) -> None:
        manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags) or None))

    def update(path: str) -> bool:
        request = UpdateWeightFromDiskReqInput(model_path=path, load_format="penstock", flush_cache=False)
        return bool(manager.update_weights_from_disk(request).success)

    first = state()
    release()
    poison()
    resume()
    print("BACK", is_same(first), flush=True)

    # Bytes that SGLang keeps itself are not read again. Their path no longer exists.
    kept, updater.model_config.model_path = updater.model_config.model_path, gone
    release()
    resume()
    print("KEPT", is_same(first), flush=True)
    updater.model_config.model_path = kept

    # A trainer sends weights between the tags.
    release()
    poison()
    resume("weights")
    print("BETWEEN", is_same(first), update(other), flush=True)
    second = state()
    resume("kv_cache", "cuda_graph")
    print("SENT", is_same(second), is_same(first), flush=True)

    # The weights of the last update come back.
    release()
    poison()
    resume("weights", "cuda_graph")
    print("BEFORE THE LAST TAG", is_same(second), flush=True)
    resume("kv_cache")
    print("BACK", is_same(second), flush=True)

    # A release without the weights causes no read.
    release("kv_cache")
    resume("kv_cache")
    print("CACHE", is_same(second), flush=True)

    release()
    poison()
    updater.model_config.model_path = gone
    try:
        resume()
        print("GONE", None, flush=True)
    except PenstockError as error:
        print("GONE", type(error).__name__, flush=True)


def main() -> None:
    model, other, gone = sys.argv[1:]
    arguments = resolve(["--model-path", model, "--load-format", "penstock"])
    process = multiprocessing.get_context("spawn").Process(target=run, args=(arguments, other, gone))
    process.start()
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
