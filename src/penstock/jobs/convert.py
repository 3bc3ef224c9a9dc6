"""`convert`: any weight set to any other, out of core, resumable, published whole.

In: URIs and words. Out: a checkpoint where there was none, and a `ConvertReport`.
Not here: the plan (`job`), the workers (`run`), what operations do, what became of earlier runs (`result`).

    open sources --> plan_job --> OutputSet + Journal (resumed?) --> Coordinator --> leaves, manifest --> publish
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from penstock.config import Settings, parse_bytes
from penstock.engine.trace import save_spans
from penstock.errors import ConfigError, SourceChanged
from penstock.jobs.beside import beside, small_from
from penstock.jobs.complete import completed
from penstock.jobs.crew import Crew, LocalCrew, WorkerStats, rows_of
from penstock.jobs.job import SHARD_BYTES, Job, plan_job
from penstock.jobs.journal import Journal
from penstock.jobs.messages import EXECUTORS, Words
from penstock.jobs.result import (
    METADATA,
    check_unchanged,
    forget_what_did_not_last,
    manifest_of,
    published,
    small_files,
)
from penstock.jobs.run import Coordinator
from penstock.jobs.words import Word, operation_of
from penstock.plan.placement import Placement
from penstock.plan.tasks import TASK_BYTES
from penstock.storage import is_remote, local_path
from penstock.storage.manifest import Uris, WeightSet, open_weights
from penstock.storage.output import OutputSet, require_free
from penstock.storage.upload import publish_remote, require_none
from penstock.types import GB, MIB

WORKER_MEMORY_BYTES = 512 * MIB
"""Host memory of one worker's tasks unless the user says otherwise: four tasks of 64 MiB, and room to spare."""

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Of any GPU that torch knows: NVIDIA's, that of WSL, AMD's."""

Progress = Callable[[int, int], None]
"""Called with tasks done and tasks in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did."""

    uri: str
    """Where the result is."""
    revision: str
    operation: str
    num_tensors: int
    nbytes: int
    """Of the result's tensors."""
    read_bytes: int
    """Of the tasks done in this run, as planned."""
    num_tasks: int
    num_resumed: int
    """Tasks that an earlier run had done."""
    num_stolen: int
    num_twice: int
    num_workers: int
    """That were to run at once."""
    wall_s: float
    busy_s: Mapping[str, float]
    """Per executor, summed over workers and their threads."""
    workers: tuple[WorkerStats, ...]
    peak_bytes: int
    """Most host memory that any worker's tasks held at once."""
    verified: bool = True
    """The manifest's digests are of the bytes as they were made."""

    @property
    def gb_per_s(self) -> float:
        """Bytes read a second."""
        return self.read_bytes / GB / self.wall_s if self.wall_s else 0.0

    @property
    def utilisation(self) -> dict[str, float]:
        """Of each executor: threads busy at a time, as a mean over `num_workers` and `wall_s`."""
        return {name: busy_s / (self.wall_s * self.num_workers) for name, busy_s in self.busy_s.items()}


