"""Network settings from the environment: proxies, hosts reached without a proxy, and certificates.

The variables are those that curl, requests, boto3 and huggingface_hub read. Connections to Penstock's hubs and members
are always direct. The URL's scheme selects `HTTP_PROXY` or `HTTPS_PROXY`, and `ALL_PROXY` is the default. `NO_PROXY`
may list `*`, hosts (which include their subdomains), suffixes of addresses, `host:port` and networks.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from penstock.config import Settings, network_environment
from penstock.errors import ConfigError, SourceUnavailable

CERTIFICATE_HINT = (
    "set PENSTOCK_CA_FILE (or ca_file) to the PEM bundle of the authority that signs it; "
    "SSL_CERT_FILE, REQUESTS_CA_BUNDLE and, for object stores, AWS_CA_BUNDLE are read too"
)

NOBODY = "*,0.0.0.0/0,::/0"
"""Exclusions that match every host, for obstore, in which `*` matches names but not addresses."""


class Proxy(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP proxy. `authorization` is the value of `Proxy-Authorization`, and `url` includes the password."""

    host: str
    port: int
    authorization: str
    url: str

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The header fields for the proxy."""
        return [("Proxy-Authorization", self.authorization)] if self.authorization else []


def proxy_of(url: SplitResult, environ: Mapping[str, str] | None = None) -> Proxy | None:
    """Return the proxy for a URL, or None for a direct connection. Raises ConfigError for an unusable proxy."""
    found = network_environment(environ)
    name, named = found.proxies.get(url.scheme) or found.proxies.get("all") or ("", "")
    if not named or _is_excluded(url, found.no_proxy):
        return None
    return _parse(name, named)


def exclusions(environ: Mapping[str, str] | None = None) -> str:
    """Return the hosts without a proxy in obstore's format, which does not support entries with a port."""
    entries = re.split(r"[,\s]+", network_environment(environ).no_proxy)
    return ",".join(entry.strip("[]") for entry in entries if entry and not _has_port(entry))


def _parse(name: str, named: str) -> Proxy:
    # Error messages omit the value, which may contain a password.
    hint = f"write {name} as http://host:port, or http://user:password@host:port with special characters as %40"
    scheme, _, rest = named.rpartition("://")
    scheme = scheme.lower() or "http"
    if scheme.startswith("socks"):
        message = f"{name} is a SOCKS proxy, which is not supported"
        raise ConfigError(message, hint=f"set {name} to an HTTP proxy, or list the hosts in NO_PROXY")
    if scheme != "http":
        raise ConfigError(f"{name} is a {scheme}:// URL, but only http:// proxies are supported", hint=hint)
    try:
        parts = urlsplit(f"http://{rest.removeprefix('//')}")
        host, port = parts.hostname or "", parts.port or 80
        host.encode("idna")
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    except ValueError as error:
        raise ConfigError(f"{name} does not contain a valid address", hint=hint) from error
    if not host:
        raise ConfigError(f"{name} does not contain a valid address", hint=hint)
    authorization = "" if pair == b":" else "Basic " + base64.b64encode(pair).decode()
    return Proxy(host=host, port=port, authorization=authorization, url=parts.geturl())


def _is_excluded(url: SplitResult, no_proxy: str) -> bool:
    host = (url.hostname or "").rstrip(".").lower()
    port = url.port or (443 if url.scheme == "https" else 80)
    address = _address(host)
    for entry in re.split(r"[,\s]+", no_proxy.lower()):
        if entry == "*":
            return True
        scheme, _, name = entry.rpartition("://")
        if not name or scheme not in {"", "all", url.scheme}:
            continue
        if _has_port(name):
            name, _, number = name.rpartition(":")
            if number != str(port):
                continue
        name = name.strip("[]").removeprefix("*").strip(".")
        if address is not None:
            with contextlib.suppress(ValueError):
                if address in ipaddress.ip_network(name, strict=False):
                    return True
        # Compare an address as text too, as other libraries do.
        if name and (host == name or host.endswith(f".{name}")):
            return True
    return False


