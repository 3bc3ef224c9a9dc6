"""Save, restore and list the bundles next to a model, in a directory, an object store or a fleet.

A start must not fail because compiled code is missing. If `restore` finds no usable bundle, its report contains the
reason, and the engine compiles into a directory that `save` can read.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock import config as process
from penstock.arguments import require_type
from penstock.config import ConnectionSettings, Settings
from penstock.errors import (
    MALFORMED,
    ConfigError,
    FormatError,
    HubUnavailable,
    IntegrityError,
    NotFound,
    PenstockError,
    SourceChanged,
    SourceError,
    SourceTruncated,
)
from penstock.loader.verify import inspect, read_key
from penstock.logs import log_named
from penstock.report import Summarised, bytes_text
from penstock.storage import is_remote, list_uris, local_path, text_of
from penstock.storage.local import read_bounded
from penstock.storage.locate import display, resolve, sidecar_uri
from penstock.storage.object_stores import locate_object
from penstock.storage.objects import upload_file
from penstock.storage.place import BUNDLES, lock_within
from penstock.storage.weight_set import WeightSet, open_weights
from penstock.storage.write import new_directory, typed
from penstock.types import MIB, DType
from penstock.waits import Threads
from penstock_compile_cache import caches
from penstock_compile_cache.bundle import (
    CONTENT,
    DESCRIPTION,
    MAX_BYTES,
    MAX_DESCRIPTION_BYTES,
    SIGNATURE,
    SIGNATURE_BYTES,
    describe,
    pack,
    parse,
    remove_partial,
    unpack,
)
from penstock_compile_cache.key import Key, key_of

if TYPE_CHECKING:
    import torch

log = log_named("penstock.compile_cache")
REFUSED = "the bundle %s is not used, the engine compiles: %s"
"""Warning for a refused bundle. `Restored.why` has the same reason, so a command shows it only once."""

_SUFFIX = ".safetensors"
_REVISION = re.compile(r"[hw]1-[0-9a-f]{64}")
_MAX_NEAR = 32
"""Maximum number of bundles whose keys `restore` reads in order to report how the closest key differs."""
_LOCK_S = 600.0
"""Maximum wait in seconds for another process on this host that is restoring the same bundle."""
_READ_BYTES = 8 * MIB
"""Number of bytes in each read of a bundle's content."""
_READ_THREADS = 8
"""Number of parallel reads, because an object store limits the rate of each connection."""
_HOLDER_S = 1.0
"""Maximum wait in seconds for a fleet member with a bundle that storage lacks. A compilation takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Summarised):
    """The result of `restore`.

    Attributes:
        is_found: whether compiled code for this key was found.
        source: URI of the bundle, `fleet:NAME`, or the local directory. Empty if there is no bundle.
        why: source of the bundle, or the reason why there is no bundle.
        key: key of this process.
        directory: directory of the caches to which this process's environment variables now point.
        num_files: number of files that this call wrote.
        nbytes: total size in bytes of the files that this call wrote.
        wall_s: duration of the call in seconds.
        not_moved: caches that stay at their previous path, because their programs were imported before the call.
    """

    is_found: bool
    source: str
    why: str
    key: Key
    directory: Path
    num_files: int
    nbytes: int
    wall_s: float
    not_moved: tuple[str, ...]

    def summary(self) -> str:
        """Return one line of text."""
        text = f"compile cache {self.key.id}: "
        if not self.is_found:
            text += f"none, the engine compiles: {self.why}"
        elif self.num_files:
            text += f"{self.num_files} files, {bytes_text(self.nbytes)} from {self.source} in {self.wall_s:.2f} s"
        else:
            text += self.why
        if not self.key.engine_version:
            # A missing package is not an error, because the engine may be the user's own program.
            text += f"; no package {self.key.engine!r} is installed, so the key does not include its version"
        return text + (f"; not moved, already imported: {', '.join(self.not_moved)}" if self.not_moved else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(Summarised):
    """The result of `save`."""

    uri: str
    key: Key
    num_files: int
    nbytes: int
    """Total size of the files in bytes."""
    stored_bytes: int
    """Size of the bundle in bytes."""
    wall_s: float

    def summary(self) -> str:
        """Return one line of text."""
        return (
            f"{self.uri}: {self.num_files} files, {bytes_text(self.nbytes)} in {bytes_text(self.stored_bytes)}, "
            f"written in {self.wall_s:.2f} s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed(Summarised):
    """A bundle that `list_bundles` found."""

    uri: str
    key: Key | None
    """Key of the bundle. None if the bundle was refused for the reason in `fault`."""
    num_files: int
    nbytes: int
    signature: str
    """`good`, `not checked` without a public key, or `refused`."""
    fault: str

    def summary(self) -> str:
        """Return one line of text."""
        if self.key is None:
            return f"{self.uri}: refused: {self.fault}"
        key = self.key
        engine = f"{key.engine} {key.engine_version}".rstrip()
        about = f"{engine}, torch {key.torch}, {key.device}, model {key.model[:16]}"
        extra = "".join(f", {name} {text}" for name, text in sorted(key.config.items()))
        size = f"{self.num_files} files, {bytes_text(self.nbytes)}"
        return f"{self.uri}: {about}{extra}; {size}; signature {self.signature}"


def restore(
    uri: str | os.PathLike[str],
    *,
    engine: str,
    config: Mapping[str, str] | None = None,
    device: str = "cpu",
    at: str | os.PathLike[str] | None = None,
    model: str | None = None,
    public_keys: Sequence[str | os.PathLike[str]] | None = None,
    connection: ConnectionSettings | str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Restored:
    """Fill the caches of this process's compilers from a bundle, and set the environment variables for their paths.

    Call `restore` before the engine is imported or compiles. Without a bundle the caches stay empty.
    A bundle that is missing, unsigned, signed with a different key, corrupt, unreachable or too large for the disk
    raises no error. `Restored.why` contains the reason. No file from a refused bundle is written.

    Args:
        uri: URI of the model, whose headers are read to determine its revision. Bundles are stored next to the model.
        engine: the program that compiles, such as `vllm`, `sglang`, `transformers`, or a name that you choose.
        config: further values that the engine's code depends on, as strings: dtype, parallel sizes, a hash of the
            engine's configuration.
        device: `"cpu"`, `"cuda"` or `"cuda:N"`.
        at: directory or prefix of the bundles. None means `penstock-artifacts` next to the model.
        model: revision or name of the model. None means the revision of the model at `uri`.
        public_keys: paths of Ed25519 public keys in PEM, one of which must have signed the bundle. None means
            `PENSTOCK_COMPILE_CACHE_KEYS`. Without public keys, no bundle is unpacked.
        connection: connection to a hub. The bundle is read from fleet members if possible, and this process serves
            the bundle to other members until the process exits. None means storage only.
        storage_options: see `load`.

    Raises:
        ConfigError: an argument or the cache directory cannot be used.
        NotFound, FormatError, SourceError: the model cannot be opened.
        DestinationError, DiskFull: the directory for the caches cannot be created.
    """
    start_s = time.perf_counter()
    settings = Settings.read()
    place = text_of(uri)
    key = key_of(
        model if model is not None else _revision(place, storage_options), engine=engine, config=config, device=device
    )
    trusted = [read_key(path) for path in (settings.compile_cache_keys if public_keys is None else public_keys)]
    directory = _directory(settings)
    root = directory / key.id
    with typed(root), _locked(root):
        if not (about := _key_path(directory, key.id)).exists():
            about.write_bytes(msgspec.json.encode(key))
        # An earlier process may have found no bundle and compiled nothing.
        _remove_empty(root)
        if root.exists():
            found = _Found(source=str(root), why=f"already in {root}")
        else:
            remove_partial(root)
            bundles = _Bundles(bundles_place(place, at), settings, storage_options)
            found = _find(bundles, key, trusted, root, connection)
            if not found.source:
                root.mkdir(mode=0o700)
    not_moved = tuple(caches.read_already())
    process.set_variables(caches.variables(root))
    return Restored(
        is_found=bool(found.source),
        source=found.source,
        why=found.why,
        key=key,
        directory=root,
        num_files=found.num_files,
        nbytes=found.nbytes,
        wall_s=time.perf_counter() - start_s,
        not_moved=not_moved,
    )


def save(
    uri: str | os.PathLike[str],
    key: Key | str,
    *,
    at: str | os.PathLike[str] | None = None,
    private_key: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> Saved:
    """Write the code that was compiled since `restore`, in any process on this host, to a signed bundle.

    Call `save` after the engine's warm-up, when the engine has compiled everything. A bundle with the same key is
    replaced.

    Args:
        uri, at, storage_options: see `restore`.
        key: `Restored.key`, or the id of this key. If the key contains a revision of the model, the model at `uri`
            must have the same revision.
        private_key: path of an Ed25519 private key in PEM. None means `PENSTOCK_COMPILE_CACHE_SIGNING_KEY`.

    Raises:
        ConfigError: an argument is wrong, there is no private key, the key belongs to a different model, or nothing was
            compiled since `restore`.
        NotFound, FormatError, SourceError: the model cannot be opened.
        DestinationError, DiskFull, SourceError: the bundle cannot be written, and an existing one is unchanged.
    """
    start_s = time.perf_counter()
    settings = Settings.read()
    signing_key = settings.compile_cache_signing_key if private_key is None else private_key
    if signing_key is None:
        hint = "set PENSTOCK_COMPILE_CACHE_SIGNING_KEY, or pass private_key="
        raise ConfigError("there is no private key to sign the bundle", hint=hint)
    pem = read_key(signing_key)
    directory = _directory(settings)
    if isinstance(key, str):
        key = _key_of_id(directory, key)
    require_type("key", key, Key, "the key of a restore, or its id")
    target = _Bundles(bundles_place(uri, at), settings, storage_options).uri_of(key)
    if is_remote(target):
        # Check the destination now, because an invalid destination must raise before the files are packed.
        locate_object(target, settings=settings, options=storage_options or {})
    _require_model_of(key, text_of(uri), storage_options)
    # Write a local bundle on the target's file system, because a rename is atomic only within one file system.
    path = Path(local_path(target)) if not is_remote(target) else directory / f"{key.id}{_SUFFIX}"
    # Use a name that cannot be guessed. Otherwise users with access to the directory could plant a symlink.
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with typed(path), new_directory(path.parent):
        try:
            description = pack(directory / key.id, key, pem, new)
            stored_bytes = new.stat().st_size
            if is_remote(target):
                upload_file(target, new, settings=settings, storage_options=storage_options)
            else:
                os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
    return Saved(
        uri=display(target),
        key=key,
        num_files=description.num_files,
        nbytes=description.nbytes,
        stored_bytes=stored_bytes,
        wall_s=time.perf_counter() - start_s,
    )


def list_bundles(
    uri: str | os.PathLike[str],
    *,
    at: str | os.PathLike[str] | None = None,
    public_keys: Sequence[str | os.PathLike[str]] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[Listed]:
    """Return the bundles next to a model, sorted by file name.

    Args:
        uri, at, public_keys, storage_options: see `restore`.

    Raises:
        ConfigError: a public key cannot be read.
        NotFound: the model does not exist, and `at` is None.
        SourceError: the directory or prefix cannot be listed.
    """
    settings = Settings.read()
    trusted = [read_key(path) for path in (settings.compile_cache_keys if public_keys is None else public_keys)]
    bundles = list(_Bundles(bundles_place(uri, at), settings, storage_options).listed(trusted))
    if not bundles and at is None:
        # An empty result for a mistyped path would hide the mistake.
        resolve(uri, settings=settings, storage_options=storage_options)
    return bundles


def bundles_place(uri: str | os.PathLike[str], at: str | os.PathLike[str] | None) -> str:
    """Return the directory or prefix for the bundles of a model. See `restore` for the arguments."""
    return text_of(at) if at is not None else _place_of(text_of(uri))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The source of a bundle, or the reason why there is no bundle."""

    source: str = ""
    why: str = ""
    num_files: int = 0
    nbytes: int = 0


