"""`convert`: any weight set to any other, out of core, resumable, published whole.

In: URIs and operations. Out: a checkpoint where there was none, and a `ConvertReport`.
Not here: opening sources (`request`), the plan (`job`), the workers (`coordinator`), results of earlier runs
(`publish`).

    plan_request --> _stage: OutputSet, Journal (resumed?) --> _run: Coordinator --> _publish: manifest
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from penstock.engine.trace import Trace, open_trace, save_spans
from penstock.errors import ConfigError, DiskFull, IntegrityError, PenstockError, SourceChanged, SourceTruncated
from penstock.jobs.coordinator import Coordinator
from penstock.jobs.job import SHARD_BYTES, Job, Journal, Notes, bytes_read
from penstock.jobs.messages import EXECUTORS, JobSpec
from penstock.jobs.operations.spec import Operations
from penstock.jobs.predict import Predicted, predict
from penstock.jobs.publish import (
    METADATA,
    ONE_FILE,
    SCHEME,
    STAMP,
    MemoryDestination,
    check_repeated,
    check_unchanged,
    config_of,
    fill,
    forget_what_did_not_last,
    manifest_of,
    published,
    sidecar_files,
    small_files,
    small_from,
    stamp,
)
from penstock.jobs.report import ConvertReport, how_verified
from penstock.jobs.request import ConvertRequest, plan_request
from penstock.jobs.workers.launch import Launcher, LocalLauncher, devices_of, gpus, rows_of
from penstock.loader.report import Progress, ProgressOption
from penstock.plan.cluster import Rates
from penstock.plan.tasks import TASK_BYTES
from penstock.storage import is_remote, local_path, text_of
from penstock.storage.locate import left_out
from penstock.storage.output import (
    OutputRegion,
    OutputSet,
    publish_remote,
    require_free,
    require_free_remote,
    typed,
)
from penstock.storage.weight_set import Uris


def convert(
    sources: Uris,
    destination: str | os.PathLike[str] | MemoryDestination,
    *,
    to: str | None = None,
    operations: Operations = (),
    verify: bool | None = None,
    devices: str | Sequence[str] = "all",
    workers: int | None = None,
    memory_bytes: int | str | None = None,
    task_bytes: int | str = TASK_BYTES,
    shard_bytes: int | str = SHARD_BYTES,
    storage_options: Mapping[str, str] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | None = None,
    ray: str | None = None,
    launcher: Launcher | None = None,
    rates: Rates | None = None,
    progress: ProgressOption = None,
) -> ConvertReport:
    """Convert one or several checkpoints to one.

    Args:
        sources: what is read; as many as the first operation takes.
        destination: a directory that is not there yet, a prefix of an object store, or a keeper's `into`.
        to: a format (`cast:BF16`, `fp8-block128`, ...) that what the operations give is stored in.
        operations: one after the other, each `{"op": name, ...}` or as `--op` has it (`"slerp:t=0.4"`); one alone
            need not be in a list; none: a copy.
        verify: hold what is read to the leaf digests of each source that has them; True: of all, or fail; False: none.
        devices: `"all"`: every GPU, or one worker a core where there is none; `"cpu"`; or names, one worker each.
        workers: how many, taking `devices` in turn; None: one for each.
        memory_bytes: host memory of each worker's tasks.
        task_bytes, shard_bytes: see `plan.tasks.cut`; files of at most so many bytes.
        storage_options: see `load`; of sources and destination.
        scratch: where files grow that go to an object store; None: the system's temporary directory.
        trace: a file for one Chrome trace of all workers.
        ray: start the workers on the Ray cluster at this address, where source, destination and `scratch` are the same.
        launcher: who starts workers; None: processes of this host, or Ray's.
        rates: of this machine, to predict by; None: those that are known of its GPUs.
        progress: see `load`; of tasks.

    Returns:
        What was done. The destination is whole, with index, manifest and the first source's small files.

    Raises:
        ConfigError: something is at the destination, or words that mean nothing.
        PlanError, BudgetTooSmall: sources do not fit the operation; a task needs more than `memory_bytes`.
        OperationFailed: an operation raised, hung, or gave what it had not said.
        IntegrityError, SourceChanged, DiskFull, SourceError, DestinationError: as their names say.
        After all of these the destination is untouched; the same call goes on where this one ended, but into memory.
    """
    began = time.monotonic()
    if not isinstance(destination, MemoryDestination):
        destination = text_of(destination)
    devices_of(devices, workers, list)  # what names no device is said before anything is begun
    stages = open_trace(trace)
    with ExitStack() as stack:
        launcher = launcher or _launcher(ray, devices, workers, stack)
        shard_bytes = ONE_FILE if isinstance(destination, MemoryDestination) else shard_bytes
        with stages.stage("plan"):
            request = plan_request(
                sources, to, operations, task_bytes, shard_bytes, storage_options, verify, stack, memory_bytes
            )
            request.job.check_budget(request.job_spec.memory_bytes, "one task")
        run = partial(_run, stack, stages, launcher, devices, workers, rates, progress)
        result = _make(request, destination, scratch, run, stages, stack)
        end = stack.pop_all()
    with stages.stage("close"):
        end.close()
    if trace is not None:
        traces = () if result[2] is None else result[2][0].traces
        save_spans(trace, {"job": stages.take(), **rows_of(traces, EXECUTORS)}, stages.origin)
    return _report(*result, began)


def plan(
    sources: Uris,
    *,
    to: str | None = None,
    operations: Operations = (),
    verify: bool | None = None,
    task_bytes: int | str = TASK_BYTES,
    shard_bytes: int | str = SHARD_BYTES,
    storage_options: Mapping[str, str] | None = None,
) -> Job:
    """Return what `convert` would do: headers are read, nothing is written. Arguments and errors as there."""
    with ExitStack() as stack:
        return plan_request(sources, to, operations, task_bytes, shard_bytes, storage_options, verify, stack).job


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedRequest(ConvertRequest):
    """A request with the staging directory that its result is written to until it is published."""

    into: str
    out: OutputSet
    journal: Journal
    config: bytes | None
    """The result's configuration, if it has one and is to be published as files."""


