"""Engines that serve the versions of an adapter: a vLLM or SGLang server on this host, or vLLM's `LLM` in this process.

Each version has a separate name, id and path (`policy@7`), and no version replaces another in place. Running requests
finish on the version that they began with, and a prefix cache never mixes versions. vLLM's `load_inplace` reuses the
id, so running requests would continue with weights of a different version.

The vLLM routes were tested with vLLM 0.32. The SGLang routes follow the source code of SGLang 0.5.23 and are untested.
This module can be imported without vLLM or SGLang.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from penstock import ConnectionSettings, UpdateReport
from penstock.errors import MALFORMED, BaseMismatch, ConfigError, DestinationError
from penstock.spi import Closeable, ControlConnection, MalformedAnswer, Settings, over_tcp
from penstock_hf.adapter import (
    AdapterDirectory,
    AdapterSubscriber,
    Base,
    adapter_subscriber,
    base_identity,
    is_same_base,
)

_REASON_CHARS = 2000


class LoraEngine(Protocol):
    """An engine that loads each adapter once from a directory, and never replaces an adapter in place."""

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter under a name. Raise DestinationError if the engine fails to load it."""
        ...

    def unload(self, name: str) -> None:
        """Stop using an adapter for new requests. Running requests finish with the adapter.

        Raise DestinationError on failure.
        """
        ...


class _LoraRoutes:
    """The routes of a server on this host.

    Args:
        url: URL of the server.
        token: token for the `Authorization` header, or None if the server needs no token.
        timeout_s: deadline in seconds for one response. The default is the stall deadline (`PENSTOCK_STALL_S`).
    """

    _load_route = ""
    _unload_route = ""
    _hint = ""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float | None = None) -> None:
        # The server reads files on this host, so a local address without TLS is sufficient.
        if urlsplit(url).scheme != "http" or not urlsplit(url).hostname:
            raise ConfigError(f"{url!r} is not a server's address", hint="use an address like http://localhost:8000")
        self.url = url.rstrip("/")
        self._token = token
        self._timeout_s = Settings.read(stall_s=timeout_s).stall_s

    def load(self, name: str, directory: Path) -> None:
        """See `LoraEngine.load`."""
        self._post(self._load_route, {"lora_name": name, "lora_path": str(directory)})

    def unload(self, name: str) -> None:
        """See `LoraEngine.unload`."""
        self._post(self._unload_route, {"lora_name": name})

    def _post(self, route: str, body: Mapping[str, str]) -> None:
        status, answer = self._ask("POST", route, msgspec.json.encode(body))
        if status != 200:
            reason = answer.decode("utf-8", "replace")[:_REASON_CHARS]
            hint = self._hint if status == 404 and b"Not Found" in answer else None
            raise DestinationError(
                f"the server returned {status} from {route} for {body['lora_name']}: {reason}", uri=self.url, hint=hint
            )

    def _ask(self, method: str, route: str, body: bytes | None = None) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        host, port = str(parts.hostname), parts.port or 80
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        with ControlConnection(over_tcp(host, port), f"{host}:{port}") as connection:
            try:
                return connection.request(method, parts.path + route, body, headers, timeout_s=self._timeout_s)
            except (OSError, MalformedAnswer) as error:
                raise DestinationError(f"the server did not respond to {route}: {error}", uri=self.url) from error


class VllmServer(_LoraRoutes):
    """A vLLM server on this host, started with `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.

    The server must run with `--max-loras 2` or more, because running requests use the previous adapter.
    """

    _load_route = "/v1/load_lora_adapter"
    _unload_route = "/v1/unload_lora_adapter"
    _hint = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"

    def synced_base(self, name: str) -> Callable[[], str]:
        """Return a function that identifies the base of a server whose own weights come from the sync `name`.

        The returned function queries the server, and returns `NAME:VERSION`. The server must have been started with
        `--weight-transfer-config '{"backend": "penstock"}'` and `VLLM_SERVER_DEV_MODE=1`.
        """

        def identity() -> str:
            status, answer = self._ask("GET", "/weight_info")
            try:
                info = msgspec.json.decode(answer, type=dict[str, Any]) if status == 200 else {}
            except MALFORMED:
                info = {}
            if "weight_version" not in info:
                message = f"the server does not report which version of {name!r} it serves: it returned {status}"
                raise DestinationError(message, uri=self.url, hint="start it with VLLM_SERVER_DEV_MODE=1")
            return f"{name}:{info['weight_version']}"

        return identity


class SglangServer(_LoraRoutes):
    """An SGLang server on this host, started with `--enable-lora --max-lora-rank ... --lora-target-modules ...`."""

    _load_route = "/load_lora_adapter"
    _unload_route = "/unload_lora_adapter"
    _hint = "start the server with --enable-lora"


