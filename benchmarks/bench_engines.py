"""vLLM and SGLang as users wait for them: starts, new weights from a trainer, and sleeps. Each engine is a new process.

    python -m benchmarks.bench_engines load --engine vllm --gb 11 --rounds 3 --out benchmarks/results/MACHINE
    python -m benchmarks.bench_engines update --engine sglang --gb 6
    python -m benchmarks.bench_engines sleep --engine vllm --gb 6 --sleeps 4
    python -m benchmarks.bench_engines render FILE.jsonl

The ways take turns, and every second round has the reverse order. Files are in tmpfs. An engine whose tokens are not
those of the first engine counts as failed. A way that this machine cannot run is a failed row with the reason.

`load`: seconds of imports, of "Loading weights took" in the engine's log, of the engine's constructor, and from the
start of the process to the first token. A replica reads verified weights from the host memory of a member of its
fleet. `update`: the trainer's model is on the same GPU in another process. `send` is
a whole version, and `pause` the part of it in which the engine must not serve. vLLM's `nccl` and SGLang's `distributed`
need a second GPU, because NCCL refuses two ranks on one. `sleep`: level 1. The first sleep pins host memory and is
reported apart. `outside` is the part of a call that vLLM's allocator does not take, in which Penstock's digests are.
The limits are those of this machine: new pinned memory, and copies by torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = Path("/dev/nvidiactl").exists()
if "sglang" in sys.argv and not HAS_GPU:
    # SGLang's kernels exist only for GPUs. A spawned process imports this module again.
    from tests.engines import sglang_loads  # noqa: F401

Row = dict[str, Any]
OURS = ("penstock", "penstock verified", "penstock replica")
WAYS: dict[tuple[str, str], tuple[str, ...]] = {
    ("load", "vllm"): ("auto", "fastsafetensors", "instanttensor", "runai_streamer", *OURS),
    ("load", "sglang"): ("auto", "fastsafetensors", "instanttensor", "runai_streamer", *OURS),
    ("update", "vllm"): ("ipc", "nccl", "penstock"),
    ("update", "sglang"): ("tensor", "distributed", "penstock"),
    ("sleep", "vllm"): ("alone", "with penstock"),
}
"""The ways of each suite, in their order in the first round."""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
QUIET |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
# vLLM pickles the handles of its `ipc` on their way to the worker.
QUIET |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
PROMPT = [1, *range(7, 300, 4)]
NUM_TOKENS = 16
PIECE_BYTES = 256 << 20
"""Size of a buffer of the limits. vLLM copies its allocator's segments, of which the largest are as large."""
FLEET = "bench"
MARK = "RESULT "
HOLDER = f"""
import sys
import penstock
with penstock.join("{FLEET}") as fleet:
    fleet.fetch({{}}, fallback=sys.argv[1], device="cpu")
    print("HOLDS", flush=True)
    sys.stdin.read()
"""
"""A member of the fleet that has all weights, from which a replica reads."""
TOOK = re.compile(r"Loading weights took ([\d.]+) seconds|Load weight end\. elapsed=([\d.]+) s")


class SleepTimes:
    """An extension of vLLM's workers: seconds of their allocator's sleeps and wakes, and what it copies."""

    def watch_sleeps(self) -> None:
        """Note the seconds of each later sleep and wake."""
        from vllm.device_allocator import get_mem_allocator_instance

        allocator = get_mem_allocator_instance()
        self._sleep_times: dict[str, list[float]] = {"sleep": [], "wake_up": []}
        for name, seconds in self._sleep_times.items():
            setattr(allocator, name, timed(getattr(allocator, name), seconds))

    def sleep_times(self) -> Row:
        """Return the noted seconds, and the number and bytes of the segments that have weights."""
        from vllm.device_allocator import get_mem_allocator_instance

        data = get_mem_allocator_instance().pointer_to_data.values()
        sizes = [int(one.handle[1]) for one in data if one.tag == "weights"]
        return {**self._sleep_times, "segments": len(sizes), "gb": sum(sizes) / 1e9}