_Ran = tuple[Coordinator, Predicted]
"""The coordinator of a run, and the predicted duration."""
_Made = tuple[_StagedRequest, str, _Ran | None]
"""A finished request, its revision, and its run; None for the run where an earlier call had published the result."""


def _stage(
    request: ConvertRequest, into: str, scratch: str | os.PathLike[str] | None, stack: ExitStack
) -> _StagedRequest:
    """Open the staging files and the journal of earlier runs; remove them at the end if no later call can use them."""
    if into.startswith(SCHEME):
        raise ConfigError(
            "a keeper is not a directory", uri=into, hint="pass Keeper.into(MODEL), or use `penstock convert`"
        )
    job = request.job
    of_config = request.opened[small_from(job)].uri
    # Before anything is written: a broken config.json must not cost hours of conversion.
    config = config_of(of_config, job.operation, request.settings, request.job_spec.storage_options)
    staged_path = _staging_path(job, into, scratch)
    journal = Journal(staged_path.with_name(f"{staged_path.name}.journal"), job.key)
    stack.callback(journal.close)
    out = OutputSet(staged_path, job.files.table, job.files.body_nbytes, METADATA, job.files.groups)
    stack.callback(out.close)
    stack.push(partial(_leave, journal, out))
    return _staged_request(
        request, msgspec.structs.replace(request.job_spec, directory=str(staged_path)), into, out, journal, config
    )


def _begin(staged: _StagedRequest) -> str | None:
    """Return the revision if this job's result is published already; else open its files and correct the journal."""
    job, journal, into, out = staged.job, staged.journal, staged.into, staged.out
    settings, options = staged.settings, staged.job_spec.storage_options
    if revision := published(job, into, settings, options):
        journal.kept = frozenset(range(len(job.tasks)))
        journal.remove()
        out.remove()
        return revision
    if is_remote(into):
        require_free_remote(into, settings=settings, storage_options=options)
    else:
        require_free(Path(local_path(into)))
    out.make()
    if journal.done:  # a file of an earlier run may be gone, or short: what is not there reads as zeros
        out.allocate()
    out.open()
    forget_what_did_not_last(job, journal, out)
    return None


