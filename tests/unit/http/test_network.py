"""Proxies and certificates from the environment, in the forms of curl, requests and boto3."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.config import Settings
from penstock.errors import ConfigError
from penstock.http.network import bundles, exclusions, is_local_service, proxy_of, read_bundle

HOST = "https://weights.example.org/x"
PROXY = {"https_proxy": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("environ", "url", "proxy"),
    [
        ({"HTTPS_PROXY": "http://proxy:1"}, HOST, ("proxy", 1)),
        ({"https_proxy": "http://proxy:1"}, HOST, ("proxy", 1)),
        ({"HTTPS_PROXY": "http://upper:1", "https_proxy": "http://lower:2"}, HOST, ("lower", 2)),
        ({"HTTPS_PROXY": "http://upper:1", "https_proxy": ""}, HOST, None),
        ({"HTTP_PROXY": "http://proxy:1"}, HOST, None),
        ({"HTTP_PROXY": "http://proxy:1"}, "http://weights.example.org/x", ("proxy", 1)),
        ({"HTTP_PROXY": "http://proxy:1", "REQUEST_METHOD": "GET"}, "http://weights.example.org/x", None),
        ({"ALL_PROXY": "http://proxy:1"}, HOST, ("proxy", 1)),
        ({"all_proxy": "http://proxy:1"}, "http://weights.example.org/x", ("proxy", 1)),
        ({"ALL_PROXY": "http://all:1", "HTTPS_PROXY": "http://one:2"}, HOST, ("one", 2)),
        ({"HTTPS_PROXY": "proxy:3128"}, HOST, ("proxy", 3128)),
        ({"HTTPS_PROXY": "//proxy:3128"}, HOST, ("proxy", 3128)),
        ({"HTTPS_PROXY": "http://proxy/"}, HOST, ("proxy", 80)),
        ({"HTTPS_PROXY": "http://[::1]:8080"}, HOST, ("::1", 8080)),
        ({"HTTPS_PROXY": "  "}, HOST, None),
        ({}, HOST, None),
    ],
)
def test_proxy_is_selected_by_url_scheme(environ: dict[str, str], url: str, proxy: tuple[str, int] | None) -> None:
    found = proxy_of(urlsplit(url), environ)
    assert (found and (found.host, found.port)) == proxy


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_direct"),
    [
        ("*", HOST, True),
        ("other, *", HOST, True),
        ("weights.example.org", HOST, True),
        ("WEIGHTS.Example.org", HOST, True),
        ("example.org", HOST, True),
        (".example.org", HOST, True),
        ("*.example.org", HOST, True),
        (".weights.example.org", HOST, True),
        ("ample.org", HOST, False),
        ("other.org , example.org", HOST, True),
        ("other.org example.org", HOST, True),
        ("example.org:443", HOST, True),
        ("example.org:8443", HOST, False),
        ("example.org:8443", "https://weights.example.org:8443/x", True),
        ("https://example.org", HOST, True),
        ("http://example.org", HOST, False),
        ("10.0.0.0/8", "https://10.1.2.3/x", True),
        ("10.0.0.0/8", "https://11.1.2.3/x", False),
        ("10.1.2.3", "https://10.1.2.3:9000/x", True),
        ("10.1.2.3:9000", "https://10.1.2.3:9000/x", True),
        ("10.1.2.3:9001", "https://10.1.2.3:9000/x", False),
        (".0.0.1", "https://127.0.0.1/x", True),
        ("::1", "https://[::1]:9000/x", True),
        ("[::1]", "https://[::1]/x", True),
        ("[::1]:9000", "https://[::1]:9000/x", True),
        ("[::1]:9000", "https://[::1]:9001/x", False),
        ("fd00::/8", "https://[fd00::12]/x", True),
        ("localhost", "https://127.0.0.1/x", False),
        ("", HOST, False),
    ],
)
def test_no_proxy_hosts_are_connected_directly(no_proxy: str, url: str, is_direct: bool) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        assert (proxy_of(urlsplit(url), {**PROXY, name: no_proxy}) is None) == is_direct


def test_proxy_credentials_are_decoded() -> None:
    found = proxy_of(urlsplit(HOST), {"https_proxy": "http://user:p%40ss@proxy:1"})
    assert found is not None
    assert found.headers == [("Proxy-Authorization", "Basic dXNlcjpwQHNz")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("socks5://s3cret@proxy:1", "ALL_PROXY is a SOCKS proxy"),
        ("socks5h://s3cret@proxy:1", "SOCKS"),
        ("SOCKS4://s3cret@proxy:1", "SOCKS"),
        ("https://s3cret@proxy:1", "only http://"),
        ("http://s3cret@proxy:port", "valid address"),
        ("http://s3cret@:1", "valid address"),
        ("http://a..b:80", "valid address"),
        ("http://\udc80:s3cret@proxy:1", "valid address"),
    ],
)
def test_unusable_proxy_raises_config_error(value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        proxy_of(urlsplit(HOST), {"ALL_PROXY": value})
    assert "s3cret" not in f"{caught.value} {caught.value.hint}"
    assert proxy_of(urlsplit(HOST), {"ALL_PROXY": value, "NO_PROXY": "example.org"}) is None


def test_no_proxy_entries_with_ports_are_omitted_for_obstore() -> None:
    assert exclusions({"NO_PROXY": "a.org, b.org:80 [::1],10.0.0.0/8"}) == "a.org,::1,10.0.0.0/8"


def test_ca_bundle_variables_are_read(tmp_path: Path) -> None:
    environ = {"REQUESTS_CA_BUNDLE": "/r.pem", "CURL_CA_BUNDLE": "/c.pem"}
    names = [bundle.name for bundle in bundles(Settings(ca_file=tmp_path / "own.pem"), environ)]
    assert names == ["ca_file (PENSTOCK_CA_FILE)", "REQUESTS_CA_BUNDLE"]
    assert [bundle.name for bundle in bundles(Settings(), {"CURL_CA_BUNDLE": "/c.pem"})] == ["CURL_CA_BUNDLE"]


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_unreadable_ca_bundle_error_names_variable(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "c.pem"
    if content is not None:
        file.write_bytes(content)
    (bundle,) = bundles(Settings(), {"CURL_CA_BUNDLE": str(file)})
    with pytest.raises(ConfigError, match="CURL_CA_BUNDLE"):
        read_bundle(bundle)


def test_ca_bundle_directory_is_accepted(tmp_path: Path) -> None:
    for name in ("a.pem", "b.pem"):
        (tmp_path / name).write_text(f"-----BEGIN CERTIFICATE-----\n{name}\n")
    (bundle,) = bundles(Settings(), {"REQUESTS_CA_BUNDLE": str(tmp_path)})
    assert read_bundle(bundle).count(b"BEGIN") == 2


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "::ffff:169.254.169.254",
        "::169.254.169.254",
        "::ffff:0:169.254.169.254",
        # These are NAT64 addresses, with the well-known prefix and with local prefixes of 48, 56, 64 and 96 bits.
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1:a9fe:a9:fe00::",
        "64:ff9b:1:a9:fe:a9fe::",
        "64:ff9b:1:0:a9:fea9:fe00:0",
        "64:ff9b:1::a9fe:a9fe",
        # These are 6to4, Teredo with the address as its client, and ISATAP.
        "2002:a9fe:a9fe::1",
        "2001:0:4136:e378:8000:63bf:5601:5601",
        "2001:db8::5efe:169.254.169.254",
        "2001:db8::200:5efe:169.254.169.254",
        "64:ff9b::6464:64c8",
    ],
)
def test_link_local_address_is_detected_in_every_notation(address: str) -> None:
    assert is_local_service(address)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "::", "93.184.216.34", "64:ff9b::5db8:d822", "2002:5db8:d822::1", "2001:db8::a9fe:a9fe"],
)
def test_remote_address_is_not_link_local(address: str) -> None:
    assert not is_local_service(address)
