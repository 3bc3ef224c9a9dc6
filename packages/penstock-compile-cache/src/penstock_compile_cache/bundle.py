"""Bundles: the files of compilers' caches as one signed file of safetensors, and back into a directory.

In: a directory of caches, its key, a private key; or the tensors of a bundle and public keys. Out: a file; or a
directory that is complete when it appears.
Not here: which caches there are (`caches`), where bundles are stored (`store`).

    file: description (JSON: key, frames, files with digests) | signature (Ed25519 of it) | content (zstd frames)

A bundle is a weight set of three tensors, so that every way by which weights travel carries it. What it contains is
code: nothing of it is parsed before the signature holds, and no file is written whose digest differs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec
import zstandard
from blake3 import blake3

from penstock.errors import MALFORMED, ConfigError, FormatError, IntegrityError
from penstock.storage.manifest import check_signature, sign
from penstock.storage.output import require_space
from penstock.storage.safetensors import encode_header
from penstock.storage.write import typed
from penstock.types import GIB, MIB, DType
from penstock.waits import Threads
from penstock_compile_cache import caches
from penstock_compile_cache.key import Key

DESCRIPTION, SIGNATURE, CONTENT = "description", "signature", "content"
"""Names of the tensors of a bundle."""

MAX_DESCRIPTION_BYTES = 64 * MIB
"""Longest description that is read before its signature is checked. Reason: a file takes some 150 bytes of it, and the
caches that were seen have 2,600 files at most."""
SIGNATURE_BYTES = 64
MAX_BYTES = 16 * GIB
"""Most bytes of files that a bundle may have. Reason: far above the caches that were seen, at most 97 MB
(benchmarks/results/h100_202611/artifacts.md), and below what would fill a disk."""

_FRAME_BYTES = 4 * MIB
"""Files are compressed together until they have this many bytes: most have a few kB, and resemble each other."""
_LEVEL = 3
"""Of zstd: its default."""
PURPOSE = b"penstock artifacts 1\n"
"""Before the description in what is signed: a signature for another purpose must not hold for a bundle."""


class BundledFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file of a frame: after the one before it."""

    path: str
    """Below the root, with slashes."""
    nbytes: int
    is_executable: bool
    digest: str
    """BLAKE3."""


class BundleFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Files that are compressed together; after the frame before it."""

    nbytes: int
    """Compressed."""
    files: tuple[BundledFile, ...]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a bundle: its key, and its files with their digests."""

    format: Literal["penstock-artifacts-1"]
    key: Key
    directory: str
    """Where the caches were when they were packed."""
    frames: tuple[BundleFrame, ...]

    @property
    def is_tied(self) -> bool:
        """True if what torch tuned is in it: torch (2.11, 2.13) looks for it at the path where it was written."""
        return any(file.path.endswith(".best_config") for frame in self.frames for file in frame.files)

    @property
    def num_files(self) -> int:
        """Files in all frames."""
        return sum(len(frame.files) for frame in self.frames)

    @property
    def content_bytes(self) -> int:
        """Bytes of the content: of all frames, compressed."""
        return sum(frame.nbytes for frame in self.frames)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for frame in self.frames for file in frame.files)


