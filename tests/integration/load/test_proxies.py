"""Reads through an authenticating proxy, with certificates from the variables of other tools."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save
from tests.support.authority import Authority
from tests.support.servers.http_server import RangeServer

import penstock
from penstock.errors import ConfigError, SourceUnavailable

DATA = save({"a": torch.arange(100.0)})
USER = "Basic " + base64.b64encode(b"user:p@ss").decode()
NAME = "storage.invalid"
"""Only the proxy knows this host, so whatever arrives went through the proxy."""


class Proxy(BaseHTTPRequestHandler):
    """A forward proxy that sends all hosts to one server."""

    protocol_version = "HTTP/1.1"
    target = 0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _is_known(self) -> bool:
        if self.headers.get("Proxy-Authorization") == USER:
            return True
        self.send_response(407)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def do_CONNECT(self) -> None:
        if not self._is_known():
            return
        with socket.create_connection(("127.0.0.1", self.target)) as upstream:
            self.send_response(200)
            self.end_headers()
            threading.Thread(target=self._pump, args=(upstream, self.connection), daemon=True).start()
            self._pump(self.connection, upstream)
        self.close_connection = True

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def do_GET(self) -> None:
        if not self._is_known():
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.target)
        named = {name: value for name, value in self.headers.items() if not name.lower().startswith("proxy")}
        upstream.request(self.command, urlsplit(self.path)._replace(scheme="", netloc="").geturl(), headers=named)
        answer = upstream.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        upstream.close()

    do_HEAD = do_GET


@contextlib.contextmanager
def proxy_to(server: RangeServer) -> Iterator[str]:
    """Yield the address of a proxy that sends all hosts to this server."""
    handler = type("Handler", (Proxy,), {"target": urlsplit(server.url).port})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        proxy.daemon_threads = True
        threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{proxy.server_address[1]}"
        proxy.shutdown()


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Remove the developer's network variables, set credentials, and retry rarely."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("PENSTOCK_STALL_S", "5")
    monkeypatch.setenv("PENSTOCK_RETRIES", "1")
    return monkeypatch


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def secure(authority: Authority, host: str) -> RangeServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("server", host))
    return RangeServer({"b/m.safetensors": DATA}, tls=context)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "all_proxy"])
def test_proxy_credentials_are_sent_for_every_source(clean: pytest.MonkeyPatch, variable: str) -> None:
    with RangeServer({"b/m.safetensors": DATA}) as server, proxy_to(server) as proxy:
        clean.setenv(variable, f"http://user:p%40ss@{proxy}")
        clean.setenv("AWS_ENDPOINT_URL", f"http://{NAME}")
        for uri in (f"http://{NAME}/b/m.safetensors", "s3://b/m.safetensors"):
            assert list(penstock.load(uri)) == ["a"]


def test_proxy_tunnel_sends_credentials(clean: pytest.MonkeyPatch, authority: Authority) -> None:
    with secure(authority, NAME) as server, proxy_to(server) as proxy:
        clean.setenv("AWS_CA_BUNDLE", str(authority.ca_file))
        clean.setenv("REQUESTS_CA_BUNDLE", str(authority.ca_file))
        clean.setenv("AWS_ENDPOINT_URL", f"https://{NAME}")
        uris = (f"https://{NAME}/b/m.safetensors", "s3://b/m.safetensors")
        clean.setenv("HTTPS_PROXY", f"http://user:p%40ss@{proxy}")
        for uri in uris:
            assert list(penstock.load(uri)) == ["a"]
        clean.setenv("HTTPS_PROXY", f"http://user:wrong@{proxy}")
        for uri in uris:
            with pytest.raises(ConfigError, match="407"):
                penstock.load(uri)


def test_no_proxy_host_is_reached_directly(clean: pytest.MonkeyPatch) -> None:
    with RangeServer({"b/m.safetensors": DATA}) as server:
        clean.setenv("ALL_PROXY", "http://127.0.0.1:9")
        clean.setenv("AWS_ENDPOINT_URL", server.url)
        for uri in (f"{server.url}/b/m.safetensors", "s3://b/m.safetensors"):
            with pytest.raises(SourceUnavailable):
                penstock.load(uri)
        for direct in ("*", "127.0.0.0/8", ".0.0.1", server.url.removeprefix("http://")):
            clean.setenv("NO_PROXY", direct)
            for uri in (f"{server.url}/b/m.safetensors", "s3://b/m.safetensors"):
                assert list(penstock.load(uri)) == ["a"]


def test_unknown_certificate_error_names_environment_variables(clean: pytest.MonkeyPatch, authority: Authority) -> None:
    with secure(authority, "localhost") as server:
        clean.setenv("AWS_ENDPOINT_URL", server.url)
        for uri in (f"{server.url}/b/m.safetensors", "s3://b/m.safetensors"):
            with pytest.raises(SourceUnavailable, match="certificate cannot be verified") as caught:
                penstock.load(uri)
            assert "PENSTOCK_CA_FILE" in str(caught.value.hint)