class _Bundles:
    def __init__(self, place: str, settings: Settings, storage_options: Mapping[str, str] | None) -> None:
        self.place = place.rstrip("/")
        self._settings = settings
        self.storage_options = storage_options

    def uri_of(self, key: Key) -> str:
        return f"{self.place}/{key.id}{_SUFFIX}"

    def open(self, uri: str) -> WeightSet:
        """Open a bundle, whose tensors `_read_part` reads. Raise the same errors as `open_weights`."""
        return open_weights(uri, settings=self._settings, storage_options=self.storage_options)

    def listed(self, trusted: Sequence[bytes]) -> Iterator[Listed]:
        try:
            uris = list_uris(self.place, settings=self._settings, storage_options=self.storage_options)
        except NotFound:
            return
        for uri in uris:
            if not uri.endswith(_SUFFIX):
                continue
            try:
                with self.open(uri) as weights:
                    raw, signature = _described(partial(_read_part, weights))
                about = describe(raw, signature, trusted) if trusted else parse(raw)
            except (IntegrityError, FormatError, NotFound, SourceTruncated, SourceChanged) as error:
                # A corrupt bundle, or a bundle that is being replaced, must not hide the other bundles.
                yield Listed(uri=uri, key=None, num_files=0, nbytes=0, signature="refused", fault=error.message)
                continue
            yield Listed(
                uri=uri,
                key=about.key,
                num_files=about.num_files,
                nbytes=about.nbytes,
                signature="good" if trusted else "not checked",
                fault="",
            )


