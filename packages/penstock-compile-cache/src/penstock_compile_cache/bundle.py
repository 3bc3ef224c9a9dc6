"""Bundles: pack the files of compilers' caches into one signed safetensors file, and unpack them into a directory.

A bundle has three tensors: a description (JSON with key, frames, and files with digests), its Ed25519 signature, and
the content (zstd frames). A bundle contains code, so its signature is checked before anything is parsed, and no file
with a different digest is written.
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
"""Names of the tensors in a bundle."""
MAX_DESCRIPTION_BYTES = 64 * MIB
"""Maximum size in bytes of a description, which is read before its signature is checked. A description has about 150
bytes for each file, and the largest known caches have 2,600 files."""
SIGNATURE_BYTES = 64
MAX_BYTES = 16 * GIB
"""Maximum total size of the files in a bundle, in bytes. The largest known caches have 97 MB
(benchmarks/results/h100_202611/artifacts.md)."""
_FRAME_BYTES = 4 * MIB
"""Files are compressed in groups of this many bytes, because most have a few kB and are similar."""
_LEVEL = 3
"""Compression level for zstd, its default."""
PURPOSE = b"penstock artifacts 1\n"
"""Prefix of the signed text. It prevents reuse of a signature for a different purpose."""


class BundledFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file in a frame. The bytes of each file directly follow the bytes of the previous file."""

    path: str
    """Path below the root, with slashes."""
    nbytes: int
    is_executable: bool
    digest: str
    """BLAKE3 digest."""


class BundleFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Files that are compressed as a group. Frames are stored one after another without gaps."""

    nbytes: int
    """Number of compressed bytes."""
    files: tuple[BundledFile, ...]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a bundle: its key, and its files with their digests."""

    format: Literal["penstock-artifacts-1"]
    key: Key
    directory: str
    """Directory in which the caches were when they were packed."""
    frames: tuple[BundleFrame, ...]

    @property
    def is_tied(self) -> bool:
        """Whether the bundle has torch's tuning results, which torch 2.11 and 2.13 find only at the original path."""
        return any(file.path.endswith(".best_config") for frame in self.frames for file in frame.files)

    @property
    def num_files(self) -> int:
        """Number of files in all frames."""
        return sum(len(frame.files) for frame in self.frames)

    @property
    def content_bytes(self) -> int:
        """Number of compressed bytes in all frames."""
        return sum(frame.nbytes for frame in self.frames)

    @property
    def nbytes(self) -> int:
        """Number of bytes in all files."""
        return sum(file.nbytes for frame in self.frames for file in frame.files)