def timed(call: Callable[..., object], seconds: list[float]) -> Callable[..., object]:
    """Return a function that also notes the seconds of its calls."""

    def run(*arguments: object, **named: object) -> object:
        began = time.perf_counter()
        try:
            return call(*arguments, **named)
        finally:
            seconds.append(time.perf_counter() - began)

    return run


def format_of(way: str) -> Row:
    """Return the load format of a way, and its options."""
    if not way.startswith("penstock"):
        return {"load_format": way}
    options = {"fleet": FLEET, "serve": False} if way == "penstock replica" else {"verify": way == "penstock verified"}
    return {"load_format": "penstock", "model_loader_extra_config": options}


def vllm(model: str, **options: Any) -> tuple[Any, Callable[[int], list[int]]]:
    """Start vLLM. Return the engine, and a function that generates tokens."""
    from vllm import LLM, SamplingParams

    usual = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 1024, "seed": 0}
    engine = LLM(model=model, **usual, **({"gpu_memory_utilization": 0.4} if HAS_GPU else {}), **options)

    def tokens(number: int) -> list[int]:
        few = SamplingParams(temperature=0, max_tokens=number, detokenize=False)
        (answer,) = engine.generate([{"prompt_token_ids": PROMPT}], few, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    return engine, tokens


def sglang(model: str, **options: Any) -> tuple[Any, Callable[[int], list[int]]]:
    """Start SGLang. Return the engine, and a function that generates tokens."""
    import sglang

    usual = {"skip_tokenizer_init": True, "sampling_backend": "pytorch", "grammar_backend": "none", "random_seed": 0}
    usual |= {"max_total_tokens": 4096, "disable_cuda_graph": True, "dtype": "bfloat16", "log_level": "info"}
    if HAS_GPU:
        usual |= {"attention_backend": "triton", "mem_fraction_static": 0.4}
    else:
        usual |= {"attention_backend": "torch_native", "mem_fraction_static": 0.1, "device": "cpu"}
    if extra := options.pop("model_loader_extra_config", None):
        options["model_loader_extra_config"] = json.dumps(extra)
    engine = sglang.Engine(model_path=model, **usual, **options)

    def tokens(number: int) -> list[int]:
        few = {"temperature": 0, "max_new_tokens": number, "ignore_eos": True}
        found: list[int] = engine.generate(input_ids=PROMPT, sampling_params=few)["output_ids"]
        return found

    return engine, tokens


ENGINES = {"vllm": vllm, "sglang": sglang}


def run_load(engine: str, way: str, model: str, spawned: float) -> Row:
    """Start an engine, and return the seconds since its process was spawned."""
    importlib.import_module(engine)
    if engine == "vllm":
        importlib.import_module("vllm.entrypoints.llm")
    imported = time.monotonic()
    held, tokens = ENGINES[engine](model, **format_of(way))
    started = time.monotonic()
    tokens(1)
    row = {"import_s": imported - spawned, "start_s": started - imported, "first_token_s": time.monotonic() - spawned}
    row["tokens"] = tokens(NUM_TOKENS)
    if engine == "sglang":
        held.shutdown()
    return row


class Client:
    """vLLM's interface for trainers, for an engine whose frontend is in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: Row) -> None:
        self._engine.init_weight_transfer_engine({"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        """Do nothing, because the engine ends with this process."""

    def start_weight_update(self) -> None:
        self._engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._engine.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_weight_update(weight_version)


def vllm_sender(engine: Any, way: str, model: Any) -> Callable[[int], Row]:
    """Return a function that sends a version with vLLM's interface for trainers."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ModuleSource

    if way == "penstock":
        from penstock_vllm.trainer import PenstockTrainerInitInfo

        info: Any = PenstockTrainerInitInfo(name="bench", rank=0, mode="live", stall_s=30.0)
    elif way == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(rank=0, packed=True)
    else:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=29571, world_size=2, rank=0)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(engine), source=ModuleSource(model))

    def send(version: int) -> Row:
        began = time.perf_counter()
        if way != "penstock":
            trainer.send_weights()
            took = time.perf_counter() - began
            return {"send_s": took, "pause_s": took}
        trainer.stage(version)
        staged = time.perf_counter()
        trainer.commit()
        ended = time.perf_counter()
        return {"send_s": ended - began, "pause_s": ended - staged}

    return send


