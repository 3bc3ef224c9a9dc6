"""What members show each other and check: certificates of the fleet's own authority, at doors and for weight bytes.

In: the files of `PENSTOCK_CA_FILE`, `PENSTOCK_CERT_FILE`, `PENSTOCK_KEY_FILE`. Out: a context for each side.
Not here: the hub's certificate (`auth`, `serve`), tokens and grants, which are asked for all the same.

Both sides show a certificate and check that the authority signed the other's; nothing else of it is looked at, for
members come and go at addresses that no certificate names. So the authority must sign members of this fleet alone.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Settings
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberTls:
    """Both sides' contexts of one member."""

    serving: ssl.SSLContext
    asking: ssl.SSLContext

    @classmethod
    def read(cls, settings: Settings | None = None) -> MemberTls | None:
        """Of the environment's files; None: there is no certificate, or no authority to check others' by.

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


def _context(side: int, ca_file: Path, cert_file: Path, key_file: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca_file)
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        raise ConfigError(f"a certificate for members cannot be used: {error}", uri=str(cert_file)) from error
    return context