def pack(root: Path, key: Key, private_key_pem: bytes, path: Path) -> Description:
    """Write the caches below `root` to a bundle.

    Files that a compiler removes, or is writing, meanwhile are left out. Equal files at one path make equal bundles.

    Args:
        root: a directory with those of `caches`.
        key: of the process that filled them.
        private_key_pem: Ed25519, PEM.
        path: of the bundle; written anew.

    Raises:
        ConfigError: the private key cannot be used, or there are no files.
        DestinationError, DiskFull: the bundle cannot be written; what was written is there.
    """
    with typed(path), tempfile.TemporaryFile(dir=path.parent) as content:
        frames = []
        # Its digests are those of what was read: a file that changes later changes nothing here.
        num_threads = len(os.sched_getaffinity(0))
        with Threads(num_threads, "penstock-compress", waits_for_calls=True) as pool:
            groups = _groups(root)
            # A few at a time: the pool would read all of them ahead.
            while some := list(islice(groups, 2 * num_threads)):
                for frame, data in pool.map(_compressed, some):
                    frames.append(frame)
                    content.write(data)
        if not frames:
            raise ConfigError(
                f"there is no compiled code in {root}",
                hint="call restore() before the engine compiles: it makes the engine put its caches there",
            )
        description = Description(format="penstock-artifacts-1", key=key, directory=str(root), frames=tuple(frames))
        raw = msgspec.json.encode(description)
        entries, start = [], 0
        for name, nbytes in ((DESCRIPTION, len(raw)), (SIGNATURE, SIGNATURE_BYTES), (CONTENT, content.tell())):
            entries.append((name, DType.U8, (nbytes,), start, start + nbytes))
            start += nbytes
        with open(path, "wb", opener=_opener(0o600)) as file:
            file.write(encode_header(entries, {"format": description.format}, uri=str(path)))
            file.write(raw)
            file.write(sign(PURPOSE + raw, private_key_pem))
            content.seek(0)
            shutil.copyfileobj(content, file, MIB)
            file.flush()
            # Who may read the model may read its bundles. By the descriptor: the name could lead elsewhere by now.
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
    return description


def describe(raw: bytes, signature: bytes, public_keys_pem: Sequence[bytes]) -> Description:
    """Return the description of a bundle, after its signature was checked.

    Raises:
        IntegrityError: it is signed by none of the keys, or belongs to another file.
        FormatError: it is no description that this version knows.
        ConfigError: there are no keys, or one is not an Ed25519 public key in PEM.
    """
    if not public_keys_pem:
        raise ConfigError("no public key is trusted", hint="set PENSTOCK_ARTIFACT_KEYS, or give public_keys=")
    for pem in public_keys_pem:
        try:
            check_signature(PURPOSE + raw, signature, pem)
            break
        except IntegrityError:
            continue
    else:
        count = len(public_keys_pem)
        raise IntegrityError(f"the bundle is not signed by {'the key' if count == 1 else f'any of the {count} keys'}")
    return parse(raw)


def parse(raw: bytes) -> Description:
    """Return a description whose signature was not checked: for people to read, and for no other use.

    Raises:
        FormatError: it is no description that this version knows.
    """
    try:
        return msgspec.json.decode(raw, type=Description)
    except MALFORMED as error:
        raise FormatError(f"the bundle's description cannot be read: {error}") from error


def unpack(description: Description, content: memoryview, root: Path) -> None:
    """Write the files of a bundle to the new directory `root`, which appears when all of them are there.

    Args:
        description: of `describe`, so that its signature holds.
        content: the tensor of that name.
        root: made by this call, for this user alone; its parent is there.

    Raises:
        FormatError: a path leads out of `root`, or to no cache; the sizes are not those of the content.
        IntegrityError: a file differs from its digest.
        DestinationError, DiskFull: the directory cannot be written.

    After an error nothing of it is there. A process that is killed leaves a directory of another name, which
    `remove_partial` removes.
    """
    frames = _placed(description, content)
    partial_root = root.with_name(f"{root.name}{_PARTIAL}{secrets.token_hex(4)}")
    with typed(root):
        require_space(root.parent, description.nbytes)
        partial_root.mkdir(mode=0o700)
        try:
            # Each by itself: `mkdir` makes missing parents with another mode.
            for directory in sorted({parent for _, files in frames for _, path in files for parent in path.parents}):
                (partial_root / directory).mkdir(mode=0o700, exist_ok=True)
            with Threads(len(os.sched_getaffinity(0)), "penstock-unpack", waits_for_calls=True) as pool:
                for _ in pool.map(partial(_write, partial_root), frames):
                    pass
            os.rename(partial_root, root)
        except BaseException:
            shutil.rmtree(partial_root, ignore_errors=True)
            raise


