"""The result of a job: the journal of its finished tasks, the check of their bytes on disk, and the sidecar files.

    {"job": key}                        the first line of a journal
    {"task": 7, "digests": "<hex>"}     one line for each finished task

Lines are appended without `fsync`. After a crash, the bytes on disk are compared with the digests in the journal. The
first unreadable line and all lines after it are ignored. `storage.output` writes the bytes and the index, and `convert`
publishes the result.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from penstock.config import Settings
from penstock.digest.leaf import leaf_digests, num_leaves, revision, take_leaves
from penstock.errors import (
    MALFORMED,
    ConfigError,
    DestinationError,
    DiskFull,
    FormatError,
    IntegrityError,
    OperationFailed,
    PenstockError,
)
from penstock.storage import is_remote, local_path, read_small
from penstock.storage.file_names import file_names
from penstock.storage.files import FileSource
from penstock.storage.foreign_json import read_object, write_object
from penstock.storage.gguf import GgufHeader
from penstock.storage.headers import read_header
from penstock.storage.locate import SIDECAR, display
from penstock.storage.manifest import decode, encode
from penstock.storage.output import Content, OutputSet
from penstock.storage.place import STAMP
from penstock.storage.weight_set import WeightSet
from penstock.storage.write import typed
from penstock.types import MIB, U64, FileEntry, Manifest, TensorTable
from penstock.waits import Threads
from penstock_convert.job import ConversionJob
from penstock_convert.operations.formats import keeps_codes
from penstock_convert.operations.gguf import gguf_of
from penstock_convert.operations.operation import Attested, Operation
from penstock_convert.operations.stored import CONFIG_FILES, QUANTIZATION_METADATA, described_layers, without_declared
from penstock_convert.output_region import OutputRegion
from penstock_convert.small_files import SmallFiles, read_file

METADATA = {"format": "pt"}
"""Metadata in the header of every file, which transformers requires."""
_MAX_METADATA = MIB
"""Maximum size in characters of a source's metadata that the result keeps, because every shard repeats it."""
CONFIG = "config.json"
"""Name of the configuration, which an operation may change."""
MISTRAL_CONFIG = "params.json"
"""Name of Mistral's configuration, which may also declare how the weights are quantised."""


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of a journal: the key of its job."""

    job: str


class _FinishedTask(msgspec.Struct, forbid_unknown_fields=True):
    """A line in a journal: a finished task and the digests of its pieces, as little-endian uint64 in hexadecimal."""

    task: int
    digests: str


_HEAD = msgspec.json.Decoder(_Head)
_ENTRY = msgspec.json.Decoder(_FinishedTask)


class Journal:
    """An append-only file of a job's finished tasks. One thread writes the file, and a lock keeps other processes out.

    Attributes:
        path: path of the file.
        done: digests of each task that this run or an earlier run finished, by task number.
        kept: numbers of the tasks that earlier runs finished.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.done = dict[int, U64]()
        self.kept = frozenset[int]()
        self._fd = fd

    @classmethod
    def open(cls, path: Path, key: str) -> Journal:
        """Open or create the journal of a job, and read the finished tasks.

        Args:
            path: path of the file.
            key: key of the job.

        Raises:
            DestinationError: another process has locked the file, the file belongs to another job, or the file cannot
                be written.
        """
        with typed(path):
            journal = Journal(path, _locked(path))
            try:
                journal._read(key)
            except BaseException:
                # Remove an empty journal, which remains if the disk has no space even for the first line.
                if not os.fstat(journal._fd).st_size:
                    journal.remove()
                journal.close()
                raise
        return journal

    def _read(self, key: str) -> None:
        """Read the finished tasks of earlier runs, and truncate the file after the last readable line."""
        # A crash can leave half a line or blocks of zeros at the end. Keep only the complete lines before that.
        whole = 0
        with suppress(*MALFORMED, ValueError), open(self._fd, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if not whole:
                    if _HEAD.decode(line).job != key:
                        message = "the journal belongs to another job"
                        raise DestinationError(message, uri=str(self.path), hint="remove the journal")
                    whole = len(line)
                    continue
                entry = _ENTRY.decode(line)
                self.done[entry.task] = np.frombuffer(bytes.fromhex(entry.digests), "<u8").astype(np.uint64)
                whole += len(line)
        os.ftruncate(self._fd, whole)
        if not whole:
            self._write(msgspec.json.encode(_Head(job=key)) + b"\n")

    def add(self, task: int, digests: U64) -> None:
        """Record that a task has written its bytes. Raise DiskFull or DestinationError."""
        self.done[task] = digests
        # Do not call `fsync`, which would take milliseconds for each task. A resumed run reads all output back anyway.
        line = msgspec.json.encode(_FinishedTask(task=task, digests=digests.astype("<u8").tobytes().hex())) + b"\n"
        with typed(self.path):
            self._write(line)

    def _write(self, line: bytes) -> None:
        # Use one write. If the process is killed here, the last line may be incomplete, and `_read` drops it.
        if os.write(self._fd, line) < len(line):
            raise DiskFull("cannot write the journal: only part of a line was written", uri=str(self.path))

    def forget(self, tasks: Mapping[int, object]) -> None:
        """Rewrite the journal without these tasks, because their bytes on disk have changed."""
        lasting = {task: digests for task, digests in self.done.items() if task not in tasks}
        # Rewrite the file in place instead of renaming a new file over it. The lock belongs to this file, so another
        # process could lock the new file. After a crash midway, tasks that are missing from the journal only run again.
        with typed(self.path):
            head = os.pread(self._fd, 4096, 0).partition(b"\n")[0] + b"\n"
            os.ftruncate(self._fd, 0)
            self._write(head)
        self.done = {}
        for task, digests in lasting.items():
            self.add(task, digests)

    def remove(self) -> None:
        """Delete the journal. Call this after the result was published, or if no task has finished."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class MemoryJournal(Journal):
    """A journal in memory, for a job whose output is lost when its coordinator exits."""

    def __init__(self) -> None:
        self.done = dict[int, U64]()
        self.kept = frozenset[int]()
        self._fd = -1

    def add(self, task: int, digests: U64) -> None:
        """See `Journal.add`."""
        self.done[task] = digests


def _locked(path: Path) -> int:
    """Open and lock the file. Raise DestinationError if another process holds the lock."""
    while True:
        # Another user could guess the path and create a symlink or a FIFO there. Do not follow a symlink or wait for a
        # FIFO.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o666)
        try:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
                message = "the journal is not a regular file owned by this user"
                raise DestinationError(message, uri=str(path), hint="find out who created it, then remove it")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock is on the open file, but the path may refer to a different file by now.
            at_path = os.stat(path) if path.exists() else None
        except DestinationError:
            os.close(fd)
            raise
        except BlockingIOError as error:
            os.close(fd)
            raise DestinationError(
                "another process is running the same job", uri=str(path), hint="wait until that process ends"
            ) from error
        if at_path is not None and os.path.samestat(at_path, os.fstat(fd)):
            return fd
        # The process that held the lock removed the file before this process acquired the lock. Retry.
        os.close(fd)


def forget_lost_tasks(job: ConversionJob, journal: Journal, out: OutputSet) -> None:
    """Read back the output of earlier runs, and forget tasks whose bytes do not match their digests."""
    if lost := _lost(job, journal, out, journal.done):
        journal.forget(dict.fromkeys(lost))
    journal.kept = frozenset(journal.done)


def check_repeated(job: ConversionJob, journal: Journal, out: OutputSet, tasks: Iterable[int]) -> None:
    """Read back the output of tasks that ran more than once. Call this only after the last worker has stopped writing.

    Raises:
        OperationFailed: the runs returned different bytes, so the output may be a mixture of them.
    """
    if lost := _lost(job, journal, out, tasks):
        recipe = job.recipes[next(job.tasks.entries(lost[0]))[0]]
        raise OperationFailed(
            f"{job.operation.name} returned different bytes when it ran on the same task again",
            tensor=recipe.outputs[0].spec.name,
            hint="the operation must return the same bytes for the same inputs on every device of the job",
        )


def _lost(job: ConversionJob, journal: Journal, out: OutputSet, tasks: Iterable[int]) -> list[int]:
    """Return the tasks whose bytes on disk do not match their digests."""

    def lasted(task: int) -> bool:
        # Check the range of the task number, because another program may have written to the journal.
        return 0 <= task < len(job.tasks) and np.array_equal(_digests_of(job, task, out), journal.done[task])

    tasks = sorted(tasks)
    # Use threads, because reading and digesting release the GIL, and a job may have terabytes to read back.
    with Threads(len(os.sched_getaffinity(0)), "penstock-resume", waits_for_calls=True) as pool:
        return [task for task, is_there in zip(tasks, pool.map(lasted, tasks), strict=True) if not is_there]


def _digests_of(job: ConversionJob, task: int, out: OutputSet) -> U64:
    """Return the digests of the bytes that are now in a task's output ranges, one for each piece."""
    digests = []
    for written in job.written(task):
        at = int(job.files.table.offset[written.row])
        for start, stop in pairwise(written.cuts(job.leaf_bytes).tolist()):
            digests.append(_digest(out, int(job.files.table.file_index[written.row]), at + start, stop - start))
    return np.array(digests, np.uint64)


def _digest(out: OutputSet, file: int, offset: int, nbytes: int) -> int:
    data, digest = memoryview(bytearray(nbytes)), np.empty(1, np.uint64)
    out.read(file, offset, data)
    leaf_digests(data, nbytes, digest)
    return int(digest[0])


class _Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `STAMP`: the job that wrote a result, and the result's revision."""

    job: str
    revision: str
    files: tuple[str, ...] = ()
    """The files of the result other than weights. `replace` may remove them together with the weights."""


_STAMP = msgspec.json.Decoder(_Stamp)


def stamp(job: ConversionJob, revision: str, files: Iterable[str]) -> bytes:
    """Return the content of `STAMP`, the file in which a repeated call finds the key of the job that wrote the result.

    Args:
        files: names of all other files in the result, without the weight files.
    """
    return msgspec.json.encode(_Stamp(job=job.key, revision=revision, files=tuple(sorted(files)))) + b"\n"


def published(
    job: ConversionJob, into: str, settings: Settings, storage_options: Mapping[str, str] | None
) -> str | None:
    """Return the revision of the result at the destination, or None if this job did not write that result.

    The job's key covers the operation with its options, the sources' revisions and files, and the task and shard sizes.
    The files at the destination must have the names and sizes in the manifest. Only `penstock verify` compares bytes.
    """
    place, options = into.rstrip("/"), storage_options
    raw = read_small(f"{place}/{STAMP}", settings=settings, storage_options=options)
    manifest = read_small(f"{place}/{SIDECAR}", settings=settings, storage_options=options) if raw else None
    if raw is None or manifest is None:
        return None
    # Corrupt or unrelated files are not an error here, because this job did not write them.
    try:
        mark, there = _STAMP.decode(raw), decode(manifest, uri=into)
    except (*MALFORMED, FormatError, IntegrityError):
        return None
    if mark.job != job.key or mark.revision != there.revision:
        return None
    table = job.files.table
    row_of = {name: row for row, name in enumerate(there.tensors.names)}
    if row_of.keys() != set(table.names):
        return None
    if not np.array_equal(there.tensors.nbytes[[row_of[name] for name in table.names]], table.nbytes):
        return None
    if is_remote(into):
        # An upload writes the manifest last, so all other files are complete.
        return there.revision
    paths = [Path(local_path(place), file.name) for file in there.files]
    is_whole = all(
        path.is_file() and path.stat().st_size == file.nbytes for path, file in zip(paths, there.files, strict=True)
    )
    return there.revision if is_whole else None


def _leaves(job: ConversionJob, journal: Journal) -> tuple[U64, npt.NDArray[np.bool_]]:
    """Return the digests of the output's leaves, and a mask of the leaves that a single task wrote completely."""
    table, leaf_bytes = job.files.table, job.leaf_bytes
    first = np.concatenate([[0], np.cumsum(num_leaves(table.nbytes, leaf_bytes))])
    leaves, is_known = np.zeros(int(first[-1]), np.uint64), np.zeros(int(first[-1]), bool)
    for task in range(len(job.tasks)):
        digests, num_before = journal.done[task], 0
        for written in job.written(task):
            count = written.num_pieces(leaf_bytes)
            at, stop = int(first[written.row]) + written.start // leaf_bytes, written.stop
            # Only the first and the last piece can be incomplete leaves.
            begin = 0 if written.start % leaf_bytes == 0 else 1
            end = count if stop % leaf_bytes == 0 or stop == int(table.nbytes[written.row]) else count - 1
            if begin < end:
                leaves[at + begin : at + end] = digests[num_before + begin : num_before + end]
                is_known[at + begin : at + end] = True
            num_before += count
    return leaves, is_known


def manifest_of(job: ConversionJob, journal: Journal, out: OutputSet) -> Manifest:
    """Build the output's manifest from the tasks' digests. Read back and digest each leaf that several tasks wrote."""
    table, leaf_bytes = job.files.table, job.leaf_bytes
    # A leaf's digest cannot be computed from digests of its pieces. An output range has at most two incomplete leaves.
    leaves, is_known = _leaves(job, journal)
    first = np.concatenate([[0], np.cumsum(num_leaves(table.nbytes, leaf_bytes))])
    for at in np.flatnonzero(~is_known).tolist():
        row = int(np.searchsorted(first, at, side="right")) - 1
        start = (at - int(first[row])) * leaf_bytes
        nbytes = min(leaf_bytes, int(table.nbytes[row]) - start)
        leaves[at] = _digest(out, int(table.file_index[row]), int(table.offset[row]) + start, nbytes)
    entries = zip(out.names, out.file_nbytes, strict=True)
    # The job's offsets are relative to the end of the header, but a manifest's offsets to the beginning of the file.
    placed = TensorTable(
        names=table.names,
        dtypes=table.dtypes,
        shapes=table.shapes,
        file_index=table.file_index,
        offset=table.offset + np.array(out.data_offset, np.int64)[table.file_index],
        nbytes=table.nbytes,
    )
    return Manifest(
        files=tuple(FileEntry(name=name, nbytes=nbytes, metadata=out.metadata) for name, nbytes in entries),
        tensors=placed,
        leaf_bytes=leaf_bytes,
        leaves=leaves,
        revision=revision(placed, leaf_bytes, leaves),
    )


def output_of(job: ConversionJob, sources: Sequence[WeightSet], directory: Path) -> OutputSet:
    """Return the output files of a job: safetensors files, or one GGUF file with the metadata of the first source."""
    table, body_nbytes, groups = job.files.table, job.files.body_nbytes, job.files.groups
    stored = gguf_of(job.operation)
    if stored is None:
        metadata = _metadata_of(job, sources[job.small_from].manifest.files)
        return OutputSet(directory, table, body_nbytes, metadata, groups, stem=job.stem)
    if groups != ("",):
        raise ConfigError(f"{job.operation.name} creates several weight sets, but a GGUF file can hold only one")
    # Read the header again for its tokenizer. In a split model, the first file has the metadata of all files.
    header = read_header(sources[0].sources[0]) if sources[0].sources else None
    source = header if isinstance(header, GgufHeader) else None
    return OutputSet(directory, table, body_nbytes, groups=groups, gguf_header=stored.header(table, source))


def _metadata_of(job: ConversionJob, files: Sequence[FileEntry]) -> dict[str, str]:
    """Return the metadata for every output file: `METADATA`, and the entries that are equal in all source files."""
    if not files or not all(file.name.endswith(".safetensors") for file in files):
        return METADATA
    first, *others = (file.metadata for file in files)
    kept = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    # Drop the entries of DCP and Penstock, because they describe the layout of the source files.
    kept = {key: value for key, value in kept.items() if not key.startswith(("DCP", "penstock."))}
    # Merge the layer descriptions of all source files, because a tensor may be in any output file.
    of_layers = described_layers([file.metadata for file in files])
    if keeps_codes(job.operation):
        kept |= of_layers
    else:
        untrue = {QUANTIZATION_METADATA, *of_layers}
        kept = {key: value for key, value in kept.items() if key not in untrue}
    is_small = sum(len(key) + len(value) for key, value in kept.items()) <= _MAX_METADATA
    return (kept if is_small else {}) | METADATA


def check_unchanged(weights: WeightSet) -> None:
    """Raise SourceChanged if a local file was replaced during the job. Workers may have opened the new file."""
    for source in weights.sources:
        if isinstance(source, FileSource):
            source.check_unchanged()


def config_of(
    source_files: SmallFiles, operation: Operation, settings: Settings, storage_options: Mapping[str, str] | None
) -> bytes | None:
    """Return the source's `config.json` as changed by the operation, or None if the source has no `config.json`.

    Call this before weights are read, so that an error in the configuration does not waste a whole conversion.

    Raises:
        FormatError: the source's `config.json` is not a JSON object.
        OperationFailed: the operation's `config` raised an error, or returned something other than a mapping.
    """
    at = source_files.files.get(CONFIG)
    if at is None:
        return None
    raw = read_file(at, settings=settings, storage_options=storage_options)
    config = read_object(raw, at, hint="repair it, or convert a directory without it")
    try:
        # Let msgspec convert dataclasses and sets, but not encode the JSON, because it writes `null` for infinity.
        return write_object(msgspec.to_builtins(dict(operation.config(config))))
    except PenstockError:
        raise
    except Exception as error:
        # Catch any error, because `config` may be a user's code.
        message = f"{operation.name}: config() failed on {CONFIG}: {type(error).__name__}: {error}"
        raise OperationFailed(
            message, uri=at, hint="config() must take a mapping and return a mapping of plain values"
        ) from error


def without_source_quantization(source_files: SmallFiles, operation: Operation) -> SmallFiles:
    """Return the small files. If the result is no longer quantised, omit the files that describe the quantisation."""
    untrue = source_files.files.keys() & CONFIG_FILES
    if keeps_codes(operation) or not untrue:
        return source_files
    why = {display(source_files.files[name]): "it describes the quantisation of the source" for name in sorted(untrue)}
    files = {name: file for name, file in source_files.files.items() if name not in untrue}
    return SmallFiles(files=files, left_out={**source_files.left_out, **why})


def small_files(
    source_files: SmallFiles,
    config: bytes | None,
    operation: Operation,
    settings: Settings,
    storage_options: Mapping[str, str] | None,
) -> dict[str, Content]:
    """Return the small files of the result by name: `config`, and functions that read the source's files."""
    files: dict[str, Content] = {} if config is None else {CONFIG: config}
    read = partial(read_file, settings=settings, storage_options=storage_options)
    files |= {name: partial(read, file) for name, file in source_files.files.items() if name != CONFIG}
    if MISTRAL_CONFIG in source_files.files and not keeps_codes(operation):
        place = source_files.files[MISTRAL_CONFIG]
        said = read_object(read(place), place, hint="repair it, or convert a directory without it")
        files[MISTRAL_CONFIG] = write_object(without_declared(said))
    return files


def sidecar_files(job: ConversionJob, manifest: Manifest, small: Mapping[str, Content]) -> dict[str, Content]:
    """Return all sidecar files, after the operation has checked the manifest.

    A result with several weight sets has small files and a manifest in the directory of each set. If all sets are in
    one directory, each weight file has a separate manifest, and the directory contains the small files once. The root
    also contains a manifest of all sets. The manifest of all sets shows that the result is complete.
    """
    in_each_set = dict(small)
    if isinstance(job.operation, Attested):
        job.operation.check(manifest)
        in_each_set |= job.operation.files()
    groups = dict.fromkeys(group for group in job.files.groups if group)
    sidecars = {} if groups and not any("*" in group for group in groups) else dict(in_each_set)
    for group in groups:
        files = [i for i, of_file in enumerate(job.files.groups) if of_file == group]
        # A group name with `*` means that all sets are in one directory, so each manifest needs a different name.
        if "*" in group:
            sidecars |= {f"{manifest.files[i].name}.{SIDECAR}": encode(_part(manifest, [i], group, "")) for i in files}
        else:
            sidecars |= {f"{group}/{name}": data for name, data in in_each_set.items()}
            sidecars[f"{group}/{SIDECAR}"] = encode(_part(manifest, files, group, f"{group}/"))
    return sidecars | {SIDECAR: encode(manifest)}


def _part(manifest: Manifest, files: list[int], group: str, place: str) -> Manifest:
    """Return the manifest of one group's files, with the group's name removed from the tensor names."""
    assert manifest.leaves is not None
    table = manifest.tensors
    rows = np.flatnonzero(np.isin(table.file_index, files))
    taken = table.take(rows.tolist())
    number = {file: i for i, file in enumerate(files)}
    tensors = replace(
        taken,
        names=tuple(name[len(group) + 1 :] for name in taken.names),
        file_index=np.array([number[file] for file in taken.file_index.tolist()], np.int64),
    )
    leaves = take_leaves(manifest.leaves, num_leaves(table.nbytes, manifest.leaf_bytes), rows)
    return Manifest(
        files=tuple(replace(manifest.files[i], name=manifest.files[i].name.removeprefix(place)) for i in files),
        tensors=tensors,
        leaf_bytes=manifest.leaf_bytes,
        leaves=leaves,
        revision=revision(tensors, manifest.leaf_bytes, leaves),
    )


SCHEME = "cache:"
"""Prefix of the `uri` of a memory destination, also on a command line."""
ONE_FILE = 1 << 62
"""`shard_bytes` for a job whose result is one region of memory."""


@runtime_checkable
class MemoryDestination(Protocol):
    """Memory on this host to which a conversion writes its result.

    Attributes:
        uri: name of the destination in reports and errors.
    """

    uri: str

    def take(self, key: str, nbytes: int, fill: Callable[[Path], Manifest]) -> None:
        """Allocate memory for the job's one file, call `fill`, and publish the memory completely or not at all.

        Args:
            key: key of the job, which is the same for the same sources and operations.
            nbytes: size of the file in bytes.
            fill: function that writes a file at a path and returns its manifest. `take` must call `fill` once.

        Raises:
            BudgetTooSmall: there is not enough memory.
            ConfigError: the destination already contains a result.

        Errors from `fill` are raised unchanged.
        """
        ...


def fill(target: MemoryDestination, job: ConversionJob, run: Callable[[OutputRegion, MemoryJournal], None]) -> str:
    """Run a job into a memory destination, and return the result's revision.

    Args:
        run: function that runs every task with the output and the journal, and raises an error if a source changed.

    Raises:
        ConfigError: the result is not a single weight set. See also `MemoryDestination.take`.
    """
    # The destination maps the memory as one weight set, but each rank of a reshard would need a separate region.
    if gguf_of(job.operation) is not None:
        hint = "convert to a directory, or without gguf"
        raise ConfigError(f"{target.uri} accepts tensors, but not a GGUF file", uri=target.uri, hint=hint)
    if len(job.files.body_nbytes) != 1 or job.files.groups != ("",):
        raise ConfigError(
            f"{target.uri} accepts only one weight set, but {job.operation.name} creates several", uri=target.uri
        )
    # `take` returns None, so `make` stores the manifest in a list.
    manifests: list[Manifest] = []

    def make(path: Path) -> Manifest:
        out, notes = OutputRegion(path, job.files.table), MemoryJournal()
        try:
            out.open()
            run(out, notes)
            manifest = manifest_of(job, notes, out)
            # Memory has no file name, but a fleet member that writes the result to a file needs a name.
            (entry,) = manifest.files
            manifest = replace(manifest, files=(replace(entry, name=file_names(1, job.stem)[0]),))
        finally:
            out.close()
        # Check inside `take`, so that an operation can reject the result before other processes see the memory.
        if isinstance(job.operation, Attested):
            job.operation.check(manifest)
        manifests.append(manifest)
        return manifest

    target.take(job.key, int(job.files.body_nbytes[0]), make)
    return manifests[0].revision
