"""A worker of `benchmarks.bench_fetch`: a process that holds, fetches, broadcasts, loads or attaches on request.

In: (name, arguments) by a pipe; each name is a method of `Worker`. Out: what the method gives, or its error.
Not here: what is asked in which order, what is made of it (`bench_fetch`).
"""

from __future__ import annotations

import gc
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

MODEL = "bench"


class Worker:
    """State of one process: its weights, its membership, its process group."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        import torch

        torch.set_num_threads(1 if device == "cpu" else 8)
        self.rank, self.world_size = rank, world_size
        self.device = f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else device
        self.weights: dict[str, torch.Tensor] = {}
        self.fleet: Any = None
        self.model: Any = None
        if device == "cuda":
            torch.cuda.set_device(self.device)
            torch.empty(1, device=self.device)

    def sync(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give back weights and what torch's allocator kept of them."""
        import torch

        self.weights.clear()
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def leave(self) -> None:
        if self.fleet is not None:
            self.fleet.leave(2.0)
            self.fleet = None
        self.free()

    def hold(self, hub: str, nbytes: int) -> dict[str, float]:
        """Make weights and offer them."""
        import penstock
        from penstock_tools.bench_command import make_weights

        self.weights = make_weights(nbytes, self.device)
        self.sync()
        self.fleet = penstock.join(MODEL, connection=hub)
        begun = time.perf_counter()
        self.fleet.offer(self.weights)
        return {"offer_s": time.perf_counter() - begun, "nbytes": sum(t.nbytes for t in self.weights.values())}

    def fetch(self, hub: str, fallback: str | None = None) -> dict[str, Any]:
        """Join, fetch, leave: seconds of each, as the report has them."""
        import penstock

        begun = time.perf_counter()
        self.fleet = penstock.join(MODEL if fallback is None else "cold", connection=hub)
        joined = time.perf_counter() - begun
        report = self.fleet.fetch(self.weights, fallback=fallback, device=self.device)
        self.sync()
        total = time.perf_counter() - begun
        found = {
            "join_s": joined,
            "wall_s": report.wall_s,
            "total_s": total,
            "nbytes": report.nbytes,
            "phases": dict(report.phases),
            "paths": dict(report.nbytes_by_path),
            "storage_bytes": report.storage_bytes,
            "faults": list(report.faults),
            "verified": report.verified,
        }
        if fallback is None:
            self.leave()
        return found

    def limit(self, nbytes: int, seconds: float = 0.2) -> float:
        """GB/s of plain copies over so long: from the device before this one, or in host memory."""
        import torch

        # Modulo the GPUs, too: several workers may share one.
        before = (self.rank - 1) % self.world_size
        far = f"cuda:{before % torch.cuda.device_count()}" if self.device != "cpu" else "cpu"
        source = torch.ones(nbytes, dtype=torch.uint8, device=far)
        into = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        into.copy_(source)
        self.sync()
        if far != "cpu":
            torch.cuda.synchronize(far)
        begun, num_copies = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            for _ in range(4):
                into.copy_(source)
            self.sync()
            if far != "cpu":
                torch.cuda.synchronize(far)
            num_copies += 4
        found = num_copies * nbytes / (time.perf_counter() - begun) / 1e9
        del source, into
        self.free()
        return found

    def broadcast(self, store: str, nbytes: int, reps: int) -> list[float]:
        """Seconds of broadcasts of the same bytes from rank 0; the first, which connects, is left out."""
        import torch
        import torch.distributed as dist

        backend = "nccl" if self.device != "cpu" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=self.rank, world_size=self.world_size)
        whole = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            for at in range(0, nbytes, 1 << 30):
                whole[at : at + (1 << 30)].random_(0, 256)
        times = []
        for _ in range(reps + 1):
            dist.barrier()
            self.sync()
            begun = time.perf_counter()
            for at in range(0, nbytes, 1 << 30):
                dist.broadcast(whole[at : at + (1 << 30)], 0)
            self.sync()
            times.append(time.perf_counter() - begun)
        dist.destroy_process_group()
        del whole
        self.free()
        return times[1:]

    def load(self, uri: str, *, part: bool = False) -> dict[str, float]:
        """A load of one's own: everything, or this rank's part of the bytes."""
        import penstock

        names = None
        if part:
            table = penstock.inspect(uri).manifest.tensors
            mine = [row for row in range(len(table)) if row % self.world_size == self.rank]
            names = [table.names[row] for row in mine]
        begun = time.perf_counter()
        weights = penstock.load(
            uri, device=self.device, names=names, progress=False, settings=penstock.ReadSettings(copy=True)
        )
        self.sync()
        seconds = time.perf_counter() - begun
        nbytes = weights.report.nbytes
        del weights
        self.free()
        return {"seconds": seconds, "nbytes": nbytes}

    def prepare_decode(self) -> str:
        """A model to decode with; says which."""
        self.model, what = _model(self.device)
        self.decode(0.5)
        return what

    def decode(self, seconds: float) -> float:
        """Tokens a second over about so long."""
        begun, tokens = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            tokens += self.model()
            self.sync()
        return tokens / (time.perf_counter() - begun)

    def attach(self, hub: str, name: str, verify: bool) -> dict[str, Any]:
        """As an engine that starts again: attach, and use the first tensor."""
        import penstock

        attach = penstock.cache.attach  # imports its room, as an engine does before it has a model to ask for
        begun = time.perf_counter()
        attached = attach(name, connection=hub, device=self.device, verify=verify, timeout_s=5.0)
        first = next(iter(attached.values()))
        float(first.view(-1)[:16].float().sum())
        seconds = time.perf_counter() - begun
        report = attached.report
        attached.close()
        return {
            "seconds": seconds,
            "nbytes": report.nbytes,
            "path": report.path,
            "phases": dict(report.phases),
            "verified": report.verified,
        }