def _make(
    request: ConvertRequest,
    destination: str | os.PathLike[str] | MemoryDestination,
    scratch: str | os.PathLike[str] | None,
    run: Callable[[_StagedRequest], _Ran],
    stages: Trace,
    stack: ExitStack,
) -> _Made:
    """Run the tasks that are left, and publish the result."""
    if isinstance(destination, MemoryDestination):
        return _fill(request, destination, run)
    staged = _stage(request, os.fspath(destination), scratch, stack)
    if (revision := _begin(staged)) is not None:
        return staged, revision, None
    ran = run(staged)
    with stages.stage("publish"):
        return staged, _publish(staged), ran


def _run(
    stack: ExitStack,
    stages: Trace,
    launcher: Launcher,
    devices: str | Sequence[str],
    workers: int | None,
    rates: Rates | None,
    progress: ProgressOption,
    staged: _StagedRequest,
) -> _Ran:
    """Run every task that no earlier run finished. Workers start while disk space is allocated, and end after this."""
    job, journal = staged.job, staged.journal
    if staged.job_spec.in_memory and launcher.listen is not None:
        message = "workers on other hosts cannot write to memory of this host"
        raise ConfigError(message, uri=staged.into, hint="leave out ray=, or convert to a directory")
    uris = [*(source.uri for weights in staged.opened for source in weights.sources), staged.into]
    job_spec = msgspec.structs.replace(staged.job_spec, trace=stages.enabled)
    is_over = threading.Event()
    # Allocating hundreds of gigabytes and importing torch each take seconds: they run side by side.
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-room") as pool, ExitStack() as ends:
        ends.callback(is_over.set)
        room = pool.submit(_make_room, staged.out, stages, is_over)
        shown = stack.enter_context(Progress(progress, staged.into, unit="tasks"))
        with stages.stage("workers"):
            where = devices_of(devices, workers, launcher.gpus if isinstance(launcher, LocalLauncher) else gpus)
            coordinator = stack.enter_context(
                Coordinator(job, job_spec, journal, launcher, where, stall_s=job_spec.stall_s, on_progress=shown)
            )
            coordinator.begin()
        predicted = predict(job, journal.kept, uris, where if launcher.listen is None else (), rates)
        room.result()
    with stages.stage("run"):
        coordinator.run()
    check_repeated(job, journal, staged.out, coordinator.repeated)
    return coordinator, predicted


def _make_room(out: OutputSet, stages: Trace, is_over: threading.Event) -> None:
    with stages.stage("room"):
        out.allocate(is_over.is_set)


def _publish(staged: _StagedRequest) -> str:
    """Publish the complete result if no source changed meanwhile; return its revision."""
    job, out, into, settings = staged.job, staged.out, staged.into, staged.settings
    options = staged.job_spec.storage_options
    for weights in staged.opened:
        check_unchanged(weights)
    manifest = manifest_of(job, staged.journal, out)
    of_small = staged.opened[small_from(job)].uri
    small = sidecar_files(job, manifest, small_files(of_small, staged.config, settings, options))
    small |= {STAMP: stamp(job, manifest.revision)}
    if is_remote(into):
        publish_remote(out, into, small, settings=settings, storage_options=options)
    else:
        out.publish(Path(local_path(into)), small)
    # Last: a crash before this line leaves a journal whose job the next call finds published, by its stamp.
    staged.journal.remove()
    return manifest.revision


def _fill(request: ConvertRequest, target: MemoryDestination, run: Callable[[_StagedRequest], _Ran]) -> _Made:
    """Run the conversion into memory: no sidecar files are written, nothing is resumed."""
    results: list[tuple[_StagedRequest, _Ran]] = []

    def make(out: OutputRegion, notes: Notes) -> None:
        job_spec = msgspec.structs.replace(request.job_spec, directory=str(out.directory), in_memory=True)
        staged = _staged_request(request, job_spec, target.uri, out, notes)
        results.append((staged, run(staged)))
        for weights in request.opened:
            check_unchanged(weights)

    revision = fill(target, request.job, make)
    return results[0][0], revision, results[0][1]


