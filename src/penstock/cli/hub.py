"""`penstock hub`: the directory of a fleet, until it is told to stop.

In: where to listen, who may ask. Out: its URL on stdout once it listens; then nothing until SIGTERM or SIGINT.
Not here: serving (`hub.server`).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from penstock.cli.terminal import given, note


def hub(
    listen: Annotated[
        str | None, given("--listen", "ADDRESS", "host:port or unix:///path; without, a Unix socket of this user.")
    ] = None,
    redis: Annotated[
        str | None, given("--redis", "URL", "State of several hubs that act as one: redis://host:6379/0.")
    ] = None,
    redis_password_file: Annotated[
        Path | None, given("--redis-password-file", "FILE", "Password of that Redis: the file's first line.")
    ] = None,
    token_file: Annotated[
        Path | None, given("--token-file", "FILE", "A token a line, then the patterns of the models it is for.")
    ] = None,
    cert: Annotated[Path | None, given("--cert", "FILE", "PEM certificate: speak TLS.")] = None,
    key: Annotated[Path | None, given("--key", "FILE", "PEM key of --cert.")] = None,
    client_ca: Annotated[
        Path | None, given("--client-ca", "FILE", "Callers show a certificate that it signed.")
    ] = None,
    audit: Annotated[bool, typer.Option("--audit", help="A line on stderr for each grant and refusal.")] = False,
    audit_file: Annotated[
        Path | None, given("--audit-file", "FILE", "The same lines to a file, begun anew at 64 MiB; 4 are kept.")
    ] = None,
) -> None:
    """Serve the directory of a fleet: who holds what, who reads what; never weight bytes."""
    from penstock.errors import MissingExtra
    from penstock.hub.auth import Auth

    try:
        from penstock.hub.directory import Directory
        from penstock.hub.local_hub import own_address
        from penstock.hub.server import run_hub
        from penstock.hub.store import MemoryStore, RedisStore, Store
    except MissingExtra:
        raise
    except ImportError as error:
        raise MissingExtra(f"the hub needs {error.name}", hint="pip install 'penstock[hub]'") from error

    _log(audit, audit_file)
    auth = Auth.of(token_file=token_file, certificate=cert, private_key=key, client_ca=client_ca)
    url, password = _redis(redis, redis_password_file)
    store: Store = RedisStore(url, password=password) if url else MemoryStore()
    if not auth.guards:
        note("penstock hub: nobody is asked who they are, so only processes of this user can reach it")

    def ready(url: str) -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()

    try:
        run_hub(Directory(store), listen or own_address(), auth, ready=ready)
    finally:
        store.close()


def _redis(option: str | None, password_file: Path | None) -> tuple[str, str | None]:
    """Return the URL of Redis, empty for none, and its password where a file holds it.

    Raises:
        ConfigError: the password stands on the command line, or its file cannot be read.
    """
    from penstock.config import Settings, without_password
    from penstock.errors import ConfigError

    settings = Settings.read()
    query = "" if option is None else urlsplit(option).query
    if option is not None and (urlsplit(option).password or "password=" in query):
        raise ConfigError(
            f"--redis {without_password(option)} was given with its password, which every user of this host can read",
            hint="put it into --redis-password-file, or the URL into PENSTOCK_REDIS_URL",
        )
    password_file = password_file or settings.redis_password_file
    url = option or settings.redis_url
    if password_file is None:
        return url, None
    if not url:
        raise ConfigError("a password of Redis was given, but no Redis", hint="give --redis or PENSTOCK_REDIS_URL")
    try:
        password = password_file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the password of Redis cannot be read from {password_file}: {error}") from error
    if not password:
        raise ConfigError(f"the first line of {password_file} is empty; it must be the password of Redis")
    return url, password


def _log(audit: bool, audit_file: Path | None) -> None:
    """Write warnings to stderr, and the audit's lines where they are asked for.

    Raises:
        ConfigError: the audit's file cannot be written.
    """
    from penstock.hub.audit import audit_handler

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
