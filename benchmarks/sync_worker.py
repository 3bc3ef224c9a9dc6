"""A rank of `benchmarks.bench_sync`: a process that trains, publishes, serves, updates or broadcasts on request.

In: (name, arguments) by a pipe; each name is a method of `Worker`. Out: what the method gives, or its error.
Not here: what is asked in which order, what is made of it (`bench_sync`).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.fetch_worker import obey

NAME = "bench"
STALL_S = 30.0
"""What a rank that fails may cost the rest of the run; a first version takes 9 s, and tells that it gets on."""


class Worker:
    """State of one process: a trainer's shards or an engine's model, and its end of the sync."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        import torch

        torch.set_num_threads(1 if device == "cpu" else 8)
        self.rank, self.world_size, self.small = rank, world_size, device == "cpu"
        self.device = device if self.small else self.device_of(rank)
        self.flat: list[torch.Tensor] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tag: str | None = None
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

    def cpu_s(self) -> float:
        """Seconds of a core that all threads of this process took so far."""
        return time.process_time()

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

    def train(self, kind: str, nbytes: int, rank: int, world_size: int, arena: bool, few: bool) -> dict[str, Any]:
        """Rows of every tensor, cut as FSDP2 cuts them: version 0."""
        import torch
        from benchmarks.sync_model import TAGS, fill, shapes_of

        from penstock.memory.arena import Arena, needed_bytes
        from penstock.sync.shards import Shard

        self.shapes, self.tag = shapes_of(kind, nbytes, small=few), TAGS.get(kind)
        cut = {name: _rows(shape[0], rank, world_size) for name, shape in self.shapes.items()}
        sizes = [2 * len(rows) * math.prod(self.shapes[name][1:]) for name, rows in cut.items()]
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
            NAME,
            self.params,
            connection=penstock.ConnectionSettings(hub=hub, stall_s=STALL_S),
            mode=mode,
            snapshot_device=replica,
            transforms=self.tag,
            rank=(rank, world_size),
        )
        return time.perf_counter() - begun

    def publish(self, version: int, commit: str = "each") -> dict[str, Any]:
        """A step of training, near enough, then publish it; of a version for the fleet, wait for the decision too."""
        from benchmarks.sync_model import advance

        for one in self.flat:
            advance(one)
        self.sync()
        begun = time.perf_counter()
        report = self.end.publish(version, commit=commit)
        ended = time.perf_counter()
        if report.outcome == "pending":
            report = self.end.wait_decision()
        return {
            "begun": begun,
            "ended": ended,
            "copy_s": report.phases["copy"],
            "transform_s": report.phases["transform"],
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

    def serve(self, kind: str, nbytes: int, rank: int, world_size: int, arena: bool, few: bool) -> dict[str, Any]:
        """A model to fill; `few`: of few small tensors."""
        from benchmarks.sync_model import TAGS, Served, served_of, shapes_of

        from penstock.memory.rehome import rehome

        self.shapes, self.tag = shapes_of(kind, nbytes, small=few), TAGS.get(kind)
        self.model = Served(served_of(kind, self.shapes), rank, world_size, self.device)
        if arena:
            rehome(self.model, copy=False, is_remappable=True)
            gc.collect()
            self._empty()
        self.sync()
        return {"nbytes": sum(p.nbytes for p in self.model.parameters())}

    def _empty(self) -> None:
        import torch

        if not self.small:
            torch.cuda.empty_cache()

    def subscribe(self, hub: str, mode: str, rank: int, world_size: int) -> None:
        """Be a subscriber."""
        import penstock

        self.end = penstock.subscriber(
            NAME,
            self.model,
            connection=penstock.ConnectionSettings(hub=hub, stall_s=STALL_S),
            mode=mode,
            transforms=self.tag,
            rank=(rank, world_size),
        )

    def prepare(self) -> float:
        """Do what the first update does once; seconds of the wall."""
        begun = time.perf_counter()
        if not self.end.prepare():
            raise AssertionError("no publisher came")
        return time.perf_counter() - begun

    def sleep_and_wake(self) -> dict[str, Any]:
        """Give the weights up, and bring the newest version back."""
        before = self._used_bytes()
        begun = time.perf_counter()
        freed = self.end.release()
        slept = time.perf_counter()
        used = self._used_bytes()
        report = self.end.restore()
        ended = time.perf_counter()
        told = {"release_s": slept - begun, "restore_s": ended - slept, "freed": freed, "given_back": before - used}
        seconds = {f"{phase}_s": report.phases[phase] for phase in ("plan", "wire")}
        return told | seconds | {"nbytes": report.nbytes, "path": report.path}

    def _used_bytes(self) -> int:
        import torch

        return 0 if self.small else int(torch.cuda.memory_reserved())

    def update(self, version: int) -> dict[str, Any]:
        """Wait for a version, take it."""
        self.end.wait(version, timeout_s=STALL_S)
        heard = time.perf_counter()
        report = self.end.update(version)
        ended = time.perf_counter()
        names = ("nbytes", "wall_s", "pause_s", "path", "attempts", "why", "staging_bytes")
        seconds = {f"{phase}_s": report.phases[phase] for phase in ("plan", "wire", "install")}
        return {"heard": heard, "ended": ended} | seconds | {name: getattr(report, name) for name in names}

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
            for called, one in self._loaded(name, whole).items():
                wanted = self.model.wanted(called, one)
                got = self.model.part(called, len(wanted))
                if not torch.equal(got.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)):
                    raise AssertionError(f"{called} is not that of turn {turn}")
        return len(some)

    def _loaded(self, name: str, whole: Any) -> dict[str, Any]:
        """Return the input of an engine's loader for a trained tensor: the tensor, or its codes and scales."""
        from benchmarks.sync_model import SCALES

        from penstock.transform.formats import format_of
        from penstock.transform.quantize import quantise

        if name + SCALES not in self.model.places:
            return {name: whole}
        codes, scales = quantise(format_of(str(self.tag)), whole)
        return {name: codes, name + SCALES: scales}

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

    def broadcast(
        self, store: str, how: str, rank: int, world_size: int, kind: str, nbytes: int, reps: int
    ) -> list[float]:
        """Seconds of syncs by broadcast from rank 0, which has all tensors whole; not of the first."""
        from benchmarks.sync_beside import Broadcasts
        from benchmarks.sync_model import shapes_of

        shapes = shapes_of(kind, nbytes, small=self.small)
        made = Broadcasts(shapes, self.model if rank else None, self.tag, self.device, how=how)
        times = made.run(f"file://{store}", rank, world_size, reps)
        del made
        gc.collect()
        self._empty()
        return times


def _rows(total: int, rank: int, world_size: int) -> range:
    each = -(-total // world_size)
    return range(min(total, rank * each), min(total, (rank + 1) * each))


def serve(pipe: Connection, rank: int, world_size: int, device: str) -> None:
    """Do as told until the pipe is closed."""
    obey(pipe, Worker(rank, world_size, device))
