"""A measurement in a process of its own: import, context, [ready ... go], the timed load, check, answer.

    parent:   start -> (ready from every rank) -> set the cache state -> go -> sample host memory -> answer or kill
    child:    import, CUDA context, join group -> ready -> go -> barrier -> [load, synchronize] on the clock -> check

In: a `Job`. Out: one dict a job, `error` set if it failed or ran over its time.
Not here: the order of jobs and the time budget (`__main__`).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.load import limits
from benchmarks.load.checkpoints import Checkpoint
from benchmarks.load.loaders import LOADERS, Call, prepare

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The description of a measurement. `loader` is a name of `LOADERS`, or `limit:...`, or `digests:write`."""

    row: str
    loader: str
    checkpoint: Checkpoint
    device: str = "cuda"
    world_size: int = 1
    memory_bytes: int | None = None
    sample_memory: bool = False
    timeout_s: float = 60.0
    turn: int = 0
    """Which repetition this is; a limit with several shapes takes the next one each time."""


def fingerprint(tensors: dict[str, Any]) -> str:
    """SHA-256 over names, shapes and the int16 sum of every 1 MiB of every tensor, on its own device.

    Every byte counts and a 1 MiB block out of place changes it; a few ms for 14 GB on a GPU.
    """
    import torch

    block = MIB // 2
    digest, sums = hashlib.sha256(), []
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().reshape(-1).view(torch.int16)
        whole = flat.numel() // block
        if whole:
            sums.append(flat[: whole * block].view(whole, block).sum(1, dtype=torch.int64))
        if flat.numel() > whole * block:
            sums.append(flat[whole * block :].sum(dtype=torch.int64)[None])
    if sums:
        digest.update(torch.cat(sums).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


def _limit(job: Job, rank: int) -> dict[str, Any]:
    name, files = job.loader.removeprefix("limit:"), job.checkpoint.files
    cuda = job.device == "cuda"
    device = f"cuda:{rank}" if cuda else "cpu"
    if name == "h2d":
        rate, shape = limits.h2d(device), "256 MiB copies"
    elif name == "read":
        rate, shape = limits.best_read(files, register=cuda)
    elif name == "direct":
        threads, chunk_bytes = limits.DIRECT_SHAPES[job.turn % len(limits.DIRECT_SHAPES)]
        rate = limits.read(files, threads=threads, chunk_bytes=chunk_bytes, direct=True)
        shape = f"{threads} x {chunk_bytes // MIB} MiB"
    else:
        rate, shape = limits.digest_kernel(device), "8 GiB"
    return {"gb_per_s": rate, "shape": shape}


def _group_read(job: Job, rank: int, barrier: Callable[[], None]) -> dict[str, Any]:
    """Each rank its own part, all at once; the rate of the slowest rank times the ranks, best shape."""
    ring = limits.Ring(max(2 * t * c for t, c in limits.GROUP_SHAPES), register=job.device == "cuda")
    rates = {}
    for threads, chunk_bytes in limits.GROUP_SHAPES:
        barrier()
        start = time.perf_counter()
        limits.read(
            job.checkpoint.files, threads=threads, chunk_bytes=chunk_bytes, ring=ring, part=(rank, job.world_size)
        )
        barrier()
        rates[f"{threads} x {chunk_bytes // MIB} MiB"] = job.checkpoint.nbytes / (time.perf_counter() - start) / 1e9
    return {"rates": rates}


def _write_digests(job: Job) -> dict[str, Any]:
    from pathlib import Path

    from penstock.config import Settings
    from penstock.storage import weight_set

    with weight_set.open_weights(job.checkpoint.directory, settings=Settings.read()) as weights:
        raw = weight_set.encode(weight_set.build(weights))
    Path(weight_set.sidecar_uri(job.checkpoint.directory)).write_bytes(raw)
    return {"sidecar_bytes": len(raw)}


def _load(job: Job, call: Call, barrier: Callable[[], None]) -> dict[str, Any]:
    import torch

    gc.collect()
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="utf-8") as refs:
        refs.write("5")
    before = _status_bytes("VmRSS")
    barrier()
    start = time.perf_counter()
    tensors = LOADERS[job.loader].run(call)
    limits.synchronize(call.device)
    seconds = time.perf_counter() - start
    growth = _status_bytes("VmHWM") - before
    barrier()
    if job.device == "cpu":
        torch.set_num_threads(1)  # thousands of small sums: waiting for threads would cost more than they save
    report = getattr(tensors, "report", None)
    return {
        "seconds": seconds,
        "rss_growth_bytes": growth,
        "num_tensors": len(tensors),
        "fingerprint": fingerprint(tensors),
        "report": report.summary() if report is not None else None,
    }