def require(result: Any) -> None:
    """Raise SystemExit with SGLang's message if an update failed."""
    if not result[0]:
        raise SystemExit(str(result[1]))


def sglang_sender(stack: ExitStack, engine: Any, way: str, model: Any) -> Callable[[int], Row]:
    """Return a function that sends a version with SGLang's own routes, or with Penstock's path for a trainer."""
    import torch

    named = list(model.state_dict().items())
    if way == "penstock":
        import penstock

        publisher = stack.enter_context(penstock.publisher("bench", model, mode="snapshot"))

        def update(version: int) -> None:
            publisher.publish(version)
            require(engine.update_weights_from_disk(f"sync://bench/{version}", load_format="penstock"))

    elif way == "tensor":

        def update(version: int) -> None:
            require(engine.update_weights_from_tensor(named))

    else:
        from sglang.srt.utils import init_custom_process_group

        pool = stack.enter_context(ThreadPoolExecutor(1))
        options = {"backend": "nccl", "world_size": 2, "group_name": "bench"}
        joining = pool.submit(init_custom_process_group, init_method="tcp://127.0.0.1:29572", rank=0, **options)
        engine.init_weights_update_group("127.0.0.1", 29572, 1, 2, "bench", "nccl")
        group = joining.result(60)

        def update(version: int) -> None:
            sent = pool.submit(lambda: [torch.distributed.broadcast(one, 0, group=group) for _, one in named])
            dtypes = [str(one.dtype).removeprefix("torch.") for _, one in named]
            names, shapes = [name for name, _ in named], [list(one.shape) for _, one in named]
            require(engine.update_weights_from_distributed(names, dtypes, shapes, group_name="bench"))
            sent.result(60)

    def send(version: int) -> Row:
        began = time.perf_counter()
        update(version)
        took = time.perf_counter() - began
        # SGLang answers no request during an update.
        return {"send_s": took, "pause_s": took}

    return send


def run_update(engine: str, way: str, directory: str, versions: int) -> Row:
    """Send versions from a model in this process to an engine in another one, and return the seconds."""
    if engine == "vllm":
        held, tokens = vllm(directory, load_format="auto", weight_transfer_config={"backend": way})
    else:
        held, tokens = sglang(directory, load_format="penstock" if way == "penstock" else "auto")
    first = tokens(NUM_TOKENS)
    import torch
    import transformers

    if way in ("nccl", "distributed") and torch.cuda.device_count() < 2:
        raise SystemExit(f"{way} needs two GPUs: NCCL refuses two ranks on one GPU")
    device = "cpu" if not HAS_GPU else "cuda:1" if way in ("nccl", "distributed") else "cuda:0"
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
    rows: list[Row] = []
    with ExitStack() as stack:
        send = vllm_sender(held, way, model) if engine == "vllm" else sglang_sender(stack, held, way, model)
        for version in range(1, 2 * versions + 1):
            with torch.no_grad():
                model.lm_head.weight.neg_()
            if HAS_GPU:
                torch.cuda.synchronize()
            rows.append(send(version))
            # Every second version has the weights of the files.
            if engine == "vllm":
                held.reset_prefix_cache()
            if (tokens(NUM_TOKENS) == first) != (version % 2 == 0):
                raise SystemExit(f"{way}: wrong tokens after version {version}")
    if engine == "sglang":
        held.shutdown()
    return {name: [row[name] for row in rows] for name in ("send_s", "pause_s")} | {"tokens": first}