def pack(root: Path, key: Key, private_key_pem: bytes, path: Path) -> Description:
    """Write the caches below `root` to a bundle. Equal files at the same paths produce identical bundles.

    Files that a compiler is writing or removes during this call are omitted.

    Args:
        root: directory that contains the directories listed in `caches`.
        key: key of the process that filled the caches.
        private_key_pem: Ed25519 private key in PEM.
        path: path of the bundle, which is overwritten.

    Raises:
        ConfigError: the private key cannot be used, or there are no files.
        DestinationError, DiskFull: the bundle cannot be written. A partial file remains.
    """
    with typed(path), tempfile.TemporaryFile(dir=path.parent) as content:
        frames = []
        # Digests are computed from the bytes that were read, so a later change to a file does no harm.
        num_threads = len(os.sched_getaffinity(0))
        with Threads(num_threads, "penstock-compress", waits_for_calls=True) as pool:
            groups = _groups(root)
            # Submit only a few groups at a time, because otherwise the pool would read all of them in advance.
            while some := list(islice(groups, 2 * num_threads)):
                for frame, data in pool.map(_compressed, some):
                    frames.append(frame)
                    content.write(data)
        if not frames:
            raise ConfigError(
                f"there is no compiled code in {root}",
                hint="call restore() before the engine compiles, so that the engine uses this directory",
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
            # Every user who can read the model may read its bundles. Use the file descriptor, because the path may have
            # been replaced.
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
    return description


def describe(raw: bytes, signature: bytes, public_keys_pem: Sequence[bytes]) -> Description:
    """Return the description of a bundle after checking its signature.

    Raises:
        IntegrityError: none of the keys has signed the description.
        FormatError: this version cannot read the description.
        ConfigError: there are no keys, or a key is not an Ed25519 public key in PEM.
    """
    if not public_keys_pem:
        raise ConfigError("no public key is trusted", hint="set PENSTOCK_COMPILE_CACHE_KEYS, or pass public_keys=")
    for pem in public_keys_pem:
        try:
            check_signature(PURPOSE + raw, signature, pem)
            break
        except IntegrityError:
            continue
    else:
        count = len(public_keys_pem)
        keys = "the trusted key" if count == 1 else f"any of the {count} trusted keys"
        raise IntegrityError(f"the bundle is not signed by {keys}")
    return parse(raw)


def parse(raw: bytes) -> Description:
    """Return a description for display, without checking its signature. Raise FormatError for malformed bytes."""
    try:
        return msgspec.json.decode(raw, type=Description)
    except MALFORMED as error:
        raise FormatError(f"the bundle's description cannot be read: {error}") from error


def unpack(description: Description, content: memoryview, root: Path) -> None:
    """Write the files of a bundle to the new directory `root`, which appears only when all files are written.

    After an error no files remain. `remove_partial` removes directories that killed processes left behind.

    Args:
        description: result of `describe`, which has checked the bundle's signature.
        content: the tensor `content` of the bundle.
        root: directory that this call creates, with access only for this user. The parent directory must exist.

    Raises:
        FormatError: a path is outside `root` or outside every cache, or the sizes do not match the content.
        IntegrityError: a file does not match its digest.
        DestinationError, DiskFull: the directory cannot be written.
    """
    frames = _placed(description, content)
    partial_root = root.with_name(f"{root.name}{_PARTIAL}{secrets.token_hex(4)}")
    with typed(root):
        require_space(root.parent, description.nbytes)
        partial_root.mkdir(mode=0o700)
        try:
            # Create each parent separately, because `mkdir` creates missing parents with a different mode.
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
    """Remove directories next to `root` that killed processes left behind. The caller must hold the lock for `root`."""
    for path in root.parent.glob(f"{root.name}{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def _groups(root: Path) -> Iterator[list[tuple[str, bytes, bool]]]:
    """Yield groups of files as (path, content, executable). Every group except the last has at least `_FRAME_BYTES`."""
    group: list[tuple[str, bytes, bool]] = []
    size = 0
    for directory, names, files in os.walk(root):
        # Sort the names, so that equal files produce identical bundles.
        names.sort()
        for name in sorted(files):
            path = Path(directory, name)
            parts = path.relative_to(root).parts
            # A symlink could lead to a file outside the caches.
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
    """Check all sizes and paths, and return the bytes and the files of each frame."""
    if any(frame.nbytes < 0 for frame in description.frames) or content.nbytes != description.content_bytes:
        raise FormatError(
            f"the bundle has {content.nbytes} bytes of content, but its description states a different size"
        )
    sizes = [file.nbytes for frame in description.frames for file in frame.files]
    if min(sizes, default=0) < 0 or sum(sizes) > MAX_BYTES:
        raise FormatError(f"the bundle's files have {sum(sizes)} bytes, but the limit is {MAX_BYTES}")
    placed, start = [], 0
    for frame in description.frames:
        data = content[start : start + frame.nbytes]
        placed.append((data, [(file, _checked(file.path)) for file in frame.files]))
        start += frame.nbytes
    return placed


def _checked(path: str) -> PurePosixPath:
    """Return a path below the root. Raise FormatError for a path that leaves the root or lies outside every cache."""
    parts = path.split("/")
    if any(part in {"", ".", ".."} or "\0" in part for part in parts) or parts[0] not in caches.NAMES or len(parts) < 2:
        raise FormatError(f"the bundle contains {path!r}, which is outside the cache directories")
    return PurePosixPath(path)


def _write(root: Path, frame: _Placed) -> None:
    """Decompress a frame, and write each of its files after checking the file's digest."""
    data, files = frame
    expected = sum(file.nbytes for file, _ in files)
    try:
        # Check the size before decompressing, because zstd allocates the size that the frame states.
        if (stated := zstandard.frame_content_size(data)) != expected:
            raise IntegrityError(f"a frame of the bundle states {stated} bytes, but its files have {expected}")
        raw = memoryview(zstandard.ZstdDecompressor().decompress(data, max_output_size=expected))
    except zstandard.ZstdError as error:
        raise IntegrityError(f"a frame of the bundle cannot be decompressed: {error}") from error
    start = 0
    for file, path in files:
        part = raw[start : start + file.nbytes]
        start += file.nbytes
        if blake3(part).hexdigest() != file.digest:
            raise IntegrityError(f"the bundle's file {file.path} does not match its digest")
        # With O_EXCL a duplicate path raises an error. A path below a regular file raises an error too.
        mode = 0o700 if file.is_executable else 0o600
        with open(root / path, "xb", opener=_opener(mode)) as out:
            out.write(part)


def _opener(mode: int) -> Callable[[str, int], int]:
    return lambda path, flags: os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
