"""Callers of the hub and of members: authentication by token and certificate, the models and the rate of each.

In: a token file, which may change; certificates; the files of `PENSTOCK_CA_FILE`, `PENSTOCK_CERT_FILE` and
`PENSTOCK_KEY_FILE`. Out: an `Auth` and the `Caller` of a request; a `RateLimit` for callers by name; the TLS contexts
of a member (`MemberTls`).
Not here: grants between members (`grants`), which are required as well; the sockets (`server`, `connection`).

Members talk to each other under mutual TLS: both sides show a certificate and check that the fleet's own authority
signed the other's. Members come and go at addresses that no certificate names, so the address is not compared with it:
if the hub requires certificates, a member's server must show the certificate that the hub knows the member by. If it
does not, the authority must sign members of this fleet alone.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from penstock.config import Settings
from penstock.errors import ConfigError, FormatError, SourceError
from penstock.logs import log_named
from penstock.storage import text_of
from penstock.storage.local import read_bounded

_log = log_named("penstock.hub")
LIFE_HEADER = "Penstock-Life"
"""Header with the secret of the member that the caller speaks for."""
MAX_TOKENS_BYTES = 1 << 20
"""Longest token file that is read: some thousand tokens with their patterns."""

TOKEN_CALLER = "token:"
"""Beginning of `Caller.name` for callers that have a token."""
OPERATOR = "@operator"
"""Word behind a token that may drain members."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")


