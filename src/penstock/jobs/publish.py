"""What became of a job: bytes of earlier runs held to their digests, the manifest, the small files beside weights.

In: a job, its journal, its output. Out: a journal that is true; a `Manifest`; files by name.
Not here: the run (`coordinator`), publishing (`convert`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config import Settings
from penstock.digest.leaf import leaf_digests, num_leaves, revision
from penstock.errors import FormatError, IntegrityError, OperationFailed, PenstockError
from penstock.jobs.job import Job
from penstock.jobs.journal import Journal
from penstock.jobs.operations.operation import Operation
from penstock.storage import is_remote, list_uris, local_path, read_small
from penstock.storage.files import FileSource
from penstock.storage.locate import SIDECAR
from penstock.storage.manifest import decode
from penstock.storage.output import OutputSet
from penstock.storage.weight_set import WeightSet
from penstock.types import MIB, U64, FileEntry, Manifest, TensorTable

STAMP = "penstock.job"
"""Beside a result: which job made it. The same call, made again, then finds its own result and is done."""
METADATA = {"format": "pt"}
"""Of every file: what transformers asks for."""
_CONFIG = "config.json"
_SMALL = re.compile(
    r"\.(json|txt|model|jinja|tiktoken|py|bpe|vocab|spm|yaml)$|^(tokenizer|tekken|vocab|merges|sentencepiece|spiece)\."
    r"(?!.*(safetensors|bin|pt|pth|gguf|onnx)$)"
)
"""What is copied along: configurations, vocabularies (`tokenizer.model.v3`, `vocab.bpe`), templates, model code."""
_MAX_SMALL_BYTES = 64 * MIB
"""Longest configuration or tokenizer that is copied along."""


def forget_what_did_not_last(job: Job, journal: Journal, out: OutputSet) -> None:
    """Read back what earlier runs wrote, and forget tasks whose bytes are not those of their digests."""

    if lost := _lost(job, journal, out, journal.done):
        journal.forget(dict.fromkeys(lost))
    journal.kept = frozenset(journal.done)


def check_repeated(job: Job, journal: Journal, out: OutputSet, tasks: Iterable[int]) -> None:
    """Read back tasks that were run more than once. Order: once nobody writes any more.

    Raises:
        OperationFailed: their runs gave different bytes, which lie over each other.
    """
    if lost := _lost(job, journal, out, tasks):
        recipe = job.recipes[next(job.tasks.entries(lost[0]))[0]]
        raise OperationFailed(
            f"{job.operation.name} gave other bytes when it ran on a task again",
            tensor=recipe.outputs[0].spec.name,
            hint="it must give the same for the same inputs, on all devices at once",
        )


def _lost(job: Job, journal: Journal, out: OutputSet, tasks: Iterable[int]) -> list[int]:
    """Return those of the tasks whose bytes are not those of their digests."""

    def lasted(task: int) -> bool:
        return 0 <= task < len(job.tasks) and np.array_equal(_digests_of(job, task, out), journal.done[task])

    tasks = sorted(tasks)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="penstock-resume") as pool:
        return [task for task, is_there in zip(tasks, pool.map(lasted, tasks), strict=True) if not is_there]


def _digests_of(job: Job, task: int, out: OutputSet) -> U64:
    found = []
    for one in job.written(task):
        at = int(job.files.table.offset[one.row])
        for start, stop in one.pieces(job.leaf_bytes):
            found.append(_digest(out, int(job.files.table.file_index[one.row]), at + start, stop - start))
    return np.array(found, np.uint64)


def _digest(out: OutputSet, file: int, offset: int, nbytes: int) -> int:
    data, digest = memoryview(bytearray(nbytes)), np.empty(1, np.uint64)
    out.read(file, offset, data)
    leaf_digests(data, nbytes, digest)
    return int(digest[0])


class _Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a result says of the job that made it, in `STAMP`."""

    job: str
    revision: str


_STAMP = msgspec.json.Decoder(_Stamp)


def stamp(job: Job, revision: str) -> bytes:
    """Return the content of `STAMP`."""
    return msgspec.json.encode(_Stamp(job=job.key, revision=revision)) + b"\n"


def published(job: Job, into: str, settings: Settings, storage_options: Mapping[str, str] | None) -> str | None:
    """Revision of what is at the destination, if this very job put it there; None: it is another's, or nothing.

    The key stands for the operation and its words, the sources' revisions, files and identities, and the sizes. The
    files beside it must be those of the manifest: their bytes are compared by `penstock verify`, not here.
    """
    place, options = into.rstrip("/"), storage_options
    raw = read_small(f"{place}/{STAMP}", settings=settings, storage_options=options)
    manifest = read_small(f"{place}/{SIDECAR}", settings=settings, storage_options=options) if raw else None
    if raw is None or manifest is None:
        return None
    try:
        said, there = _STAMP.decode(raw), decode(manifest, uri=into)
    except (msgspec.DecodeError, UnicodeDecodeError, FormatError, IntegrityError):
        return None  # then something else is there, and stays
    if said.job != job.key or said.revision != there.revision:
        return None
    table = job.files.table
    row_of = {name: row for row, name in enumerate(there.tensors.names)}  # a manifest has an order of its own
    if row_of.keys() != set(table.names):
        return None
    if not np.array_equal(there.tensors.nbytes[[row_of[name] for name in table.names]], table.nbytes):
        return None
    if is_remote(into):
        return there.revision  # the manifest came last
    paths = [Path(local_path(place), file.name) for file in there.files]
    is_whole = all(
        path.is_file() and path.stat().st_size == file.nbytes for path, file in zip(paths, there.files, strict=True)
    )
    return there.revision if is_whole else None


