"""Commands for weights in storage: `penstock inspect`, `penstock manifest` and `penstock verify`.

`inspect` reads only headers and does not require torch. `manifest` and `verify` read every body.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import terminal
from penstock.report import bytes_text

if TYPE_CHECKING:
    from penstock.loader.verify import InspectReport

_SHOWN = 40


def inspect(
    uri: terminal.Uri,
    all_tensors: Annotated[bool, typer.Option("--all", help=f"Every tensor, not the first {_SHOWN}.")] = False,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """List the files, dtypes and tensors of weights."""
    import penstock

    report = penstock.inspect(uri)
    manifest = report.manifest
    per_file = Counter(manifest.tensors.file_index.tolist())
    if format is terminal.OutputFormat.json:
        terminal.write_json(
            {
                "uri": report.uri,
                "num_tensors": report.num_tensors,
                "nbytes": report.nbytes,
                "dtypes": report.dtypes,
                "not_loadable": list(report.not_loadable),
                "revision": manifest.revision,
                "digests": manifest.leaves is not None,
                "files": [
                    {"name": file.name, "nbytes": file.nbytes, "num_tensors": per_file[i], "metadata": file.metadata}
                    for i, file in enumerate(manifest.files)
                ],
                "tensors": [_tensor_row(report, i) for i in range(len(manifest.tensors))],
            }
        )
        return
    terminal.write_fields(
        {
            "uri": report.uri,
            "tensors": report.num_tensors,
            "bytes": bytes_text(report.nbytes),
            "revision": manifest.revision,
            "digests": "yes" if manifest.leaves is not None else "no (penstock manifest writes them)",
        }
    )
    if report.not_loadable:
        terminal.write_lines(
            f"load refuses {len(report.not_loadable)} of the tensors, because torch has no dtype for them"
        )
    dtypes = sorted(report.dtypes.items(), key=lambda item: -item[1])
    terminal.write_lines("")
    terminal.write_columns(["dtype", "bytes"], [[str(dtype), bytes_text(nbytes)] for dtype, nbytes in dtypes])
    terminal.write_lines("")
    files = [[file.name, bytes_text(file.nbytes), per_file[i]] for i, file in enumerate(manifest.files)]
    terminal.write_columns(["file", "bytes", "tensors"], files)
    terminal.write_lines("")
    # An MoE checkpoint has 60,000 tensors, so show only some. The JSON output contains all of them.
    num_shown = len(manifest.tensors) if all_tensors else min(_SHOWN, len(manifest.tensors))
    shown = (_tensor_row(report, i) for i in range(num_shown))
    # For a quantised tensor, show its type and elements instead of the stored dtype U8 and bytes.
    rows = [
        [row["name"], row.get("type", row["dtype"]), row.get("elements", row["shape"]), row["nbytes"], row["file"]]
        for row in shown
    ]
    terminal.write_columns(["tensor", "dtype", "shape", "bytes", "file"], rows)
    if num_shown < len(manifest.tensors):
        terminal.write_lines(f"... and {len(manifest.tensors) - num_shown} more. Use --all to list all.")


def _tensor_row(report: InspectReport, row: int) -> dict[str, object]:
    """Return a tensor as plain values. For a quantised GGUF tensor, include the type and the shape in elements."""
    table = report.manifest.tensors
    blocks = report.blocks.get(table.names[row])
    return {
        "name": table.names[row],
        "dtype": table.dtypes[row].value,
        "shape": list(table.shapes[row]),
        "nbytes": int(table.nbytes[row]),
        "file": report.manifest.files[int(table.file_index[row])].name,
        "offset": int(table.offset[row]),
        **({} if blocks is None else {"type": blocks.type, "elements": list(blocks.shape)}),
    }


def manifest(
    uri: terminal.Uri,
    sign: Annotated[Path | None, terminal.option("--sign", "KEY", "Ed25519 private key (PEM). Adds FILE.sig.")] = None,
    out: Annotated[str | None, terminal.option("--out", "URI", "Where to write. Default: next to the weights.")] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a manifest with different digests, because the weights were changed."),
    ] = False,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """Write a manifest with digests of the weights.

    Every body is read once, and every later load is verified against the manifest. If there is a manifest with
    different digests, the command fails, because the weights may be damaged.
    """
    import penstock

    report = penstock.manifest(uri, out=out, sign=sign, replace=force)
    if format is terminal.OutputFormat.json:
        terminal.write_json(report)
        return
    terminal.write_fields(
        {
            "uri": report.uri,
            "revision": report.revision,
            "tensors": report.num_tensors,
            "bytes": bytes_text(report.nbytes),
            "digests": f"{report.num_leaves} of at most {bytes_text(report.leaf_bytes)}",
            "written": report.written_text,
        }
    )


def verify(
    uri: terminal.Uri,
    public_key: Annotated[
        Path | None, terminal.option("--public-key", "KEY", "Ed25519 public key (PEM). Requires its signature.")
    ] = None,
    format: terminal.FormatOption = terminal.OutputFormat.human,
) -> None:
    """Compare weights with their manifest's digests.

    Every body is read. With --public-key, the manifest's signature is checked first.
    """
    import penstock

    verdict = penstock.verify(uri, public_key=public_key)
    if format is terminal.OutputFormat.json:
        terminal.write_json(verdict)
    else:
        terminal.write_fields(
            {
                "verified": "yes" if verdict.verified else "NO",
                "why": verdict.why,
                "digests": verdict.num_leaves,
                "bytes": bytes_text(verdict.nbytes),
                "signature": verdict.signature,
            }
        )
    if not verdict.verified:
        # For scripts, exit with the code for a failure that leaves the destination intact (`main.FAILED`).
        raise typer.Exit(3)