def member_of(life: str) -> str:
    """Return the member id that belongs to a process's secret: its digest, so that only this process can use the id.

    Any hub can check that, even one that has just started, and no hub stores a secret.
    """
    # The prefix keeps this digest apart from others of the same secret.
    return hashlib.sha256(b"penstock life 1\n" + life.encode("utf-8", "replace")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller.

    Attributes:
        models: patterns of the model names that it may access; None: all.
        name: how it authenticated, without the secret: `token:` and the beginning of a digest, `certificate:` and the
            names in it; `anybody`, where the hub requires neither.
        certificate: the names in the certificate that it showed; empty: the hub requires none.
        is_operator: whether it may drain members: its token has the word `@operator`, or the hub requires nothing, and
            then only processes of its own user reach it.
    """

    models: tuple[str, ...] | None = None
    name: str = "anybody"
    certificate: str = ""
    is_operator: bool = False

    def may_ask(self, models: Iterable[str]) -> bool:
        """Return True if the caller may access all of these models."""
        if self.models is None:
            return True
        return all(any(fnmatchcase(model, pattern) for pattern in self.models) for model in models)


@dataclass(frozen=True, slots=True, kw_only=True)
class Auth:
    """The authentication settings of a hub; the default requires nothing, and the hub then listens on a Unix socket.

    Attributes:
        token_file: the accepted bearer tokens; None: no token is required.
        certificate, private_key: PEM files the hub shows; with them it speaks TLS.
        client_ca: PEM file; callers must show a certificate that it signed.
    """

    token_file: TokenFile | None = None
    certificate: Path | None = None
    private_key: Path | None = None
    client_ca: Path | None = None

    @classmethod
    def of(
        cls,
        *,
        token_file: Path | None = None,
        certificate: Path | None = None,
        private_key: Path | None = None,
        client_ca: Path | None = None,
    ) -> Auth:
        """Read the settings from files.

        Args:
            token_file: read again whenever it changes. One token a line, at least 16 characters, then the patterns of
                the models it is for (none: all), and `@operator` if it may drain members; `#` begins a remark.
            certificate: see the class. private_key: see the class. client_ca: see the class.

        Raises:
            ConfigError: a file cannot be read, a token is too short, or a certificate has no key.
        """
        # Without TLS no certificate is ever shown, and every caller would be refused.
        if client_ca is not None and certificate is None:
            raise ConfigError("callers' certificates need the hub's own", hint="give --cert and --key")
        if (certificate is None) != (private_key is None):
            raise ConfigError("a certificate and its key come together", hint="give both --cert and --key")
        tokens = None if token_file is None else TokenFile.open(token_file)
        return cls(token_file=tokens, certificate=certificate, private_key=private_key, client_ca=client_ca)

    @property
    def guards(self) -> bool:
        """True if callers must authenticate."""
        return self.token_file is not None or self.client_ca is not None

    @property
    def tokens(self) -> tuple[tuple[bytes, Caller], ...]:
        """Return the bearer tokens that are good now, with their callers."""
        return () if self.token_file is None else self.token_file.tokens()

    def caller(self, authorization: str, certificate: str = "") -> Caller | None:
        """Return the caller of an `Authorization` header; None: unknown. Takes the same time for every token.

        Args:
            authorization: the header.
            certificate: the names in the certificate that was shown, and checked, where `client_ca` asks for one.
        """
        if self.token_file is None:
            if certificate:
                return Caller(name=f"certificate:{certificate}", certificate=certificate)
            return Caller(is_operator=self.client_ca is None)
        scheme, _, credentials = authorization.partition(" ")
        caller_of_token: Caller | None = None
        shown = credentials.strip().encode("utf-8", "replace")
        # All tokens are compared, without a break: the time must not show which token a guess came close to.
        for token, caller in self.tokens:
            if hmac.compare_digest(token, shown) and scheme.lower() == "bearer":
                caller_of_token = caller
        return None if caller_of_token is None else replace(caller_of_token, certificate=certificate)


class TokenFile:
    """A file of tokens, read again when it changes, so that a token can be added or revoked while the hub runs.

    A file that cannot be read, or has a fault, changes nothing: the tokens read last stay good, and an error is logged.

    Args:
        path: Path of the file; see `Auth.of` for the format.
        tokens: The tokens that were read.
        seen: Stamp of the file before the tokens were read.
    """

    def __init__(self, path: Path, tokens: tuple[tuple[bytes, Caller], ...], seen: tuple[int, ...]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = seen
        self._tokens = tokens

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Read the tokens. ConfigError: the file cannot be read, or has a fault."""
        # The stamp before the content: a change in between is then read once more, instead of being missed.
        seen = _stamp(path)
        return cls(path, read_tokens(path), seen)

    def tokens(self) -> tuple[tuple[bytes, Caller], ...]:
        """Return the tokens that are good now. Looks at the file's stamp each time: 3 us."""
        stamp = _stamp(self._path)
        if stamp != self._seen:
            with self._lock:
                # Another thread may have read it while this one waited.
                if stamp != self._seen:
                    self._seen = stamp
                    self._read()
        return self._tokens

    def reread(self) -> None:
        """Read the file again whether or not its stamp has changed: SIGHUP."""
        with self._lock:
            self._seen = _stamp(self._path)
            self._read()

    def _read(self) -> None:
        """Read the tokens, or keep those read before. The caller holds the lock."""
        # A file with a fault must not lock every member out: it is most often one that is being edited.
        try:
            self._tokens = read_tokens(self._path)
        except ConfigError as error:
            _log.error("%s; the tokens read before stay good", error.message)
        else:
            _log.warning("token file %s was read again: %d tokens are good", self._path, len(self._tokens))


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a value that differs after each change of a file, or an empty one if the file cannot be reached."""
    # With ctime and inode: an editor that renames a new file into place may give it the old size and mtime.
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def first_token(path: str | Path | None) -> str | None:
    """Return the first token of a file, for a client to send; None without a file. Raises ConfigError as `Auth.of`."""
    return None if path is None else read_tokens(Path(path))[0][0].decode()


def read_tokens(path: Path) -> tuple[tuple[bytes, Caller], ...]:
    """Read a token file: the tokens with their callers; see `Auth.of` for the format and the errors."""
    try:
        text = read_bounded(text_of(path), MAX_TOKENS_BYTES).decode()
    except (SourceError, FormatError, UnicodeDecodeError) as error:
        hint = "a token a line: `openssl rand -hex 32` makes one"
        why = str(error) if isinstance(error, UnicodeDecodeError) else error.message
        raise ConfigError(f"token file {path} cannot be read: {why}", hint=hint) from error
    tokens = []
    # A fault names the line, never its text: a token that is wrong by one letter is still a secret.
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not _TOKEN.fullmatch(words[0]):
            hint = "openssl rand -hex 32 makes one"
            raise ConfigError(f"{path}:{number}: a token is 16 to 512 letters, digits and ._~+/=-", hint=hint)
        patterns = tuple(word for word in words[1:] if word != OPERATOR)
        # Any other word with an @ would be a pattern that no model matches: more often it is a misspelt right.
        if unknown := next((word for word in patterns if word.startswith("@")), None):
            raise ConfigError(f"{path}:{number}: {unknown} is no right of a token", hint=f"the only one is {OPERATOR}")
        caller = Caller(patterns or None, _token_name(words[0]), is_operator=OPERATOR in words)
        tokens.append((words[0].encode(), caller))
    if not tokens:
        raise ConfigError(f"token file {path} has no token", hint="openssl rand -hex 32 makes one")
    return tuple(tokens)


def _token_name(token: str) -> str:
    """Return the name of a token in logs and counts; it does not reveal the token."""
    return TOKEN_CALLER + hashlib.sha256(b"penstock caller 1\n" + token.encode()).hexdigest()[:12]


MAX_NAMES = 4096
"""Most recent callers that are remembered; a hub has tens of tokens, or one certificate for each member."""


class RateLimit:
    """A limit of `burst` events at once, and `per_s` a second in the long run, for each name. Any thread.

    Args:
        per_s: tokens added per second.
        burst: capacity of a bucket.
        clock: monotonic seconds.
    """

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        # Name -> tokens left, and the time of that count.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, name: str) -> bool:
        """Take one from a name's bucket; False if there is none."""
        with self._lock:
            now = self._clock()
            # Popped and put back: the order is that of use, so the bound below forgets the callers idle for longest,
            # whose buckets are full again anyway.
            left, then = self._left.pop(name, (self._burst, now))
            left = min(self._burst, left + max(0.0, now - then) * self._per_s)
            is_allowed = left >= 1.0
            self._left[name] = (left - is_allowed, now)
            while len(self._left) > MAX_NAMES:
                self._left.popitem(last=False)
            return is_allowed


CERTIFICATE = "penstock.certificate"
"""Key of a request's scope for the names in the caller's certificate; empty: none was required."""
MAX_NAMES_LENGTH = 1024
"""Longer names are replaced by their digest, since they are stored with each holding and sent to each reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTls:
    """The TLS contexts of one member, for both sides of a connection."""

    serving: ssl.SSLContext
    asking: ssl.SSLContext

    @classmethod
    def read(cls, settings: Settings | None = None) -> MemberTls | None:
        """Read the files of the environment; None: no certificate is set, or no authority to check others with.

        Raises:
            ConfigError: a file cannot be used.
        """
        settings = settings or Settings.read()
        if settings.ca_file is None or settings.cert_file is None:
            return None
        files = settings.ca_file, settings.cert_file, settings.key_file
        return cls(
            serving=_context(ssl.PROTOCOL_TLS_SERVER, *files),
            asking=_context(ssl.PROTOCOL_TLS_CLIENT, *files),
        )


def certificate_names(certificate: Mapping[str, Any]) -> str:
    """Return the names in a checked certificate, in one line; empty: none was shown.

    Args:
        certificate: of `ssl.SSLSocket.getpeercert`.
    """
    if not certificate:
        return ""
    # All names, sorted: which of them means a member is the fleet's business, and only equality is tested.
    subject = [f"{kind}:{value}" for names in certificate.get("subject", ()) for kind, value in names]
    others = [f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ())]
    # A certificate without any name is told apart by its serial number.
    names = ",".join(sorted({*subject, *others})) or f"serialNumber:{certificate.get('serialNumber', '')}"
    if len(names) <= MAX_NAMES_LENGTH:
        return names
    return f"digest:{hashlib.sha256(names.encode()).hexdigest()}"


def _context(side: int, ca_file: Path, cert_file: Path, key_file: Path | None) -> ssl.SSLContext:
    """Return the TLS context of one side, which requires a certificate of the other."""
    context = ssl.SSLContext(side)
    # Members come and go at addresses that no certificate names: see the module for the check that replaces this one.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca_file)
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        raise ConfigError(f"a certificate for members cannot be used: {error}", uri=str(cert_file)) from error
    return context