def _find(
    bundles: _Bundles, key: Key, trusted: Sequence[bytes], root: Path, connection: ConnectionSettings | str | None
) -> _Found:
    """Unpack the bundle for a key to `root`, if a trusted key has signed the bundle."""
    if not trusted:
        return _Found(why="no public key is trusted (PENSTOCK_COMPILE_CACHE_KEYS)")
    uri = bundles.uri_of(key)
    try:
        with _opened(uri, key, connection, bundles) as (part, source):
            description = describe(*_described(part), trusted)
            # A valid bundle under another bundle's name may contain code for a different machine.
            if description.key != key:
                raise IntegrityError(f"the bundle has a different key: {'; '.join(key.differences(description.key))}")
            unpack(description, part(CONTENT, min(description.content_bytes, MAX_BYTES)), root)
        if description.is_tied and description.directory != str(root):
            log.warning(
                "the bundle %s was saved in %s and is now in %s, so torch tunes some kernels again; set the same "
                "PENSTOCK_COMPILE_CACHE_DIR on all hosts",
                display(uri),
                description.directory,
                root,
            )
    except NotFound:
        return _Found(why=_nearest(bundles, key, trusted))
    except ConfigError:
        raise
    except PenstockError as error:
        log.warning(REFUSED, display(uri), error.message)
        return _Found(why=f"{display(uri)} is not used: {error.message}")
    return _Found(source=source, why=f"from {source}", num_files=description.num_files, nbytes=description.nbytes)


