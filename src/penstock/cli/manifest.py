"""`penstock manifest` and `penstock verify`: writing the digests of a weight set, and holding it to them.

In: a URI, keys as PEM files. Out: what was written, or the verdict, on stdout.
Not here: the work (`loader.manifest`, `loader.verify`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Format, FormatOption, Uri, given
from penstock.cli.output import bytes_text, write_fields, write_json


def manifest(
    uri: Uri,
    sign: Annotated[Path | None, given("--sign", "KEY", "Ed25519 private key (PEM); adds FILE.sig.")] = None,
    out: Annotated[str | None, given("--out", "URI", "Where to write; default: beside the weights.")] = None,
    format: FormatOption = Format.human,
) -> None:
    """Read every body once and write the manifest with its digests, so that every later load is verified."""
    from penstock import api

    report = api.manifest(uri, out=out, sign=sign)
    if format is Format.json:
        write_json(report)
        return
    write_fields(
        {
            "uri": report.uri,
            "revision": report.revision,
            "num_tensors": report.num_tensors,
            "nbytes": bytes_text(report.nbytes),
            "num_leaves": f"{report.num_leaves} of at most {report.leaf_bytes} bytes",
            "written": ", ".join(report.written),
        }
    )


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
