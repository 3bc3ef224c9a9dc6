"""Engines that serve an adapter's versions: a vLLM or SGLang server on this host, or vLLM's `LLM` in this process.

In: versions of an adapter (`adapter`), an engine. Out: the engine serves each version under a name of its own, and its
tokens are of that version alone.
Not here: receiving and the files of a version (`adapter`), whole weights (`penstock_vllm.weight_transfer`).

    version 7 -> a directory that never changes -> engine loads `policy@7` -> requests for `policy@7`, `policy`
    version 8 -> another directory              -> `policy@8`; requests that run on `policy@7` end on it

A version has a name, an id and a path of its own, and nothing is loaded in place. vLLM keys the prefix cache by name
and path, SGLang by an id that each load makes, so no request uses keys and values of another version. vLLM's
`load_inplace` keeps the id: requests that run would go on with another version's weights.

vLLM's routes were run with 0.32. SGLang's were read in 0.5.23 and not run. Neither package is needed to import this.
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
    """An engine that loads adapters from directories. Each is loaded once, and never in place of another."""

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter under a name. Raises DestinationError: it is not loaded."""
        ...

    def unload(self, name: str) -> None:
        """Let no further request use an adapter; those that run end on it. Raises DestinationError."""
        ...


class _Server:
    """The routes of a server on this host.

    Args:
        url: of the server.
        token: for its `Authorization` header; None: it needs none.
        timeout_s: for one answer; None: the stall deadline.
    """

    _load_route = ""
    _unload_route = ""
    _hint = ""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float | None = None) -> None:
        # The server reads files of this host, so its own address is enough, without TLS.
        if urlsplit(url).scheme != "http" or not urlsplit(url).hostname:
            raise ConfigError(f"{url!r} is not the address of a server", hint="write http://localhost:8000")
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
                f"the server answered {status} to {route} for {body['lora_name']}: {reason}", uri=self.url, hint=hint
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
                raise DestinationError(f"the server did not answer {route}: {error}", uri=self.url) from error


class VllmServer(_Server):
    """A vLLM server on this host: `vllm serve --enable-lora`, with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.

    It needs room for two adapters at least (`--max-loras 2`): the newest, and that of the requests that still run.
    """

    _load_route = "/v1/load_lora_adapter"
    _unload_route = "/v1/unload_lora_adapter"
    _hint = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"

    def synced_base(self, name: str) -> Callable[[], str]:
        """Return the base of a server whose own weights come by the sync `name`: `NAME:VERSION`, as it serves them now.

        The server is one of `--weight-transfer-config '{"backend": "penstock"}'` and `VLLM_SERVER_DEV_MODE=1`.
        """

        def identity() -> str:
            status, answer = self._ask("GET", "/weight_info")
            try:
                info = msgspec.json.decode(answer, type=dict[str, Any]) if status == 200 else {}
            except MALFORMED:
                info = {}
            if "weight_version" not in info:
                message = f"the server does not say which version of {name!r} it serves: it answered {status}"
                raise DestinationError(message, uri=self.url, hint="start it with VLLM_SERVER_DEV_MODE=1")
            return f"{name}:{info['weight_version']}"

        return identity


class SglangServer(_Server):
    """An SGLang server on this host, of `--enable-lora --max-lora-rank ... --lora-target-modules ...`."""

    _load_route = "/load_lora_adapter"
    _unload_route = "/unload_lora_adapter"
    _hint = "start the server with --enable-lora"


