"""Load models with SGLang's own loaders, as its launcher and its scheduler do. `test_sglang` runs this.

    python sglang_loads.py CASES.json [--schedulers]

CASES.json is a list of {"arguments": [...], "out": FILE, "update": PATH}. This process resolves the arguments as the
launcher does. A spawned process loads each model as a scheduler does, updates it from PATH if there is one, and saves
its state dict. With --schedulers, each case runs in SGLang's own scheduler process, and these processes stay until
stdin ends. Without a GPU, a package whose functions raise replaces SGLang's kernels.
Loading calls none of these functions.
"""

import importlib.util
import json
import multiprocessing
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from penstock.errors import PenstockError

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


class Kernels(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*arguments: Any, **named: Any) -> None:
            raise RuntimeError(f"sgl_kernel.{name} needs a GPU")

        return missing


# This is at module level, because a spawned process imports this module again.
if not ON_GPU:
    sys.modules.setdefault("sgl_kernel", Kernels("sgl_kernel"))


def environment(directory: Path, endpoint: str) -> dict[str, str]:
    """Return the variables for a process that runs this program: a Hugging Face hub, and caches in a directory."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    models = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    return {
        # Importing the 200 other models takes a minute.
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(p.stem for p in models.glob("*.py") if p.stem != "llama"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(directory / "hf"),
        "SGLANG_CACHE_DIR": str(directory / "cache"),
        "SGLANG_PLUGINS": "penstock,penstock_runai",
        "PENSTOCK_PROGRESS": "0",
        **({} if ON_GPU else {"SGLANG_USE_CPU_ENGINE": "1"}),
    }


def resolve(arguments: Sequence[str]) -> Any:
    """Return SGLang's arguments as its launcher resolves them."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    attention = "triton" if ON_GPU else "torch_native"
    fixed = [
        *("--device", DEVICE, "--attention-backend", attention, "--dtype", "float32", "--skip-tokenizer-init"),
        *("--max-total-tokens", "256", "--mem-fraction-static", "0.1"),
    ]
    resolved = prepare_server_args([*arguments, *fixed])
    resolved.resolve_once()
    resolved.check_server_args()
    return resolved


def loader(number: int, arguments: Any) -> tuple[Any, Callable[[], Any]]:
    """Prepare this process for its n-th load as a scheduler does. Return the model's config and a load function."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.model_executor.model_runner_components.load_model_utils import build_load_config
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(arguments, role="test", ranks=SpawnRanks(world_rank=0))
    if number == 0:
        place = tempfile.mktemp(prefix="sglang-")
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="nccl" if ON_GPU else "gloo",
            distributed_init_method=f"file://{place}",
        )
        initialize_model_parallel(backend="nccl" if ON_GPU else "gloo")
        initialize_dp_attention_flags(arguments)
    load_config = build_load_config(
        server_args=arguments,
        tp_rank=0,
        remote_instance_weight_transporter_engine=None,
        remote_instance_weight_transporter_session_id="",
        draft_model_idx=None,
        weight_cache_mode="off",
        weight_cache_socket=None,
    )
    config = ModelConfig.from_server_args(arguments)

    def load() -> Any:
        return get_model(model_config=config, load_config=load_config, device_config=DeviceConfig(DEVICE, 0))

    return config, load


def load_all(cases: list[tuple[Any, str, str | None]]) -> None:
    """Load each model, update it if a path is given, and save its state dict or its error."""
    for number, (arguments, out, update) in enumerate(cases):
        try:
            config, load = loader(number, arguments)
            model = load()
            if update is not None:
                print(
                    "UPDATED", out, *updater_of(model, config).update_weights_from_disk(update, "penstock"), flush=True
                )
        except PenstockError as error:
            torch.save({"error": f"{type(error).__name__}: {error}"}, out)
            continue
        torch.save(model.state_dict(), out)
    streamer = sys.modules.get("runai_model_streamer")
    print("RUNAI", getattr(streamer, "__name__", None), flush=True)
    # Members of a fleet leave in their exit handlers.


def updater_of(model: Any, config: Any) -> Any:
    """Return SGLang's updater for the weights of a live model."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    return WeightUpdater(
        tp_rank=0,
        device=DEVICE,
        gpu_id=0,
        model_config=config,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )


def serve(cases: list[Any]) -> None:
    """Start a scheduler process for each case as the launcher does, and return when stdin ends."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.server_args import PortArgs

    context = multiprocessing.get_context("spawn")
    processes, readers = [], []
    # A failed scheduler sends this signal to its parent. Here the parent notices the end of the pipe instead.
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    for arguments in cases:
        reader, writer = context.Pipe(duplex=False)
        ports = PortArgs.init_new(arguments)
        process = context.Process(target=run_scheduler_process, args=(arguments, ports, 0, 0, 0, None, writer))
        process.start()
        writer.close()
        processes.append(process)
        readers.append(reader)
    try:
        for reader in readers:
            print("READY", reader.recv()["status"], flush=True)
        sys.stdin.read()
    finally:
        for process in processes:
            process.terminate()
            process.join(20)
            process.kill()


def main() -> None:
    cases = []
    for case in json.loads(Path(sys.argv[1]).read_text()):
        arguments = resolve(case["arguments"])
        resolved = arguments.resolved_dict()
        fields = ("model_path", "served_model_name", "load_format")
        print("RESOLVED", json.dumps({field: resolved[field] for field in fields}), flush=True)
        cases.append((arguments, case["out"], case["update"]))
    if "--schedulers" in sys.argv:
        serve([arguments for arguments, _, _ in cases])
        return
    process = multiprocessing.get_context("spawn").Process(target=load_all, args=(cases,))
    process.start()
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