def child(job: Job, rank: int, store: str, log: str, pipe: Connection) -> None:
    """Body of the measuring process; answers through `pipe` and leaves at once."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        pipe.send(("answer", _measured(job, rank, store, pipe)))
    except BaseException:
        pipe.send(("error", traceback.format_exc(limit=-4)))
        raise
    finally:
        pipe.close()
        sys.stderr.flush()
        os._exit(0)


def _measured(job: Job, rank: int, store: str, pipe: Connection) -> dict[str, Any]:
    import torch

    device = "cpu"
    if job.device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    group, barrier = None, lambda: None
    if job.world_size > 1:
        import torch.distributed as dist

        backend = "nccl" if job.device == "cuda" else "gloo"
        options = {"device_id": torch.device(device)} if job.device == "cuda" else {}
        # A file, since a port that was free can be taken before rank 0 listens on it.
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=job.world_size, **options)
        group = dist.group.WORLD
        ones = torch.ones(1, device=device)

        def barrier() -> None:
            dist.all_reduce(ones)
            limits.synchronize(device)

        barrier()
    if job.loader in LOADERS:
        prepare(job.loader)
    pipe.send(("ready", None))
    pipe.recv()
    if job.loader == "limit:group-read":
        return _group_read(job, rank, barrier)
    if job.loader.startswith("limit:"):
        return _limit(job, rank)
    if job.loader == "digests:write":
        return _write_digests(job)
    at = job.checkpoint
    call = Call(directory=at.directory, files=at.files, device=device, group=group, memory_bytes=job.memory_bytes)
    return _load(job, call, barrier)


def used_bytes() -> int:
    """Host memory that is neither free nor reclaimable."""
    with open("/proc/meminfo", encoding="utf-8") as info:
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in itertools.islice(info, 3)}
    return fields["MemTotal"] - fields["MemAvailable"]


def run(job: Job, before_go: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Runs `job` in fresh processes (one a rank) and returns its answer; kills them at `timeout_s`.

    Args:
        before_go: called when every rank has finished its imports, just before the clock starts.
    """
    context = multiprocessing.get_context("forkserver")
    began = time.monotonic()
    ranks: list[tuple[Any, Connection]] = []
    with tempfile.TemporaryDirectory() as directory, open(f"{directory}/log", "w+", encoding="utf-8") as log:
        for rank in range(job.world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=child, args=(job, rank, f"{directory}/store", log.name, there), daemon=True
            )
            process.start()
            there.close()
            ranks.append((process, here))
        answers: list[dict[str, Any]] = [{"error": "interrupted"}]
        try:
            answers = _collect(job, [pipe for _, pipe in ranks], began + job.timeout_s, before_go)
        except (EOFError, ConnectionError):
            answers = [{"error": "a process died"}]
        finally:
            _end(ranks, patience_s=0.0 if any("error" in answer for answer in answers) else 20.0)
        tail = open(log.name, encoding="utf-8", errors="replace").read()[-1500:]  # noqa: SIM115
    return _merge(job, answers, tail) | {"process_s": round(time.monotonic() - began, 2)}


def _end(ranks: list[tuple[Any, Connection]], *, patience_s: float) -> None:
    for process, pipe in ranks:
        process.join(patience_s)
        if process.is_alive():
            process.kill()
            process.join()
        pipe.close()


def _collect(job: Job, pipes: list[Connection], deadline: float, before_go: Callable[[], Any]) -> list[dict[str, Any]]:
    answers: dict[Connection, dict[str, Any]] = {}
    waiting, ready, baseline, peak = set(pipes), 0, 0, 0
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            return [*answers.values(), {"error": f"not done after {job.timeout_s:.0f} s"}]
        sampling = bool(baseline) and job.sample_memory
        if sampling:
            peak = max(peak, used_bytes())
        for pipe in wait(list(waiting), timeout=0.005 if sampling else min(left, 1.0)):
            kind, value = pipe.recv()
            if kind == "ready":
                ready += 1
                if ready == len(pipes):
                    before_go()
                    baseline = peak = used_bytes()
                    for each in pipes:
                        each.send("go")
                continue
            waiting.discard(pipe)
            answers[pipe] = {"error": value} if kind == "error" else value
            if kind == "error":
                return list(answers.values())
    return [answers[pipe] | ({"used_growth_bytes": peak - baseline} if job.sample_memory else {}) for pipe in pipes]


def _merge(job: Job, answers: list[dict[str, Any]], tail: str) -> dict[str, Any]:
    head = {"row": job.row, "loader": job.loader, "world_size": job.world_size, "nbytes": job.checkpoint.nbytes}
    failed = [answer["error"] for answer in answers if "error" in answer]
    if failed:
        return head | {"error": failed[0].strip()[-600:], "log": tail[-600:]}
    merged = head | answers[0]
    if "rates" in merged:
        rates: dict[str, float] = merged.pop("rates")
        merged["shape"] = max(rates, key=lambda shape: rates[shape])
        merged["gb_per_s"] = rates[merged["shape"]]
    if "seconds" in merged:
        merged["seconds"] = max(answer["seconds"] for answer in answers)
        merged["rss_growth_bytes"] = max(answer["rss_growth_bytes"] for answer in answers)
        merged["gb_per_s"] = job.checkpoint.nbytes / merged["seconds"] / 1e9
        merged["fingerprints"] = sorted({answer["fingerprint"] for answer in answers})
        del merged["fingerprint"]
    return merged
