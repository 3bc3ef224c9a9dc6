"""The request of a conversion: opened sources, operation specs completed from the files next to them, the planned job.

In: URIs, operations, bounds. Out: a `ConvertRequest`.
Not here: the plan (`job`), the staging directory (`convert`).

Defaults of operation specs, read from the files next to the sources, so that all workers get the same spec.

In: operation specs and their opened sources. Out: complete specs, with an adapter's configuration, heads, a delta, or
the quantisation of sources.
Not here: options of a command line (`cli.convert`), operations made from specs (`jobs.operations.spec`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.arguments import require_type
from penstock.config import Settings, parse_bytes
from penstock.digest.leaf import LEAF_BYTES
from penstock.errors import FormatError, IntegrityError, PlanError
from penstock.jobs.job import Job, plan_job
from penstock.jobs.messages import JobSpec
from penstock.jobs.operations.delta import FILE, decoded, delta_of, encoded
from penstock.jobs.operations.spec import COMPUTES_WITH_ALL, Operations, OperationSpec, operation_of, operation_specs
from penstock.storage import read_small, text_of
from penstock.storage.weight_set import Uris, WeightSet, build, open_weights
from penstock.transform.stored import declared, find
from penstock.types import MIB, Manifest

Options = Mapping[str, str] | None


def completed(
    specs: Sequence[OperationSpec], sources: Sequence[WeightSet], settings: Settings, options: Options
) -> list[OperationSpec]:
    """Return the specs with the first one completed (it reads all sources), and each `dequantise`.

    Raises:
        PlanError: a required file is not next to the source, or a delta is of another base.
        FormatError: one of these files cannot be decoded. SourceError: it cannot be read.
    """
    if not specs:
        return []
    first = dict(specs[0])
    op = first.get("op")
    if op == "lora-merge" and "adapter_config" not in first and len(sources) == 2:
        raw = _read_sibling(sources[1].uri, "adapter_config.json", settings, options)
        if raw is None:
            hint = "give adapter_config=..."
            raise PlanError(f"there is no adapter_config.json beside {sources[1].uri}", hint=hint)
        first["adapter_config"] = _json(raw, sources[1].uri)
    if op == "lora-merge" and "tied" not in first and sources:
        raw = _read_sibling(sources[0].uri, "config.json", settings, options)
        first["tied"] = _tied(_json(raw, sources[0].uri)) if raw is not None else None
    if op == "reshard" and len(sources) > 1:
        _check_ranks(sources)
    if op == "reshard" and "heads" not in first and sources:
        raw = _read_sibling(sources[0].uri, "config.json", settings, options)
        first["heads"] = _heads(_json(raw, sources[0].uri)) if raw is not None else []
    elif op in {"delta", "delta-apply"}:
        if len(sources) != 2:
            raise PlanError(f"{op} takes two sources, not {len(sources)}")
        base = _digested(sources[0])
        first["delta"] = _made(base, sources[1]) if op == "delta" else _read(base, sources[1], settings, options)
    if op in COMPUTES_WITH_ALL and "dequantise" not in first:
        quantised = [_quantised(source, settings, options) for source in sources]
        if any(dequantise is not None for dequantise in quantised):
            first["dequantise"] = quantised
    return [
        {**spec, "quantization": _quantization(sources[0], settings, options)}
        if spec.get("op") == "dequantise" and "quantization" not in spec and sources
        else spec
        for spec in (first, *specs[1:])
    ]


def _quantised(source: WeightSet, settings: Settings, options: Options) -> dict[str, Any] | None:
    """Return the options of `dequantise` for a source; None: nothing of it is quantised."""
    table = source.manifest.tensors
    config = _quantization(source, settings, options)
    stored = find(zip(table.names, table.dtypes, table.shapes, strict=True), config)
    return {"quantization": config} if config is not None or stored.any else None


def _quantization(source: WeightSet, settings: Settings, options: Options) -> dict[str, Any] | None:
    """Return the `quantization_config` of a source; None: it has none."""
    raw = _read_sibling(source.uri, "config.json", settings, options)
    config = None if raw is None else declared(_json(raw, source.uri))
    if config is not None:
        return dict(config)
    # AutoGPTQ and ModelOpt write files of their own. A source that has only these must be refused by name: without a
    # quantization_config its codes would be copied as if they were plain weights.
    for name in ("quantize_config.json", "hf_quant_config.json"):
        if _read_sibling(source.uri, name, settings, options) is not None:
            return {"quant_method": f"of {name}"}
    return None


def _read_sibling(uri: str, name: str, settings: Settings, options: Options) -> bytes | None:
    directory = uri.rpartition("/")[0] if uri.endswith(".safetensors") else uri.rstrip("/")
    where = f"{directory}/{name}" if directory else name
    return read_small(where, settings=settings, storage_options=options)


def _json(raw: bytes, uri: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"a configuration file of this source is not a JSON object: {error}", uri=uri) from error


_RANK = re.compile(r"rank[-_](\d+)(?:[-_]of[-_](\d+))?")


def _check_ranks(sources: Sequence[WeightSet]) -> None:
    """Raise PlanError if the sources cannot be the ranks in order: by numbers in their names, or one is given twice.

    Names without a number prove nothing: then the caller's order is used.
    """
    ranks = [_RANK.findall(source.uri.rstrip("/").rpartition("/")[2]) for source in sources]
    for rank, (source, numbers) in enumerate(zip(sources, ranks, strict=True)):
        number, count = numbers[-1] if numbers else ("", "")
        if all(ranks) and int(number) != rank:
            hint = "give every rank once, in order: rank 0 first"
            raise PlanError(f"reshard: source {rank} is rank {int(number)} by its name: {source.uri}", hint=hint)
        if count and int(count) != len(sources) and len(sources) > 1:
            raise PlanError(f"reshard: {source.uri} is one of {int(count)} ranks, and {len(sources)} sources are given")
    seen: dict[str, str] = {}
    for source in sources:
        revision = source.manifest.revision if source.manifest.leaves is not None else source.uri
        if revision in seen:
            raise PlanError(f"reshard: {source.uri} has the same bytes as {seen[revision]}", hint="give each rank once")
        seen[revision] = source.uri


def _heads(config: dict[str, Any]) -> list[int]:
    """Return the numbers of query and of key heads from a transformers configuration; empty if it has none."""
    text = config.get("text_config") or config
    queries = text.get("num_attention_heads")
    return [queries, text.get("num_key_value_heads") or queries] if queries else []


def _tied(config: dict[str, Any]) -> bool | None:
    """Return whether a transformers configuration ties embedding and head; None if it does not say."""
    text = config.get("text_config")
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return None if tied is None else bool(tied)


def _digested(source: WeightSet) -> Manifest:
    """Return a source's manifest with digests; if it has none, read the whole source to compute them."""
    stated = source.manifest
    return stated if stated.leaves is not None and stated.leaf_bytes == LEAF_BYTES else build(source)


