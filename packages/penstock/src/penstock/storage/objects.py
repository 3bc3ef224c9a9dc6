"""Objects in S3, Google Cloud Storage and Azure: open, list, read and write them.

Reads use signed URLs and fill the caller's buffers directly, see `storage.http`. If URLs cannot be signed, reads go
through obstore with one extra copy. `object_stores` handles credentials and options.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from email.utils import format_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import obstore
from obstore.exceptions import BaseError

from penstock import waits
from penstock.config import Settings
from penstock.errors import FormatError, NotFound, SourceChanged, SourceStalled, SourceUnavailable
from penstock.http.range_request import Arrivals, Origin, Patience, RequestFailed, Validators
from penstock.storage.http import HttpSource, PlainOrigin
from penstock.storage.object_stores import (
    ObjectKey,
    Store,
    anonymous_signing_store,
    check_process,
    locate_object,
    mapped,
)
from penstock.storage.source import GLOB, Source, glob_pattern, read_whole, span, take
from penstock.types import MIB

if TYPE_CHECKING:
    from obstore import ObjectMeta

# Minimum size of the pieces that obstore returns, because each piece acquires the GIL.
_PIECE_BYTES = MIB

MAX_SEEN_KEYS = 10_000_000
"""Maximum number of keys that a listing inspects. S3 lists about 10,000 keys per second."""
MAX_LISTED_KEYS = 1_000_000
"""Maximum number of keys that a listing returns. The largest checkpoints have a few thousand files."""
MAX_LISTED_BYTES = 256 * MIB
"""Maximum total length of the returned keys. An S3 key has at most 1,024 bytes."""

# Deadline for listing one directory, as a multiple of `stall_s`. obstore returns all pages of the listing at once.
_LISTING = 20

T = TypeVar("T")

# Seconds that a signed URL is valid. It is renewed after half of that time.
_SIGNED_S = 3600

# Part size of an upload. S3 allows 10,000 parts, that is 160 GB. Source: AWS, "Multipart upload limits".
_PART_BYTES = 16 * MIB
_PARTS = 8


class SignedOrigin:
    """An object's signed URL, renewed before it expires and after a refusal."""

    def __init__(self, place: ObjectKey) -> None:
        self._place = place
        self._current: tuple[SplitResult, float] | None = None

    def url(self) -> SplitResult:
        """See `Origin.url`."""
        # Store the URL and its time in one attribute, because another thread may renew the URL.
        current = self._current
        if current is None or time.monotonic() - current[1] > _SIGNED_S / 2:
            signed = _signed(self._place.uri, self._place.store, self._place.key)
            current = self._current = (urlsplit(signed), time.monotonic())
        return current[0]

    def headers(self, url: SplitResult) -> Mapping[str, str]:
        """See `Origin.headers`. A signed URL needs no headers."""
        return {}

    def is_redirected(self, url: SplitResult) -> bool:
        """See `Origin.is_redirected`."""
        return False

    def renew(self, url: SplitResult, status: int) -> bool:
        """See `Origin.renew`. A new signature may succeed, because the credentials may have been replaced."""
        current = self._current
        if current is not None and current[0] == url:
            self._current = None
        return status in {400, 401, 403}

    def moved(self, url: SplitResult, location: str) -> str | None:
        """See `Origin.moved`. A signature is valid for one host only."""
        return "the server redirects a signed request; the bucket may be in another region: set AWS_REGION"


class AnonymousOrigin(PlainOrigin):
    """The plain URL of an object in a public bucket."""

    def moved(self, url: SplitResult, location: str) -> str | None:
        """See `Origin.moved`."""
        return "the server redirects; the bucket may be in another region: set AWS_REGION"


