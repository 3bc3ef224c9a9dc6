"""The Run:ai Model Streamer's functions that list and download a model's files."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from penstock.errors import ConfigError, NotFound, PenstockError, also
from penstock.spi import Settings, download_files, list_uris, path_inside, typed_errors_of_writing
from penstock_hf.runai_streamer.settings import runai_settings

_SCHEMES = ("s3://", "gs://", "az://")


@dataclass(slots=True)
class S3Credentials:
    """Credentials for an S3 store. A field that is None is read from the usual AWS environment variables and files."""

    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None
    region_name: str | None = None
    endpoint: str | None = None

    # Omit the secret keys, because programs may log this object.
    def __repr__(self) -> str:
        return f"S3Credentials(endpoint={self.endpoint!r}, region_name={self.region_name!r})"


def is_object(path: str) -> bool:
    """Return whether a path is in an object store."""
    return path.startswith(_SCHEMES)


def storage_options(path: str, credentials: S3Credentials | None) -> dict[str, str] | None:
    """Return the storage options for a path: from Run:ai's environment variables, overridden by the credentials."""
    if not path.startswith("s3://"):
        return None
    options = dict(runai_settings().storage_options)
    if credentials is not None:
        fields = {
            "access_key_id": credentials.access_key_id,
            "secret_access_key": credentials.secret_access_key,
            "session_token": credentials.session_token,
            "region": credentials.region_name,
            "endpoint": credentials.endpoint,
        }
        options |= {name: value for name, value in fields.items() if value is not None}
    return options


@contextlib.contextmanager
def raising_value_errors() -> Iterator[None]:
    """Raise Penstock errors as instances of the classes that programs for the Run:ai Model Streamer catch.

    This is ValueError, and for an invalid argument also the original's class if the program has imported the original.
    """
    try:
        yield
    except PenstockError as error:
        original = sys.modules.get("runai_model_streamer.file_streamer.file_streamer")
        theirs = getattr(original, "RunaiStreamerInvalidInputException", None)
        others = [theirs] if theirs is not None and isinstance(error, ConfigError) else []
        raise also(error, ValueError, *others) from error.__cause__


def list_safetensors(path: str, s3_credentials: S3Credentials | None = None) -> list[str]:
    """Return the `*.safetensors` files directly in a directory or prefix. The list may be empty."""
    if not is_object(path):
        return glob.glob(os.path.join(glob.escape(path), "*.safetensors"))
    with raising_value_errors():
        uris = _list(path, s3_credentials, recursive=False)
    return [uri for uri in uris if uri.endswith(".safetensors")]


def list_objects(
    path: str,
    credentials: S3Credentials | None,
    *,
    recursive: bool,
    allow: Sequence[str] | None,
    ignore: Sequence[str] | None,
) -> list[str]:
    """Return the objects under a prefix whose keys match a pattern in `allow` and no pattern in `ignore` (fnmatch)."""
    uris = _list(path, credentials, recursive=recursive)
    # As in the original, patterns apply to the whole key, without the bucket.
    bucket = path[: path.index("/", path.index("://") + 3) + 1] if "/" in path.partition("://")[2] else path
    keys = matching([uri.removeprefix(bucket) for uri in uris], allow, ignore)
    return [bucket + key for key in keys]


def matching(paths: Sequence[str], allow: Sequence[str] | None, ignore: Sequence[str] | None) -> list[str]:
    """Return the paths that match a pattern in `allow` (None allows all) and no pattern in `ignore` (fnmatch)."""
    return [
        path
        for path in paths
        if (allow is None or any(fnmatch.fnmatch(path, pattern) for pattern in allow))
        and not any(fnmatch.fnmatch(path, pattern) for pattern in ignore or ())
    ]


def _list(path: str, credentials: S3Credentials | None, *, recursive: bool) -> list[str]:
    """Return the URIs of the objects under a prefix. The list may be empty."""
    prefix = path.rstrip("/")
    options = storage_options(path, credentials)
    try:
        return list_uris(
            f"{prefix}/**" if recursive else f"{prefix}/", settings=Settings.read(), storage_options=options
        )
    except NotFound:
        return []