def _made(base: Manifest, new: WeightSet) -> bytes:
    return encoded(delta_of(base, _digested(new)))


def _read(base: Manifest, delta: WeightSet, settings: Settings, options: Options) -> bytes:
    raw = _read_sibling(delta.uri, FILE, settings, options)
    if raw is None:
        raise PlanError(f"there is no {FILE} beside {delta.uri}", hint="the second source is what `delta` made")
    changes = decoded(raw)
    if changes.base != base.revision:
        raise PlanError(f"the delta is of {changes.base}, and the base is {base.revision}")
    if changes.leaf_bytes != LEAF_BYTES:
        raise PlanError(f"the delta has leaves of {changes.leaf_bytes} bytes, not {LEAF_BYTES}")
    return raw


WORKER_MEMORY_BYTES = 512 * MIB
"""Host memory of one worker's tasks unless the user says otherwise: four tasks of 64 MiB, and room to spare."""

MIN_TASK_BYTES = MIB // 4
"""A task is not made smaller than this for lack of memory: it reads two leaves of 256 KiB of each source anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """Opened sources, and the job planned for them."""

    settings: Settings
    opened: Sequence[WeightSet]
    job: Job
    job_spec: JobSpec
    """The job for workers, still without the directory that they write to."""


def plan_request(
    sources: Uris,
    to: str | None,
    operations: Operations,
    task_bytes: int | str,
    shard_bytes: int | str,
    storage_options: Mapping[str, str] | None,
    verify: bool | None,
    stack: ExitStack,
    memory_bytes: int | str | None = None,
) -> ConvertRequest:
    """Open the sources until the stack ends, complete the specs from them, plan the job. Arguments as of `convert`.

    Tasks are smaller than requested if they would not fit in a worker's `memory_bytes` otherwise.
    """
    settings, options = Settings.read(), dict(storage_options or {})
    opened = [
        stack.enter_context(open_weights(uri, settings=settings, storage_options=options)) for uri in _uris(sources)
    ]
    if verify and (why := next((weights.why_unverified for weights in opened if weights.why_unverified), None)):
        raise IntegrityError(f"verify=True, but {why}", hint="write one with `penstock manifest URI`")
    require_type("to", to, (str, type(None)), 'a format: "cast:BF16", "fp8-block128"')
    specs = [*operation_specs(operations), *([{"op": "store", "format": to}] if to is not None else [])]
    specs = completed(specs, opened, settings, options)
    budget = WORKER_MEMORY_BYTES if memory_bytes is None else parse_bytes(memory_bytes)
    wanted = parse_bytes(task_bytes)

    def planned(task_bytes: int) -> Job:
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
        # Tasks are read out to the ends of leaves, so one that aims at the budget is above it.
        smaller = max(MIN_TASK_BYTES, min(wanted, budget) // 2)
        if (cut_smaller := planned(smaller)).least_bytes.max(initial=0) >= least:
            break  # the largest task is one that its operation cannot cut: smaller tasks do not help
        job, wanted = cut_smaller, smaller
    job_spec = JobSpec(
        sources=tuple(_uris(sources)),
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


def _uris(sources: Uris) -> list[str]:
    several = sources if isinstance(sources, Sequence) and not isinstance(sources, str | bytes) else [sources]
    return [text_of(uri) for uri in several]
