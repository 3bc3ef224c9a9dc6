"""The authentication of callers at the hub, by tokens and certificates."""

from __future__ import annotations

import hmac
import threading
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.hub.auth import Caller, read_tokens
from penstock.logs import log_named

_log = log_named("penstock.hub")
ANYBODY = Caller()
"""A caller without restrictions on models."""
CERTIFICATE = "penstock.certificate"
"""Key in a request's scope for the names in the caller's certificate. Empty if no certificate was required."""


class Auth(msgspec.Struct, frozen=True, kw_only=True):
    """The authentication settings of a hub. The default requires nothing, and the hub then listens on a Unix socket.

    Attributes:
        certificate: PEM file with the hub's certificate, or None for a hub without TLS.
        private_key: PEM file with the key of the hub's certificate.
        client_ca: PEM file with the CA that must have signed the callers' certificates.
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
            token_file: read again whenever it changes. Each line has a token of at least 16 characters, then patterns
                of the models that the token may access, or no pattern to allow all models. `@operator` in the line
                grants the right to drain members. `#` begins a comment.

        Raises:
            ConfigError: a file cannot be read, a token is too short, or a certificate has no key.
        """
        # Without TLS no caller can present a certificate.
        if client_ca is not None and certificate is None:
            message = "checking the callers' certificates requires a certificate of the hub"
            raise ConfigError(message, hint="pass --cert and --key")
        if (certificate is None) != (private_key is None):
            message = "a certificate requires its private key, and a private key requires its certificate"
            raise ConfigError(message, hint="pass both --cert and --key")
        tokens = None if token_file is None else TokenFile.open(token_file)
        return cls(token_file=tokens, certificate=certificate, private_key=private_key, client_ca=client_ca)

    @property
    def guards(self) -> bool:
        """Whether callers must authenticate."""
        return self.token_file is not None or self.client_ca is not None

    @property
    def tokens(self) -> tuple[tuple[bytes, Caller], ...]:
        """Return the currently accepted bearer tokens with their callers."""
        return () if self.token_file is None else self.token_file.tokens()

    def caller(self, authorization: str, certificate: str = "") -> Caller | None:
        """Return the caller for an `Authorization` header, or None if none matches. Takes the same time for any token.

        Args:
            certificate: the names in the caller's verified certificate, if `client_ca` is set.
        """
        if self.token_file is None:
            if certificate:
                return Caller(name=f"certificate:{certificate}", certificate=certificate)
            return Caller(is_operator=self.client_ca is None)
        scheme, _, credentials = authorization.partition(" ")
        caller_of_token: Caller | None = None
        guess = credentials.strip().encode("utf-8", "replace")
        # Compare with all tokens, so that the time does not reveal a partial match.
        for token, caller in self.tokens:
            if hmac.compare_digest(token, guess) and scheme.lower() == "bearer":
                caller_of_token = caller
        return None if caller_of_token is None else msgspec.structs.replace(caller_of_token, certificate=certificate)


class TokenFile:
    """A file of tokens, read again when it changes, so that tokens can be added and revoked while the hub runs.

    If the file becomes unreadable or invalid, the previous tokens stay valid and an error is logged.
    """

    def __init__(self, path: Path, tokens: tuple[tuple[bytes, Caller], ...], seen: tuple[int, ...]) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = seen
        self._tokens = tokens

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Read the tokens. Raise ConfigError if the file cannot be read or is invalid."""
        # Get the stamp before reading, so that a concurrent change causes another read instead of being missed.
        seen = _stamp(path)
        return cls(path, read_tokens(path), seen)

    def tokens(self) -> tuple[tuple[bytes, Caller], ...]:
        """Return the valid tokens. Each call checks whether the file has changed, which takes 3 us."""
        stamp = _stamp(self._path)
        if stamp != self._seen:
            with self._lock:
                # Another thread may have read the file while this thread waited for the lock.
                if stamp != self._seen:
                    self._seen = stamp
                    self._read()
        return self._tokens

    def reread(self) -> None:
        """Read the file again even if its stamp has not changed. SIGHUP calls this method."""
        with self._lock:
            self._seen = _stamp(self._path)
            self._read()

    def _read(self) -> None:
        """Read the tokens, or keep the previous tokens if that fails. The caller holds the lock."""
        # An invalid file must not lock every member out, because an editor may be about to correct it.
        try:
            self._tokens = read_tokens(self._path)
        except ConfigError as error:
            _log.error("%s. The tokens read before stay valid.", error.message)
        else:
            _log.warning("token file %s was read again and has %d tokens", self._path, len(self._tokens))


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a stamp that changes whenever the file changes, or an empty tuple if the file is not accessible."""
    # An editor that replaces the file by renaming may preserve its size and mtime, so include ctime and inode.
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