_PARTIAL = ".partial-"


def remove_partial(root: Path) -> None:
    """Remove what killed calls of `unpack` left beside `root`. Order: the caller holds the lock of `root`."""
    for path in root.parent.glob(f"{root.name}{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _groups(root: Path) -> Iterator[list[tuple[str, bytes, bool]]]:
    """Yield files as (path, content, executable), together until they are `_FRAME_BYTES`."""
    group: list[tuple[str, bytes, bool]] = []
    size = 0
    for directory, names, files in os.walk(root):
        # In order: equal files at one path make equal bundles.
        names.sort()
        for name in sorted(files):
            path = Path(directory, name)
            parts = path.relative_to(root).parts
            # A link could lead to a file that is no cache.
            if not caches.is_copied(parts) or path.is_symlink() or not path.is_file():
                continue
            try:
                data, mode = path.read_bytes(), path.stat().st_mode
            except FileNotFoundError:
                continue
            group.append(("/".join(parts), data, bool(mode & 0o100)))
            size += len(data)
            if size >= _FRAME_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def _compressed(group: list[tuple[str, bytes, bool]]) -> tuple[BundleFrame, bytes]:
    data = zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(data for _, data, _ in group))
    files = tuple(BundledFile(path, len(data), mode, blake3(data).hexdigest()) for path, data, mode in group)
    return BundleFrame(len(data), files), data


_Placed = tuple[memoryview, list[tuple[BundledFile, PurePosixPath]]]


def _placed(description: Description, content: memoryview) -> list[_Placed]:
    """Return each frame's bytes and its files with their paths, after all sizes and paths were checked."""
    if any(frame.nbytes < 0 for frame in description.frames) or content.nbytes != description.content_bytes:
        raise FormatError(f"the bundle has {content.nbytes} bytes of content, and its description says otherwise")
    sizes = [file.nbytes for frame in description.frames for file in frame.files]
    if min(sizes, default=0) < 0 or sum(sizes) > MAX_BYTES:
        raise FormatError(f"the bundle's files have {sum(sizes)} bytes; at most {MAX_BYTES} are unpacked")
    placed, start = [], 0
    for frame in description.frames:
        data = content[start : start + frame.nbytes]
        placed.append((data, [(file, _checked(file.path)) for file in frame.files]))
        start += frame.nbytes
    return placed


def _checked(path: str) -> PurePosixPath:
    """Return the path of a file below the root. FormatError: it could lead out of it, or is in no cache."""
    parts = path.split("/")
    if any(part in {"", ".", ".."} or "\0" in part for part in parts) or parts[0] not in caches.NAMES or len(parts) < 2:
        raise FormatError(f"the bundle has a file at {path!r}, which is no place in a cache")
    return PurePosixPath(path)


def _write(root: Path, frame: _Placed) -> None:
    """Decompress a frame and write its files, each after its digest was compared."""
    data, files = frame
    expected = sum(file.nbytes for file, _ in files)
    try:
        # Before it is decompressed: zstd allocates what the frame says.
        if (stated := zstandard.frame_content_size(data)) != expected:
            raise IntegrityError(f"a frame of the bundle says that it has {stated} bytes, and its files {expected}")
        raw = memoryview(zstandard.ZstdDecompressor().decompress(data, max_output_size=expected))
    except zstandard.ZstdError as error:
        raise IntegrityError(f"a frame of the bundle cannot be decompressed: {error}") from error
    start = 0
    for file, path in files:
        part = raw[start : start + file.nbytes]
        start += file.nbytes
        if blake3(part).hexdigest() != file.digest:
            raise IntegrityError(f"the bundle's file {file.path} differs from its digest")
        # O_EXCL: a path that occurs twice is an error, and so is one that goes on below a file.
        mode = 0o700 if file.is_executable else 0o600
        with open(root / path, "xb", opener=_opener(mode)) as out:
            out.write(part)


def _opener(mode: int) -> Callable[[str, int], int]:
    return lambda path, flags: os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