_Part = Callable[[str, int], memoryview]
"""A function that returns the bytes of a bundle's tensor, for a name and a maximum number of bytes.

It raises FormatError if the tensor is missing, does not consist of bytes, or is longer than the maximum.
"""


def _described(part: _Part) -> tuple[bytes, bytes]:
    # Copy the description and the signature, because they must not change after the check.
    return bytes(part(DESCRIPTION, MAX_DESCRIPTION_BYTES)), bytes(part(SIGNATURE, SIGNATURE_BYTES))


@contextmanager
def _opened(
    uri: str, key: Key, connection: ConnectionSettings | str | None, bundles: _Bundles
) -> Iterator[tuple[_Part, str]]:
    """Yield a bundle's tensors and their source: the fleet's members, or else storage."""
    if connection is not None:
        name = fleet_name(key.id)
        try:
            tensors, is_shared = _fetch(name, uri, connection, bundles)
        except HubUnavailable as error:
            text = "the bundle is read from storage, %s, instead of fleet %s: %s"
            log.warning(text, display(uri), name, error.message)
        else:
            yield partial(_bytes_of, tensors), f"fleet:{name}" if is_shared else uri
            return
    with bundles.open(uri) as weights:
        yield partial(_read_part, weights), uri


def _fetch(
    name: str, uri: str, connection: ConnectionSettings | str, bundles: _Bundles
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return a bundle's tensors from its fleet, and whether members sent bytes, or raise HubUnavailable."""
    from penstock.fetcher.join import join

    fleet = join(name, connection=connection)
    tensors: dict[str, torch.Tensor] = {}
    try:
        try:
            report = fleet.fetch(tensors, fallback=uri, storage_options=bundles.storage_options, progress=False)
        except NotFound:
            # A member may have a bundle that storage lacks, for example if the member's engine is not allowed to write
            # to storage.
            report = fleet.fetch(tensors, timeout_s=_HOLDER_S, progress=False)
    except BaseException:
        fleet.leave()
        raise
    # This process serves the bundle to other members until it exits.
    atexit.register(fleet.leave, 0.0)
    return tensors, report.storage_bytes < report.nbytes


def _read_part(weights: WeightSet, name: str, most_bytes: int) -> memoryview:
    """Read a tensor of a bundle from storage. See `_Part`."""
    # Do not call `load`, because importing torch would make `penstock compile-cache restore` 2 s slower.
    table = weights.manifest.tensors
    row = table.names.index(name) if name in table.names else None
    if row is None or table.dtypes[row] != DType.U8 or len(table.shapes[row]) != 1:
        raise _no_part(name, is_there=row is not None)
    nbytes, start = int(table.nbytes[row]), int(table.offset[row])
    # Check the size before allocating memory, because the header may state any number.
    _check_size(name, nbytes, most_bytes)
    source, data = weights.sources[int(table.file_index[row])], np.empty(nbytes, np.uint8).data

    def read(at: int) -> None:
        source.readv(start + at, [data[at : at + _READ_BYTES]])

    with Threads(_READ_THREADS, "penstock-bundle", waits_for_calls=True) as pool:
        for _ in pool.map(read, range(0, nbytes, _READ_BYTES)):
            pass
    return data


def fleet_name(bundle_id: str) -> str:
    """Return the name of the fleet whose members exchange a bundle."""
    return f"artifacts-{bundle_id}"


def _nearest(bundles: _Bundles, key: Key, trusted: Sequence[bytes]) -> str:
    """Return the reason why there is no bundle for a key, such as how the closest key differs."""
    try:
        keys = [bundle.key for bundle in islice(bundles.listed(trusted), _MAX_NEAR) if bundle.key is not None]
    except SourceError as error:
        return f"{display(bundles.place)} has no bundle for this key, and cannot be listed: {error.message}"
    if not keys:
        return f"there is no bundle in {display(bundles.place)}"
    nearest = min((key.differences(one) for one in keys), key=len)
    return f"{display(bundles.place)} has no bundle for this key; the nearest one has {'; '.join(nearest)}"


def _bytes_of(tensors: Mapping[str, torch.Tensor], name: str, most_bytes: int) -> memoryview:
    """Return the bytes of a bundle's tensor without a copy. See `_Part`."""
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != 1 or str(tensor.dtype) != "torch.uint8":
        raise _no_part(name, is_there=tensor is not None)
    _check_size(name, tensor.nbytes, most_bytes)
    return tensor.numpy().data


def _check_size(name: str, nbytes: int, most_bytes: int) -> None:
    if nbytes > most_bytes:
        raise FormatError(f"the file is not a bundle: its {name} has {nbytes} bytes, but the limit is {most_bytes}")


def _no_part(name: str, *, is_there: bool) -> FormatError:
    """Return the error for a tensor that is missing or does not consist of bytes."""
    # The description is read before the signature, so a file that lacks only the signature is a bundle.
    if name == SIGNATURE and not is_there:
        return FormatError("the bundle is not signed")
    return FormatError(f"the file is not a bundle: it has no bytes named {name!r}")


def _remove_empty(root: Path) -> None:
    """Remove a directory tree that contains no files."""
    for directory, _, _ in os.walk(root, topdown=False):
        # `rmdir` fails for a directory with files, so a file that appears in the meantime is not lost.
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _revision(uri: str, storage_options: Mapping[str, str] | None) -> str:
    return inspect(uri, storage_options=storage_options).manifest.revision


def _require_model_of(key: Key, uri: str, storage_options: Mapping[str, str] | None) -> None:
    """Raise ConfigError if the revision of the model at a URI differs from the revision in the key."""
    revision = _revision(uri, storage_options)
    # A key may contain a name that the user chose instead of a revision, and a name may stand for several models.
    if _REVISION.fullmatch(key.model) and key.model != revision:
        raise ConfigError(
            f"the compiled code {key.id} is for a model with revision {key.model[:19]}, but the model at "
            f"{display(uri)} has {revision[:19]}, so no restore would find the bundle",
            hint="pass the restored model, or restore again, because a new manifest changes the revision",
        )


def _place_of(uri: str) -> str:
    return f"{sidecar_uri(uri).rpartition('/')[0] or '.'}/{BUNDLES}"


def _key_path(directory: Path, bundle_id: str) -> Path:
    return directory / f"{bundle_id}.json"


def _key_of_id(directory: Path, bundle_id: str) -> Key:
    """Return the key of an earlier `restore` on this host. Raise ConfigError for an unknown id."""
    try:
        raw = read_bounded(str(_key_path(directory, bundle_id)), MIB) if bundle_id.isalnum() else b""
        return msgspec.json.decode(raw, type=Key)
    except (NotFound, *MALFORMED) as error:
        known = ", ".join(sorted(path.stem for path in directory.glob("*.json"))) or "none"
        hint = f"known ids: {known}"
        raise ConfigError(f"no restore has the id {bundle_id!r}", hint=hint) from error


def _directory(settings: Settings) -> Path:
    """Return the directory of all caches. Raise ConfigError unless only this user can write to the directory."""
    directory = settings.compile_cache_dir or process.home_cache("compile-cache")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A symlink could lead to a directory of a different user.
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(
            f"cannot create the directory for compiled code: {error}", hint="set PENSTOCK_COMPILE_CACHE_DIR"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        hint = "run chmod 700 on the directory, or set PENSTOCK_COMPILE_CACHE_DIR to another directory"
        raise ConfigError(f"other users can write to {directory}, so code from it cannot be trusted", hint=hint)
    return directory


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the lock for a directory of caches, so that only one rank on a host restores the caches."""
    with open(root.with_name(f"{root.name}.lock"), "a", encoding="ascii") as file:
        try:
            lock_within(file.fileno(), _LOCK_S)
        except BlockingIOError as error:
            message = f"another process has held {file.name} for {_LOCK_S:.0f} s"
            raise ConfigError(message, hint="stop that process") from error
        yield
