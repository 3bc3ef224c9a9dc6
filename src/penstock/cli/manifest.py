"""`penstock manifest` and `penstock verify`: writing the digests of a weight set, and holding it to them.

In: a URI, keys as PEM files. Out: the sidecar (and its detached signature), or the verdict.
Not here: digests, encoding and signatures (`storage.weight_set`).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Format, FormatOption, Uri, given
from penstock.cli.output import bytes_text, write_fields, write_json
from penstock.config import Settings
from penstock.errors import ConfigError


def manifest(
    uri: Uri,
    sign: Annotated[Path | None, given("--sign", "KEY", "Ed25519 private key (PEM); adds FILE.sig.")] = None,
    out: Annotated[str | None, given("--out", "URI", "Where to write; default: beside the weights.")] = None,
    format: FormatOption = Format.human,
) -> None:
    """Read every body once and write the manifest with its digests, so that every later load is verified."""
    from penstock.loader.verify import read_key
    from penstock.storage import weight_set as manifests

    settings = Settings.read()
    target = manifests.sidecar_uri(uri) if out is None else out
    if target.startswith(("http://", "https://")):
        raise ConfigError("plain http(s) cannot be written", uri=target, hint="give --out FILE and upload it there")
    key = None if sign is None else read_key(sign)
    with manifests.open_weights(uri, settings=settings) as weights:
        built = manifests.build(weights)
    raw = manifests.encode(built)
    files = {target: raw} if key is None else {f"{target}.sig": manifests.sign(raw, key), target: raw}
    for place, data in files.items():
        write_whole(place, data, settings)
    facts = {
        "uri": uri,
        "revision": built.revision,
        "num_tensors": len(built.tensors),
        "nbytes": built.nbytes,
        "num_leaves": 0 if built.leaves is None else len(built.leaves),
        "written": list(files),
    }
    if format is Format.json:
        write_json(facts)
    else:
        text = f"{facts['num_leaves']} of at most {built.leaf_bytes} bytes"
        shown = facts | {"nbytes": bytes_text(built.nbytes), "num_leaves": text}
        write_fields(shown | {"written": ", ".join(files)})


def verify(
    uri: Uri,
    public_key: Annotated[Path | None, given("--public-key", "KEY", "Ed25519 public key (PEM) to ask for.")] = None,
    format: FormatOption = Format.human,
) -> None:
    """Read every body and hold it to the manifest's digests, and the manifest to its signature."""
    from penstock import api

    verdict = api.verify(uri, public_key=public_key)
    if format is Format.json:
        write_json(verdict)
    else:
        write_fields(
            {
                "verified": "yes" if verdict.verified else "NO",
                "why": verdict.why,
                "leaves": verdict.num_leaves,
                "bytes": bytes_text(verdict.nbytes),
                "signature": verdict.signature,
            }
        )
    if not verdict.verified:
        raise typer.Exit(3)


def write_whole(uri: str, data: bytes, settings: Settings) -> None:
    """Write a small file or object that appears whole, or leaves the one before it.

    Raises:
        DiskFull, DestinationError: the file cannot be written; nothing was touched. Others as the object store's.
    """
    from penstock.storage import is_remote, local_path
    from penstock.storage.output import typed

    if is_remote(uri):
        from penstock.storage import write_small

        write_small(uri, data, settings=settings)
        return
    path = Path(local_path(uri))
    with typed(path):
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(partial).chmod(0o644)
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