def _leaves(job: Job, journal: Journal) -> tuple[U64, npt.NDArray[np.bool_]]:
    """Digests of the output's leaves, and which are known: those that one task wrote whole."""
    table, leaf_bytes = job.files.table, job.leaf_bytes
    first = np.concatenate([[0], np.cumsum(num_leaves(table.nbytes, leaf_bytes))])
    leaves, is_known = np.zeros(int(first[-1]), np.uint64), np.zeros(int(first[-1]), bool)
    for task in range(len(job.tasks)):
        digests = iter(journal.done[task].tolist())
        for one in job.written(task):
            for start, stop in one.pieces(leaf_bytes):
                digest = next(digests)
                whole = min((start // leaf_bytes + 1) * leaf_bytes, int(table.nbytes[one.row]))
                if start % leaf_bytes == 0 and stop == whole:
                    at = int(first[one.row]) + start // leaf_bytes
                    leaves[at], is_known[at] = digest, True
    return leaves, is_known


def manifest_of(job: Job, journal: Journal, out: OutputSet) -> Manifest:
    """Return the output's, from what tasks said; leaves that no one task wrote whole are read back."""
    table, leaf_bytes = job.files.table, job.leaf_bytes
    leaves, is_known = _leaves(job, journal)
    first = np.concatenate([[0], np.cumsum(num_leaves(table.nbytes, leaf_bytes))])
    for at in np.flatnonzero(~is_known).tolist():
        row = int(np.searchsorted(first, at, side="right")) - 1
        start = (at - int(first[row])) * leaf_bytes
        nbytes = min(leaf_bytes, int(table.nbytes[row]) - start)
        leaves[at] = _digest(out, int(table.file_index[row]), int(table.offset[row]) + start, nbytes)
    entries = zip(out.names, out.file_nbytes, strict=True)
    placed = TensorTable(
        names=table.names,
        dtypes=table.dtypes,
        shapes=table.shapes,
        file_index=table.file_index,
        offset=table.offset + np.array(out.data_offset, np.int64)[table.file_index],
        nbytes=table.nbytes,
    )
    return Manifest(
        files=tuple(FileEntry(name=name, nbytes=nbytes, metadata=METADATA) for name, nbytes in entries),
        tensors=placed,
        leaf_bytes=leaf_bytes,
        leaves=leaves,
        revision=revision(placed, leaf_bytes, leaves),
    )


def check_unchanged(weights: WeightSet) -> None:
    """SourceChanged if a local file is another than when the job began: what workers opened later is it, too."""
    for source in weights.sources:
        if isinstance(source, FileSource):
            source.check_unchanged()


def config_of(
    uri: str, operation: Operation, settings: Settings, storage_options: Mapping[str, str] | None
) -> bytes | None:
    """Return the result's `config.json`: that of a source as the operation changes it; None where the source has none.

    Order: before anything else is read, so that what is wrong with it does not cost a conversion.

    Raises:
        FormatError: the source's is no object of JSON. OperationFailed: the operation's `config` raised, or gave none.
    """
    listed = list_uris(uri, settings=settings, storage_options=storage_options)
    at = next((one for one in listed if one.rpartition("/")[2] == _CONFIG), None)
    raw = None if at is None else read_small(at, settings=settings, storage_options=storage_options)
    if raw is None:
        return None
    try:
        config = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"it is not an object of JSON: {error}"
        raise FormatError(message, uri=at, hint="repair it, or convert a directory without it") from error
    try:
        made = msgspec.json.encode(dict(operation.config(config)))
    except PenstockError:
        raise
    except Exception as error:
        message = f"{operation.name}: its config() failed on {_CONFIG}: {type(error).__name__}: {error}"
        raise OperationFailed(message, uri=at, hint="it takes a mapping and returns one of plain values") from error
    return msgspec.json.format(made, indent=2)


def small_files(
    uri: str, config: bytes | None, settings: Settings, storage_options: Mapping[str, str] | None
) -> dict[str, bytes]:
    """Tokenizer and other small files of a source, and the configuration that `config_of` gave."""
    found: dict[str, bytes] = {} if config is None else {_CONFIG: config}
    for one in list_uris(uri, settings=settings, storage_options=storage_options):
        name = one.rpartition("/")[2]
        if name == _CONFIG or not _SMALL.search(name) or name.endswith(".safetensors.index.json"):
            continue
        raw = read_small(one, settings=settings, storage_options=storage_options)
        if raw is not None and len(raw) <= _MAX_SMALL_BYTES:
            found[name] = raw
    return found