class VllmEngine:
    """vLLM's `LLM` in this process, created with `enable_lora=True` and `max_loras` of at least 2.

    If vLLM runs its engine in a separate process, loading an adapter that vLLM refuses raises a plain Exception.

    Attributes:
        requests: vLLM's `LoRARequest` for each loaded adapter, by name. Pass one of these requests to
            `llm.generate(lora_request=...)`.
    """

    def __init__(self, llm: Any) -> None:
        self.requests: dict[str, Any] = {}
        self._llm = llm
        self._num_loaded = 0

    def load(self, name: str, directory: Path) -> None:
        """See `LoraEngine.load`."""
        from vllm.lora.request import LoRARequest

        self._num_loaded += 1
        request = LoRARequest(lora_name=name, lora_int_id=self._num_loaded, lora_path=str(directory))
        try:
            self._llm.llm_engine.add_lora(request)
        except (ValueError, RuntimeError, OSError) as error:
            raise DestinationError(f"vLLM could not load the adapter {name}: {error}") from error
        self.requests[name] = request

    def unload(self, name: str) -> None:
        """See `LoraEngine.unload`."""
        self._llm.llm_engine.remove_lora(self.requests.pop(name).lora_int_id)


class ServedAdapter(Closeable):
    """The loaded versions of an adapter in an engine. A context manager. Only one thread at a time may call `update`.

    Attributes:
        received: subscription to the adapter's versions.
        loaded: names of the versions in the engine, oldest first.
    """

    def __init__(
        self, received: AdapterSubscriber, directory: AdapterDirectory, engine: LoraEngine, base: Base, name: str
    ) -> None:
        self.received = received
        self.loaded: list[str] = []
        self.install_s = 0.0
        """Time in seconds for writing and loading the files of the newest version."""
        self._directory = directory
        self._engine = engine
        self._base = base
        self._name = name
        # Identity of the base model for which the loaded versions were published.
        self._loaded_base = ""

    @property
    def name(self) -> str:
        """Return the engine's name for the newest version, such as `policy@7`.

        Raise ConfigError if no version is loaded.
        """
        if not self.loaded:
            raise ConfigError(f"no version of {self._name!r} is loaded", hint="call update()")
        return self.loaded[-1]

    @property
    def version(self) -> int:
        """Return the version that the engine serves, or -1 before the first version."""
        return int(self.loaded[-1].rpartition("@")[2]) if self.loaded else -1

    def update(self, version: int | None = None, timeout_s: float | None = None) -> UpdateReport:
        """Receive a version, and make the engine serve it under a new name.

        Running requests finish with the version that they started with. The previous version stays loaded, and older
        versions are unloaded.

        Raises:
            BaseMismatch: the version's base differs from the engine's base. No bytes of the version were read. Versions
                for a base that the engine no longer has are unloaded.
            DestinationError: the engine refused the version, for the reason in the error message. The engine
                continues to serve the previous version. Call `update` again.
            PenstockError: see `penstock.sync.Subscriber.update`.
        """
        self.check_base()
        report = self.received.update(version, timeout_s)
        began = time.perf_counter()
        name = f"{self._name}@{self.received.version}"
        if name not in self.loaded:
            self._engine.load(name, self._directory.write())
            self.loaded.append(name)
            self._loaded_base = self.received.base
            self.install_s = time.perf_counter() - began
            if not self.check_base():
                raise BaseMismatch(
                    f"the engine's base changed while it loaded {name}, which is for {self.received.base}",
                    expected=self.received.base,
                    found=base_identity(self._base),
                    hint="publish an adapter for the new base",
                )
        while len(self.loaded) > 2:
            self._engine.unload(self.loaded[0])
            del self.loaded[0]
        return report

    def check_base(self) -> bool:
        """Return whether the engine still has the loaded versions' base. If the base changed, unload all versions.

        Call this function after the engine's base was updated, and before the engine serves requests again.
        """
        if not self.loaded or is_same_base(self._loaded_base, base_identity(self._base)):
            return True
        self.unload()
        return False

    def unload(self) -> None:
        """Unload all versions. Raise DestinationError if the engine fails to unload a version."""
        while self.loaded:
            self._engine.unload(self.loaded[-1])
            del self.loaded[-1]

    def close(self) -> None:
        """Unload all versions, leave the sync, and remove the files. Idempotent."""
        # A server that has exited no longer holds the versions either.
        with contextlib.suppress(DestinationError):
            self.unload()
        self.received.close()
        self._directory.close()


def serve_adapter(
    name: str,
    engine: LoraEngine,
    *,
    base: Base,
    served_name: str | None = None,
    connection: ConnectionSettings | str | None = None,
    directory: Path | str | None = None,
    keep: int = 8,
) -> ServedAdapter:
    """Receive the versions of an adapter for an engine on this host. Raises the same errors as `penstock.subscriber`.

    Args:
        name: name of the sync under which a trainer publishes the adapter.
        engine: `VllmServer(url)`, `VllmEngine(llm)`, `SglangServer(url)`, or another `LoraEngine`.
        base: base of the engine. See `adapter.base_identity` and `VllmServer.synced_base`.
        served_name: prefix of the names in the engine. Version N is loaded as `SERVED_NAME@N`. The default is `name`.
        connection: see `penstock.subscriber`.
        directory, keep: see `AdapterDirectory`. The engine's processes read the files in `directory`. If the engine
            runs as a different user or in a container, choose a directory that the engine can read.
    """
    if keep < 2:
        raise ConfigError(f"keep must be at least 2, not {keep}", hint="the engine may read two versions again")
    received = adapter_subscriber(name, base=base, connection=connection)
    files = AdapterDirectory(received, directory, keep=keep)
    return ServedAdapter(received, files, engine, base, served_name or name)
