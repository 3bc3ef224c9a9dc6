"""What the hub and members know of a caller: its token, its certificate, its models and its rate.

Members connect to each other with mutual TLS. Certificates are not compared with addresses, because members
move to addresses that no certificate names. If the hub requires certificates, a member's server must present the
certificate from its registration. If the hub requires no certificates, the CA must sign only members of this fleet.
Members also require grants (`grants`).
"""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import Settings
from penstock.errors import ConfigError, FormatError, SourceError
from penstock.storage import text_of
from penstock.storage.local import read_bounded

LIFE_HEADER = "Penstock-Life"
"""Header with the secret of the member for which the caller speaks."""
MAX_TOKENS_BYTES = 1 << 20
"""Maximum size of a token file in bytes, enough for several thousand tokens with their patterns."""

TOKEN_CALLER = "token:"
"""Prefix of `Caller.name` for callers with a token."""
OPERATOR = "@operator"
"""Word after a token in the token file that grants the token the right to drain members."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


def member_of(life: str) -> str:
    """Return the member id of a process: the digest of its secret, which no hub has to store."""
    # The prefix separates this digest from other digests of the same secret.
    return hashlib.sha256(b"penstock life 1\n" + life.encode("utf-8", "replace")).hexdigest()[:32]


class Caller(msgspec.Struct, frozen=True):
    """An authenticated caller.

    Attributes:
        models: patterns of the model names that the caller may access, or None for all models.
        name: `token:` or `certificate:` and an identifier that is not secret, or `anybody` without authentication.
        certificate: the names in the caller's certificate, or empty if the hub requires no certificates.
        is_operator: whether the caller may drain members (always true without authentication).
    """

    models: tuple[str, ...] | None = None
    name: str = "anybody"
    certificate: str = ""
    is_operator: bool = False

    def may_ask(self, models: Iterable[str]) -> bool:
        """Return whether the caller may access all of these models."""
        patterns = self.models
        return patterns is None or all(any(fnmatchcase(model, pattern) for pattern in patterns) for model in models)


def first_token(path: str | Path | None) -> str | None:
    """Return the first token in a file, or None without a file. Raise ConfigError, as `Auth.of` does."""
    return None if path is None else read_tokens(Path(path))[0][0].decode()


def read_tokens(path: Path) -> tuple[tuple[bytes, Caller], ...]:
    """Return the tokens in a file with their callers. See `Auth.of` for the format and the errors."""
    try:
        text = read_bounded(text_of(path), MAX_TOKENS_BYTES).decode()
    except (SourceError, FormatError, UnicodeDecodeError) as error:
        hint = "write one token per line, for example from `openssl rand -hex 32`"
        why = str(error) if isinstance(error, UnicodeDecodeError) else error.message
        raise ConfigError(f"cannot read token file {path}: {why}", hint=hint) from error
    tokens = []
    # Errors name the line and never its text, because a misspelt token is still a secret.
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not _TOKEN.fullmatch(words[0]):
            hint = "create a token with `openssl rand -hex 32`"
            raise ConfigError(f"{path}:{number}: a token consists of 16 to 512 letters, digits and ._~+/=-", hint=hint)
        patterns = tuple(word for word in words[1:] if word != OPERATOR)
        # Any other word that begins with @ is probably a misspelt right, because no model's name begins with @.
        if unknown := next((word for word in patterns if word.startswith("@")), None):
            raise ConfigError(f"{path}:{number}: unknown token right {unknown}", hint=f"the only right is {OPERATOR}")
        # The name is safe to use in logs and metrics.
        digest = hashlib.sha256(b"penstock caller 1\n" + words[0].encode()).hexdigest()
        caller = Caller(patterns or None, TOKEN_CALLER + digest[:12], is_operator=OPERATOR in words)
        tokens.append((words[0].encode(), caller))
    if not tokens:
        raise ConfigError(f"token file {path} contains no token", hint="create a token with `openssl rand -hex 32`")
    return tuple(tokens)


MAX_NAMES = 4096
"""Maximum number of recent callers to remember. A hub has dozens of tokens, or one certificate for each member."""


class RateLimit:
    """A thread-safe rate limit for each name: `burst` events at once, and `per_s` events a second on average."""

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        # For each name, the number of tokens in its bucket and the time at which they were counted.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, name: str) -> bool:
        """Take a token from a name's bucket. Return False if the bucket is empty."""
        with self._lock:
            now = self._clock()
            # Pop and insert to keep the order of use. The limit below then drops the buckets of the callers that were
            # idle longest, which are full.
            tokens, then = self._buckets.pop(name, (self._burst, now))
            tokens = min(self._burst, tokens + max(0.0, now - then) * self._per_s)
            is_allowed = tokens >= 1.0
            self._buckets[name] = (tokens - is_allowed, now)
            while len(self._buckets) > MAX_NAMES:
                self._buckets.popitem(last=False)
            return is_allowed


MAX_NAMES_LENGTH = 1024
"""Longer names are replaced by their digest, because they are stored with each holding and sent to each reader."""


class MemberTls(msgspec.Struct, frozen=True):
    """The TLS contexts of one member, for both sides of a connection."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def read(cls, settings: Settings | None = None) -> MemberTls | None:
        """Read the files that the environment names. Return None without a certificate or a CA. Raise ConfigError."""
        settings = settings or Settings.read()
        if settings.ca_file is None or settings.cert_file is None:
            return None
        files = settings.ca_file, settings.cert_file, settings.key_file
        return cls(_context(ssl.PROTOCOL_TLS_SERVER, *files), _context(ssl.PROTOCOL_TLS_CLIENT, *files))


def certificate_names(certificate: Mapping[str, Any]) -> str:
    """Return the names in a certificate from `getpeercert` as one line, which is empty without a certificate."""
    if not certificate:
        return ""
    # Names are only tested for equality, because the fleet decides which name identifies a member.
    subject = [f"{kind}:{value}" for names in certificate.get("subject", ()) for kind, value in names]
    others = [f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ())]
    # A certificate without names is identified by its serial number.
    names = ",".join(sorted({*subject, *others})) or f"serialNumber:{certificate.get('serialNumber', '')}"
    return names if len(names) <= MAX_NAMES_LENGTH else f"digest:{hashlib.sha256(names.encode()).hexdigest()}"


def _context(side: int, ca_file: Path, cert_file: Path, key_file: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    # The module's docstring says which check replaces the check of host names.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca_file)
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        raise ConfigError(f"cannot use the certificate for members: {error}", uri=str(cert_file)) from error
    return context
