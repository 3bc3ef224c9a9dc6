"""Every environment variable that Penstock reads, with its default. No other module reads `os.environ`.

A caller's arguments override the environment, and the environment overrides the defaults. obstore reads the credentials
of object stores itself, from `AWS_*`, `GOOGLE_*` and `AZURE_*`.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from penstock.arguments import require_hub_address, require_name, require_texts, require_type, wrong
from penstock.errors import ConfigError
from penstock.units import GIB, MIB

REMOTE_FETCH_THREADS = 16
"""Default number of threads that read one remote checkpoint. A request waits 20-200 ms for its first byte, and one
connection to S3 carries 85-90 MB/s. Source: AWS, "Performance guidelines for Amazon S3";
benchmarks/results/cpu2_202611/objects.md."""

_SECRET = {"token", "storage_options"}

_SUFFIXES = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB, "T": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes in an int or a text such as `"256M"`, `"1.5GiB"` or `"4096"`.

    Suffixes are powers of 1024. Any other value raises ConfigError.
    """
    if not isinstance(text, str | int) or isinstance(text, bool):
        message = f"{text!r} is not a number of bytes: it is a {type(text).__name__}, not an int or a str"
        raise ConfigError(message, hint="write it as 268435456, 256M or 1.5G")
    try:
        nbytes = text if isinstance(text, int) else _bytes_of(text.strip().upper())
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text!r} is not a number of bytes", hint="write it as 268435456, 256M or 1.5G") from error
    if nbytes < 0:
        raise ConfigError(f"{text!r} is below 0 bytes")
    return nbytes


def _bytes_of(text: str) -> int:
    raw = text.removesuffix("IB").removesuffix("B")
    suffix = raw[-1:] if raw[-1:] in _SUFFIXES else ""
    return int(float(raw.removesuffix(suffix)) * _SUFFIXES[suffix])


def _flag(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ConfigError(f"{text!r} is neither on nor off", hint="write 1 or 0")


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part) for part in text.split(os.pathsep) if part)


_DESCRIBED: list[tuple[Callable[[str], Any], str]] = []
"""The parser and the meaning of each field of `Settings`, in their order."""


def _env(parse: Callable[[str], Any], default: Any, doc: str) -> Any:
    _DESCRIBED.append((parse, doc))
    return default


def _variable(name: str) -> str:
    return f"PENSTOCK_{name.upper()}"


class MetricsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address for serving metrics: a host and a range of ports. The first free port is used."""

    host: str
    first_port: int
    last_port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        last = f"-{self.last_port}" if self.last_port != self.first_port else ""
        return f"{host}:{self.first_port}{last}"


def metrics_address(text: str) -> MetricsAddress:
    """Parse `host:port` or `host:first-last`. Raise ConfigError for any other text."""
    host, _, ports = text.rpartition(":")
    first, _, last = ports.partition("-")
    last = last or first
    is_host = bool(host) and (":" not in host or host[0] + host[-1] == "[]")
    if not (is_host and all(port.isascii() and port.isdigit() for port in (first, last))):
        hint = "write 127.0.0.1:9464, or 127.0.0.1:9464-9479 where several processes share the setting"
        raise ConfigError(f"{text!r} is not an address for metrics", hint=hint)
    if not int(first) <= int(last) <= 65535:
        raise ConfigError(f"{text!r} is not a range of ports", hint="write FIRST-LAST with ports up to 65535")
    return MetricsAddress(host=host.removeprefix("[").removesuffix("]"), first_port=int(first), last_port=int(last))


def asks_for_metrics() -> bool:
    """Return whether `PENSTOCK_METRICS` is set. The function avoids reading all settings, which takes 80 us."""
    return bool(os.environ.get("PENSTOCK_METRICS"))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a process. `Settings.read()` applies the environment to the defaults."""

    memory_bytes: int = _env(parse_bytes, 256 * MIB, "host memory that one load uses for staging, in bytes")
    chunk_bytes: int = _env(parse_bytes, 8 * MIB, "bytes in one read; see docs/operate/tuning.md")
    fetch_threads: int = _env(int, 0, "number of reading threads; 0: chosen by source and cores")
    stall_s: float = _env(float, 30.0, "seconds without a byte before a source counts as stalled")
    retries: int = _env(int, 5, "attempts without progress before a source counts as unavailable")
    cache_dir: Path | None = _env(Path, None, "directory of the local cache of remote objects; unset: no cache")
    cache_bytes: int = _env(parse_bytes, 100 * GIB, "size limit of that cache")
    progress: bool | None = _env(_flag, None, "show progress bars on stderr; unset: only on a terminal")
    io_uring: bool = _env(_flag, True, "read cached files with io_uring if the kernel has it")
    safetensors_log: bool = _env(_flag, False, "print on stderr how `penstock run` reads each file")
    nixl_tls: str = _env(str, "", "transports that UCX uses for NIXL (as UCX_TLS); unset: UCX chooses")
    ca_file: Path | None = _env(Path, None, "PEM bundle that verifies object stores and hubs")
    cert_file: Path | None = _env(Path, None, "PEM certificate of this process, for members and hubs")
    key_file: Path | None = _env(Path, None, "PEM key for PENSTOCK_CERT_FILE; unset: that file has it")
    hub: str | None = _env(str, None, "address of the hub; unset: the hub of this host")
    token_file: Path | None = _env(Path, None, "file whose first token is sent to the hub (not for `penstock hub`)")
    runtime_dir: Path | None = _env(Path, None, "directory of sockets and locks; unset: XDG_RUNTIME_DIR or /tmp")
    compile_cache_dir: Path | None = _env(
        Path, None, "compiled code of engines; unset: ~/.cache/penstock/compile-cache"
    )
    compile_cache_keys: tuple[Path, ...] = _env(_paths, (), "public keys (PEM) whose bundles are unpacked, by colons")
    compile_cache_signing_key: Path | None = _env(
        Path, None, "PEM private key that signs bundles; unset: none are saved"
    )
    metrics: MetricsAddress | None = _env(
        metrics_address, None, "address where this process serves its metrics; unset: not served"
    )
    metrics_token_file: Path | None = _env(Path, None, "file of tokens; a reader of the metrics must send one of them")
    redis_url: str = _env(str, "", "Redis that several hubs share; `penstock hub` reads it unless --redis is given")
    redis_password_file: Path | None = _env(
        Path, None, "file with the password for that Redis; `penstock hub` reads it"
    )

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Return the settings: `overrides` that are not None, then the environment, then the defaults.

        Raises:
            ConfigError: a variable or override does not parse or is out of range. Nothing was started.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for name, (parse, _) in zip(cls.__struct_fields__, _DESCRIBED, strict=True):
            # An empty variable counts as unset, because shells and container specs cannot easily unset a variable.
            if text := environ.get(_variable(name), ""):
                values[name] = _parse(_variable(name), parse, text)
        values |= {name: value for name, value in overrides.items() if value is not None}
        settings = cls(**values)
        for name in ("memory_bytes", "chunk_bytes", "stall_s", "retries", "cache_bytes", "fetch_threads"):
            least = "0 or more" if name == "fetch_threads" else "positive"
            value = getattr(settings, name)
            # The comparison also rejects NaN.
            if not (value > 0 or (value == 0 and name == "fetch_threads")):
                if overrides.get(name) is not None:
                    raise ConfigError(f"{name} must be {least}, not {value}")
                raise ConfigError(f"environment variable {_variable(name)}={value} must be {least}")
        return settings


