"""`convert` writes a new checkpoint from existing checkpoints, out of core, and publishes the result atomically.

`Conversion.plan` opens the sources and plans the job. `Conversion.make` runs the tasks that no earlier call finished,
checks that the sources are unchanged, and publishes the result.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.arguments import require_type, wrong
from penstock.config import parse_bytes
from penstock.engine.trace import Trace, open_trace, save_spans
from penstock.errors import (
    ConfigError,
    DestinationError,
    IntegrityError,
    PenstockError,
    SourceChanged,
    SourceTruncated,
)
from penstock.loader.progress import Progress, ProgressOption
from penstock.storage import is_remote, text_of
from penstock.storage.locate import left_out
from penstock.storage.output import OutputSet, publish_remote, require_free_remote
from penstock.storage.place import STAMP, DestinationClaim, OutputPlace, require_apart
from penstock.storage.weight_set import Uris
from penstock.storage.write import typed
from penstock.telemetry.journey import Journey
from penstock.types import GIB, MIB
from penstock.waits import Threads
from penstock_convert.coordinator import Coordinator
from penstock_convert.job import SHARD_BYTES, ConversionJob, bytes_read
from penstock_convert.messages import EXECUTORS, JobSpec, listen
from penstock_convert.operations.spec import COPIES, Operations, is_copy
from penstock_convert.output_region import OutputRegion
from penstock_convert.report import ConvertReport, Predicted, WorkerTrace, how_verified, predict, rows_of
from penstock_convert.request import ConvertRequest, plan_request, uris_of
from penstock_convert.result import (
    ONE_FILE,
    SCHEME,
    Journal,
    MemoryDestination,
    MemoryJournal,
    check_repeated,
    check_unchanged,
    config_of,
    fill,
    forget_lost_tasks,
    manifest_of,
    output_of,
    published,
    sidecar_files,
    small_files,
    stamp,
    without_source_quantization,
)
from penstock_convert.small_files import NO_SMALL_FILES, find_small_files
from penstock_convert.watch import JobObserver, JobWatch
from penstock_convert.workers.in_process import ThreadLauncher
from penstock_convert.workers.launch import Launcher, LocalLauncher, devices_of, gpus, has_driver

if TYPE_CHECKING:
    from penstock_convert.plan.cluster import Rates

THREAD_BYTES = 1024 * MIB
"""Maximum number of bytes that a small conversion reads and writes. One thread finishes it before worker processes
would have started. Source: two cores, 600 MB from BF16 to Q8_0, benchmarks/results/cpu2_202611/gguf.md."""
COPY_THREAD_BYTES = 16 * GIB
"""The same limit for operations that change no value, because reads, digests and writes release the GIL. Source: two
cores, benchmarks/results/cpu2_202611/convert.md, "Copies beside cp". Larger conversions were not measured."""
_NO_ARITHMETIC = COPIES | {"reshard"}
_THREAD_OPERATIONS = _NO_ARITHMETIC | {"store", "dequantise", "gguf", "average", "linear"}
"""Operations that may run on several torch threads in the caller's process. They compute each element separately or
with the maximum of its block. `slerp` and `lora-merge` are excluded, because their sums depend on the number of
threads. User functions are excluded, because they may hang or exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings for running a conversion: the workers, their memory and their machines.

    Pass the settings to `convert` as `workers=`, which also accepts a number of workers, or None for the defaults.

    Attributes:
        num_workers: number of workers, which use `devices` in rotation. None means one worker for each device.
        memory_bytes: host memory of each worker, as a number of bytes or a string like `"2G"`. None means 512 MiB. A
            task above the limit is split, run in parts or refused. The limit also applies to workers on a GPU.
        task_bytes: bytes that one task reads and writes. Tasks are smaller if they would not fit in a worker's memory.
            None means 64 MiB, or up to 128 MiB if the sources exceed 8 GiB in total.
        storage_options: options for the object stores of sources and destination, with obstore's names. These storage
            options override the environment and are omitted from the repr.
        trace: file to which a Chrome trace of all workers is written. None means no trace.
        scratch: directory for files that are later uploaded to an object store. None means the system's temporary
            directory.
        ray: address of a Ray cluster on which the workers run. Sources, destination and `scratch` must be accessible
            from all nodes of the cluster.
        launcher: starts and stops the workers. None means processes on this host, or Ray actors if `ray` is set.
        rates: rates of this machine, for predicting the duration. None means the known rates of the GPU model.
        observer: receives the state of the running conversion. A `HubReporter` reports the state to a hub, for `status`
            and the fleet page.

    Raises:
        ConfigError: a field has the wrong type or an invalid value, or both `ray` and `launcher` are set.
    """

    num_workers: int | None = None
    memory_bytes: int | str | None = None
    task_bytes: int | str | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    trace: str | os.PathLike[str] | None = None
    scratch: str | os.PathLike[str] | None = None
    ray: str | None = None
    launcher: Launcher | None = None
    rates: Rates | None = None
    observer: JobObserver | None = None

    def __post_init__(self) -> None:
        require_type("num_workers", self.num_workers, (int, type(None)), "a number of workers, or None")
        if self.num_workers is not None and self.num_workers < 1:
            raise ConfigError(f"num_workers={self.num_workers}: a conversion needs at least one worker")
        # Parse the sizes only to validate them, so that an invalid size raises here instead of during the conversion.
        for nbytes in (self.memory_bytes, self.task_bytes):
            if nbytes is not None:
                parse_bytes(nbytes)
        options = "options of the store by name, or None"
        require_type("storage_options", self.storage_options, (Mapping, type(None)), options)
        require_type("trace", self.trace, (str, os.PathLike, type(None)), "a file, or None")
        require_type("scratch", self.scratch, (str, os.PathLike, type(None)), "a directory, or None")
        require_type("ray", self.ray, (str, type(None)), "the address of a Ray cluster, or None")
        require_type("launcher", self.launcher, (Launcher, type(None)), "an object with spawn, ended and kill, or None")
        require_type("observer", self.observer, (JobObserver, type(None)), "an object with begin, or None")
        if self.rates is not None:
            # Import `Rates` only here, because most conversions specify no rates and do not use the simulation.
            from penstock_convert.plan.cluster import Rates

            require_type("rates", self.rates, Rates, "a penstock_convert.plan.cluster.Rates, or None")
        if self.ray is not None and self.launcher is not None:
            raise ConfigError("both ray= and launcher= are set", hint="omit ray= or launcher=")

    @classmethod
    def of(cls, workers: WorkerSettings | int | None) -> WorkerSettings:
        """Return the settings for the `workers` argument of `convert`. Raise ConfigError for a wrong type."""
        if isinstance(workers, cls):
            return workers
        if workers is None or (isinstance(workers, int) and not isinstance(workers, bool)):
            return cls(num_workers=workers)
        raise wrong("workers", workers, "a number of workers, a penstock_convert.WorkerSettings, or None")


def convert(
    sources: Uris,
    destination: str | os.PathLike[str] | MemoryDestination,
    *,
    to: str | None = None,
    operations: Operations = (),
    verify: bool | None = None,
    devices: str | Sequence[str] = "all",
    workers: WorkerSettings | int | None = None,
    shard_bytes: int | str = SHARD_BYTES,
    replace: bool = False,
    progress: ProgressOption = None,
) -> ConvertReport:
    """Convert one or several checkpoints to one checkpoint.

    Args:
        sources: URIs of the checkpoints to read, as many as the first operation accepts.
        destination: a directory that does not exist yet, a prefix in an object store, or `WeightCache.into(MODEL)`.
        to: the format of the result, such as `cast:BF16` or `fp8-block128`. `gguf`, `gguf:Q8_0`, `gguf:F16`,
            `gguf:BF16` and `gguf:F32` write one GGUF file.
        operations: operations to apply in order, each `{"op": name, ...}` or a string as for `--op` (`"slerp:t=0.4"`).
            A single operation does not need a list. An empty list means a copy.
        verify: whether to compare the bytes that are read with the sources' leaf digests. None compares the bytes of
            sources that have digests. True requires digests for all sources. False compares nothing.
        devices: `"all"` means one worker for every GPU, or for every core if there is no GPU. Alternatively `"cpu"` or
            device names, with one worker for each device.
        workers: the number of workers. None means one worker for each device. Alternatively a `WorkerSettings`, which
            also sets the memory, options for object stores, a trace, a Ray cluster or your own launcher.
        shard_bytes: maximum size of an output file in bytes, at least 1. A larger tensor gets a separate file.
        replace: whether to replace an existing directory that contains a weight set. The old directory is replaced
            atomically when the new directory is complete, and is then removed. Object stores are refused, because they
            cannot replace several objects atomically.
        progress: see `load`. The unit of progress is a task.

    Returns:
        The report. The destination is complete, with index, manifest and the first source's small files.

    Raises:
        ConfigError: the destination already exists, or an argument is invalid.
        PlanError, BudgetTooSmall: the sources do not suit the operation, or a task requires more than `memory_bytes`.
        OperationFailed: an operation raised an error, hung, or returned tensors that do not match its recipes.
        IntegrityError, SourceChanged, DiskFull, SourceError, DestinationError: see `penstock.errors`.

    After an error the destination is unchanged. Repeating the call resumes conversions to files, but not into memory.
    """
    began = time.monotonic()
    settings = WorkerSettings.of(workers)
    if not isinstance(destination, MemoryDestination):
        destination = text_of(destination)
    into = destination.uri if isinstance(destination, MemoryDestination) else destination
    _require_text([*uris_of(sources), into, os.fspath(settings.scratch or "")])
    if replace:
        _check_replaceable(destination)
    _check_apart(uris_of(sources), destination, replace=replace)
    with Journey("convert", uri=into) as journey:
        # Report invalid device names now. GPUs are counted later, in a separate process.
        devices_of(devices, settings.num_workers, list)
        stages = open_trace(settings.trace)
        # One stack closes sources, staging files and workers after the result is published.
        with ExitStack() as stack:
            display = stack.enter_context(Progress(progress, into, unit="tasks"))
            conversion = Conversion(
                destination,
                settings,
                devices,
                replace=replace,
                stack=stack,
                stages=stages,
                display=display,
                journey=journey,
            )
            conversion.plan(sources, to, operations, verify=verify, shard_bytes=shard_bytes)
            conversion.make()
            end = stack.pop_all()
        # Report success before the workers exit, because the result is published even if a worker does not exit.
        conversion.watch.done(conversion.revision, len(conversion.journal.kept))
        # Close the stack in a separate stage, because the report includes the time that the workers take to exit.
        with stages.stage("close"):
            end.close()
        if settings.trace is not None:
            save_spans(settings.trace, {"job": stages.take(), **rows_of(conversion.traces, EXECUTORS)}, stages.origin)
        report = conversion.report(began)
        # Each lost worker was replaced, so the number of surplus workers is the number of retries.
        journey.num_retries = max(0, len(report.workers) - report.num_workers)
        journey.received = lambda: {
            ("storage", "workers"): report.fetched_bytes,
            ("cache", "workers"): report.held_bytes,
        }
        journey.report = report
        return report


class Conversion:
    """One conversion. Call `plan`, `make` and `report` in this order.

    Args:
        destination: directory, prefix or memory to write to.
        settings, devices: settings and devices of the workers.
        replace: whether the result may replace an existing directory.
        stack: closes the sources, the staging files and the workers.
        stages, display, journey: the trace, the progress display and the record of this call.

    Attributes:
        request: the opened sources and the job.
        journal: the finished tasks.
        watch: reports the conversion's state to an observer.
        coordinator: assigns tasks to the workers. None if an earlier call had already published this result.
        revision: revision of the published result. Empty until the result is published.
    """

    request: ConvertRequest
    journal: Journal
    watch: JobWatch
    _launcher: Launcher
    _out: OutputSet
    _job_spec: JobSpec
    """The job as sent to workers, with the directory that they write to."""
    _place: OutputPlace | None
    """The destination if it is a local directory. Otherwise None."""

    def __init__(
        self,
        destination: str | MemoryDestination,
        settings: WorkerSettings,
        devices: str | Sequence[str],
        *,
        replace: bool,
        stack: ExitStack,
        stages: Trace,
        display: Progress,
        journey: Journey,
    ) -> None:
        self._destination = destination
        self._settings = settings
        self._devices = devices
        self._replace = replace
        self._stack = stack
        self._stages = stages
        self._display = display
        self._journey = journey
        self._small_files = NO_SMALL_FILES
        self._config: bytes | None = None
        self._predicted: Predicted = None, "nothing was left to do"
        self.coordinator: Coordinator | None = None
        self.revision = ""

    @property
    def into(self) -> str:
        """Return the URI of the destination."""
        return self._destination if isinstance(self._destination, str) else self._destination.uri

    @property
    def traces(self) -> Sequence[WorkerTrace]:
        """Return the spans of every worker."""
        return () if self.coordinator is None else self.coordinator.traces

    def plan(
        self,
        sources: Uris,
        to: str | None,
        operations: Operations,
        *,
        verify: bool | None,
        shard_bytes: int | str,
    ) -> None:
        """Open the sources, plan the job, and choose where its workers run. See `convert` for arguments and errors."""
        settings, stack = self._settings, self._stack
        in_memory = isinstance(self._destination, MemoryDestination)
        only_copies = to is None and is_copy(operations)
        may_use_threads = not in_memory and _may_use_threads(settings, self._devices, only_copies=only_copies)
        # Start the launcher before planning, because workers take seconds to import torch and initialise CUDA.
        launcher = None if may_use_threads else _launcher(settings, self._devices, stack)
        with self._stages.stage("plan"):
            request = plan_request(
                sources,
                to,
                operations,
                stack,
                verify=verify,
                task_bytes=settings.task_bytes,
                shard_bytes=ONE_FILE if in_memory else shard_bytes,
                memory_bytes=settings.memory_bytes,
                storage_options=settings.storage_options,
            )
            # Check the files too, because an index can name files in other directories and symlinks can lead anywhere.
            files = [source.uri for weights in request.opened for source in weights.sources]
            _check_apart(files, self._destination, replace=self._replace)
            request.job.check_budget(request.job_spec.memory_bytes, "one task")
        if launcher is None and _fits_a_thread(request):
            launcher = stack.enter_context(ThreadLauncher())
            self._settings, self._devices = dataclasses.replace(settings, num_workers=1), "cpu"
        self._launcher = _launcher(settings, self._devices, stack) if launcher is None else launcher
        self.request = request
        self.watch = JobWatch(settings.observer, request.job, request.job_spec.sources, self.into)

    def make(self) -> None:
        """Run the tasks that no earlier call finished, and publish the result. Raise the same errors as `convert`."""
        try:
            if isinstance(self._destination, MemoryDestination):
                self.revision = fill(self._destination, self.request.job, self._fill)
                return
            self._stage(self._destination)
            if not self._is_published():
                self._run()
                self._display.state("publishing")
                with self._stages.stage("publish"):
                    self.publish()
        except BaseException as error:
            self.watch.failed(error)
            raise

    def _fill(self, out: OutputRegion, notes: MemoryJournal) -> None:
        """Run every task with memory as the destination, without writing sidecar files and without resuming."""
        self._out, self.journal = out, notes
        # Workers map the same memory through its path, just as they would open files in a directory.
        self._job_spec = msgspec.structs.replace(self.request.job_spec, directory=str(out.directory), in_memory=True)
        self._run()
        for weights in self.request.opened:
            check_unchanged(weights)

    def _stage(self, into: str) -> None:
        """Open the staging files and the journal. When closed, the stack removes files that no later call can use."""
        if into.startswith(SCHEME):
            raise ConfigError(
                "convert() cannot write to a weight cache through a URI",
                uri=into,
                hint="pass WeightCache.into(MODEL), or use `penstock convert`",
            )
        request, stack = self.request, self._stack
        job, settings, options = request.job, request.settings, request.job_spec.storage_options
        # Read the configuration before any weights, so that an invalid config.json fails now instead of hours later.
        source_files = find_small_files(
            request.small_place(job.small_from),
            [file.name for file in request.opened[job.small_from].manifest.files],
            settings=settings,
            storage_options=options,
        )
        self._small_files = without_source_quantization(source_files, job.operation)
        self._config = config_of(self._small_files, job.operation, settings, options)
        self._place = None if is_remote(into) else OutputPlace.at(into)
        staged_path = _staging_path(job, self._place, self._settings.scratch)
        stack.push(partial(_name_destination, staged_path, into))
        # Open the journal before the files, because the journal's lock excludes a second process with the same job.
        self.journal = Journal.open(staged_path.with_name(f"{staged_path.name}.journal"), job.key)
        stack.callback(self.journal.close)
        self._out = output_of(job, request.opened, staged_path)
        stack.callback(self._out.close)
        # Push this callback last, so that it runs first, while the journal's lock is still held.
        stack.push(partial(_leave, self.journal, self._out))
        self._job_spec = msgspec.structs.replace(request.job_spec, directory=str(staged_path))

    def _is_published(self) -> bool:
        """Return whether this result is published. Prepare the staging files and the journal of an unpublished result.

        Until the stack is closed, no other process can start writing to this destination.
        """
        job, journal, into, out = self.request.job, self.journal, self.into, self._out
        settings, options = self.request.settings, self._job_spec.storage_options
        if revision := published(job, into, settings, options):
            journal.kept = frozenset(range(len(job.tasks)))
            journal.remove()
            out.remove()
            self.revision = revision
            return True
        if self._place is None:
            require_free_remote(into, settings=settings, storage_options=options)
            # Other users can also write to the system's temporary directory.
            self._stack.enter_context(DestinationClaim.open(out.directory, out.directory, mode=0o700))
        else:
            self._place.require_free(replace=self._replace)
            self._stack.enter_context(DestinationClaim.open(self._place.path, out.directory))
        out.make()
        # Extend files from earlier calls to full size. Zeros fail the digest check, so the affected tasks run again.
        if journal.done:
            out.allocate()
        out.open()
        forget_lost_tasks(job, journal, out)
        return False

    def _run(self) -> None:
        """Run every task that no earlier call finished. Workers start while disk space is allocated.

        Raises:
            ConfigError: the destination is memory and workers are on other hosts. See also `Coordinator.run`.
        """
        job, stages = self.request.job, self._stages
        if self._job_spec.in_memory and self._launcher.listen is not None:
            message = "workers on other hosts cannot write to the memory of this host"
            raise ConfigError(message, uri=self.into, hint="omit ray=, or convert to a directory")
        # Pass all URIs, because `predict` returns no prediction if any file is in an object store.
        uris = [*(source.uri for weights in self.request.opened for source in weights.sources), self.into]
        is_over = threading.Event()
        # Allocate disk space while the workers import torch, because each of the two can take seconds.
        with Threads(1, "penstock-room", waits_for_calls=True) as pool, ExitStack() as ends:
            # Set the event before the pool is closed, so that after an error nothing waits for the allocation.
            ends.callback(is_over.set)
            room = pool.submit(_allocate, self._out, stages, is_over)
            self._display.state("starting workers", len(self.journal.done), len(job.tasks))
            with stages.stage("workers"):
                # A local launcher counts GPUs in a separate process, so this process does not initialise the CUDA
                # driver.
                counted = self._launcher.gpus if isinstance(self._launcher, LocalLauncher) else gpus
                where = devices_of(self._devices, self._settings.num_workers, counted)
                coordinator = self._start_workers(where)
            here = where if self._launcher.listen is None else ()
            self._predicted = predict(job, self.journal.kept, uris, here, self._settings.rates)
            # Wait until the space is allocated, so that a full disk raises an error now instead of hours later.
            room.result()
        # While the conversion runs, count only the bytes that workers received. The report later adds this process's
        # bytes.
        self._journey.received = lambda: {
            ("storage", "workers"): sum(stats.fetched_bytes for stats in list(coordinator.stats))
        }
        with stages.stage("run"):
            coordinator.run()
        self.watch.publishing(coordinator)
        check_repeated(job, self.journal, self._out, coordinator.repeated)

    def _start_workers(self, where: Sequence[str]) -> Coordinator:
        # Use a random name, because two jobs in one process must not share an address.
        listener, address = listen(self._launcher.listen, secrets.token_hex(8))
        coordinator = Coordinator(
            self.request.job,
            msgspec.structs.replace(self._job_spec, trace=self._stages.enabled),
            self.journal,
            self._launcher,
            where,
            listener=listener,
            address=address,
            on_progress=self._display,
            on_turn=lambda: self.watch.turn(coordinator),
        )
        self._stack.enter_context(coordinator)
        self.coordinator = coordinator
        coordinator.begin()
        return coordinator

    def publish(self) -> None:
        """Publish the complete result. Raise SourceChanged if a source has changed during the conversion."""
        request, out = self.request, self._out
        job, settings, options = request.job, request.settings, self._job_spec.storage_options
        for weights in request.opened:
            check_unchanged(weights)
        manifest = manifest_of(job, self.journal, out)
        small = sidecar_files(
            job, manifest, small_files(self._small_files, self._config, job.operation, settings, options)
        )
        small |= {STAMP: stamp(job, manifest.revision, [*small, *out.index()])}
        if self._place is None:
            publish_remote(out, self.into, small, settings=settings, storage_options=options)
        else:
            out.publish(self._place.path, small, replace=self._replace)
        # Remove the journal last. After a crash before this line, the next call recognises the result by its stamp.
        self.journal.remove()
        self.revision = manifest.revision

    def report(self, began: float) -> ConvertReport:
        """Return the report of a conversion that began at the monotonic time `began`."""
        request, resumed, coordinator = self.request, self.journal.kept, self.coordinator
        job, (predicted_s, predicted_by) = request.job, self._predicted
        stats = () if coordinator is None else tuple(coordinator.stats)
        # This process also reads headers through the cache, and reads whole sources if their digests are missing.
        came_here = bytes_read(request.opened)
        fetched_bytes = came_here[0] + sum(worker.fetched_bytes for worker in stats)
        asked_bytes = came_here[1] + sum(worker.asked_bytes for worker in stats)
        ended = time.monotonic()
        # If no worker was ever ready, the whole duration counts as start time.
        started = ended if coordinator is None else min(coordinator.began, ended)
        moving_s = 0.0 if coordinator is None else coordinator.moving_s
        others = [weights for i, weights in enumerate(request.opened) if i != job.small_from]
        why_left_out = dict(self._small_files.left_out) | {
            path: "it does not belong to the weight set"
            for weights in others
            for path in left_out(weights.uri, [file.name for file in weights.manifest.files])
        }
        read_bytes = job.read_bytes[[task for task in range(len(job.tasks)) if task not in resumed]].sum(axis=0)
        return ConvertReport(
            uri=self.into,
            revision=self.revision,
            operation=job.operation.name,
            num_tensors=len(job.files.table),
            nbytes=int(job.files.table.nbytes.sum()),
            read_bytes=int(read_bytes.sum()),
            verified_bytes=int(read_bytes[np.array(job.leaf_sizes) > 0].sum()),
            fetched_bytes=fetched_bytes,
            # The difference is negative if a cache fetched whole chunks of which only parts were requested.
            held_bytes=max(0, asked_bytes - fetched_bytes),
            num_tasks=len(job.tasks),
            num_resumed=len(resumed),
            num_stolen=0 if coordinator is None else coordinator.placement.num_stolen,
            num_twice=0 if coordinator is None else coordinator.placement.num_twice,
            num_workers=0 if coordinator is None else coordinator.num_workers,
            wall_s=ended - began,
            phases={"start": started - began, "move": moving_s, "end": ended - started - moving_s},
            predicted_s=predicted_s,
            predicted_by=predicted_by,
            busy_s={name: sum(worker.busy_s.get(name, 0.0) for worker in stats) for name in EXECUTORS},
            workers=stats,
            peak_bytes=max((worker.peak_bytes for worker in stats), default=0),
            verified=all(job.leaf_sizes),
            left_out=tuple(why_left_out),
            why_left_out=why_left_out,
            why=how_verified(request.opened, verify=self._job_spec.verify),
        )


def _require_text(names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is not valid UTF-8, because messages to workers contain the names."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            hint = "rename the file, or pass a symlink with a valid name"
            raise ConfigError(f"the name {name[:200]!r} is not valid UTF-8", hint=hint) from error


def _check_replaceable(destination: str | MemoryDestination) -> None:
    """Raise ConfigError unless the destination is a local directory."""
    if isinstance(destination, MemoryDestination) or is_remote(destination):
        uri = destination if isinstance(destination, str) else destination.uri
        message = (
            "only a local directory can be replaced, because object stores and memory cannot replace files atomically"
        )
        raise ConfigError(message, uri=uri, hint="write to a new path, then remove the old result")


def _check_apart(sources: Iterable[str], destination: str | MemoryDestination, *, replace: bool) -> None:
    """Raise ConfigError if a source is the destination or lies inside the destination."""
    if isinstance(destination, MemoryDestination):
        return
    if is_remote(destination):
        place = destination.rstrip("/")
        if source := next((one for one in sources if f"{one.rstrip('/')}/".startswith(f"{place}/")), None):
            message = f"the destination {'is' if source.rstrip('/') == place else 'contains'} the source {source}"
            raise ConfigError(message, uri=destination, hint="write to another prefix")
        return
    # If the result replaced its sources, an interrupted run could not resume.
    require_apart(sources, OutputPlace.at(destination).path, replace=replace)


def _may_use_threads(settings: WorkerSettings, devices: str | Sequence[str], *, only_copies: bool) -> bool:
    """Return whether a small conversion may run in a thread, because it needs neither a GPU nor an import of torch."""
    if settings.launcher is not None or settings.ray is not None or settings.num_workers not in {None, 1}:
        return False
    named = [devices] if isinstance(devices, str) else list(devices)
    # Copies use no device, and several processes would wait for each other's writes to the same file.
    if only_copies:
        return named in (["cpu"], ["all"])
    torch = sys.modules.get("torch")
    # A thread that must import torch starts as slowly as a process, and a thread would use a changed default dtype.
    if torch is None or torch.get_default_dtype() is not torch.float32:
        return False
    return named == ["cpu"] or (named == ["all"] and not has_driver())


def _fits_a_thread(request: ConvertRequest) -> bool:
    """Return whether a conversion is small and its result does not depend on the number of torch threads."""
    names = {spec["op"] for spec in request.job_spec.operation}
    limit = COPY_THREAD_BYTES if names <= _NO_ARITHMETIC else THREAD_BYTES
    return names <= _THREAD_OPERATIONS and int(request.job.tasks.cost.sum()) <= limit


def _launcher(settings: WorkerSettings, devices: str | Sequence[str], stack: ExitStack) -> Launcher:
    """Return the caller's launcher, or a new launcher that closes with the stack."""
    if settings.launcher is not None:
        return settings.launcher
    if settings.ray is None:
        launcher = stack.enter_context(LocalLauncher(devices, settings.num_workers))
        launcher.begin()
        return launcher
    from penstock_convert.workers.launch import RayLauncher

    cluster = RayLauncher(settings.ray)
    stack.callback(cluster.close)
    return cluster


