"""Mutual TLS between members: certificates of the fleet's own authority, for their servers and for weight bytes.

In: the files of `PENSTOCK_CA_FILE`, `PENSTOCK_CERT_FILE`, `PENSTOCK_KEY_FILE`. Out: a context for each side.
Not here: the hub's certificate (`auth`, `server`), tokens and grants, which are required as well.

Both sides show a certificate and check that the authority signed the other's. Members come and go at addresses that no
certificate names, so the address is not compared with it: if the hub requires certificates, a member's server must show
the certificate that the hub knows the member by. If it does not, the authority must sign members of this fleet alone.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import Settings
from penstock.errors import ConfigError

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
    subject = [f"{kind}:{value}" for names in certificate.get("subject", ()) for kind, value in names]
    others = [f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ())]
    names = ",".join(sorted({*subject, *others})) or f"serialNumber:{certificate.get('serialNumber', '')}"
    if len(names) <= MAX_NAMES_LENGTH:
        return names
    return f"digest:{hashlib.sha256(names.encode()).hexdigest()}"


def _context(side: int, ca_file: Path, cert_file: Path, key_file: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    # Certificates of members do not name addresses: see the module for the check that replaces this one.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(ca_file)
        context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        raise ConfigError(f"a certificate for members cannot be used: {error}", uri=str(cert_file)) from error
    return context