def run_sleep(way: str, model: str, sleeps: int) -> Row:
    """Start an engine, let it sleep and wake, and return the seconds."""
    began = time.perf_counter()
    engine, tokens = vllm(
        model,
        load_format="auto" if way == "alone" else "penstock",
        enable_sleep_mode=True,
        worker_extension_cls=f"benchmarks.bench_engines.{SleepTimes.__name__}",
    )
    start_s = time.perf_counter() - began
    before = tokens(NUM_TOKENS)
    engine.collective_rpc("watch_sleeps")
    seconds: dict[str, list[float]] = {"sleep": [], "wake_up": []}
    for number in range(sleeps):
        timed(engine.sleep, seconds["sleep"])(level=1)
        timed(engine.wake_up, seconds["wake_up"])()
        if tokens(NUM_TOKENS) != before:
            raise SystemExit(f"{way}: other tokens after wake {number + 1}")
    (inside,) = engine.collective_rpc("sleep_times")
    return {
        "start_s": start_s,
        "sleep_s": seconds["sleep"],
        "wake_s": seconds["wake_up"],
        "sleep_inside_s": inside["sleep"],
        "wake_inside_s": inside["wake_up"],
        "segments": inside["segments"],
        "gb": inside["gb"],
        "tokens": before,
    }


def run_limits(total_gb: float) -> Row:
    """Pin as much new host memory as an engine does, and copy as much; return seconds and GB/s."""
    import torch

    device = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")
    pieces: list[torch.Tensor] = []
    num_pieces = max(1, round(total_gb * 1e9 / PIECE_BYTES))
    gb = num_pieces * PIECE_BYTES / 1e9
    torch.cuda.synchronize()

    def rate(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return gb / (time.perf_counter() - began)

    def pin() -> None:
        for _ in range(num_pieces):
            pieces.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True))

    return {
        "gb": gb,
        "pin_gb_per_s": rate(pin),
        "d2h_gb_per_s": [rate(lambda: [piece.copy_(device) for piece in pieces]) for _ in range(4)],
        "h2d_gb_per_s": [rate(lambda: [device.copy_(piece) for piece in pieces]) for _ in range(4)],
    }


def run_model(directory: str, gb: float) -> Row:
    """Write a Llama of so many bytes that an engine can serve without a tokenizer, and its manifest."""
    import penstock
    from penstock.testing.checkpoints import write_llama

    began = time.perf_counter()
    files = write_llama(directory, total_bytes=int(gb * 1e9), fp8=False, shards=8)
    size = sum(file.stat().st_size for file in files)
    penstock.manifest(directory)
    return {"gb": size / 1e9, "seconds": time.perf_counter() - began}


def in_process(job: Sequence[object], environ: dict[str, str], timeout_s: float) -> Row:
    """Run a job of this module in a new process; return its row.

    Raises:
        RuntimeError: it failed or did not end in time; with its last words.
    """
    sources = [str(ROOT), *map(str, sorted(ROOT.glob("packages/*/src"))), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, **QUIET, **environ, "PYTHONPATH": ":".join(filter(None, sources))}
    command = [sys.executable, "-m", "benchmarks.bench_engines", "job", *map(str, job)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output, start_new_session=True, cwd=ROOT)
        try:
            why = f"ended with {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            why = f"did not end within {timeout_s:.0f} s"
        # With the engine's own processes, which have the GPU's memory.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    found = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not found:
        raise RuntimeError("\n".join([*lines[-60:], f"{' '.join(map(str, job))}: {why}"]))
    row: Row = json.loads(found[-1])
    loads = [match for line in lines if (match := TOOK.search(line))]
    if loads:
        row["load_s"] = float(loads[0].group(1) or loads[0].group(2))
    return row