def _staged_request(
    request: ConvertRequest, job_spec: JobSpec, into: str, out: OutputSet, journal: Journal, config: bytes | None = None
) -> _StagedRequest:
    return _StagedRequest(
        settings=request.settings,
        opened=request.opened,
        job=request.job,
        job_spec=job_spec,
        into=into,
        out=out,
        journal=journal,
        config=config,
    )


def _staging_path(job: Job, into: str, scratch: str | os.PathLike[str] | None) -> Path:
    """Return the staging directory: next to the destination, so that a rename publishes it; or in `scratch`."""
    if is_remote(into):
        return Path(tempfile.gettempdir() if scratch is None else scratch) / f"penstock-{job.key[:12]}"
    final = Path(local_path(into)).absolute()
    with typed(final):
        final.parent.mkdir(parents=True, exist_ok=True)
    return final.with_name(f".{final.name}.penstock-{job.key[:12]}")


def _leave(
    journal: Journal, out: OutputSet, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Remove staged files that no later call can resume from: no task is done, or the sources have to change first."""
    if kind is None:
        return
    if not journal.done or issubclass(kind, SourceChanged | SourceTruncated | IntegrityError):
        out.remove()
        journal.remove()
    elif isinstance(error, PenstockError):
        resume_hint = f"{len(journal.done)} finished tasks are kept in {out.directory}: the same call goes on with them"
        first = "make room, then run it again" if isinstance(error, DiskFull) else None
        error.hint = "; ".join(part for part in (error.hint, first, resume_hint) if part)


def _launcher(ray: str | None, devices: str | Sequence[str], workers: int | None, stack: ExitStack) -> Launcher:
    if ray is None:
        launcher = stack.enter_context(LocalLauncher(devices, workers))
        launcher.begin()
        return launcher
    from penstock.jobs.workers.launch import RayLauncher

    cluster = RayLauncher(ray)
    stack.callback(cluster.close)
    return cluster


def _report(staged: _StagedRequest, revision: str, ran: _Ran | None, began: float) -> ConvertReport:
    job, resumed = staged.job, staged.journal.kept
    coordinator, (predicted_s, predicted_by) = ran or (None, (None, "nothing was left to do"))
    stats = () if coordinator is None else tuple(coordinator.stats)
    came_here = bytes_read(staged.opened)
    fetched_bytes = came_here[0] + sum(worker.fetched_bytes for worker in stats)
    asked_bytes = came_here[1] + sum(worker.asked_bytes for worker in stats)
    ended = time.monotonic()
    started = ended if coordinator is None else min(coordinator.began, ended)
    read_bytes = job.read_bytes[[task for task in range(len(job.tasks)) if task not in resumed]].sum(axis=0)
    return ConvertReport(
        uri=staged.into,
        revision=revision,
        operation=job.operation.name,
        num_tensors=len(job.files.table),
        nbytes=int(job.files.table.nbytes.sum()),
        read_bytes=int(read_bytes.sum()),
        verified_bytes=int(read_bytes[np.array(job.held_to) > 0].sum()),
        fetched_bytes=fetched_bytes,
        held_bytes=max(0, asked_bytes - fetched_bytes),
        num_tasks=len(job.tasks),
        num_resumed=len(resumed),
        num_stolen=0 if coordinator is None else coordinator.placement.num_stolen,
        num_twice=0 if coordinator is None else coordinator.placement.num_twice,
        num_workers=0 if coordinator is None else coordinator.num_workers,
        wall_s=ended - began,
        start_s=started - began,
        moving_s=0.0 if coordinator is None else coordinator.moving_s,
        predicted_s=predicted_s,
        predicted_by=predicted_by,
        busy_s={name: sum(worker.busy_s.get(name, 0.0) for worker in stats) for name in EXECUTORS},
        workers=stats,
        peak_bytes=max((worker.peak_bytes for worker in stats), default=0),
        verified=all(job.held_to),
        left_out=tuple(
            path
            for weights in staged.opened
            for path in left_out(weights.uri, [f.name for f in weights.manifest.files])
        ),
        why=how_verified(staged.opened, verify=staged.job_spec.verify),
    )