class StoreSource:
    """A `Source` that reads through obstore with one extra copy. `why` gives the reason why URLs cannot be signed."""

    def __init__(self, place: ObjectKey, meta: ObjectMeta, *, settings: Settings, why: str) -> None:
        self.uri = place.uri
        self.nbytes = meta["size"]
        self.identity = meta["e_tag"] or ""
        self.why = why
        self._place = place
        self._settings = settings
        self._arrivals = Arrivals()

    def readv(self, offset: int, buffers: Sequence[memoryview]) -> str:
        """See `Source.readv`."""
        stop, left = span(self, offset, buffers)
        patience = Patience(self.uri, self._settings, arrivals=self._arrivals)
        piece_bytes = _PIECE_BYTES
        while left:
            before = offset
            try:
                with mapped(self.uri, (offset, stop)):
                    pieces = self._pieces(offset, stop, piece_bytes)
                    # obstore's waits cannot be interrupted, so a helper thread waits.
                    while (piece := waits.in_helper(partial(next, pieces, None))) is not None:
                        offset += piece.nbytes
                        at = 0
                        for buffer in take(left, piece.nbytes):
                            buffer[:] = piece[at : at + buffer.nbytes]
                            at += buffer.nbytes
                patience.progress()
            except (SourceUnavailable, SourceStalled) as error:
                # obstore has already retried. If a response ends inside a large piece, the bytes of that piece are
                # lost, so continue with small pieces, in which every byte counts as progress.
                piece_bytes = 1
                if offset > before:
                    patience.progress()
                is_silent = isinstance(error, SourceStalled)
                patience.pause(RequestFailed(error.message, silent=is_silent, cause=error), (offset, stop))
        return "obstore"

    def _pieces(self, start: int, stop: int, piece_bytes: int) -> Iterator[memoryview]:
        check_process()
        options: obstore.GetOptions = {"range": (start, stop)}
        # If-Match needs strong ETags (RFC 9110, 13.1.1).
        if self.identity and not self.identity.startswith("W/"):
            options["if_match"] = self.identity
        result = obstore.get(self._place.streaming(), self._place.key, options=options)
        if result.meta["size"] != self.nbytes or (result.meta["e_tag"] or "") != self.identity:
            raise SourceChanged("the object has changed since it was opened", uri=self.uri, byte_range=(start, stop))
        if result.range != (start, stop):
            message = f"the server answered with bytes {result.range}"
            raise SourceUnavailable(message, uri=self.uri, byte_range=(start, stop))
        stream = result.stream(min_chunk_size=piece_bytes)
        try:
            for piece in stream:
                yield memoryview(piece)
        finally:
            # A traceback would keep the response alive and its connection open.
            del result, stream

    def close(self) -> None:
        """See `Source.close`. The connections stay open in the shared store."""