@contextmanager
def holder(model: Path, environ: dict[str, str]) -> Iterator[None]:
    """Run a member that has all weights."""
    sources = [*map(str, sorted(ROOT.glob("packages/*/src"))), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, **environ, "PYTHONPATH": ":".join(filter(None, sources))}
    command = [sys.executable, "-c", HOLDER, str(model)]
    with subprocess.Popen(command, env=environ, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("HOLDS"):
            raise RuntimeError("the member of the fleet has no weights; its messages are above")
        try:
            yield
        finally:
            process.kill()


def run_job(job: Sequence[str]) -> Row:
    """Run what a process was started for."""
    match list(job):
        case ["model", directory, gb]:
            return run_model(directory, float(gb))
        case ["limits", gb]:
            return run_limits(float(gb))
        case ["load", engine, way, model, spawned]:
            return run_load(engine, way, model, float(spawned))
        case ["update", engine, way, model, versions]:
            return run_update(engine, way, model, int(versions))
        case ["sleep", _, way, model, sleeps]:
            return run_sleep(way, model, int(sleeps))
    raise SystemExit(f"unknown job: {job}")


def in_turns(ways: Sequence[str], rounds: int) -> list[str]:
    """Return the ways in the order in which they run: ABC, CBA, ABC."""
    return [way for number in range(rounds) for way in (ways if number % 2 == 0 else ways[::-1])]


def machine(engine: str) -> Row:
    """Return the hardware and the versions."""
    gpu = "none"
    if HAS_GPU:
        gpu = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=False,
        ).stdout.strip()  # fmt: skip
    versions = {}
    for name in (engine, f"{engine}-cpu", "torch", "fastsafetensors", "instanttensor", "runai-model-streamer"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "GPU": gpu.replace("\n", ", "),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "Python": platform.python_version(),
        **versions,
    }


def measure(asked: argparse.Namespace) -> Iterator[Row]:
    """Run all jobs, and yield each row when it is there."""
    suite, engine = asked.suite, asked.engine
    ways = asked.ways or WAYS[suite, engine]
    command = f"python -m benchmarks.bench_engines {suite} --engine {engine} --gb {asked.gb:g} --rounds {asked.rounds}"
    yield {"kind": "machine", "suite": suite, "engine": engine, "command": command, **machine(engine)}
    directory = Path(tempfile.mkdtemp(prefix="engines-", dir=asked.directory))
    runtime = {"PENSTOCK_RUNTIME_DIR": str(directory / "run")}
    (directory / "run").mkdir(mode=0o700)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        made = in_process(["model", directory / "model", asked.gb], {}, asked.timeout_s)
        yield {"kind": "model", **made}
        # The allocator of pinned memory rounds up to powers of two.
        limits = ["limits", 1.5 * made["gb"]]
        if suite == "sleep":
            yield {"kind": "limits", **in_process(limits, {}, asked.timeout_s)}
        if "penstock replica" in ways:
            stack.enter_context(holder(directory / "model", runtime))
        tokens = None
        for way in in_turns(ways, asked.rounds):
            count = {"load": time.monotonic(), "update": asked.versions, "sleep": asked.sleeps}[suite]
            environ = runtime | ({"VLLM_PLUGINS": ""} if way == "alone" else {})
            try:
                row = in_process([suite, engine, way, directory / "model", count], environ, asked.timeout_s)
            except RuntimeError as error:
                # The others are of use all the same.
                yield {"kind": "failed", "way": way, "why": str(error)}
                continue
            tokens = tokens or row["tokens"]
            if row["tokens"] != tokens:
                yield {"kind": "failed", "way": way, "why": f"other tokens: {row['tokens']}, not {tokens}"}
                continue
            yield {"kind": "engine", "way": way, **row}
        if suite == "sleep":
            yield {"kind": "limits", **in_process(limits, {}, asked.timeout_s)}


def spread(values: Iterable[float]) -> str:
    """Return the median, and the least and the greatest value."""
    found = list(values)
    if not found:
        return ""
    return f"{statistics.median(found):.3f} ({min(found):.3f}-{max(found):.3f}), n = {len(found)}"


def outside(row: Row, name: str) -> list[float]:
    """Return the seconds of each call that vLLM's allocator did not take; none where it was called more often."""
    whole, inside = row[f"{name}_s"], row[f"{name}_inside_s"]
    return [one - part for one, part in zip(whole, inside, strict=True)] if len(whole) == len(inside) else []