class VllmEngine:
    """vLLM's `LLM` in this process, made with `enable_lora=True` and `max_loras` of 2 at least.

    If vLLM runs its engine in a process of its own, a refused adapter is vLLM's own plain Exception.

    Args:
        llm: the `LLM`.

    Attributes:
        requests: vLLM's `LoRARequest` of each adapter that is loaded, by name: for `llm.generate(lora_request=...)`.
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
            raise DestinationError(f"vLLM does not load the adapter {name}: {error}") from error
        self.requests[name] = request

    def unload(self, name: str) -> None:
        """See `LoraEngine.unload`."""
        self._llm.llm_engine.remove_lora(self.requests.pop(name).lora_int_id)


class ServedAdapter(Closeable):
    """An adapter's versions in an engine. Made by `serve_adapter`; a context manager. One thread at a time updates.

    Attributes:
        received: where the versions come from.
        loaded: the names under which the engine has versions, the oldest first.
    """

    def __init__(
        self, received: AdapterSubscriber, directory: AdapterDirectory, engine: LoraEngine, base: Base, name: str
    ) -> None:
        self.received = received
        self.loaded: list[str] = []
        self.install_s = 0.0
        """Time of the newest version's installation: files and the engine's load."""
        self._directory = directory
        self._engine = engine
        self._base = base
        self._name = name
        # The base of the versions in the engine.
        self._loaded_base = ""

    @property
    def name(self) -> str:
        """Return the name under which the engine has the newest version, as `policy@7`. ConfigError: it has none."""
        if not self.loaded:
            raise ConfigError(f"no version of {self._name!r} is loaded", hint="call update()")
        return self.loaded[-1]

    @property
    def version(self) -> int:
        """Return the version that the engine serves; -1: none."""
        return int(self.loaded[-1].rpartition("@")[2]) if self.loaded else -1

    def update(self, version: int | None = None, timeout_s: float | None = None) -> UpdateReport:
        """Receive a version, and have the engine serve it under a name of its own.

        Requests that run end on the version that they began with. The version before stays loaded, older ones do not.

        Raises:
            BaseMismatch: the version is for another base than the engine's; no byte of it was read. Versions of a base
                that the engine no longer has are unloaded.
            DestinationError: the engine refused it; says why. The engine serves the version before. Call this again.
            Others as `penstock.sync.Subscriber.update`.
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
                    f"the engine's base changed while {name} was loaded, which is for {self.received.base}",
                    expected=self.received.base,
                    found=base_identity(self._base),
                    hint="publish an adapter of the new base",
                )
        while len(self.loaded) > 2:
            self._engine.unload(self.loaded[0])
            del self.loaded[0]
        return report

    def check_base(self) -> bool:
        """Return whether the engine still has the base of the versions in it; unload them all if it does not.

        Order: call this after the engine's base was updated, before it serves requests again.
        """
        if not self.loaded or is_same_base(self._loaded_base, base_identity(self._base)):
            return True
        self.unload()
        return False

    def unload(self) -> None:
        """Unload all versions. Raises DestinationError: the engine did not do so."""
        while self.loaded:
            self._engine.unload(self.loaded[-1])
            del self.loaded[-1]

    def close(self) -> None:
        """Unload all versions, leave the sync, and remove the files. Idempotent."""
        # A server that ended before has unloaded them too.
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
    """Receive the versions of an adapter for an engine of this host.

    Args:
        name: of the sync that a trainer publishes the adapter under.
        engine: `VllmServer(url)`, `VllmEngine(llm)`, `SglangServer(url)`, or another `LoraEngine`.
        base: the engine's base: see `adapter.base_identity`, and `VllmServer.synced_base`.
        served_name: the engine has version N as `SERVED_NAME@N`; None: `name`.
        connection: see `penstock.subscriber`.
        directory, keep: see `AdapterDirectory`. The engine's processes read the files: if the engine runs as another
            user, or in a container, name a directory that it may read.

    Raises:
        As `penstock.subscriber`.
    """
    if keep < 2:
        raise ConfigError(f"keep is {keep}", hint="the engine has two versions loaded, and may read both again")
    received = adapter_subscriber(name, base=base, connection=connection)
    files = AdapterDirectory(received, directory, keep=keep)
    return ServedAdapter(received, files, engine, base, served_name or name)
