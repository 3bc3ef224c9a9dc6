"""A set of files into an object store: shards by multipart upload, what makes them a set last.

In: an `OutputSet` that is complete, small files. Out: objects under a prefix.
Not here: reading objects (`objects`), the local way (`output`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import obstore

from penstock.config import Settings
from penstock.errors import ConfigError, NotFound
from penstock.storage.locate import SIDECAR
from penstock.storage.object_stores import locate, mapped
from penstock.storage.objects import list_objects, write_small
from penstock.storage.output import OutputSet
from penstock.types import MIB

PART_BYTES = 16 * MIB
"""Of a multipart upload. Source: AWS, "Multipart upload limits": 5 MiB to 5 GiB, at most 10,000 parts: 160 GB."""
UPLOADS = 4
"""Files uploaded at once, each `PARTS` at a time."""
PARTS = 8


def publish_remote(
    out: OutputSet,
    uri: str,
    small: Mapping[str, bytes],
    *,
    settings: Settings,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Upload all, the index and the manifest after everything else, and remove the local files.

    Raises:
        ConfigError: something is under the prefix already, with a manifest that says it is whole.
        SourceUnavailable, PermissionDenied: of the store; what was uploaded has no manifest, and may be overwritten.
    """
    prefix = uri.rstrip("/")
    require_none(prefix, settings=settings, storage_options=storage_options)

    def upload(name: str) -> None:
        place = locate(f"{prefix}/{name}", settings=settings, options=storage_options or {})
        with mapped(place.uri), open(out.directory / name, "rb") as file:
            obstore.put(place.store, place.key, file, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS)

    with ThreadPoolExecutor(UPLOADS, thread_name_prefix="penstock-upload") as pool:
        try:
            for done in [pool.submit(upload, name) for name in out.names]:
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # Index and manifest last: a reader that finds them finds every file that they name.
    last = {**out.index(), SIDECAR: small[SIDECAR]}
    for name, data in [*((n, d) for n, d in small.items() if n not in last), *last.items()]:
        write_small(f"{prefix}/{name}", data, settings=settings, storage_options=storage_options)
    out.remove()


def require_none(uri: str, *, settings: Settings, storage_options: Mapping[str, str] | None) -> None:
    """Raise ConfigError where a whole weight set is under the prefix already."""
    prefix = uri.rstrip("/")
    try:
        there = list_objects(f"{prefix}/{SIDECAR}", settings=settings, storage_options=storage_options)
    except NotFound:
        return
    if f"{prefix}/{SIDECAR}" in there:
        raise ConfigError("a weight set is there already", uri=prefix, hint="remove it, or write elsewhere")
