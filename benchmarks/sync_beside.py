"""The peers of `benchmarks.bench_sync`: broadcasts of torch.distributed from a rank that has all tensors.

In: a checkpoint's shapes, an engine's model. Out: seconds of each version, from barrier to barrier.
Not here: the sync (`sync_worker`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from benchmarks.sync_model import BLOCK, SCALES, Served, Shape

from penstock.transform.formats import format_of
from penstock.transform.fuse import KernelJob, fuse

BUCKET_BYTES = 1 << 30
"""Of packed broadcasts."""
GROUP_S = 20.0
"""How long ranks wait for one another: one that failed before must not cost the rest of the run."""

Steps = list[Callable[[], object]]


class Broadcasts:
    """A rank of the broadcasts. Buffers, views and kernels are made before the clock runs, and before the group.

    Args:
        shapes: of the checkpoint.
        model: what a receiver fills; None: this rank has all tensors, and gives them.
        tag: the format of the model's codes; None: it has none.
        how: `packed`: buckets packed, broadcast, unpacked, as vLLM and trainers do, or what of them is wanted quantised
            by the kernel that publishers use; `per tensor`: each into its place, or through a buffer.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], model: Served | None, tag: str | None, device: str, *, how: str
    ) -> None:
        self._shapes, self._model, self._tag, self._device = shapes, model, tag, device
        self._whole = {} if model is not None else _views(shapes, device)
        self._steps = self._packed() if how == "packed" else self._per_tensor()

    def run(self, store: str, rank: int, world_size: int, reps: int) -> list[float]:
        """Seconds of each version; of the first none."""
        device = None if self._device == "cpu" else torch.device(self._device)
        dist.init_process_group(
            "gloo" if device is None else "nccl",
            store,
            rank=rank,
            world_size=world_size,
            device_id=device,
            timeout=timedelta(seconds=GROUP_S),
        )
        times = []
        try:
            for _ in range(reps + 1):
                self._meet()
                begun = time.perf_counter()
                for step in self._steps:
                    step()
                self._sync()
                self._meet()
                times.append(time.perf_counter() - begun)
        finally:
            dist.destroy_process_group()
        return times[1:]

    def _meet(self) -> None:
        dist.barrier()
        self._sync()

    def _sync(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)

    def _per_tensor(self) -> Steps:
        buffer = self._buffer(max(map(math.prod, self._shapes.values())))
        steps: Steps = []
        for name, shape in self._shapes.items():
            one = self._whole[name] if self._whole else buffer[: math.prod(shape)].view(shape)
            pairs = self._pairs(name, one)
            if pairs and pairs[0][0].shape == shape and pairs[0][0].is_contiguous():
                one, pairs = pairs[0][0], []
            steps.append(partial(dist.broadcast, one, 0))
            steps += [partial(into.copy_, part) for into, part in pairs]
        return steps

    def _packed(self) -> Steps:
        buffer = self._buffer(max(BUCKET_BYTES // 2, *map(math.prod, self._shapes.values())))
        buckets: list[list[str]] = [[]]
        used = 0
        for name, shape in self._shapes.items():
            if used + math.prod(shape) > len(buffer):
                buckets.append([])
                used = 0
            buckets[-1].append(name)
            used += math.prod(shape)
        steps: Steps = []
        for names in buckets:
            sizes = [math.prod(self._shapes[name]) for name in names]
            bucket = buffer[: sum(sizes)]
            if self._whole:
                steps.append(partial(torch.cat, [self._whole[name].view(-1) for name in names], out=bucket))
            steps.append(partial(dist.broadcast, bucket, 0))
            named = zip(names, bucket.split(sizes), strict=True)
            steps += self._unpacked({name: one.view(self._shapes[name]) for name, one in named})
        return steps

    def _unpacked(self, whole: Mapping[str, torch.Tensor]) -> Steps:
        """From a bucket into the model."""
        steps: Steps = []
        jobs = []
        for name, one in whole.items():
            pairs = self._pairs(name, one)
            if self._model is not None and pairs and name + SCALES in self._model.places:
                ((codes, part),) = pairs
                scales = self._model.part(name + SCALES, -(-len(part) // BLOCK)).detach()
                jobs.append(KernelJob(source=part, outputs=(codes, scales)))
            else:
                steps += [partial(into.copy_, part) for into, part in pairs]
        if jobs:
            fusion = fuse(format_of(str(self._tag)), jobs)
            fusion.run()  # it is compiled now
            steps.append(fusion.run)
        return steps

    def _pairs(self, name: str, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the destination and the part of a tensor that this rank wants; None: it wants none."""
        if self._model is None or name not in self._model.places:
            return []
        part = self._model.wanted(name, whole)
        return [(self._model.part(name, len(part)).detach(), part)]

    def _buffer(self, num_elements: int) -> torch.Tensor:
        return torch.empty(num_elements, dtype=torch.bfloat16, device=self._device)


def _views(shapes: Mapping[str, Shape], device: str) -> dict[str, torch.Tensor]:
    """Whole tensors, one after another in one piece of memory."""
    flat = torch.zeros(sum(map(math.prod, shapes.values())), dtype=torch.bfloat16, device=device)
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: one.view(shape) for (name, shape), one in zip(shapes.items(), parts, strict=True)}
