"""Weight sets: open the files that a URI names, check headers against index and manifest, and digest bodies."""

from __future__ import annotations

import fnmatch
import mmap
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain

import msgspec
import numpy as np

from penstock import descriptors
from penstock.arguments import require_texts, require_type
from penstock.config import Settings
from penstock.digest import leaf
from penstock.errors import ConfigError, FormatError, NotFound, PermissionDenied, PlanError
from penstock.lifecycle import Closeable
from penstock.report import names_text
from penstock.storage import Digested, Source, is_remote, open_source, read_small, timed
from penstock.storage.headers import read_header
from penstock.storage.locate import Location, Uri, Uris, display, is_part, resolve, sidecar_uri, signature_uri
from penstock.storage.manifest import Sidecar, check_signature, decode, encode, leaves_of, read_sidecar, sign, unpack
from penstock.storage.safetensors import Header, clip, format_hint
from penstock.storage.source import require_checked
from penstock.types import MIB, U64, FileEntry, Manifest, TensorTable
from penstock.waits import Threads

__all__ = [
    "Names",
    "Uri",
    "Uris",
    "WeightSet",
    "build",
    "check_signature",
    "decode",
    "encode",
    "open_weights",
    "resolve",
    "sidecar_uri",
    "sign",
    "signature_uri",
]

Names = str | re.Pattern[str] | Callable[[str], bool] | Sequence[str] | None
"""Selects tensors: a glob, a list of globs, a regex to search for, a predicate, or None for all."""

Rename = Callable[[str, Header], Header]
"""Accepts the URI of a file and its header. Returns the header with new tensor names."""

# Number of threads that fetch headers from an object store. Each request waits tens of milliseconds for its first byte.
# 16 threads read the 100 shards of a large checkpoint in a few round trips.
_REMOTE_THREADS = 16
# Maximum number of local headers that are read one by one. Parsing holds the GIL, so threads are slower (60,000 tensors
# in 4 files: 43 ms one by one, 66-100 ms in 4 threads, on 2 cores). With more files the latency of NFS would add up.
_FEW_FILES = 8
# Number of threads that read headers from a file system. Only the latency of the device overlaps.
_LOCAL_THREADS = 4