def convert(
    sources: Uris,
    destination: str | os.PathLike[str],
    *,
    to: str | None = None,
    operations: Sequence[Word] = (),
    devices: str | Sequence[str] = "all",
    workers: int | None = None,
    memory_bytes: int | str | None = None,
    task_bytes: int | str = TASK_BYTES,
    shard_bytes: int | str = SHARD_BYTES,
    storage_options: Mapping[str, str] | None = None,
    spool: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    ray: str | None = None,
    crew: Crew | None = None,
    on_progress: Progress | None = None,
) -> ConvertReport:
    """Convert one or several checkpoints to one.

    Args:
        sources: what is read; as many as the first operation takes.
        destination: a directory that is not there yet, or a prefix of an object store.
        to: a format (`cast:BF16`, `fp8-block128`, ...) that what the operations give is stored in.
        operations: one after the other, each `{"op": name, ...}`; none: a copy.
        devices: `"all"`: every GPU, or one worker a core where there is none; `"cpu"`; or names, one worker each.
        workers: how many, taking `devices` in turn; None: one for each.
        memory_bytes: host memory of each worker's tasks.
        task_bytes: see `plan.tasks.cut`.
        shard_bytes: files of at most so many bytes.
        storage_options: see `load`; of sources and destination.
        spool: where files grow that go to an object store; None: the system's temporary directory.
        trace: a file for one Chrome trace of all workers.
        ray: put the workers on the Ray cluster at this address; source, destination and spool must be the same there.
        crew: who starts workers; None: processes of this host, or Ray's.
        on_progress: see `Progress`.

    Returns:
        What was done. The destination is whole, with index, manifest and the first source's small files.

    Raises:
        ConfigError: something is at the destination, or words that mean nothing.
        PlanError, BudgetTooSmall: sources do not fit the operation; a task needs more than `memory_bytes`.
        OperationFailed: an operation raised, hung, or gave what it had not said.
        SourceChanged, DiskFull, SourceError, DestinationError: as their names say.
        After all of these the destination is untouched, and the same call goes on where this one ended.
    """
    began, settings = time.monotonic(), Settings.read()
    into, options = os.fspath(destination), dict(storage_options or {})
    words, where = _words(to, operations), _devices(devices, workers)
    with ExitStack() as stack:
        sizes = parse_bytes(task_bytes), parse_bytes(shard_bytes)
        opened, words, job = _open(sources, words, settings, options, *sizes, stack)
        budget = WORKER_MEMORY_BYTES if memory_bytes is None else parse_bytes(memory_bytes)
        job.check_budget(budget, "one task")
        growing = _growing(job, into, spool)
        journal = Journal(growing.with_name(f"{growing.name}.journal"), job.key)
        stack.callback(journal.close)
        out = OutputSet(growing, job.files.table, job.files.body_nbytes, METADATA, job.files.groups)
        stack.callback(out.close)
        stack.push(partial(_leave, journal, out))
        if revision := published(job, journal, into, settings, options):
            journal.kept = frozenset(journal.done)
            journal.remove()
            out.remove()
            return _report(into, revision, job, journal, (), Placement((), done=()), len(where), began)
        if is_remote(into):
            require_none(into, settings=settings, storage_options=options)
        else:
            require_free(Path(local_path(into)))
        out.create()
        out.open()
        forget_what_did_not_last(job, journal, out)
        told = Words(
            sources=tuple(_uris(sources)),
            operation=tuple(dict(word) for word in words),
            key=job.key,
            directory=str(out.directory),
            task_bytes=parse_bytes(task_bytes),
            shard_bytes=parse_bytes(shard_bytes),
            leaf_bytes=job.leaf_bytes,
            memory_bytes=budget,
            stall_s=settings.stall_s,
            storage_options=options,
            trace=trace is not None,
        )
        coordinator = Coordinator(
            job, told, journal, crew or _crew(ray, stack), where, stall_s=settings.stall_s, on_progress=on_progress
        )
        origin = time.perf_counter()
        with coordinator:
            coordinator.run()
        if trace is not None:
            save_spans(trace, rows_of(coordinator.traces, EXECUTORS), origin)
        for one in opened:
            check_unchanged(one)
        manifest = manifest_of(job, journal, out)
        kept = small_files(opened[small_from(job)].uri, job.operation.config, settings, options)
        small = beside(job, manifest, kept)
        if is_remote(into):
            publish_remote(out, into, small, settings=settings, storage_options=options)
        else:
            out.publish(Path(local_path(into)), small)
        journal.remove()
    stats = tuple(coordinator.stats)
    return _report(into, manifest.revision, job, journal, stats, coordinator.placement, len(where), began)


def plan(
    sources: Uris,
    *,
    to: str | None = None,
    operations: Sequence[Word] = (),
    task_bytes: int | str = TASK_BYTES,
    shard_bytes: int | str = SHARD_BYTES,
    storage_options: Mapping[str, str] | None = None,
) -> Job:
    """What `convert` would do: headers are read, nothing is written. Arguments and errors as there."""
    settings, options = Settings.read(), dict(storage_options or {})
    sizes = parse_bytes(task_bytes), parse_bytes(shard_bytes)
    with ExitStack() as stack:
        return _open(sources, _words(to, operations), settings, options, *sizes, stack)[2]