def _has_port(entry: str) -> bool:
    # An IPv6 address contains colons, so a port may only follow its brackets.
    return re.fullmatch(r"(\[[^\]]*\]|[^:]*):\d+", entry.rpartition("://")[2]) is not None


# Link-local addresses, and the metadata services of AWS instances and pods, Google, Azure, Oracle and Alibaba, which
# reveal credentials. Source: RFC 3927, RFC 4291; the documentation of these clouds.
_LOCAL_SERVICES = [
    ipaddress.ip_network(network)
    for network in (
        *("169.254.0.0/16", "fe80::/10", "fd00:ec2::/32", "fd20:ce::254/128", "168.63.129.16/32"),
        *("192.0.0.192/32", "100.100.100.200/32"),
    )
]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_TRANSLATED = ipaddress.IPv6Network("::ffff:0:0:0/96")


def is_local_service(host: str) -> bool:
    """Return whether a host is link-local or a cloud's metadata service, even through an IPv6-to-IPv4 gateway."""
    name = host.rstrip(".").lower()
    address = _address(name)
    if address is None:
        return name in {"metadata.google.internal", "metadata", "instance-data"}
    return any(
        one in network
        for one in (address, *_translated_addresses(address))
        for network in _LOCAL_SERVICES
        if network.version == one.version
    )


def _translated_addresses(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses to which a gateway or this host's kernel may translate an IPv6 address.

    Source: RFC 4291 2.5.5 (mapped, compatible), RFC 2765 (translated), RFC 6052 and 8215 (NAT64), RFC 3056 (6to4),
    RFC 4380 (Teredo: server and client), RFC 5214 (ISATAP).
    """
    if isinstance(address, ipaddress.IPv4Address):
        return []
    bits = int(address)
    last = ipaddress.IPv4Address(bits & 0xFFFFFFFF)
    found = [one for one in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())) if one is not None]
    if address in _NAT64 or address in _COMPATIBLE or address in _TRANSLATED or (bits >> 32) & 0xFDFFFFFF == 0x5EFE:
        found.append(last)
    if address in _NAT64_LOCAL:
        # The prefix may have 48, 56, 64 or 96 bits.
        found += (
            last,
            ipaddress.IPv4Address((bits >> 64 & 0xFFFF) << 16 | bits >> 40 & 0xFFFF),
            ipaddress.IPv4Address((bits >> 64 & 0xFF) << 24 | bits >> 32 & 0xFFFFFF),
            ipaddress.IPv4Address(bits >> 24 & 0xFFFFFFFF),
        )
    return found


def require_public(address: str, host: str) -> None:
    """Raise SourceUnavailable if a redirect leads to a local service, such as a cloud's metadata service."""
    if is_local_service(address):
        hint = "the server is at fault; if the address is intended, name it yourself"
        message = f"the server redirects to {host[:100]!r}, a service of this machine's network"
        raise SourceUnavailable(message, hint=hint)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A file or directory of certificates, and the variable or argument in which it was set."""

    name: str
    path: Path


def bundles(settings: Settings, environ: Mapping[str, str] | None = None) -> tuple[Bundle, ...]:
    """Return the certificates to trust in addition to the system's, for all servers except Penstock's hubs."""
    found = network_environment(environ)
    own = () if settings.ca_file is None else (Bundle(name="ca_file (PENSTOCK_CA_FILE)", path=settings.ca_file),)
    return own + tuple(Bundle(name=name, path=path) for name, path in found.bundles)


def read_bundle(bundle: Bundle) -> bytes:
    """Return a bundle's certificates as PEM. Raises ConfigError if the certificates cannot be read."""
    try:
        files = sorted(bundle.path.iterdir()) if bundle.path.is_dir() else [bundle.path]
        pem = b"\n".join(file.read_bytes() for file in files if file.is_file())
    except OSError as error:
        raise ConfigError(f"cannot load {bundle.name} {bundle.path}: {error.strerror}") from error
    if b"-----BEGIN" not in pem:
        raise ConfigError(f"cannot load {bundle.name} {bundle.path}: it contains no PEM certificate")
    return pem
