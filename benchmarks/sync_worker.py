"""One rank of `benchmarks.bench_sync`: a process that trains, publishes, serves, updates, broadcasts as told.

In: (name, arguments) by a pipe; each name is a method of `Worker`. Out: what the method gives, or its error.
Not here: what is asked in which order, what is made of it (`bench_sync`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.fetch_worker import obey

NAME = "bench"
BUCKET_BYTES = 1 << 30
"""Of packed broadcasts."""


class Worker:
    """State of one process: a trainer's shards or an engine's model, and its end of the sync."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        import torch

        torch.set_num_threads(1 if device == "cpu" else 8)
        self.rank, self.world_size, self.small = rank, world_size, device == "cpu"
        self.device = device if self.small else self.device_of(rank)
        self.flat: list[torch.Tensor] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.params: dict[str, Any] = {}
        self.model: Any = None
        self.end: Any = None
        if not self.small:
            torch.cuda.set_device(self.device)
            torch.empty(1, device=self.device)

    def device_of(self, rank: int) -> str:
        """A rank's; where there are fewer devices than ranks, neighbours share one."""
        import torch

        return f"cuda:{rank * torch.cuda.device_count() // self.world_size}"

    def sync(self) -> None:
        import torch

        if not self.small:
            torch.cuda.synchronize(self.device)

    def end_sync(self) -> None:
        """Close our end."""
        end, self.end = self.end, None
        if end is not None:
            end.close()
        del end
        gc.collect()
        self._empty()

    def leave(self) -> None:
        """Close our end and give everything back."""
        self.model = None
        self.params.clear()
        self.flat.clear()
        self.end_sync()

    # -- a trainer

    def train(self, kind: str, nbytes: int, rank: int, world_size: int, arena: bool) -> dict[str, Any]:
        """Rows of every tensor, cut as FSDP2 cuts them: version 0."""
        import torch
        from benchmarks.sync_model import fill, shapes_of

        from penstock.memory.arena import Arena, needed_bytes
        from penstock.sync.declare import Shard

        self.shapes = shapes_of(kind, nbytes, small=self.small)
        cut = {name: _rows(shape[0], rank, world_size) for name, shape in self.shapes.items()}
        sizes = [2 * len(rows) * _width(self.shapes[name]) for name, rows in cut.items()]
        made: Iterator[torch.Tensor]
        if arena:
            home = Arena.allocate(needed_bytes(sizes), self.device)
            places = zip(home.place(sizes), sizes, strict=True)
            made = (home.bytes_at(at, size) for at, size in places)
            self.flat = [home.bytes_at(0, home.nbytes)]
        else:
            made = (torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes)
        for (name, rows), flat in zip(cut.items(), made, strict=True):
            shape = self.shapes[name]
            tensor = flat.view(torch.bfloat16).view(len(rows), *shape[1:])
            if len(rows):
                fill(tensor, name, 0, rows.start)
            if not arena:
                self.flat.append(flat)
            offset = (rows.start, *(0 for _ in shape[1:]))
            self.params[name] = Shard(tensor=tensor, global_shape=shape, offset=offset)
        self.sync()
        return {"nbytes": sum(sizes), "tensors": len(sizes)}

    def publish_as(self, hub: str, mode: str, replica: str, rank: int, world_size: int) -> float:
        """Be a publisher; seconds until it is one."""
        import penstock

        begun = time.perf_counter()
        self.end = penstock.publisher(
            NAME, self.params, hub=hub, mode=mode, replica=replica, rank=rank, world_size=world_size, stall_s=60.0
        )
        return time.perf_counter() - begun

    def publish(self, version: int) -> dict[str, Any]:
        """A step of training, near enough, then publish it."""
        from benchmarks.sync_model import advance

        for one in self.flat:
            advance(one)
        self.sync()
        begun = time.perf_counter()
        report = self.end.publish(version)
        ended = time.perf_counter()
        return {
            "begun": begun,
            "ended": ended,
            "copy_s": report.copy_s,
            "committed": len(report.committed),
            "bad": len(report.late) + len(report.failed),
        }

    def copy_to_host(self) -> float:
        """Seconds of a bare copy of the shards to pinned memory: the best of three."""
        import torch

        nbytes = sum(one.numel() for one in self.flat)
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not self.small)
        best = float("inf")
        for _ in range(3):
            self.sync()
            begun, at = time.perf_counter(), 0
            for one in self.flat:
                host[at : at + one.numel()].copy_(one, non_blocking=True)
                at += one.numel()
            self.sync()
            best = min(best, time.perf_counter() - begun)
        return best

    def steps(self, seconds: float) -> list[float]:
        """Seconds of each of some training steps, near enough: matrices, in a thread's time of its own."""
        import torch

        width = 256 if self.small else 8192
        a, b = (torch.randn(width, width, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        found, since = [], time.perf_counter()
        while time.perf_counter() - since < seconds:
            begun = time.perf_counter()
            for _ in range(16):
                torch.mm(a, b)
            self.sync()
            found.append(time.perf_counter() - begun)
        return found[1:] or found

    # -- an engine

    def serve(self, kind: str, nbytes: int, rank: int, world_size: int, arena: bool) -> dict[str, Any]:
        """A model to fill."""
        from benchmarks.sync_model import Served, shapes_of

        from penstock.memory.rehome import rehome

        self.shapes = shapes_of(kind, nbytes, small=self.small)
        self.model = Served(self.shapes, rank, world_size, self.device)
        if arena:
            rehome(self.model, copy=False)
            gc.collect()
            self._empty()
        self.sync()
        return {"nbytes": sum(p.nbytes for p in self.model.parameters())}

    def _empty(self) -> None:
        import torch

        if not self.small:
            torch.cuda.empty_cache()

    def subscribe(self, hub: str, mode: str, rank: int, world_size: int) -> None:
        import penstock

        self.end = penstock.subscriber(
            NAME, self.model, hub=hub, mode=mode, rank=rank, world_size=world_size, stall_s=60.0
        )

    def update(self, version: int) -> dict[str, Any]:
        """Wait for a version, take it."""
        self.end.wait_version(version, timeout_s=60.0)
        heard = time.perf_counter()
        report = self.end.update(version)
        ended = time.perf_counter()
        names = ("nbytes", "wall_s", "plan_s", "wire_s", "install_s", "pause_s", "path", "attempts", "why")
        return {"heard": heard, "ended": ended} | {name: getattr(report, name) for name in names}

    def check(self, turn: int, count: int) -> int:
        """Compare some tensors of the model, first to last, with what the loader makes of them; how many."""
        import torch
        from benchmarks.sync_model import fill

        names = [name for name in self.shapes if name in self.model.places]
        names = names[:: max(1, len(names) // count)]
        some = {name: self.shapes[name] for name in names}
        for name, shape in some.items():
            whole = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            fill(whole, name, turn)
            wanted = self.model.wanted(name, whole)
            got = self.model.part(name, len(wanted))
            if not torch.equal(got.contiguous().view(torch.int16), wanted.contiguous().view(torch.int16)):
                raise AssertionError(f"{name} is not that of turn {turn}")
        return len(some)

    # -- what is measured beside

    def limit(self, nbytes: int, far: int) -> float:
        """GB/s of plain copies from another device, or in host memory."""
        import torch

        there = self.device if self.small else self.device_of(far)
        source = torch.ones(nbytes, dtype=torch.uint8, device=there)
        into = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        best = float("inf")
        for _ in range(4):
            self.sync()
            begun = time.perf_counter()
            into.copy_(source)
            self.sync()
            best = min(best, time.perf_counter() - begun)
        del source, into
        self._empty()
        return nbytes / best / 1e9

    def broadcast(self, store: str, how: str, rank: int, world_size: int, kind: str, nbytes: int, reps: int) -> Any:
        """Seconds of syncs by broadcast from rank 0, which has all tensors whole; not of the first."""
        import torch
        import torch.distributed as dist
        from benchmarks.sync_model import shapes_of

        backend = "gloo" if self.small else "nccl"
        device = None if self.small else torch.device(self.device)
        dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=world_size, device_id=device)
        shapes = shapes_of(kind, nbytes, small=self.small)
        whole = _views(shapes, self.device) if rank == 0 else {}
        run = self._packed(shapes, whole) if how == "packed" else self._per_tensor(shapes, whole)
        times = []
        for _ in range(reps + 1):
            dist.barrier()
            self.sync()
            begun = time.perf_counter()
            for step in run:
                step()
            self.sync()
            dist.barrier()
            self.sync()
            times.append(time.perf_counter() - begun)
        dist.destroy_process_group()
        del whole
        gc.collect()
        self._empty()
        return times[1:]

    def _per_tensor(self, shapes: dict[str, tuple[int, ...]], whole: dict[str, Any]) -> list[Callable[[], object]]:
        """What a version takes: each tensor into its place, or into a buffer of which the part wanted is copied."""
        import torch
        import torch.distributed as dist

        most = max(_width((1, *shape)) for shape in shapes.values())
        buffer = torch.empty(most, dtype=torch.bfloat16, device=self.device)
        steps: list[Callable[[], object]] = []
        for name, shape in shapes.items():
            one = whole[name] if whole else buffer[: _width((1, *shape))].view(shape)
            pairs = [] if whole else self._pairs(name, one)
            if pairs and pairs[0][0].shape == shape and pairs[0][0].is_contiguous():
                one, pairs = pairs[0][0], []
            steps.append(partial(dist.broadcast, one, 0))
            steps += [partial(into.copy_, part) for into, part in pairs]
        return steps

    def _packed(self, shapes: dict[str, tuple[int, ...]], whole: dict[str, Any]) -> list[Callable[[], object]]:
        """What a version takes: buckets packed, broadcast, unpacked, as vLLM and trainers do; views are made before."""
        import torch
        import torch.distributed as dist

        least = max(2 * _width((1, *shape)) for shape in shapes.values())
        buffer = torch.empty(max(BUCKET_BYTES, least) // 2, dtype=torch.bfloat16, device=self.device)
        buckets: list[list[str]] = [[]]
        used = 0
        for name, shape in shapes.items():
            if used + _width((1, *shape)) > len(buffer):
                buckets.append([])
                used = 0
            buckets[-1].append(name)
            used += _width((1, *shape))
        steps: list[Callable[[], object]] = []
        for names in buckets:
            sizes = [_width((1, *shapes[name])) for name in names]
            bucket = buffer[: sum(sizes)]
            if whole:
                steps.append(partial(torch.cat, [whole[name].view(-1) for name in names], out=bucket))
            steps.append(partial(dist.broadcast, bucket, 0))
            for name, one in () if whole else zip(names, bucket.split(sizes), strict=True):
                steps += [partial(into.copy_, part) for into, part in self._pairs(name, one.view(shapes[name]))]
        return steps

    def _pairs(self, name: str, whole: Any) -> list[tuple[Any, Any]]:
        """Where the part of a tensor goes that this rank wants, and the part; none: it wants none."""
        if name not in self.model.places:
            return []
        part = self.model.wanted(name, whole)
        return [(self.model.part(name, len(part)).detach(), part)]


def _views(shapes: dict[str, tuple[int, ...]], device: str) -> dict[str, Any]:
    """Whole tensors, one after another in one piece of memory."""
    import torch

    flat = torch.zeros(sum(_width((1, *shape)) for shape in shapes.values()), dtype=torch.bfloat16, device=device)
    found, at = {}, 0
    for name, shape in shapes.items():
        found[name] = flat[at : at + _width((1, *shape))].view(shape)
        at += _width((1, *shape))
    return found


def _width(shape: tuple[int, ...]) -> int:
    """Elements of a row."""
    found = 1
    for size in shape[1:]:
        found *= size
    return found


def _rows(total: int, rank: int, world_size: int) -> range:
    each = -(-total // world_size)
    return range(min(total, rank * each), min(total, (rank + 1) * each))


def serve(pipe: Connection, rank: int, world_size: int, device: str) -> None:
    """Do as told until the pipe is closed."""
    obey(pipe, Worker(rank, world_size, device))
