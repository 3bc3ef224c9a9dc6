"""Objects in S3, Google Cloud Storage and Azure: opened, listed, read whole, written whole.

In: a URI. Out: a `Source`, a list of URIs, or bytes. Bytes come by signed URL straight into the caller's buffers
(`http`); where URLs cannot be signed, through obstore and one copy, and the path taken says so.
Not here: credentials and options (`object_stores`), the retries of ranged reads (`http`), the cache (`cache`).
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
from penstock.http.range_request import Arrivals, Origin, Patience, Validators
from penstock.storage.http import HttpSource
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

FETCH_THREADS = 16
"""Threads that read one remote checkpoint, unless the user says otherwise.

Reason: a request waits for its first byte 20-200 ms, and one connection to S3 carries 85-90 MB/s.
Source: AWS, "Performance guidelines for Amazon S3"; benchmarks/results/cpu2_202611/objects.md.
"""

# Least that obstore hands over at once: each piece costs a turn of the interpreter.
_PIECE_BYTES = MIB

MAX_SEEN_KEYS = 10_000_000
"""Keys below a prefix that a listing looks at. Reason: S3 lists some 10,000 a second."""
MAX_LISTED_KEYS = 1_000_000
"""Keys that a listing returns. Reason: the largest checkpoints have some thousand files."""
MAX_LISTED_BYTES = 256 * MIB
"""Of their names. An S3 key has at most 1,024 bytes."""

# A listing of one directory may take this many times `stall_s`: obstore returns all of its pages at once.
_LISTING = 20

T = TypeVar("T")

# Seconds a signed URL is valid; a new one is made at half of that. Session credentials last longer.
_SIGNED_S = 3600

# Of a multipart upload. Source: AWS, "Multipart upload limits": 5 MiB to 5 GiB, at most 10,000 parts: 160 GB.
_PART_BYTES = 16 * MIB
# Parts of one file that are uploaded at once.
_PARTS = 8


class SignedAddress:
    """An object's signed URL, made anew before it expires and after a refusal."""

    def __init__(self, place: ObjectKey) -> None:
        self._place = place
        self._current: tuple[SplitResult, float] | None = None

    def url(self) -> SplitResult:
        """See `Origin.url`."""
        # One attribute for both, read once: another thread may renew it in between.
        current = self._current
        if current is None or time.monotonic() - current[1] > _SIGNED_S / 2:
            signed = _signed(self._place.uri, self._place.store, self._place.key)
            current = self._current = (urlsplit(signed), time.monotonic())
        return current[0]

    def headers(self, url: SplitResult) -> Mapping[str, str]:
        """See `Origin.headers`: all that is needed is in the URL."""
        return {}

    def is_foreign(self, url: SplitResult) -> bool:
        """See `Origin.is_foreign`."""
        return False

    def renew(self, url: SplitResult, status: int) -> bool:
        """See `Origin.renew`. The credentials may have been replaced meanwhile."""
        current = self._current
        if current is not None and current[0] == url:
            self._current = None
        # 400 is S3's answer to an expired session token.
        return status in {400, 401, 403}

    def moved(self, url: SplitResult, location: str) -> str | None:
        """See `Origin.moved`: a signature holds for one host."""
        return "it redirects a signed request; the bucket may be in another region: set AWS_REGION"


class AnonymousAddress:
    """An object's bare URL in a public bucket."""

    def __init__(self, url: SplitResult) -> None:
        self._url = url

    def url(self) -> SplitResult:
        """See `Origin.url`."""
        return self._url

    def headers(self, url: SplitResult) -> Mapping[str, str]:
        """See `Origin.headers`."""
        return {}

    def is_foreign(self, url: SplitResult) -> bool:
        """See `Origin.is_foreign`."""
        return False

    def renew(self, url: SplitResult, status: int) -> bool:
        """See `Origin.renew`."""
        return False

    def moved(self, url: SplitResult, location: str) -> str | None:
        """See `Origin.moved`."""
        return "it redirects; the bucket may be in another region: set AWS_REGION"