class WeightSet(Closeable, msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A manifest with an open source for each of its files. Closing the weight set closes the sources."""

    uri: str
    manifest: Manifest
    sources: tuple[Source, ...]
    """The sources of `manifest.files`, in the same order."""
    why_unverified: str | None
    """Why there are no leaves for verification. None if there are leaves."""
    opening_bytes: int
    """Bytes of headers, index and manifest that opening read from storage."""

    def close(self) -> None:
        """Close every source. Idempotent."""
        for source in self.sources:
            source.close()


class _Opened(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    name: str
    source: Source
    header: Header


@format_hint()
def open_weights(
    uri: Uris,
    *,
    settings: Settings,
    storage_options: Mapping[str, str] | None = None,
    names: Names = None,
    with_manifest: bool = True,
    rename: Rename | None = None,
) -> WeightSet:
    """Open the files that `uri` names and read their headers, but no tensor data.

    Args:
        uri: a file, a directory or prefix, a glob, an index file, or a list of files.
        storage_options: credentials and endpoints, by obstore's names.
        names: tensors to select. With an index, files without a selected tensor are not opened.
        with_manifest: whether to read the manifest, which a caller that writes a new manifest does not need.
        rename: function that returns a file's header with new tensor names. Needed if files contain shards of a tensor.

    Returns:
        A weight set with tensors in file order and files sorted by name. The caller closes the set.

    Raises:
        FormatError: a header, the index or the manifest is malformed, or they contradict each other.
        IntegrityError: the manifest's revision does not match its content.
        NotFound: the URI does not exist, or a shard that the index names is missing.
        PlanError: `names` contains a name without wildcards that matches no tensor.
        SourceError: the storage failed.
    """
    require_type("storage_options", storage_options, (Mapping, type(None)), "a dict of options by obstore's names")
    place = resolve(uri, settings=settings, storage_options=storage_options)
    if not with_manifest:
        place = msgspec.structs.replace(place, sidecar_uri=None)
    files = list(place.files)
    wanted: set[str] | None = None
    if place.weight_map is not None and names is not None:
        tensors = list(place.weight_map)
        wanted = {tensors[row] for row in _select(tensors, names, place.uri)}
        needed = {place.weight_map[name] for name in wanted}
        files = [file for file in files if file[0] in needed]
    opened, raw = _open_all(place, files, settings, storage_options, rename)
    try:
        # Only GGUF files have a different class of header.
        if any(type(shard.header) is not Header for shard in opened):
            from penstock.storage import gguf

            gguf.check_parts([(shard.name, shard.header) for shard in opened], place.uri)
        table = _join(_resolve_duplicates(opened, place.weight_map), [shard.name for shard in opened], place.uri)
        if place.weight_map is not None:
            _check_index(table, [shard.name for shard in opened], place.weight_map, wanted, str(place.index_uri))
        manifest, why = _manifest(opened, table, raw, place)
        if names is not None:
            rows = _select(table.names, names, place.uri)
            if wanted is not None:
                # A shard may contain tensors that the index does not list.
                rows = [row for row in rows if table.names[row] in wanted]
            # Keep the revision of the whole set.
            leaves = leaves_of(manifest, np.asarray(rows, np.int64))
            manifest = msgspec.structs.replace(manifest, tensors=manifest.tensors.take(rows), leaves=leaves)
    except BaseException:
        for shard in opened:
            shard.source.close()
        raise
    headers = sum(shard.header.read_nbytes for shard in opened)
    return WeightSet(
        uri=place.uri,
        manifest=manifest,
        sources=tuple(shard.source for shard in opened),
        why_unverified=why,
        opening_bytes=headers + place.index_bytes + len(raw or b""),
    )


def _open_all(
    place: Location,
    files: Sequence[tuple[str, str]],
    settings: Settings,
    options: Mapping[str, str] | None,
    rename: Rename | None,
) -> tuple[list[_Opened], bytes | None]:
    remote = any(is_remote(uri) for _, uri in files)
    if not remote:
        # A file may need three descriptors: for buffered reads, for direct reads, and for a mapping.
        descriptors.make_room(3 * len(files))

    def open_one(file: tuple[str, str]) -> _Opened:
        name, uri = file
        # A file should exist if an index lists it or if it is a part of a split model.
        try:
            source = open_source(uri, settings=settings, storage_options=options)
        except NotFound as error:
            message = f"the index names shard {clip(name)!r}, which is missing"
            if place.index_uri is None:
                if not is_part(name):
                    raise
                message = f"{clip(name)!r}, a part of a model split over several files, is missing"
            raise NotFound(message, uri=display(uri), hint="the copy is incomplete, so copy it again") from error
        try:
            header = read_header(timed(source, uri, settings))
            return _Opened(name=name, source=source, header=header if rename is None else rename(source.uri, header))
        except BaseException:
            source.close()
            raise

    def sidecar() -> bytes | None:
        if place.sidecar_uri is None:
            return None
        try:
            return read_small(place.sidecar_uri, settings=settings, storage_options=options)
        except PermissionDenied:
            # Stores reply 403 for an absent object if the user may not list the bucket.
            if remote:
                return None
            raise

    if len(files) <= _FEW_FILES and not remote:
        opened: list[_Opened] = []
        try:
            for file in files:
                opened.append(open_one(file))
            return opened, sidecar()
        except BaseException:
            for shard in opened:
                shard.source.close()
            raise
    threads = min(_REMOTE_THREADS if remote else _LOCAL_THREADS, len(files) + 1)
    with Threads(threads, thread_name_prefix="penstock-open") as pool:
        # Read the manifest along with the headers, to save a round trip to an object store.
        raw = pool.submit(sidecar)
        jobs = [pool.submit(open_one, file) for file in files]
        try:
            return [job.result() for job in jobs], raw.result()
        except BaseException:
            pool.leave()
            for job in jobs:
                # Close all files after an error. The callback also closes files that are opened later.
                job.add_done_callback(_close_opened)
            raise


def _close_opened(job: Future[_Opened]) -> None:
    if not job.cancelled() and job.exception() is None:
        job.result().source.close()


def _resolve_duplicates(opened: Sequence[_Opened], weight_map: Mapping[str, str] | None) -> list[TensorTable]:
    """Return the table of each file. If two files contain a tensor, use the file that the index names."""
    tables = [shard.header.tensors for shard in opened]
    names = Counter(chain.from_iterable(table.names for table in tables))
    if weight_map is None or len(names) == sum(names.values()):
        return tables
    holders = {(name, shard.name) for shard in opened for name in shard.header.tensors.names}
    twice = {name for name, count in names.items() if count > 1 and (name, weight_map.get(name)) in holders}

    def is_decided(name: str, file: str) -> bool:
        return name not in twice or weight_map[name] == file

    return [
        table.take([row for row, name in enumerate(table.names) if is_decided(name, shard.name)])
        for table, shard in zip(tables, opened, strict=True)
    ]


def _join(tables: Sequence[TensorTable], files: Sequence[str], uri: str) -> TensorTable:
    if len(tables) == 1:
        return tables[0]
    names = tuple(chain.from_iterable(table.names for table in tables))
    counts = [len(table) for table in tables]
    file_index = np.repeat(np.arange(len(tables), dtype=np.int64), np.array(counts, np.int64))
    if len(set(names)) < len(names):
        first: dict[str, int] = {}
        for name, file in zip(names, file_index.tolist(), strict=True):
            if name in first:
                both = f"{clip(files[first[name]])!r} and {clip(files[file])!r}"
                raise FormatError(f"the tensor is in two files, {both}", uri=uri, tensor=clip(name), hint=_TWICE)
            first[name] = file
    return TensorTable(
        names=names,
        dtypes=tuple(chain.from_iterable(table.dtypes for table in tables)),
        shapes=tuple(chain.from_iterable(table.shapes for table in tables)),
        file_index=file_index,
        offset=np.concatenate([np.zeros(0, np.int64), *(table.offset for table in tables)]),
        nbytes=np.concatenate([np.zeros(0, np.int64), *(table.nbytes for table in tables)]),
    )


_TWICE = (
    "these files are alternatives and not parts of one set: name one of them, or give a list or a glob of the files "
    "that belong together"
)
_OTHER_INDEX = (
    "the index belongs to other files: get index and files of the same revision, or give a glob such as *.safetensors, "
    "which loads all tensors of the files without the index"
)


def _check_index(
    table: TensorTable, files: Sequence[str], weight_map: Mapping[str, str], wanted: Collection[str] | None, uri: str
) -> None:
    """Raise FormatError unless the opened files contain exactly the (wanted) tensors that the index assigns to them."""
    stated = list(map(weight_map.get, table.names))
    actual = [files[file] for file in table.file_index.tolist()]
    differ = [row for row, (a, b) in enumerate(zip(stated, actual, strict=True)) if a != b] if stated != actual else []
    if wanted is not None:
        differ = [row for row in differ if table.names[row] in wanted]
    if differ:
        row = differ[0]
        where = "does not name it" if stated[row] is None else f"puts it in {clip(stated[row])!r}"
        fault = f"tensor is in shard {clip(actual[row])!r}, but the index {where}"
        raise FormatError(fault, uri=uri, tensor=clip(table.names[row]), hint=_OTHER_INDEX)
    # Also find tensors that the index names but no file contains. `names` may omit shards, so check only opened shards.
    opened = set(files)
    if wanted is not None or len(actual) < sum(shard in opened for shard in weight_map.values()):
        there = set(table.names)
        searched = weight_map if wanted is None else wanted
        absent = (name for name in searched if weight_map[name] in opened and name not in there)
        if (name := next(absent, None)) is not None:
            fault = f"the index puts it in shard {clip(weight_map[name])!r}, which does not hold it"
            raise FormatError(fault, uri=uri, tensor=clip(name), hint=_OTHER_INDEX)


def nothing_to_verify(why: str, *, uri: str | None = None, hint: str = "") -> NotFound:
    """Return the error for `verify=True` on weights without digests. `hint` offers the user an alternative."""
    how = "write one with `penstock manifest URI`" + (f", or {hint}" if hint else "")
    return NotFound(f"verify=True, but {why}", uri=uri, hint=how)


def _manifest(
    opened: Sequence[_Opened], table: TensorTable, raw: bytes | None, place: Location
) -> tuple[Manifest, str | None]:
    files = tuple(
        FileEntry(
            name=shard.name, nbytes=shard.source.nbytes, identity=shard.source.identity, metadata=shard.header.metadata
        )
        for shard in opened
    )
    if raw is None:
        where = place.sidecar_uri
        why = f"no manifest at {display(where)}" if where is not None else "these files have no place for a manifest"
        # This revision covers headers only. Equal headers do not prove equal weights.
        revision = leaf.headers_revision([shard.header.digest for shard in opened])
        bare = Manifest(files=files, tensors=table, leaf_bytes=leaf.LEAF_BYTES, leaves=None, revision=revision)
        return bare, why
    uri = display(str(place.sidecar_uri))
    sidecar = read_sidecar(raw, uri=uri)
    leaves = _matched_leaves(sidecar, table, files, uri)
    without = None if leaves is not None else f"the manifest at {uri} was made without digests"
    return Manifest(
        files=files, tensors=table, leaf_bytes=sidecar.leaf_bytes, leaves=leaves, revision=sidecar.revision
    ), without


@format_hint(
    "copy the files and their manifest again; if the weights were changed on purpose, write a new manifest with "
    "penstock manifest URI --force"
)
def _matched_leaves(sidecar: Sidecar, table: TensorTable, files: Sequence[FileEntry], uri: str) -> U64 | None:
    """Return the sidecar's leaves in the order of `table`. Raises FormatError if sidecar and headers differ."""
    rows = leaf.name_order(table)
    order = np.asarray(rows, np.int64)
    # The encoded bytes are usually equal, so no row has to be unpacked.
    same = sidecar.body == leaf.canonical(table, rows)
    same &= sidecar.offset == table.offset[order].astype("<i8").tobytes()
    same &= sidecar.file_index == table.file_index[order].astype("<i8").tobytes()
    same &= [(file.name, file.nbytes) for file in files] == [(file.name, file.nbytes) for file in sidecar.files]
    # Only some of the sidecar's rows are needed, because of `names` or because other files share the manifest.
    if not same:
        return _matched_leaves_of_part(unpack(sidecar, uri=uri), table, files, uri)
    if sidecar.leaves is None:
        return None
    # The sidecar's rows are sorted by name. `back` maps them to the order of the table.
    back = np.empty_like(order)
    back[order] = np.arange(len(rows))
    leaves = np.frombuffer(sidecar.leaves, "<u8").astype(np.uint64)
    counts = leaf.num_leaves(table.nbytes, sidecar.leaf_bytes)
    if leaves.size != int(counts.sum()):
        raise FormatError(f"the manifest has {leaves.size} leaves, but the tensors have {int(counts.sum())}", uri=uri)
    return leaf.take_leaves(leaves, counts[order], back)


def _matched_leaves_of_part(stated: Manifest, table: TensorTable, files: Sequence[FileEntry], uri: str) -> U64 | None:
    """Return leaves as `_matched_leaves` does, for some of the manifest's files, whose tensors must all match."""
    at = {file.name: index for index, file in enumerate(stated.files)}
    for file in files:
        if file.name not in at:
            raise FormatError(f"the manifest does not list the file {clip(file.name)!r}", uri=uri)
        nbytes = stated.files[at[file.name]].nbytes
        if nbytes != file.nbytes:
            raise FormatError(f"{clip(file.name)!r} has {file.nbytes} bytes, but {nbytes} in the manifest", uri=uri)
    row_of = dict(zip(stated.tensors.names, range(len(stated.tensors)), strict=True))
    rows = np.fromiter((row_of.get(name, -1) for name in table.names), np.int64, len(table))
    if rows.size and rows.min() < 0:
        unknown = clip(table.names[int(rows.argmin())])
        raise FormatError("the manifest does not list the tensor", uri=uri, tensor=unknown)
    places = np.array([at[file.name] for file in files], np.int64)
    if len(table) < int(np.isin(stated.tensors.file_index, places).sum()):
        there, opened = set(table.names), set(places.tolist())
        stated_rows = zip(stated.tensors.names, stated.tensors.file_index.tolist(), strict=True)
        name = next(name for name, file in stated_rows if file in opened and name not in there)
        raise FormatError("the manifest lists a tensor that its file does not contain", uri=uri, tensor=clip(name))
    selected = stated.tensors.take(rows.tolist())
    wrong = (selected.offset != table.offset) | (selected.file_index != places[table.file_index])
    row = int(wrong.argmax()) if wrong.any() else -1
    if table.dtypes != selected.dtypes or table.shapes != selected.shapes:
        columns = zip(table.dtypes, selected.dtypes, table.shapes, selected.shapes, strict=True)
        row = next(row for row, (a, b, c, d) in enumerate(columns) if a != b or c != d)
    if row >= 0:
        fault = "dtype, shape or offset in the manifest differs from the file's header"
        raise FormatError(fault, uri=uri, tensor=clip(table.names[row]))
    return leaves_of(stated, rows)


def _select(tensors: Sequence[str], names: Names, uri: str) -> list[int]:
    if isinstance(names, re.Pattern):
        return [row for row, tensor in enumerate(tensors) if names.search(tensor)]
    if names is None:
        return list(range(len(tensors)))
    if callable(names):
        return [row for row, tensor in enumerate(tensors) if names(tensor)]
    require_texts(
        "names", [names] if isinstance(names, str) else names, "a glob, a list of them, a regex or a function"
    )
    globs = [names] if isinstance(names, str) else list(names)
    row_of = {tensor: row for row, tensor in enumerate(tensors)}
    selected: set[int] = set()
    missing: list[str] = []
    for glob in globs:
        # A tensor's name may contain brackets, so try the literal name first.
        rows = [row_of[glob]] if glob in row_of else []
        if any(c in glob for c in "*?["):
            match = re.compile(fnmatch.translate(glob)).match
            rows += [row for row, tensor in enumerate(tensors) if match(tensor)]
        selected.update(rows)
        if not rows:
            missing.append(glob)
    if missing:
        message = f"no such tensor: {names_text(list(map(clip, sorted(missing))), 5)}"
        raise PlanError(message, uri=uri, hint="run `penstock inspect URI --all` to list all tensors")
    return sorted(selected)


def build(
    weights: WeightSet,
    *,
    leaf_bytes: int = leaf.LEAF_BYTES,
    threads: int = 0,
    on_bytes: Callable[[int], None] | None = None,
) -> Manifest:
    """Read every tensor once and return the manifest with its digests.

    Args:
        weights: an open set with all of its tensors. Leaves that the set's manifest already has are ignored.
        threads: reader threads, each with a buffer of 8 MiB or one larger leaf. 0 means one thread per core, at most 8.
        on_bytes: called with the size of each window read, by one thread at a time.
    """
    if leaf_bytes <= 0:
        raise ConfigError(f"leaf_bytes must be positive, not {leaf_bytes}")
    manifest = weights.manifest
    without_gaps = fills_files(manifest)
    # A manifest must not certify corrupt bytes, so also check the digests from the storage.
    compared = [
        source for source in weights.sources if without_gaps and isinstance(source, Digested) and source.check_whole()
    ]
    threads = threads or min(8, os.cpu_count() or 1)
    leaves = _digest_bodies(
        weights.sources, manifest.tensors, leaf_bytes=leaf_bytes, threads=threads, on_bytes=on_bytes
    )
    for source in compared:
        require_checked(source)
    return Manifest(
        files=manifest.files,
        tensors=manifest.tensors,
        leaf_bytes=leaf_bytes,
        leaves=leaves,
        revision=leaf.revision(manifest.tensors, leaf_bytes, leaves),
    )


def fills_files(manifest: Manifest) -> bool:
    """Return whether tensors fill every file from its header to its end, without padding.

    True for safetensors. A reader of all tensors skips padding in a GGUF file, so it cannot check the file's digest.
    """
    table, count = manifest.tensors, len(manifest.files)
    first = np.array([file.nbytes for file in manifest.files], np.int64)
    nbytes = first.copy()
    np.minimum.at(first, table.file_index, table.offset)
    return bool((np.bincount(table.file_index, table.nbytes, minlength=count) == nbytes - first).all())


# Size of one read. Source: the chunk size of a load, `Settings.chunk_bytes`.
_WINDOW_BYTES = 8 * MIB

_Piece = tuple[int, int, int]


class _Window(msgspec.Struct, frozen=True, kw_only=True):
    file: int
    offset: int
    nbytes: int
    pieces: tuple[_Piece, ...]
    """(offset in the window, bytes, first leaf). Only a tensor's last piece may end inside a leaf."""


def _digest_bodies(
    sources: Sequence[Source],
    table: TensorTable,
    *,
    leaf_bytes: int,
    threads: int,
    on_bytes: Callable[[int], None] | None = None,
) -> U64:
    counts = leaf.num_leaves(table.nbytes, leaf_bytes)
    leaves = np.zeros(int(counts.sum()), np.uint64)
    window_bytes = max(_WINDOW_BYTES // leaf_bytes, 1) * leaf_bytes
    # All threads share one generator in file order, so a disk reads forwards.
    windows = _windows(table, np.cumsum(counts) - counts, leaf_bytes, window_bytes)
    lock = threading.Lock()
    stop = threading.Event()

    def next_window() -> _Window | None:
        with lock:
            return None if stop.is_set() else next(windows, None)

    def work() -> None:
        # Direct I/O needs page alignment. A shared mapping would get no huge pages.
        memory = mmap.mmap(-1, window_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = memoryview(memory)
        try:
            while (window := next_window()) is not None:
                sources[window.file].readv(window.offset, [buffer[: window.nbytes]])
                for start, nbytes, first in window.pieces:
                    leaf.leaf_digests(buffer[start : start + nbytes], leaf_bytes, leaves[first:])
                if on_bytes is not None:
                    # Hold a lock, because the callback may not be thread-safe.
                    with lock:
                        on_bytes(window.nbytes)
        finally:
            stop.set()

    with Threads(threads, thread_name_prefix="penstock-digest") as pool:
        jobs = [pool.submit(work) for _ in range(threads)]
        try:
            for job in jobs:
                job.result()
        finally:
            stop.set()
    return leaves


def _windows(table: TensorTable, first_leaf: np.ndarray, leaf_bytes: int, window_bytes: int) -> Iterator[_Window]:
    order = np.lexsort((table.offset, table.file_index))
    columns = (table.file_index[order], table.offset[order], table.nbytes[order], first_leaf[order])
    file = start = stop = -1
    pieces: list[_Piece] = []
    for row_file, offset, nbytes, row_leaf in zip(*(column.tolist() for column in columns), strict=True):
        for skip in range(0, nbytes, window_bytes):
            at, length = offset + skip, min(window_bytes, nbytes - skip)
            if pieces and (row_file != file or at != stop or at + length - start > window_bytes):
                yield _Window(file=file, offset=start, nbytes=stop - start, pieces=tuple(pieces))
                pieces = []
            if not pieces:
                file, start = row_file, at
            stop = at + length
            pieces.append((at - start, length, row_leaf + skip // leaf_bytes))
    if pieces:
        yield _Window(file=file, offset=start, nbytes=stop - start, pieces=tuple(pieces))