def pull_files(
    model_path: str,
    dst: str,
    allow_pattern: list[str] | None = None,
    ignore_pattern: list[str] | None = None,
    s3_credentials: S3Credentials | None = None,
) -> None:
    """Download every object under a prefix, at any depth, that matches `allow_pattern` and not `ignore_pattern`.

    A file appears under its name only when it is complete. Patterns are fnmatch patterns that must match the whole key.

    Raises:
        NotImplementedError: `model_path` is not in an object store, as in the original.
        ValueError (also a PenstockError): the store failed, or a key leads outside `dst`. Complete files stay.
    """
    if not is_object(model_path):
        raise NotImplementedError("pull_files accepts only s3://, gs:// and az:// paths")
    options = storage_options(model_path, s3_credentials)
    root = model_path.rstrip("/") + "/"
    with raising_value_errors():
        for uri in list_objects(root, s3_credentials, recursive=True, allow=allow_pattern, ignore=ignore_pattern):
            _download(uri, path_inside(Path(dst), uri.removeprefix(root), uri=uri), options)


def _download(uri: str, place: Path, options: Mapping[str, str] | None) -> None:
    """Download one object to a path. The file appears at the path only when the file is complete."""
    part = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    try:
        download_files({uri: part}, settings=Settings.read(), storage_options=options)
        with typed_errors_of_writing(place):
            os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)


class ObjectStorageModel:
    """A model's files, downloaded once into a directory that the processes on a host share. A context manager.

    The first process downloads the files, and other processes wait for it. If the download fails, the next process
    downloads again. The lock file is next to the directory `dir`, and a marker file in `dir` shows that `dir` is
    complete. `pull_files` and `with` acquire the lock. A `model_path` outside an object store raises ValueError.
    """

    SENTINEL_NAME = ".runai_complete"

    def __init__(self, model_path: str, dst: str, s3_credentials: S3Credentials | None = None) -> None:
        if not is_object(model_path):
            raise ValueError(f"model_path {model_path!r} does not begin with s3://, gs:// or az://")
        self.dir = dst.rstrip("/") or "/"
        self._model_path = model_path
        self._credentials = s3_credentials
        self._mark = Path(self.dir) / self.SENTINEL_NAME
        self._lock: IO[str] | None = None
        self._is_whole = False

    def _acquire(self) -> None:
        """On the first call, lock the directory and check whether it is complete. Empty an incomplete directory."""
        if self._lock is not None:
            return
        # The lock is held until `__exit__`. The kernel releases it even if the process is killed.
        lock = open(self.dir + ".lock", "a")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if not self._mark.exists():
                # Release the shared lock before the exclusive lock, because two shared locks would deadlock.
                fcntl.flock(lock, fcntl.LOCK_UN)
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._is_whole = self._mark.exists()
            if self._is_whole:
                fcntl.flock(lock, fcntl.LOCK_SH)
            else:
                shutil.rmtree(self.dir, ignore_errors=True)
                os.makedirs(self.dir)
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    def pull_files(self, allow_pattern: list[str] | None = None, ignore_pattern: list[str] | None = None) -> None:
        """Run `pull_files` with `dir` as the destination, unless another process has already downloaded the files."""
        self._acquire()
        if not self._is_whole:
            pull_files(self._model_path, self.dir, allow_pattern, ignore_pattern, self._credentials)

    def __enter__(self) -> Self:
        self._acquire()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc_type is None and not self._is_whole:
                if not any(Path(self.dir).iterdir()):
                    raise RuntimeError(f"no files were found under {self._model_path!r}")
                self._mark.touch()
        finally:
            # Closing the file releases the lock.
            if self._lock is not None:
                self._lock.close()

    def __del__(self) -> None:
        lock = getattr(self, "_lock", None)
        if lock is not None:
            lock.close()