class StoreSource:
    """A `Source` through obstore, with one copy: for stores whose URLs cannot be signed.

    Attributes:
        why: why not by signed URL.
    """

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
                    # Another thread waits for a piece: obstore's waits cannot be ended.
                    while (piece := waits.in_helper(partial(next, pieces, None))) is not None:
                        offset += piece.nbytes
                        at = 0
                        for buffer in take(left, piece.nbytes):
                            buffer[:] = piece[at : at + buffer.nbytes]
                            at += buffer.nbytes
                patience.progress()
            except (SourceUnavailable, SourceStalled) as error:
                # obstore has retried. What arrived of a larger piece is lost when the answer breaks off in it, so from
                # now on pieces come as they arrive; then every byte that arrived counts as progress.
                piece_bytes = 1
                if offset > before:
                    patience.progress()
                is_silent = isinstance(error, SourceStalled)
                patience.failed(error.message, byte_range=(offset, stop), silent=is_silent, cause=error)
        return "obstore"

    def _pieces(self, start: int, stop: int, piece_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes `[start, stop)` as obstore hands them over, if the object is still the one opened."""
        check_process()
        options: obstore.GetOptions = {"range": (start, stop)}
        # If-Match compares strongly (RFC 9110, 13.1.1): a weak ETag would never match.
        if self.identity and not self.identity.startswith("W/"):
            options["if_match"] = self.identity
        result = obstore.get(self._place.streaming(), self._place.key, options=options)
        if result.meta["size"] != self.nbytes or (result.meta["e_tag"] or "") != self.identity:
            raise SourceChanged("the object is not the one first seen", uri=self.uri, byte_range=(start, stop))
        if result.range != (start, stop):
            raise SourceUnavailable(f"asked for a range, got {result.range}", uri=self.uri, byte_range=(start, stop))
        stream = result.stream(min_chunk_size=piece_bytes)
        try:
            for piece in stream:
                yield memoryview(piece)
        finally:
            # A connection is closed with the last reference to its answer, and an error's traceback would keep one.
            del result, stream

    def close(self) -> None:
        """See `Source.close`: the store is shared and keeps its connections."""


def open_object(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> Source:
    """Open one object for ranged reads.

    Args:
        uri: s3://, gs:// or az://.
        settings: `retries`, `stall_s`, `ca_file`.
        storage_options: options of the store by obstore's names; they win over the environment.

    Raises:
        ConfigError: the URI or an option is wrong. MissingExtra: see `locate_object`.
        NotFound, PermissionDenied, SourceUnavailable, SourceStalled: as their names say.
    """
    options = storage_options or {}
    place = locate_object(uri, settings=settings, options=options)
    if not place.key or place.key.endswith("/"):
        raise NotFound("names a bucket or prefix, not an object", uri=uri)
    meta = _ask(uri, obstore.head, place.store, place.key)
    address, why = _address(place, settings=settings, options=options)
    if address is None:
        return StoreSource(place, meta, settings=settings, why=why)
    seen = Validators(
        etag=meta["e_tag"] or "",
        last_modified=format_datetime(meta["last_modified"], usegmt=True),
        nbytes=meta["size"],
    )
    return HttpSource(uri, address, seen, settings=settings, trusted=place.trusted)


def _address(place: ObjectKey, *, settings: Settings, options: Mapping[str, str]) -> tuple[Origin | None, str]:
    """Return where to read `place` by URL; or None, and why not."""
    if place.unsignable:
        return None, place.unsignable
    if place.anonymous:
        if not place.root.startswith("s3"):
            return None, "anonymous"
        # A signed URL without its query is the bare one, which obstore has no call for.
        signing_store: Store = anonymous_signing_store(place, settings=settings, options=options)
        url = _signed(place.uri, signing_store, place.key)
        return AnonymousAddress(urlsplit(url)._replace(query="")), ""
    address = SignedAddress(place)
    if place.root.startswith("s3"):
        return address, ""
    # Other stores sign only with a key at hand, which a token or an instance's role is not.
    try:
        waits.in_helper(partial(obstore.sign, place.store, "GET", place.key, timedelta(seconds=_SIGNED_S)))
    except BaseError as error:
        return None, f"cannot sign URLs: {str(error).partition(chr(10))[0][:200]}"
    return address, ""


def list_objects(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Return the objects that `uri` names, sorted: one object, those directly under a prefix, or a glob's matches.

    Args:
        uri: a key, a prefix with or without a trailing slash, or a glob (`*`, `?`, `[...]` within a segment, `**`
            across).

    Raises:
        NotFound: nothing is there. FormatError: the listing has more than `MAX_LISTED_KEYS`, say. Others as
            `open_object`.
    """
    options = storage_options or {}
    place = locate_object(uri, settings=settings, options=options)
    key = place.key
    # An object and a prefix may have one name: the object wins, since a user who means the prefix can add a slash.
    if key and not key.endswith("/") and _exists(place):
        return [uri]
    # A glob matches objects, so a key with a slash at its end is the name of a prefix.
    glob = None if key.endswith("/") else GLOB.search(key)
    prefix = key[: glob.start()].rpartition("/")[0] if glob else key.strip("/")
    nested = glob is not None and ("/" in key[glob.start() :] or "**" in key)
    pattern = glob_pattern(key) if glob else None
    # All keys below the prefix only where the glob needs them: a bucket may have millions.
    pages = _pages_below(place, prefix) if nested else [_directly_below(place, prefix, _LISTING * settings.stall_s)]
    keys: list[str] = []
    num_seen = nbytes = 0
    for page in pages:
        num_seen += len(page)
        # A console's "folder" is an empty object named as the prefix.
        found = [name for name in page if name != prefix and (pattern is None or pattern.fullmatch(name))]
        keys += found
        nbytes += sum(map(len, found))
        _check_bounds(uri, num_seen, len(keys), nbytes)
    if not keys:
        raise NotFound("no such object, prefix or match", uri=uri)
    return sorted(place.root + name for name in keys)


def _pages_below(place: ObjectKey, prefix: str) -> Iterator[list[str]]:
    """Yield all keys below a prefix by pages, each of which has the deadline of its request."""
    pages = _ask(place.uri, obstore.list, place.store, prefix or None, chunk_size=1000)
    while (page := _ask(place.uri, next, pages, None)) is not None:
        yield [meta["path"] for meta in page]


def _directly_below(place: ObjectKey, prefix: str, wait_s: float) -> list[str]:
    """Return the keys directly below a prefix. SourceStalled: they have not all come after `wait_s`."""

    async def ask() -> list[str]:
        # Not the synchronous call: nothing would end that, and an endless listing would fill the memory.
        asked = obstore.list_with_delimiter_async(place.store, prefix or None)
        try:
            found = await asyncio.wait_for(asked, wait_s)
        except TimeoutError as error:
            raise SourceStalled(f"the listing is not complete after {wait_s:g} s", uri=place.uri) from error
        return [meta["path"] for meta in found["objects"]]

    return _ask(place.uri, lambda: asyncio.run(ask()))


def _check_bounds(uri: str, num_seen: int, num_keys: int, nbytes: int) -> None:
    """Raise FormatError for a listing that is too long."""
    for number, limit, what in (
        (num_seen, MAX_SEEN_KEYS, "keys are looked at"),
        (num_keys, MAX_LISTED_KEYS, "keys are listed"),
        (nbytes, MAX_LISTED_BYTES, "characters of keys are listed"),
    ):
        if number > limit:
            hint = "name a longer prefix, or a glob that matches fewer"
            raise FormatError(f"the listing is too long: at most {limit:,} {what}", uri=uri, hint=hint)


def _exists(place: ObjectKey) -> bool:
    """Return whether there is an object of this key."""
    try:
        _ask(place.uri, obstore.head, place.store, place.key)
    except NotFound:
        return False
    return True


def read_small(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> bytes | None:
    """Return a whole small object; None when it is not there.

    A bucket that may be read but not listed answers "forbidden" for what is not there: that is PermissionDenied here.

    Raises:
        FormatError: it is larger than `MAX_SMALL_BYTES`. Others as `open_object`.
    """
    try:
        source = open_object(uri, settings=settings, storage_options=storage_options)
    except NotFound:
        return None
    return read_whole(source, stall_s=settings.stall_s)


def write_small(uri: str, data: bytes, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> None:
    """Write a whole small object (a manifest, a signature); it appears at once or not at all.

    Raises:
        ConfigError, PermissionDenied, SourceUnavailable: as `open_object`.
    """
    place = locate_object(uri, settings=settings, options=storage_options or {})
    # A single PUT is atomic; a multipart upload that dies leaves parts that are billed and in no listing.
    _ask(uri, obstore.put, place.streaming(), place.key, data, use_multipart=False)


def remove_object(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None = None) -> None:
    """Remove an object; none of that name is no error.

    Raises:
        ConfigError, PermissionDenied, SourceUnavailable: as `open_object`.
    """
    place = locate_object(uri, settings=settings, options=storage_options or {})
    with contextlib.suppress(NotFound), mapped(uri):
        obstore.delete(place.store, place.key)


def upload_file(
    uri: str, path: str | os.PathLike[str], *, settings: Settings, storage_options: Mapping[str, str] | None = None
) -> None:
    """Write a local file of any size to an object, in parts.

    Raises:
        ConfigError, PermissionDenied, SourceUnavailable: as `open_object`.
    """
    place = locate_object(uri, settings=settings, options=storage_options or {})

    def put() -> None:
        with open(path, "rb") as file:
            obstore.put(
                place.streaming(),
                place.key,
                file,
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS,
            )

    _ask(uri, put)


def _signed(uri: str, store: Store, key: str) -> str:
    """Return a signed URL. It may take requests: for the credentials of an instance's role, say."""
    return _ask(uri, obstore.sign, store, "GET", key, timedelta(seconds=_SIGNED_S))


def _ask(uri: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return the result of a call of obstore, which no signal and no error of another thread can end."""
    check_process()
    with mapped(uri):
        return waits.in_helper(partial(call, *args, **options))


class ObjectStorage:
    """The storage of s3://, gs:// and az:// URIs: the functions of this module, as a `WritableStorage`."""

    open = staticmethod(open_object)
    list = staticmethod(list_objects)
    read_small = staticmethod(read_small)
    write_small = staticmethod(write_small)
