"""Opens the sources of a conversion and plans its job. `convert` runs the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from penstock.arguments import require_type
from penstock.config import Settings, parse_bytes
from penstock.errors import ConfigError
from penstock.storage import text_of
from penstock.storage.weight_set import Uris, WeightSet, nothing_to_verify, open_weights
from penstock.types import MIB
from penstock_convert.job import SHARD_BYTES, ConversionJob, plan_job
from penstock_convert.messages import JobSpec
from penstock_convert.operations.spec import Operations, completed, operation_of, operation_specs, stored_as
from penstock_convert.plan.tasks import task_bytes_of

WORKER_MEMORY_BYTES = 512 * MIB
"""Default host memory in bytes for one worker's tasks. It is enough for four tasks of 64 MiB, with some reserve."""
MIN_TASK_BYTES = MIB // 4
"""Minimum size of a task in bytes. A smaller task saves little, because it still reads two leaves of 256 KiB from each
source."""


def plan(
    sources: Uris,
    *,
    to: str | None = None,
    operations: Operations = (),
    verify: bool | None = None,
    task_bytes: int | str | None = None,
    shard_bytes: int | str = SHARD_BYTES,
    memory_bytes: int | str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> ConversionJob:
    """Plan the job that `convert` would run, from headers only, and write nothing.

    See `convert` for other arguments and for the errors.

    Args:
        memory_bytes: see `WorkerSettings`. Tasks are below `task_bytes` if larger tasks would exceed `memory_bytes`.
    """
    with ExitStack() as stack:
        return plan_request(
            sources,
            to,
            operations,
            stack,
            verify=verify,
            task_bytes=task_bytes,
            shard_bytes=shard_bytes,
            memory_bytes=memory_bytes,
            storage_options=storage_options,
        ).job


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """Opened sources and the job planned for them."""

    settings: Settings
    opened: Sequence[WeightSet]
    job: ConversionJob
    job_spec: JobSpec
    """The job for workers, without the directory that they write to."""

    def small_place(self, source: int) -> str:
        """Return the URI for reading a source's configuration and tokenizer at the opened revision."""
        return small_place(self.job_spec.sources[source], self.opened[source])


def plan_request(
    sources: Uris,
    to: str | None,
    operations: Operations,
    stack: ExitStack,
    *,
    verify: bool | None,
    task_bytes: int | str | None,
    shard_bytes: int | str,
    storage_options: Mapping[str, str] | None,
    memory_bytes: int | str | None = None,
) -> ConvertRequest:
    """Open the sources until the stack is closed, complete the specs from the sources, and plan the job.

    See `convert` for the arguments. Tasks are smaller than `task_bytes` if larger tasks would exceed `memory_bytes`.
    """
    if parse_bytes(shard_bytes) < 1:
        raise ConfigError(
            f"shard_bytes={shard_bytes} must be at least 1", hint="omit shard_bytes, or pass a size such as 5G"
        )
    settings, options = Settings.read(), dict(storage_options or {})
    uris = uris_of(sources)
    opened = [stack.enter_context(open_weights(uri, settings=settings, storage_options=options)) for uri in uris]
    if verify and (why := next((weights.why_unverified for weights in opened if weights.why_unverified), None)):
        raise nothing_to_verify(why)
    require_type("to", to, (str, type(None)), 'a format such as "cast:BF16" or "fp8-block128"')
    # `to` becomes the last operation. A chain of operations never writes intermediate results.
    specs = [*operation_specs(operations), *([] if to is None else [stored_as(to)])]
    places = [small_place(uri, weights) for uri, weights in zip(uris, opened, strict=True)]
    specs = completed(specs, opened, places, settings, options)
    budget = WORKER_MEMORY_BYTES if memory_bytes is None else parse_bytes(memory_bytes)
    nbytes = sum(int(weights.manifest.tensors.nbytes.sum()) for weights in opened)
    wanted = task_bytes_of(nbytes) if task_bytes is None else parse_bytes(task_bytes)

    def planned(task_bytes: int) -> ConversionJob:
        return plan_job(
            operation_of(specs),
            [weights.manifest for weights in opened],
            task_bytes=task_bytes,
            shard_bytes=parse_bytes(shard_bytes),
            verify=verify is not False,
            operation_specs=specs,
        )

    job = planned(wanted)
    while (least := job.least_bytes.max(initial=0)) > budget and wanted > MIN_TASK_BYTES:
        # Use half of the budget, because reads extend to the ends of leaves and would exceed the budget otherwise.
        smaller = max(MIN_TASK_BYTES, min(wanted, budget) // 2)
        if (cut_smaller := planned(smaller)).least_bytes.max(initial=0) >= least:
            # The operation cannot cut the largest task, so smaller tasks do not help.
            break
        job, wanted = cut_smaller, smaller
    job_spec = JobSpec(
        sources=tuple(uris),
        operation=tuple(dict(spec) for spec in specs),
        key=job.key,
        directory="",
        task_bytes=wanted,
        shard_bytes=parse_bytes(shard_bytes),
        leaf_bytes=job.leaf_bytes,
        memory_bytes=budget,
        stall_s=settings.stall_s,
        storage_options=options,
        verify=verify is not False,
    )
    return ConvertRequest(settings=settings, opened=opened, job=job, job_spec=job_spec)


def small_place(uri: str, weights: WeightSet) -> str:
    """Return the URI for reading the small files of a source."""
    # Keep the user and the query of a URL, which the URI of an opened weight set lacks. HTTP has no revisions.
    return uri if uri.startswith(("http://", "https://")) else weights.uri


def uris_of(sources: Uris) -> list[str]:
    """Return one or several sources as a list of strings."""
    several = sources if isinstance(sources, Sequence) and not isinstance(sources, str | bytes) else [sources]
    return [text_of(uri) for uri in several]
