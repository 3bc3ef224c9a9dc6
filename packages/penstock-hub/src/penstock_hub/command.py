"""`penstock hub` and `penstock ui`: serve the directory of a fleet, or its page, until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from penstock.cli.terminal import Hub, TokenFile, connection_of, examples, note, option


def hub(
    listen: Annotated[
        str | None, option("--listen", "ADDRESS", "host:port or unix:///path. Default: this user's Unix socket.")
    ] = None,
    redis: Annotated[
        str | None, option("--redis", "URL", "Redis for several hubs that act as one, such as redis://host:6379/0.")
    ] = None,
    redis_password_file: Annotated[
        Path | None, option("--redis-password-file", "FILE", "File whose first line is the password for Redis.")
    ] = None,
    token_file: Annotated[
        Path | None, option("--token-file", "FILE", "One token per line, followed by patterns of its models.")
    ] = None,
    cert: Annotated[Path | None, option("--cert", "FILE", "PEM certificate. With it the hub uses TLS.")] = None,
    key: Annotated[Path | None, option("--key", "FILE", "PEM key of --cert.")] = None,
    client_ca: Annotated[
        Path | None, option("--client-ca", "FILE", "Require callers to show a certificate signed by it.")
    ] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Write a line to stderr for each grant and refusal.")] = False,
    audit_file: Annotated[
        Path | None, option("--audit-file", "FILE", "Write these lines to a file, rotated at 64 MiB. 4 are kept.")
    ] = None,
) -> None:
    """Serve the directory of a fleet.

    The hub knows the members, their models and their readers. Weights never pass through the hub.
    """
    from penstock.hub.local_hub import own_address
    from penstock_hub.auth import Auth
    from penstock_hub.directory import Directory
    from penstock_hub.server import run_hub
    from penstock_hub.store import MemoryStore, RedisStore, Store

    _log(audit, audit_file)
    auth = Auth.of(token_file=token_file, certificate=cert, private_key=key, client_ca=client_ca)
    url, password = _redis(redis, redis_password_file)
    store: Store = RedisStore(url, password=password) if url else MemoryStore()
    # Without tokens and certificates, `bind` accepts only a Unix socket.
    if not auth.guards and (listen is None or listen.startswith("unix://")):
        note("penstock hub: only processes of this user can reach it, because it has no tokens or certificates")

    with contextlib.closing(store):
        run_hub(Directory(store), listen or own_address(), auth, ready=_print_url)


def ui(
    hub: Hub = None,
    token_file: TokenFile = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1. 0 selects a free port.")
    ] = 0,
) -> None:
    """Serve the fleet page on loopback. Print the page's address for a browser, and serve the page until Ctrl-C."""
    from penstock.hub.client import HubClient, resolve_connection
    from penstock_hub.server import run_page

    connection = resolve_connection(connection_of(hub, token_file))
    with HubClient.connect(connection.hub, connection.token) as client:
        run_page(client, port, ready=_print_url)


def _print_url(url: str) -> None:
    # Flush, because scripts wait for this line and then start members.
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def _redis(url: str | None, password_file: Path | None) -> tuple[str, str | None]:
    """Return the URL of Redis, or an empty string without Redis, and the password from the password file.

    Raise ConfigError if the URL or the password file is wrong.
    """
    from penstock.config import Settings, without_password
    from penstock.errors import ConfigError

    settings = Settings.read()
    # Refuse a password in the URL, because every user of the host can read the command line of every process.
    if url is not None and (urlsplit(url).password or "password=" in urlsplit(url).query):
        raise ConfigError(
            f"--redis {without_password(url)} contains a password, which every user of this host can read",
            hint="write the password to the file of --redis-password-file, or set PENSTOCK_REDIS_URL",
        )
    password_file = password_file or settings.redis_password_file
    url = url or settings.redis_url
    if password_file is None:
        return url, None
    if not url:
        raise ConfigError("a password for Redis was set without a URL", hint="set --redis or PENSTOCK_REDIS_URL")
    try:
        password = password_file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the password for Redis from {password_file}: {error}") from error
    if not password:
        raise ConfigError(f"the first line of {password_file} must be the password for Redis, but it is empty")
    return url, password


def _log(audit: bool, audit_file: Path | None) -> None:
    """Write warnings to stderr, and audit lines to stderr and to a file.

    Raise ConfigError if the file is not writable.
    """
    from penstock_hub.audit import audit_handler

    # Only commands configure logging. As a library, Penstock does not configure it.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    for name in ("penstock.hub", "penstock.net"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
    audited = logging.getLogger("penstock.audit")
    for path in ([None] if audit else []) + ([audit_file] if audit_file is not None else []):
        audited.addHandler(audit_handler(path))
        audited.setLevel(logging.INFO)


def add_hub(commands: typer.Typer) -> None:
    """Add `penstock hub`."""
    example = "penstock hub --listen 0.0.0.0:7070 --token-file tokens --cert hub.pem --key hub.key"
    commands.command("hub", epilog=examples(example))(hub)


def add_ui(commands: typer.Typer) -> None:
    """Add `penstock ui`."""
    commands.command("ui", epilog=examples("penstock ui --hub https://hub:7070 --token-file token"))(ui)