COLUMNS: dict[str, dict[str, Callable[[Row], list[float]]]] = {
    "load": {
        "imports": lambda row: [row["import_s"]],
        "loading weights": lambda row: [row["load_s"]] if "load_s" in row else [],
        "engine start": lambda row: [row["start_s"]],
        "first token": lambda row: [row["first_token_s"]],
    },
    "update": {
        "first send": lambda row: row["send_s"][:1],
        "later send": lambda row: row["send_s"][1:],
        "later pause": lambda row: row["pause_s"][1:],
    },
    "sleep": {
        "first sleep": lambda row: row["sleep_s"][:1],
        "first sleep, outside": lambda row: outside(row, "sleep")[:1],
        "later sleep": lambda row: row["sleep_s"][1:],
        "later sleep, outside": lambda row: outside(row, "sleep")[1:],
        "wake": lambda row: row["wake_s"],
        "wake, outside": lambda row: outside(row, "wake"),
    },
}
"""The columns of each suite's table, and their values in a row."""


def page(rows: Sequence[Row]) -> str:
    """Return the Markdown page of a run."""
    (head,) = (row for row in rows if row["kind"] == "machine")
    suite = head["suite"]
    columns = COLUMNS[suite]
    said = "; ".join(f"{name} {value}" for name, value in head.items() if name not in ("kind", "suite", "command"))
    lines = [f"# {head['engine']}: {suite}", "", f"{said}.", "", f"    {head['command']}", ""]
    lines += [f"{row['gb']:.1f} GB of a Llama in BF16, eager mode." for row in rows if row["kind"] == "model"]
    lines += ["Seconds: medians, the least and the greatest value.", ""]
    lines += [f"| way | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    engines = [row for row in rows if row["kind"] == "engine"]
    for way in dict.fromkeys(row["way"] for row in engines):
        cells = [spread(s for row in engines if row["way"] == way for s in of(row)) for of in columns.values()]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    if suite == "sleep":
        lines += ["", "Limits, before the engines and after them:", ""]
        lines += ["| GB | pin, GB/s | device to pinned host, GB/s | pinned host to device, GB/s |", "|---|---|---|---|"]
        for row in (row for row in rows if row["kind"] == "limits"):
            copies = f"{spread(row['d2h_gb_per_s'])} | {spread(row['h2d_gb_per_s'])}"
            lines.append(f"| {row['gb']:.1f} | {row['pin_gb_per_s']:.2f} | {copies} |")
    failed = [row for row in rows if row["kind"] == "failed"]
    lines += ["", *(f"Failed: {row['way']}: {row['why'].splitlines()[-1]}" for row in failed)] if failed else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print the page, and write it with its rows."""
    if sys.argv[1:2] == ["job"]:
        print(f"{MARK}{json.dumps(run_job(sys.argv[2:]))}", flush=True)
        return
    if sys.argv[1:2] == ["render"]:
        print(page([json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]), end="")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=sorted({suite for suite, _ in WAYS}))
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm")
    parser.add_argument("--ways", nargs="*", help="default: all of the suite and engine")
    parser.add_argument("--gb", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2, help="engines of each way")
    parser.add_argument("--versions", type=int, default=3, help="pairs of versions that each engine gets")
    parser.add_argument("--sleeps", type=int, default=4, help="of each engine, two at least")
    parser.add_argument("--directory", default="/dev/shm", help="where the model is written")
    parser.add_argument("--out", type=Path, help="directory of the page and its rows")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of each process")
    asked = parser.parse_args()
    if (asked.suite, asked.engine) not in WAYS:
        parser.error(f"{asked.engine} has no {asked.suite}")
    name = f"{asked.engine}-{asked.suite}"
    rows: list[Row] = []
    with ExitStack() as stack:
        lines = None
        if asked.out:
            asked.out.mkdir(parents=True, exist_ok=True)
            lines = stack.enter_context((asked.out / f"{name}.jsonl").open("w"))
        for row in measure(asked):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if lines is not None:
                # At once: a run that is ended at its limit keeps the rows that it has.
                print(json.dumps(row), file=lines, flush=True)
    text = page(rows)
    print(text, end="")
    if asked.out:
        (asked.out / f"{name}.md").write_text(text)
    if any(row["kind"] == "failed" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