def _allocate(out: OutputSet, stages: Trace, is_over: threading.Event) -> None:
    """Allocate the output's disk space. Stop the allocation if the run ends."""
    with stages.stage("room"):
        out.allocate(is_over.is_set)


def _staging_path(job: ConversionJob, place: OutputPlace | None, scratch: str | os.PathLike[str] | None) -> Path:
    """Return the staging directory, which is next to a local destination, or in `scratch` for a remote destination."""
    if place is None:
        return Path(tempfile.gettempdir() if scratch is None else text_of(scratch)) / f"penstock-{job.key[:12]}"
    with typed(place.path):
        place.path.parent.mkdir(parents=True, exist_ok=True)
    return place.staging(job.key[:12])


def _name_destination(
    staged: Path, into: str, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Replace a staging path in an error with the destination, because the user does not know the staging files."""
    # The journal is next to the staging directory, and its name begins with the directory's name.
    if isinstance(error, DestinationError) and (error.uri or "").startswith(str(staged)):
        where = f"these files become {into} when the conversion is complete"
        error.hint = "; ".join(part for part in (error.hint, where) if part)


def _leave(
    journal: Journal, out: OutputSet, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Remove staging files that no later call can use, because no task is done or a source has changed."""
    if kind is None:
        return
    if not journal.done or issubclass(kind, SourceChanged | SourceTruncated | IntegrityError):
        out.remove()
        journal.remove()
    else:
        kept = f"{len(journal.done)} finished tasks are kept in {out.directory}, and the same call resumes from them"
        if isinstance(error, PenstockError):
            error.hint = "; ".join(part for part in (error.hint, kept) if part)
        elif isinstance(error, KeyboardInterrupt):
            error.add_note(kept)
