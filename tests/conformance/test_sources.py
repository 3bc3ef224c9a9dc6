"""Every `Source` passes the conformance suite: memory, local file, HTTP ranges, and the cache cold and warm."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.support.servers.http_server import Faults, RangeServer

from penstock.config import Settings
from penstock.errors import ConfigError, SourceStalled, SourceUnavailable
from penstock.storage import MemorySource, Source, open_source
from penstock.storage.cache import CachedSource, open_cached
from penstock.storage.files import FileSource
from penstock.testing.source_suite import SourceTests, read, sample

SETTINGS = Settings(stall_s=20.0)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "penstock tests")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
    return folder / "cert.pem", folder / "key.pem"


class TestMemory(SourceTests):
    def make(self, data: bytes) -> Source:
        return MemorySource(data)


class TestFile(SourceTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "object.bin"

    def make(self, data: bytes) -> Source:
        self.path.write_bytes(data)
        return FileSource.open(str(self.path))


class TestHttp(SourceTests):
    faults = Faults()

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        with RangeServer({}, faults=self.faults) as self.server:
            yield

    def make(self, data: bytes) -> Source:
        self.server.replace("object.bin", data)
        return open_source(f"{self.server.url}/object.bin", settings=SETTINGS)


class TestHttpChunked(TestHttp):
    faults = Faults(chunked=True)


class TestHttps(TestHttp):
    @pytest.fixture(autouse=True)
    def _server(self, certificate: tuple[Path, Path]) -> Iterator[None]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        self.ca_file = certificate[0]
        with RangeServer({}, tls=context) as self.server:
            yield

    def make(self, data: bytes) -> Source:
        self.server.replace("object.bin", data)
        return open_source(f"{self.server.url}/object.bin", settings=Settings(stall_s=20.0, ca_file=self.ca_file))

    def test_server_with_unknown_certificate_is_rejected(self) -> None:
        self.server.replace("object.bin", b"x")
        with pytest.raises(SourceUnavailable, match="ca_file") as caught:
            open_source(f"{self.server.url}/object.bin", settings=SETTINGS)
        assert caught.value.uri == f"{self.server.url}/object.bin"

    @pytest.mark.parametrize("content", [None, b"no certificate"])
    def test_invalid_ca_file_is_refused(self, tmp_path: Path, content: bytes | None) -> None:
        ca_file = tmp_path / "ca.pem"
        if content is not None:
            ca_file.write_bytes(content)
        with pytest.raises(ConfigError, match="ca_file"):
            open_source(f"{self.server.url}/object.bin", settings=Settings(ca_file=ca_file))

    def test_read_recovers_from_connection_faults(self) -> None:
        data = sample(500_000)
        source = self.make(data)
        try:
            for faults in (
                Faults(reset_after=100_000, num_requests=2),
                Faults(truncate_after=100_000, num_requests=2),
                Faults(status=503, num_requests=1),
            ):
                self.server.faults = faults
                assert read(source, 1, [400_000])[0] == data[1:400_001]
        finally:
            source.close()

    def test_stalled_server_raises_source_stalled(self) -> None:
        self.server.replace("object.bin", sample(1000))
        source = open_source(
            f"{self.server.url}/object.bin", settings=Settings(stall_s=0.6, retries=2, ca_file=self.ca_file)
        )
        try:
            self.server.faults = Faults(stall_after=0)
            with pytest.raises(SourceStalled):
                read(source, 0, [10])
        finally:
            source.close()


class TestHttpWeakEtag(TestHttp):
    faults = Faults(weak_etag=True)


class TestHttpDateOnly(TestHttp):
    faults = Faults(no_etag=True)


class TestHttpWithoutConditions(TestHttp):
    faults = Faults(no_validators=True, ignore_if_match=True)


class TestCacheCold(TestHttp):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.settings = Settings(stall_s=20.0, cache_dir=tmp_path)

    def make(self, data: bytes) -> Source:
        return open_cached(super().make(data), settings=self.settings)


class TestCacheWarm(TestCacheCold):
    def make(self, data: bytes) -> Source:
        first = super().make(data)
        if data:
            read(first, 0, [len(data)])
        first.close()
        source = open_cached(open_source(f"{self.server.url}/object.bin", settings=SETTINGS), settings=self.settings)
        if data:
            assert isinstance(source, CachedSource)
            assert read(source, 0, [1])[1] == "cache"
        return source


class TestCacheReadOnlyByFile(TestCacheCold):
    """The cache's directory cannot be created, so everything is read from the source."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        self.settings = Settings(stall_s=20.0, cache_dir=tmp_path / "file")