def _open(
    sources: Uris,
    words: Sequence[Word],
    settings: Settings,
    options: Mapping[str, str],
    task_bytes: int,
    shard_bytes: int,
    stack: ExitStack,
) -> tuple[list[WeightSet], list[Word], Job]:
    """The sources, opened until the stack ends, the words completed by them, and the job on them."""
    opened = [
        stack.enter_context(open_weights(uri, settings=settings, storage_options=options)) for uri in _uris(sources)
    ]
    manifests, words = [one.manifest for one in opened], completed(words, opened, settings, options)
    job = plan_job(operation_of(words), manifests, task_bytes=task_bytes, shard_bytes=shard_bytes)
    return opened, words, job


def _uris(sources: Uris) -> list[str]:
    return [os.fspath(sources)] if isinstance(sources, str | os.PathLike) else [os.fspath(one) for one in sources]


def _words(to: str | None, operations: Sequence[Word]) -> list[Word]:
    return [*operations, *([{"op": "store", "format": to}] if to is not None else [])]


def _growing(job: Job, into: str, spool: str | os.PathLike[str] | None) -> Path:
    """Where the files grow: beside the destination, so that a rename publishes them; or in the spool."""
    if is_remote(into):
        return Path(tempfile.gettempdir() if spool is None else spool) / f"penstock-{job.key[:12]}"
    final = Path(local_path(into)).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    return final.with_name(f".{final.name}.penstock-{job.key[:12]}")


def _leave(
    journal: Journal, out: OutputSet, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Leave nothing behind that no later call can go on with: nothing was done, or it was of sources that changed."""
    if kind is not None and (not journal.done or issubclass(kind, SourceChanged)):
        out.remove()
        journal.remove()


def _crew(ray: str | None, stack: ExitStack) -> Crew:
    if ray is None:
        return stack.enter_context(LocalCrew())
    from penstock.jobs.ray_crew import RayCrew

    crew = RayCrew(ray)
    stack.callback(crew.close)
    return crew


def _gpus() -> list[str]:
    """Every GPU. Where there is no driver, torch need not be asked: this process plans without it."""
    if not any(os.path.exists(one) for one in _DRIVERS):
        return []
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def _devices(devices: str | Sequence[str], workers: int | None) -> list[str]:
    """One device for each worker."""
    if workers is not None and workers < 1:
        raise ConfigError(f"{workers} workers")
    named = [devices] if isinstance(devices, str) else list(devices)
    if named == ["all"]:
        named = _gpus() or ["cpu"]
    if named == ["cpu"] and workers is None:
        workers = len(os.sched_getaffinity(0))
    return [named[i % len(named)] for i in range(workers or len(named))]


def _report(
    into: str,
    revision: str,
    job: Job,
    journal: Journal,
    stats: Sequence[WorkerStats],
    placement: Placement,
    num_workers: int,
    began: float,
) -> ConvertReport:
    total = len(job.tasks)
    ran = np.setdiff1d(np.arange(total), np.fromiter(journal.kept, np.int64, len(journal.kept)))
    return ConvertReport(
        uri=into,
        revision=revision,
        operation=job.operation.name,
        num_tensors=len(job.files.table),
        nbytes=int(job.files.table.nbytes.sum()),
        read_bytes=int(job.tasks.in_bytes[ran].sum()),
        num_tasks=total,
        num_resumed=len(journal.kept),
        num_stolen=placement.num_stolen,
        num_twice=placement.num_twice,
        num_workers=num_workers,
        wall_s=time.monotonic() - began,
        busy_s={name: sum(one.busy_s.get(name, 0.0) for one in stats) for name in EXECUTORS},
        workers=tuple(stats),
        peak_bytes=max((one.peak_bytes for one in stats), default=0),
    )