def _model(device: str) -> tuple[Any, str]:
    """A callable that decodes some tokens and says how many."""
    import torch

    big = device != "cpu"
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return _plain_model(device, big), "a torch loop of a decoder's matrices (transformers is not installed)"
    width = 2048 if big else 64
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=16 if big else 2,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000 if big else 128,
    )
    model = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()
    prompt = torch.ones((1, 16), dtype=torch.int64, device=device)

    def decode() -> int:
        with torch.inference_mode():
            out = model.generate(prompt, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)
        return int(out.shape[1]) - 16

    return decode, f"transformers, Llama of {config.num_hidden_layers} layers of {width}, batch 1"


def _plain_model(device: str, big: bool) -> Any:
    import torch

    width, layers = (2048, 16) if big else (64, 2)
    shapes = [(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]
    made = [[torch.randn(shape, device=device, dtype=torch.bfloat16) / 64 for shape in shapes] for _ in range(layers)]
    state = torch.randn(width, device=device, dtype=torch.bfloat16)

    def decode() -> int:
        x = state
        for _ in range(16):
            for q, k, v, o, gate, up, down in made:
                x = x + o @ (torch.sigmoid(q @ x) * (k @ x) + v @ x)
                x = x + down @ (torch.sigmoid(gate @ x) * (up @ x))
                x = x / (x.float().norm().to(x.dtype) + 1)
        return 16

    return decode


def serve(pipe: Connection, rank: int, world_size: int, device: str) -> None:
    """Do as told until the pipe is closed."""
    obey(pipe, Worker(rank, world_size, device))


def obey(pipe: Connection, worker: Any) -> None:
    """Have a worker do as told until the pipe is closed; then it leaves."""
    pipe.send("ready")
    while True:
        try:
            name, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            pipe.send(getattr(worker, name)(**arguments))
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            pipe.send({"error": f"{type(error).__name__}: {error}"[:2000]})
    worker.leave()