def _parse(name: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {name}: {error.message}", hint=error.hint) from error
    except ValueError as error:
        message = f"environment variable {name}={text!r} does not parse: {error}"
        raise ConfigError(message, hint="see its allowed values in docs/operate/tuning.md") from error


class _WithoutSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """Settings whose repr omits secrets, also the repr that rich prints, for example in a traceback with variables."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in _SECRET]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


class ConnectionSettings(_WithoutSecrets, frozen=True, kw_only=True):
    """How a process reaches the hub, and how other members reach the process.

    Every function that uses a hub accepts this object as `connection=`. An invalid field raises ConfigError.

    Attributes:
        hub: address of the hub, `http(s)://host:port` or `unix:///path`. The default is `PENSTOCK_HUB`, or else this
            host's hub, which runs in the first process that joins.
        token: token that the hub requires. The default is the first token in the file `PENSTOCK_TOKEN_FILE`. The repr
            omits the token.
        token_file: path of a file whose first token is sent to the hub, instead of `token`.
        listen: `host:port` where other hosts reach this member. Without `listen`, only this host reaches this member.
        data_port: second port at the host of `listen`, from which peers read bytes. 0 means any free port.
        rack: label that nearby hosts share.
        transports: names of the allowed transports: `loopback`, `cuda_ipc`, `shm`, `nixl`, `http`, or a registered
            name. The default is every transport that works on this host.
        stall_s: seconds without progress after which the hub or a member counts as stalled. The default is
            `PENSTOCK_STALL_S`.
    """

    hub: str | None = None
    token: str | None = None
    token_file: str | os.PathLike[str] | None = None
    listen: str | None = None
    data_port: int = 0
    rack: str = ""
    transports: Sequence[str] | None = None
    stall_s: float | None = None

    def __post_init__(self) -> None:
        if self.hub is not None:
            require_hub_address(self.hub)
        if self.token is not None:
            _check_token(self.token)
        require_type("token_file", self.token_file, (str, os.PathLike, type(None)), "the path of a file, or None")
        if self.token is not None and self.token_file is not None:
            raise ConfigError("token and token_file are both set", hint="set only one of them")
        self._check_data_port()
        if self.listen is not None:
            require_name("listen", self.listen)
        require_type("rack", self.rack, str, "a str that nearby hosts share")
        require_texts("transports", self.transports, 'a list of names, as ["shm", "http"], or None')
        if self.transports is not None:
            # An empty list would let the member join, and then every read would fail.
            if not self.transports:
                hint = 'list the allowed transports, such as ["shm", "http"], or pass None to allow all'
                raise ConfigError("transports is empty, so this process could not exchange bytes with peers", hint=hint)
            msgspec.structs.force_setattr(self, "transports", tuple(self.transports))
        if self.stall_s is not None:
            require_type("stall_s", self.stall_s, (int, float), "seconds, as 30.0, or None")
            if not self.stall_s > 0:
                raise wrong("stall_s", self.stall_s, "a positive number of seconds, or None")

    def _check_data_port(self) -> None:
        require_type("data_port", self.data_port, int, "a port, as 7072")
        if not 0 <= self.data_port < 1 << 16:
            raise wrong("data_port", self.data_port, "a port from 1 to 65535, or 0 for any free one")
        if not self.data_port:
            return
        if self.listen is None:
            message = "data_port is set without listen, so no other host would use it"
            raise ConfigError(message, hint='pass listen="HOST:PORT"')
        if isinstance(self.listen, str) and self.listen.rpartition(":")[2] == str(self.data_port):
            raise ConfigError(f"listen and data_port are both port {self.data_port}", hint="use two different ports")

    @classmethod
    def of(cls, connection: ConnectionSettings | str | None) -> ConnectionSettings:
        """Return the settings for a `connection` argument. A str is the hub's address. None means the defaults."""
        if isinstance(connection, cls):
            return connection
        if connection is None or isinstance(connection, str):
            return cls(hub=connection)
        raise wrong("connection", connection, "a penstock.ConnectionSettings, the hub's address as a str, or None")


class ReadSettings(_WithoutSecrets, frozen=True, kw_only=True):
    """The settings of a read. Most calls use the default settings.

    Functions that load weights accept this object as `settings=`. An invalid field raises ConfigError.

    Attributes:
        memory_bytes: limit of host staging, as a number or a text such as `"256M"`. The default is
            `PENSTOCK_MEMORY_BYTES`, or else 256 MiB.
        storage_options: options for the object store, with obstore's names. Storage options override the environment.
            The repr omits storage options, because they may contain credentials.
        trace: path at which to write a Chrome trace file, or None for no trace.
        cache: whether a model from a model hub is first written to the local cache of the hub's library, verified file
            by file, and then loaded from there. Not possible with `group`.
        copy: whether `load` and `stream` read into new memory on the CPU. By default, `load` and `stream` map local
            files with private pages.
        arena: whether `load_into` first moves the target into one arena, so that peers reach it with one registration.
            Functions other than `load_into` reject `arena`.
    """

    memory_bytes: int | str | None = None
    storage_options: Mapping[str, str] | None = None
    trace: str | os.PathLike[str] | None = None
    cache: bool = False
    copy: bool | None = None
    arena: bool = False

    def __post_init__(self) -> None:
        # Reject an invalid size when the settings are created.
        if self.memory_bytes is not None:
            parse_bytes(self.memory_bytes)
        require_type("storage_options", self.storage_options, (Mapping, type(None)), "options by name, or None")
        require_type("trace", self.trace, (str, os.PathLike, type(None)), "a file, or None")
        require_type("cache", self.cache, bool, "True or False; cache_dir is PENSTOCK_CACHE_DIR")
        require_type("copy", self.copy, (bool, type(None)), "True, False or None")
        require_type("arena", self.arena, bool, "True or False")

    @classmethod
    def of(cls, settings: ReadSettings | None) -> ReadSettings:
        """Return a `settings` argument, or the defaults for None."""
        require_type("settings", settings, (cls, type(None)), "a penstock.ReadSettings, or None")
        return cls() if settings is None else settings


def _check_token(token: object) -> None:
    # Errors are logged, so their messages must not contain the token.
    if not isinstance(token, str):
        raise ConfigError(f"token is a {type(token).__name__}, not a str", hint="pass a str, or None")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        hint = "call strip() on a token that was read from a file, because it ends with a newline"
        raise ConfigError("token is empty or contains a space, a newline or a character that is not ASCII", hint=hint)


def visible_devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the devices in CUDA_VISIBLE_DEVICES, or None if the variable is not set."""
    # CUDA ignores the first entry that is not a device, such as `-1`, and all entries after it.
    shown = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    return None if shown is None else tuple(takewhile(lambda name: name[:1] not in {"", "-"}, shown.split(",")))


# Penstock uses only subdirectories that this user owns and whose mode is 700.
SHARED_TMP = Path("/tmp")  # nosec B108


def runtime_dir(environ: Mapping[str, str] | None = None, *, shared: Path = SHARED_TMP) -> Path:
    """Return the directory for the sockets and locks of this user's processes. The directory may not exist yet.

    The result is the first of `PENSTOCK_RUNTIME_DIR`, `XDG_RUNTIME_DIR/penstock` and `/tmp/penstock-UID` that this user
    can own. If another user owns `/tmp/penstock-UID`, this user's oldest `/tmp/penstock-UID-*` is used or created.
    """
    environ = os.environ if environ is None else environ
    configured = Settings.read(environ).runtime_dir
    if configured is not None:
        return configured
    session = environ.get("XDG_RUNTIME_DIR", "")
    # After `su` or `sudo`, `XDG_RUNTIME_DIR` may still name the directory of the previous user.
    if session and os.path.isdir(session) and os.stat(session).st_uid == os.geteuid():
        return Path(session) / "penstock"
    return _own_directory(shared, f"penstock-{os.geteuid()}")


def _own_directory(shared: Path, name: str) -> Path:
    usual = shared / name
    # Check the alternative names first, because a running process may still use one even if the usual name is free now.
    others = sorted(path for path in shared.glob(f"{name}-*") if _is_private(path))
    if others and not _is_private(usual):
        return others[0]
    try:
        is_taken = usual.lstat().st_uid != os.geteuid()
    except FileNotFoundError:
        is_taken = False
    if not is_taken:
        return usual
    # Another user's directory cannot be removed from the sticky /tmp. Names that begin with the time sort by age, so
    # processes that start together agree on the oldest directory. The random suffix cannot be guessed.
    new = shared / f"{name}-{time.time_ns():020d}-{secrets.token_hex(4)}"
    try:
        new.mkdir(mode=0o700)
    except OSError as error:
        message = f"{usual} belongs to another user, and a directory with a different name cannot be created: {error}"
        raise ConfigError(message, hint="set PENSTOCK_RUNTIME_DIR to a directory that this user owns") from error
    oldest = min(path for path in shared.glob(f"{name}-*") if _is_private(path))
    if oldest != new:
        new.rmdir()
    return oldest


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def environment(environ: Mapping[str, str] | None = None) -> list[tuple[str, str | None, str]]:
    """Return the name, value (None if unset) and meaning of every variable that Penstock reads."""
    environ = os.environ if environ is None else environ
    variables = []
    for name, (_, meaning) in zip(Settings.__struct_fields__, _DESCRIBED, strict=True):
        value = environ.get(_variable(name))
        if value is not None and name in {"redis_url", "hub"}:
            value = without_password(value)
        variables.append((_variable(name), value, meaning))
    return variables


def without_password(url: str) -> str:
    """Return a URL without its user, password and query."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def ecosystem(prefix: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables whose names begin with `prefix` (such as `AWS_`) and that are not empty."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name.startswith(prefix) and value}


class NetworkEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The variables for proxies and certificates that other network tools also read.

    Attributes:
        proxies: name and value of the proxy variable for each scheme (`http`, `https`, `all`).
        no_proxy: hosts to connect to without a proxy.
        bundles: variables that name a certificate bundle, each with the bundle's path.
    """

    proxies: Mapping[str, tuple[str, str]]
    no_proxy: str
    bundles: tuple[tuple[str, Path], ...]


def network_environment(environ: Mapping[str, str] | None = None) -> NetworkEnvironment:
    """Read the variables for proxies and certificates. A lower-case name overrides the upper-case name."""
    environ = os.environ if environ is None else environ

    def either(name: str) -> tuple[str, str]:
        name = name if name in environ else name.upper()
        return name, environ.get(name, "").strip()

    proxies = {scheme: either(f"{scheme}_proxy") for scheme in ("http", "https", "all")}
    # In a CGI program the client can set HTTP_PROXY with a request header. Source: CVE-2016-5385, httpoxy.
    if "REQUEST_METHOD" in environ and proxies["http"][0] == "HTTP_PROXY":
        del proxies["http"]
    # The library `requests` reads CURL_CA_BUNDLE only if REQUESTS_CA_BUNDLE is unset.
    names = [name for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE") if environ.get(name)]
    return NetworkEnvironment(
        proxies={scheme: proxy for scheme, proxy in proxies.items() if proxy[1]},
        no_proxy=either("no_proxy")[1],
        bundles=tuple((name, Path(environ[name])) for name in names[:1]),
    )


_UCX = {
    # Penstock's errors already report failures of NIXL and UCX.
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "FATAL",
    # Larger segments and buffers wake the TCP threads less often. A 10 Gb/s link reaches 0.95 of its rate instead of
    # 0.5 to 0.9, with half the holder's CPU time. Source: benchmarks/results/cpu2_202611/hosts.md.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_TCP_SNDBUF": "8m",
    "UCX_TCP_RCVBUF": "8m",
}


@contextmanager
def ucx_variables(tls: str) -> Iterator[None]:
    """Set the variables that UCX reads at startup, unless the user has set them. `tls` always replaces UCX_TLS."""
    wanted = {name: os.environ.get(name, value) for name, value in _UCX.items()}
    # On a host without RDMA devices, UCX's RDMA modules with Debian's ibverbs-providers crash the process at exit.
    if not any(Path("/sys/class/infiniband").glob("*")):
        wanted["UCX_MODULES"] = os.environ.get("UCX_MODULES", "^ib,rdmacm")
    if tls:
        wanted["UCX_TLS"] = tls
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_variables(values: Mapping[str, str]) -> None:
    """Set environment variables for other libraries in this process and in its child processes."""
    os.environ.update(values)


def home_cache(name: str) -> Path:
    """Return `penstock/NAME` below `XDG_CACHE_HOME` or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "penstock" / name
    except RuntimeError as error:
        raise ConfigError("this user has no home directory", hint="set XDG_CACHE_HOME") from error