def open_object(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> Source:
    """Open one object for ranged reads. Raises ConfigError, MissingExtra or SourceError."""
    options = storage_options or {}
    place = locate_object(uri, settings=settings, options=options)
    if not place.key or place.key.endswith("/"):
        raise NotFound("the URI names a bucket or prefix, not an object", uri=uri)
    meta = _ask(uri, obstore.head, place.store, place.key)
    origin, why = _origin(place, settings=settings, options=options)
    if origin is None:
        return StoreSource(place, meta, settings=settings, why=why)
    seen = Validators(
        etag=meta["e_tag"] or "", last_modified=format_datetime(meta["last_modified"], usegmt=True), nbytes=meta["size"]
    )
    return HttpSource(uri, origin, seen, settings=settings, trusted=place.trusted)


def _origin(place: ObjectKey, *, settings: Settings, options: Mapping[str, str]) -> tuple[Origin | None, str]:
    """Return `(origin, "")` for reads by URL, or `(None, reason)` if the object cannot be read by URL."""
    if place.unsignable:
        return None, place.unsignable
    if place.anonymous:
        if not place.root.startswith("s3"):
            return None, "anonymous"
        # obstore cannot return a plain URL, so sign one and remove the query.
        signing_store: Store = anonymous_signing_store(place, settings=settings, options=options)
        url = urlsplit(_signed(place.uri, signing_store, place.key))
        plain = url._replace(netloc=url.netloc.rpartition("@")[2], query="")
        return AnonymousOrigin(plain.geturl(), {}), ""
    origin = SignedOrigin(place)
    if place.root.startswith("s3"):
        return origin, ""
    # Stores other than S3 can sign only with a key, not with a token or an instance's role.
    try:
        waits.in_helper(partial(obstore.sign, place.store, "GET", place.key, timedelta(seconds=_SIGNED_S)))
    except BaseError as error:
        return None, f"cannot sign URLs: {str(error).partition(chr(10))[0][:200]}"
    return origin, ""


def list_objects(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Return the sorted objects that `uri` names: one object, all objects directly under a prefix, or a glob's matches.

    In a glob, `*`, `?` and `[...]` match within a segment, and `**` across segments. Raises NotFound if no object
    matches, and FormatError if the listing exceeds a limit, such as `MAX_LISTED_KEYS`.
    """
    options = storage_options or {}
    place = locate_object(uri, settings=settings, options=options)
    key = place.key
    # An object takes precedence over a prefix with the same name. A trailing slash selects the prefix.
    if key and not key.endswith("/"):
        with contextlib.suppress(NotFound):
            _ask(uri, obstore.head, place.store, key)
            return [uri]
    glob = None if key.endswith("/") else GLOB.search(key)
    prefix = key[: glob.start()].rpartition("/")[0] if glob else key.strip("/")
    nested = glob is not None and ("/" in key[glob.start() :] or "**" in key)
    pattern = glob_pattern(key) if glob else None
    # List all keys below the prefix only if the glob needs them, because a bucket may have millions of keys.
    pages = _pages_below(place, prefix) if nested else [_directly_below(place, prefix, _LISTING * settings.stall_s)]
    keys: list[str] = []
    num_seen = nbytes = 0
    for page in pages:
        num_seen += len(page)
        # Some consoles create an empty object with the name of the prefix.
        found = [name for name in page if name != prefix and (pattern is None or pattern.fullmatch(name))]
        keys += found
        nbytes += sum(map(len, found))
        for number, limit, what in (
            (num_seen, MAX_SEEN_KEYS, "keys to inspect"),
            (len(keys), MAX_LISTED_KEYS, "keys"),
            (nbytes, MAX_LISTED_BYTES, "characters in its keys"),
        ):
            if number > limit:
                hint = "use a longer prefix, or a glob with fewer matches"
                raise FormatError(f"the listing is too long: it has more than {limit:,} {what}", uri=uri, hint=hint)
    if not keys:
        raise NotFound("no object or prefix matches", uri=uri)
    return sorted(place.root + name for name in keys)


def _pages_below(place: ObjectKey, prefix: str) -> Iterator[list[str]]:
    pages = _ask(place.uri, obstore.list, place.store, prefix or None, chunk_size=1000)
    while (page := _ask(place.uri, next, pages, None)) is not None:
        yield [meta["path"] for meta in page]


def _directly_below(place: ObjectKey, prefix: str, wait_s: float) -> list[str]:
    async def ask() -> list[str]:
        # Set a deadline, because the synchronous call cannot be interrupted and an endless listing would fill memory.
        listing = obstore.list_with_delimiter_async(place.store, prefix or None)
        try:
            found = await asyncio.wait_for(listing, wait_s)
        except TimeoutError as error:
            raise SourceStalled(f"the listing is not complete after {wait_s:g} s", uri=place.uri) from error
        return [meta["path"] for meta in found["objects"]]

    return _ask(place.uri, lambda: asyncio.run(ask()))


def read_small(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> bytes | None:
    """Return a small object, or None if it does not exist.

    If the user may read but not list the bucket, a missing object raises PermissionDenied.
    """
    try:
        source = open_object(uri, settings=settings, storage_options=storage_options)
    except NotFound:
        return None
    return read_whole(source, stall_s=settings.stall_s)


def write_small(uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> None:
    """Write a small object (a manifest, a signature) atomically. Raises the same errors as `open_object`."""
    place = locate_object(uri, settings=settings, options=storage_options or {})
    # A single PUT is atomic. An interrupted multipart upload would leave parts that cost money but are not listed.
    _ask(uri, obstore.put, place.streaming(), place.key, data, use_multipart=False)


def remove_object(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> None:
    """Remove an object, if it exists. Raises the same errors as `open_object`."""
    place = locate_object(uri, settings=settings, options=storage_options or {})
    with contextlib.suppress(NotFound), mapped(uri):
        obstore.delete(place.store, place.key)


def upload_file(
    uri: str, path: str | os.PathLike[str], *, settings: Settings, storage_options: Mapping[str, str] | None = None
) -> None:
    """Upload a local file of any size in parts. Raises the same errors as `open_object`."""
    place = locate_object(uri, settings=settings, options=storage_options or {})

    def put() -> None:
        with open(path, "rb") as file:
            obstore.put(
                place.streaming(), place.key, file, use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_PARTS
            )

    _ask(uri, put)


def _signed(uri: str, store: Store, key: str) -> str:
    """Return a signed URL. Signing may send requests, for example for an instance's role."""
    return _ask(uri, obstore.sign, store, "GET", key, timedelta(seconds=_SIGNED_S))


def _ask(uri: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call obstore in a helper thread, because its calls cannot be interrupted."""
    check_process()
    with mapped(uri):
        return waits.in_helper(partial(call, *args, **options))


class ObjectStorage:
    """The storage for s3://, gs:// and az:// URIs."""

    open = staticmethod(open_object)
    list = staticmethod(list_objects)
    read_small = staticmethod(read_small)
    write_small = staticmethod(write_small)
