"""Every environment variable Penstock reads, and the defaults behind them; nothing else reads `os.environ`.

In: the process environment. Out: a frozen `Settings`; a caller's arguments win over both. Also `ConnectionSettings`,
the argument of every verb that uses a hub (`hub.client` adds the environment).
Not here: credentials of object stores, which obstore reads by the ecosystem's names (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from penstock.arguments import require_hub_address, require_name, require_texts, require_type, wrong
from penstock.errors import ConfigError
from penstock.types import GIB, MIB

_SUFFIXES = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB, "T": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """Return the bytes of `"256M"`, `"1.5GiB"`, `"4096"` or an int; suffixes are powers of 1024.

    Raises:
        ConfigError: it is not a number of bytes.
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
    """Return the paths of a text, which colons separate."""
    return tuple(Path(part) for part in text.split(os.pathsep) if part)


def _env(name: str, parse: Callable[[str], Any], default: Any, doc: str) -> Any:
    return field(default=default, metadata={"env": name, "parse": parse, "doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAddress:
    """An address to serve metrics at: a host, and the ports of which the first free one is taken."""

    host: str
    first_port: int
    last_port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        last = f"-{self.last_port}" if self.last_port != self.first_port else ""
        return f"{host}:{self.first_port}{last}"


def metrics_address(text: str) -> MetricsAddress:
    """Return the address that `host:port` or `host:first-last` names. ConfigError: it is neither."""
    host, _, ports = text.rpartition(":")
    first, _, last = ports.partition("-")
    last = last or first
    is_host = bool(host) and (":" not in host or host[0] + host[-1] == "[]")
    if not (is_host and all(port.isascii() and port.isdigit() for port in (first, last))):
        hint = "write 127.0.0.1:9464, or 127.0.0.1:9464-9479 where several processes share the setting"
        raise ConfigError(f"{text!r} is not an address for metrics", hint=hint)
    if not int(first) <= int(last) <= 65535:
        raise ConfigError(f"{text!r} is not a range of ports", hint="the first port comes first, and 65535 is the last")
    return MetricsAddress(host=host.removeprefix("[").removesuffix("]"), first_port=int(first), last_port=int(last))


def asks_for_metrics() -> bool:
    """Return whether `PENSTOCK_METRICS` is set, without the 80 us that reading all settings takes."""
    return bool(os.environ.get("PENSTOCK_METRICS"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a process; `Settings.read()` overlays the environment on the defaults."""

    memory_bytes: int = _env("PENSTOCK_MEMORY_BYTES", parse_bytes, 256 * MIB, "host staging of one load, in bytes")
    chunk_bytes: int = _env("PENSTOCK_CHUNK_BYTES", parse_bytes, 8 * MIB, "unit of I/O; see docs/tuning.md")
    fetch_threads: int = _env("PENSTOCK_FETCH_THREADS", int, 0, "reading threads; 0 chooses by source and cores")
    stall_s: float = _env("PENSTOCK_STALL_S", float, 30.0, "seconds without a byte before a source counts as stalled")
    retries: int = _env("PENSTOCK_RETRIES", int, 5, "attempts without progress before a source counts as unavailable")
    cache_dir: Path | None = _env(
        "PENSTOCK_CACHE_DIR", Path, None, "NVMe read-through cache of remote objects; unset: none"
    )
    cache_bytes: int = _env("PENSTOCK_CACHE_BYTES", parse_bytes, 100 * GIB, "size bound of that cache")
    progress: bool | None = _env("PENSTOCK_PROGRESS", _flag, None, "progress bars on stderr; unset: on a terminal")
    io_uring: bool = _env("PENSTOCK_IO_URING", _flag, True, "read cached files by io_uring where the kernel has it")
    safetensors_log: bool = _env(
        "PENSTOCK_SAFETENSORS_LOG", _flag, False, "say on stderr which reader each file of `penstock run` gets"
    )
    nixl_tls: str = _env("PENSTOCK_NIXL_TLS", str, "", "UCX's transports for nixl (as UCX_TLS); unset: UCX chooses")
    ca_file: Path | None = _env(
        "PENSTOCK_CA_FILE", Path, None, "PEM bundle that signs object stores' and hubs' certificates"
    )
    cert_file: Path | None = _env(
        "PENSTOCK_CERT_FILE", Path, None, "PEM certificate shown to hubs that ask, and members"
    )
    key_file: Path | None = _env(
        "PENSTOCK_KEY_FILE", Path, None, "PEM key of PENSTOCK_CERT_FILE; unset: it is in there"
    )
    hub: str | None = _env("PENSTOCK_HUB", str, None, "address of the hub; unset: this host's own")
    token_file: Path | None = _env(
        "PENSTOCK_TOKEN_FILE", Path, None, "file whose first token is shown to the hub; not read by `penstock hub`"
    )
    runtime_dir: Path | None = _env(
        "PENSTOCK_RUNTIME_DIR", Path, None, "sockets and locks of this user's processes; unset: XDG_RUNTIME_DIR or /tmp"
    )

    artifact_dir: Path | None = _env(
        "PENSTOCK_ARTIFACT_DIR", Path, None, "compiled code of engines; unset: penstock/artifacts in ~/.cache"
    )
    artifact_keys: tuple[Path, ...] = _env(
        "PENSTOCK_ARTIFACT_KEYS", _paths, (), "public keys (PEM) whose bundles are unpacked, by colons"
    )
    artifact_signing_key: Path | None = _env(
        "PENSTOCK_ARTIFACT_SIGNING_KEY", Path, None, "private key (PEM) that signs bundles; unset: none are saved"
    )

    metrics: MetricsAddress | None = _env(
        "PENSTOCK_METRICS", metrics_address, None, "address at which Prometheus reads this process; unset: none"
    )
    metrics_token_file: Path | None = _env(
        "PENSTOCK_METRICS_TOKEN_FILE", Path, None, "file of tokens, one of which a reader of the metrics must show"
    )

    redis_url: str = _env(
        "PENSTOCK_REDIS_URL", str, "", "state of several hubs that act as one; read by `penstock hub` without --redis"
    )
    redis_password_file: Path | None = _env(
        "PENSTOCK_REDIS_PASSWORD_FILE", Path, None, "file with the password of that Redis, read by `penstock hub`"
    )

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Return the defaults, overlaid by the environment, then by `overrides` that are not None.

        Raises:
            ConfigError: a variable or override does not parse, or is out of range; nothing was started.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for item in fields(cls):
            text = environ.get(item.metadata["env"], "")
            # Empty counts as not set: shells and container specs cannot easily unset a variable.
            if text:
                values[item.name] = _parse(item.metadata["env"], item.metadata["parse"], text)
        values |= {name: value for name, value in overrides.items() if value is not None}
        settings = replace(cls(), **values)
        for item in fields(cls):
            least = _LEAST.get(item.name)
            value = getattr(settings, item.name)
            if least is not None and not (value > 0 if least == "positive" else value >= 0):
                is_given = overrides.get(item.name) is not None
                what = item.name if is_given else f"environment variable {item.metadata['env']}={value}"
                raise ConfigError(f"{what} must be {least}" + (f", not {value}" if is_given else ""))
        return settings


_LEAST = {
    **dict.fromkeys(("memory_bytes", "chunk_bytes", "stall_s", "retries", "cache_bytes"), "positive"),
    "fetch_threads": "0 or more",
}
"""What the values of these fields must be."""


def _parse(name: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"environment variable {name}: {error.message}", hint=error.hint) from error
    except ValueError as error:
        message = f"environment variable {name}={text!r} does not parse: {error}"
        raise ConfigError(message, hint="docs/tuning.md says what it may be") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """The settings by which a process reaches a hub, and by which other members reach the process.

    Every verb that uses a hub takes one as `connection=`. Fields that are None come from the environment when the verb
    is called.

    Attributes:
        hub: `http(s)://host:port`, `unix:///path`; None: `PENSTOCK_HUB`, else the hub of this host, which the first
            process to join runs.
        token: token for the hub, if it requires one; None: the first token in the file `PENSTOCK_TOKEN_FILE`, if set.
            It is left out of the repr.
        token_file: a file whose first token is sent to the hub, read when the verb is called; instead of `token`.
        listen: `host:port` where other hosts reach this member; None: this host only.
        data_port: second port of the member, at the host of `listen`, for the bytes that others read; 0: any free one.
        rack: a label that hosts near each other share.
        transports: names of the allowed transports (`loopback`, `cuda_ipc`, `shm`, `nixl`, `http`, or a registered
            one); None: all that work here.
        stall_s: seconds without progress after which the hub, or another member, counts as stalled; None:
            `PENSTOCK_STALL_S`.

    Raises:
        ConfigError: a field is of the wrong type, `hub` is no address, `token` and `token_file` are both given,
            `data_port` is no second port, `transports` is empty, or `stall_s` is not positive.
    """

    hub: str | None = None
    token: str | None = field(default=None, repr=False)
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
            raise ConfigError("token and token_file are both given", hint="leave one of them out")
        self._check_data_port()
        if self.listen is not None:
            require_name("listen", self.listen)
        require_type("rack", self.rack, str, "a str that near hosts share")
        require_texts("transports", self.transports, 'a list of names, as ["shm", "http"], or None')
        if self.transports is not None:
            # Without a transport a member joins, and every read fails later with a reason for each that is not allowed.
            if not self.transports:
                hint = 'name those to allow, as ["shm", "http"]; None allows all that work here'
                raise ConfigError("transports is empty: this process could exchange no bytes with its peers", hint=hint)
            object.__setattr__(self, "transports", tuple(self.transports))
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
            raise ConfigError("data_port needs listen: without it no other host reads", hint='give listen="HOST:PORT"')
        if isinstance(self.listen, str) and self.listen.rpartition(":")[2] == str(self.data_port):
            raise ConfigError(f"listen and data_port are both port {self.data_port}", hint="give two ports")

    @classmethod
    def of(cls, connection: ConnectionSettings | str | None) -> ConnectionSettings:
        """Return the settings that a verb's argument stands for: a str is the hub's address, None the defaults."""
        if isinstance(connection, cls):
            return connection
        if connection is None or isinstance(connection, str):
            return cls(hub=connection)
        raise wrong("connection", connection, "a penstock.ConnectionSettings, the hub's address as a str, or None")


def _check_token(token: object) -> None:
    # The messages leave the token out: errors are logged.
    if not isinstance(token, str):
        raise ConfigError(f"token is a {type(token).__name__}", hint="give a str, or None")
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        hint = "a token read from a file ends with its line: strip() it"
        raise ConfigError("token is empty, or has characters that no token has, as a space or a newline", hint=hint)


def visible_devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the devices in CUDA_VISIBLE_DEVICES; None: it is not set, so no device is hidden."""
    # CUDA ignores everything after the first entry that names no device, such as `-1`.
    shown = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    return None if shown is None else tuple(takewhile(lambda name: name[:1] not in {"", "-"}, shown.split(",")))


# Only directories of mode 700 that this user owns are used in it.
SHARED_TMP = Path("/tmp")  # nosec B108


def runtime_dir(environ: Mapping[str, str] | None = None, *, shared: Path = SHARED_TMP) -> Path:
    """Return the directory of the sockets and locks of this user's processes; it may not exist yet.

    `PENSTOCK_RUNTIME_DIR`, else `penstock` below `XDG_RUNTIME_DIR`, else `/tmp/penstock-UID`; if another user took that
    name, this user's oldest `/tmp/penstock-UID-*`, which is made if there is none.

    Args:
        environ: the environment; None: this process's.
        shared: the directory that all users write to.

    Raises:
        ConfigError: a directory of another name cannot be made there.
    """
    environ = os.environ if environ is None else environ
    configured = Settings.read(environ).runtime_dir
    if configured is not None:
        return configured
    session = environ.get("XDG_RUNTIME_DIR", "")
    # After `su` or `sudo` the variable may name another user's directory.
    if session and os.path.isdir(session) and os.stat(session).st_uid == os.geteuid():
        return Path(session) / "penstock"
    return _own_directory(shared, f"penstock-{os.geteuid()}")


def _own_directory(shared: Path, name: str) -> Path:
    """Return this user's directory below one that all users write to, even if another user took its usual name."""
    usual = shared / name
    # Other names first: a process that runs may use one, and the usual name may have become free since.
    others = sorted(path for path in shared.glob(f"{name}-*") if _is_private(path))
    if others and not _is_private(usual):
        return others[0]
    try:
        is_taken = usual.lstat().st_uid != os.geteuid()
    except FileNotFoundError:
        is_taken = False
    if not is_taken:
        return usual
    # Another user owns the usual name, and /tmp is sticky: it stays theirs. A name that begins with the time sorts
    # by age, so that processes that start together agree on the oldest; nobody can guess it beforehand.
    new = shared / f"{name}-{time.time_ns():020d}-{secrets.token_hex(4)}"
    try:
        new.mkdir(mode=0o700)
    except OSError as error:
        message = f"{usual} belongs to another user, and no other directory can be made there: {error}"
        raise ConfigError(message, hint="set PENSTOCK_RUNTIME_DIR to a directory of this user") from error
    oldest = min(path for path in shared.glob(f"{name}-*") if _is_private(path))
    if oldest != new:
        new.rmdir()
    return oldest


def _is_private(path: Path) -> bool:
    """Return whether a path is a directory, not a link to one, that only this user can enter."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def environment(environ: Mapping[str, str] | None = None) -> list[tuple[str, str | None, str]]:
    """Return every variable that Penstock reads: name, value in force or None, and meaning; for `penstock doctor`."""
    environ = os.environ if environ is None else environ
    variables = []
    for item in fields(Settings):
        name = item.metadata["env"]
        value = environ.get(name)
        if value is not None and item.name in {"redis_url", "hub"}:
            value = without_password(value)
        variables.append((name, value, item.metadata["doc"]))
    return variables


def without_password(url: str) -> str:
    """Return a URL as it may be shown: user, password and query are left out."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def ecosystem(prefix: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of another ecosystem (`AWS_`, `GOOGLE_`, `AZURE_`) that are set and not empty, by name."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name.startswith(prefix) and value}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEnvironment:
    """The variables by which other tools find their way to servers; see `http.network`.

    Attributes:
        proxies: by scheme (`http`, `https`, `all`): the variable's name, and its value.
        no_proxy: hosts that are reached directly.
        bundles: names and values of the variables for certificates.
    """

    proxies: Mapping[str, tuple[str, str]]
    no_proxy: str
    bundles: tuple[tuple[str, Path], ...]


def network_environment(environ: Mapping[str, str] | None = None) -> NetworkEnvironment:
    """Read the variables of proxies and certificates. An empty one in lower case hides the one in upper case."""
    environ = os.environ if environ is None else environ

    def either(name: str) -> tuple[str, str]:
        name = name if name in environ else name.upper()
        return name, environ.get(name, "").strip()

    proxies = {scheme: either(f"{scheme}_proxy") for scheme in ("http", "https", "all")}
    # A CGI program's caller sets HTTP_PROXY by a header of its request. Source: CVE-2016-5385, httpoxy.
    if "REQUEST_METHOD" in environ and proxies["http"][0] == "HTTP_PROXY":
        del proxies["http"]
    # requests reads the second only without the first.
    names = [name for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE") if environ.get(name)]
    return NetworkEnvironment(
        proxies={scheme: proxy for scheme, proxy in proxies.items() if proxy[1]},
        no_proxy=either("no_proxy")[1],
        bundles=tuple((name, Path(environ[name])) for name in names[:1]),
    )


_UCX = {
    # Our errors report their failures.
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "FATAL",
    # Fewer and larger turns of the threads that serve TCP: 0.95 of a 10 Gb/s link instead of 0.5 to 0.9, and half the
    # holder's processor time. Source: benchmarks/results/cpu2_202611/hosts.md.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_TCP_SNDBUF": "8m",
    "UCX_TCP_RCVBUF": "8m",
}


@contextmanager
def ucx_variables(tls: str) -> Iterator[None]:
    """Set the variables under which NIXL starts: quiet logs, TCP in large pieces, UCX's transports.

    Variables that the user has set stay unchanged, except that `tls` wins. UCX reads them once, when it starts.
    """
    wanted = {name: os.environ.get(name, value) for name, value in _UCX.items()}
    # Without RDMA devices UCX's modules for them, with Debian's ibverbs-providers, crash the process when it exits.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunaiSettings:
    """The settings of Run:ai Model Streamer's environment variables, in Penstock's terms; None: not set."""

    fetch_threads: int | None
    chunk_bytes: int | None
    memory_bytes: int | None
    """The limit if it is below Penstock's own default, which is far below Run:ai's 40 GB already."""
    distributed: Literal["auto", "on", "off"]
    storage_options: Mapping[str, str]
    """Options of S3, by obstore's names."""


def runai_settings(environ: Mapping[str, str] | None = None) -> RunaiSettings:
    """Read `RUNAI_STREAMER_*`: concurrency, chunk and memory bounds, distribution, S3 endpoint and addressing.

    `RUNAI_STREAMER_MEMORY_LIMIT` of -1 (no limit) and 0 (the largest tensor) change nothing: staging is bounded anyway.

    Raises:
        ConfigError: a variable does not parse or is out of range.
    """
    environ = os.environ if environ is None else environ

    def number(name: str, least: int) -> int | None:
        text = environ.get(name, "")
        value = _parse(name, int, text) if text else None
        if value is not None and value < least:
            raise ConfigError(f"environment variable {name}={text!r} must be at least {least}")
        return value

    limit = number("RUNAI_STREAMER_MEMORY_LIMIT", -1) or -1
    spread = environ.get("RUNAI_STREAMER_DIST", "") or "auto"
    words: dict[str, Literal["auto", "on", "off"]] = {"auto": "auto", "1": "on", "0": "off"}
    if spread not in words:
        raise ConfigError(f"environment variable RUNAI_STREAMER_DIST={spread!r} is not one of auto, 0, 1")
    options: dict[str, str] = {}
    if endpoint := environ.get("RUNAI_STREAMER_S3_ENDPOINT", ""):
        options["endpoint"] = endpoint
    if addressing := environ.get("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", ""):
        options["virtual_hosted_style_request"] = "true" if _flag(addressing) else "false"
    if _flag(environ.get("RUNAI_STREAMER_S3_UNSIGNED", "") or "0"):
        options["skip_signature"] = "true"
    return RunaiSettings(
        fetch_threads=number("RUNAI_STREAMER_CONCURRENCY", 1),
        chunk_bytes=number("RUNAI_STREAMER_CHUNK_BYTESIZE", 1),
        memory_bytes=limit if 0 < limit < Settings().memory_bytes else None,
        distributed=words[spread],
        storage_options=options,
    )


def set_variables(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, which other libraries of it and processes that it starts will read."""
    os.environ.update(values)


def home_cache(name: str) -> Path:
    """Return the directory `penstock/NAME` of this user's cache: below `XDG_CACHE_HOME`, else `~/.cache`.

    Raises:
        ConfigError: this user has no home directory.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "penstock" / name
    except RuntimeError as error:
        raise ConfigError("this user has no home directory", hint="set XDG_CACHE_HOME") from error
