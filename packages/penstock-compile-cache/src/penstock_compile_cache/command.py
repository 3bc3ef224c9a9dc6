"""`penstock compile-cache`: restore compiled code of engines before a start, save it afterwards, and list it.

Engines with the option `"compile_cache"` restore and save compiled code themselves.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import (
    DataPort,
    Device,
    FormatOption,
    Hub,
    Listen,
    OutputFormat,
    TokenFile,
    Uri,
    connection_of,
    examples,
    note,
    option,
    write_json,
    write_lines,
)
from penstock.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Restore, save and list compiled code of engines.")

At = Annotated[
    str | None,
    option("--at", "URI", "Directory or prefix of the bundles. Default: penstock-artifacts next to the model."),
]
PublicKeys = Annotated[
    list[Path] | None, option("--public-key", "KEY", "Trusted Ed25519 public key (PEM). May be repeated.")
]


@app.command(
    "restore",
    epilog=examples(
        "penstock compile-cache restore s3://bucket/llama/ --engine vllm --config tp=2 --device cuda",
        "penstock compile-cache restore llama --engine mine --config dtype=bf16 --public-key key.pub.pem",
    ),
)
def restore(
    uri: Uri,
    engine: Annotated[str, typer.Option("--engine", help="The program that compiles, by its package name.")],
    config: Annotated[
        list[str] | None,
        option("--config", "NAME=TEXT", "A further value that the compiled code depends on. May be repeated."),
    ] = None,
    device: Device = "cpu",
    at: At = None,
    model: Annotated[str | None, option("--model", "NAME", "Name to use instead of the model's revision.")] = None,
    public_key: PublicKeys = None,
    hub: Hub = None,
    listen: Listen = None,
    data_port: DataPort = 0,
    token_file: TokenFile = None,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Fill compilers' caches from a bundle.

    Print the environment variables of these caches for the shell's `eval`. Without a bundle the caches are empty, and
    `save` can store the code that the engine compiles.
    """
    import penstock_compile_cache
    from penstock_compile_cache import caches

    pairs = [text.partition("=") for text in config or ()]
    if wrong := [name for name, mark, _ in pairs if not mark or not name]:
        raise ConfigError(f"--config {wrong[0]!r} has no value", hint="pass --config NAME=TEXT")
    with _refusals_in_report_only():
        restored = penstock_compile_cache.restore(
            uri,
            engine=engine,
            config={name: text for name, _, text in pairs},
            device=device,
            at=at,
            model=model,
            public_keys=public_key,
            connection=None if hub is None else connection_of(hub, token_file, listen, data_port),
        )
    if format is OutputFormat.json:
        write_json({**restored.to_dict(), "id": restored.key.id, "variables": caches.variables(restored.directory)})
        return
    note(str(restored))
    write_lines(*(f"export {name}={shlex.quote(text)}" for name, text in caches.variables(restored.directory).items()))


@contextlib.contextmanager
def _refusals_in_report_only() -> Iterator[None]:
    """Drop the log line about a refused bundle, because the report on stderr gives the same reason."""
    from penstock_compile_cache.store import REFUSED, log

    def is_other(record: logging.LogRecord) -> bool:
        return record.msg != REFUSED

    log.logger.addFilter(is_other)
    try:
        yield
    finally:
        log.logger.removeFilter(is_other)


@app.command("save", epilog=examples("penstock compile-cache save s3://bucket/llama/ 4e08a872249eaad94159c510300f8647"))
def save(
    uri: Uri,
    key: Annotated[str, typer.Argument(metavar="ID", help="Id from the report of an earlier restore.")],
    at: At = None,
    sign: Annotated[Path | None, option("--sign", "KEY", "Ed25519 private key (PEM).")] = None,
    format: FormatOption = OutputFormat.human,
) -> None:
    """Write compiled code to a signed bundle.

    The bundle is stored next to the model.
    """
    import penstock_compile_cache

    saved = penstock_compile_cache.save(uri, key, at=at, private_key=sign)
    if format is OutputFormat.json:
        write_json({**saved.to_dict(), "id": saved.key.id})
    else:
        write_lines(str(saved))


@app.command("list", epilog=examples("penstock compile-cache list s3://bucket/llama/ --public-key key.pub.pem"))
def list_all(
    uri: Uri,
    at: At = None,
    public_key: PublicKeys = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Print the arguments with which `penstock cache` keeps the bundles.")
    ] = False,
    format: FormatOption = OutputFormat.human,
) -> None:
    """List the bundles next to a model.

    Each line shows the key of a bundle. With a public key, each line also says whether the signature is valid.
    """
    import penstock_compile_cache
    from penstock.storage.locate import display
    from penstock_compile_cache.store import bundles_place, fleet_name

    bundles = penstock_compile_cache.list_bundles(uri, at=at, public_keys=public_key)
    if cache:
        # Omit refused bundles, because an engine would refuse them too.
        named = [(bundle.uri, fleet_name(bundle.key.id)) for bundle in bundles if bundle.key is not None]
        write_lines(shlex.join(word for place, name in named for word in (place, "--model", name)))
    elif format is OutputFormat.json:
        write_json([bundle.to_dict() for bundle in bundles])
    elif bundles:
        write_lines(*(str(bundle) for bundle in bundles))
    else:
        write_lines(f"no bundles in {display(bundles_place(uri, at))}")


def add(commands: typer.Typer) -> None:
    """Add `penstock compile-cache`."""
    commands.add_typer(app, name="compile-cache")
