"""Versions of an adapter: its tensors and its configuration, pinned to the base that it was trained on.

In: the name of a sync that a trainer publishes an adapter under; the receiver's base. Out: the adapter's tensors by
PEFT's names and the content of its `adapter_config.json`, of one verified version; or a `BaseMismatch`.
Not here: PEFT's models, which need PEFT (`peft`); merging (`lora_merge`); engines (`lora_server`).

    trainer: publish(version, metadata={base, config}) -> receiver: base and configuration fit? -> tensors
                                                                    '-> no byte is read

The base and the configuration are metadata of each version. They come with the map that the tensors are read by, so
that they are those of the very bytes that arrive.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

import penstock
from penstock import ConnectionSettings, Hooks, PublishReport, UpdateReport
from penstock.errors import BaseMismatch, ConfigError, DestinationError, PlanError
from penstock.reports import InspectReport
from penstock.spi import (
    ADAPTERS,
    Closeable,
    OutputSet,
    Target,
    TensorSpec,
    UpdateMode,
    dtype_of,
    lay_out_tensors,
    private_directory,
    read_object,
    require_name,
    text_of,
    write_object,
    wrong_argument,
)
from penstock.sync import Publisher, Subscriber

BASE = "adapter.base"
"""The metadata of a version that identifies its base."""
CONFIG = "adapter.config"
"""The metadata of a version that is its `adapter_config.json`."""
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
"""Files of an adapter's directory. Source: PEFT 0.21, utils/constants.py."""
_NONE = "none"
_RUN = " run="
"""What precedes the run in the identity of a base that is synced."""


@runtime_checkable
class Revised(Protocol):
    """A report that says which weights it is about, as `LoadReport`, `FetchReport` and `VerifyReport` do."""

    @property
    def revision(self) -> str:
        """Return the revision of the weights."""
        ...


Base = str | Publisher | Subscriber | PublishReport | UpdateReport | InspectReport | Revised | Callable[[], str]
"""The base of an adapter: see `base_identity`."""


def base_identity(base: Base) -> str:
    """Return the text by which the two sides compare their bases.

    Args:
        base: the `Publisher` or `Subscriber` that the base itself is synced by, or a report of it: `NAME:VERSION
            run=RUN`, of the version at the time of this call. A trainer that was started again with the same number is
            another run, and has another base. A report of `load`, `inspect`, `verify` or `fetch`: its revision. A
            text, or a function that returns one: that text.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(base, str):
        identity = base
    elif isinstance(base, Publisher | Subscriber | PublishReport | UpdateReport):
        is_whole = base.version >= 0 and not getattr(base, "is_dirty", False)
        run = base.revision.rpartition(":")[0]
        identity = f"{base.name}:{base.version}{_RUN}{run}" if is_whole else _NONE
    elif isinstance(base, InspectReport):
        identity = base.manifest.revision
    elif isinstance(base, Revised):
        identity = base.revision
    elif callable(base):
        identity = base()
    else:
        identity = ""
    if not isinstance(identity, str) or not identity:
        raise wrong_argument(
            "base", base, "a text, a report with a revision, or the Publisher or Subscriber of the base"
        )
    return identity


def is_same_base(expected: str, found: str) -> bool:
    """Return whether two identities are of one base. The run counts where both sides know it: vLLM shows none."""
    if _RUN in expected and _RUN in found:
        return expected == found
    return expected.partition(_RUN)[0] == found.partition(_RUN)[0]


def adapter_metadata(base: Base, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata with which an adapter's version is published.

    Args:
        base: see `base_identity`.
        config: the content of `adapter_config.json`.

    Raises:
        ConfigError: the base has no version yet, or the configuration is no JSON.
    """
    identity = base_identity(base)
    if identity == _NONE:
        raise ConfigError("the base of the adapter has no version yet", hint="publish or receive the base first")
    try:
        # Sorted: all ranks must publish the same text, and a set has another order in each process.
        text = write_object(msgspec.to_builtins(_plain(config)), indent=None, sort_keys=True).decode()
    except TypeError as error:
        raise ConfigError(f"the adapter's configuration cannot be written as JSON: {error}") from error
    return {BASE: identity, CONFIG: text}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _config_of(name: str, version: int, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration in a version's metadata."""
    if BASE not in metadata or CONFIG not in metadata:
        raise PlanError(
            f"version {version} of {name!r} is no adapter: it has no base and no configuration",
            hint="publish it by penstock_hf.peft.adapter_publisher",
        )
    return read_object(metadata[CONFIG].encode(), f"the configuration of version {version} of the adapter {name!r}")


class AdapterSubscriber(Closeable):
    """A receiver of an adapter's versions. Made by `adapter_subscriber`; a context manager. One thread at a time.

    Attributes:
        subscriber: the subscriber of the sync.
        tensors: the adapter's tensors by PEFT's names: of the live version, except during an update.
    """

    def __init__(
        self,
        base: Base,
        check: Callable[[Mapping[str, Any]], None] | None,
        hooks: Hooks,
        check_target: Callable[[], None] | None = None,
        follow_target: Callable[[], None] | None = None,
    ) -> None:
        self.subscriber: Subscriber
        self.tensors: Mapping[str, torch.Tensor] = {}
        self._base = base
        self._check = check
        self._check_target = check_target
        self._follow_target = follow_target
        self._hooks = hooks
        # The base of the version under way.
        self._expected = ""

    @property
    def name(self) -> str:
        """Return the name of the sync."""
        return self.subscriber.name

    @property
    def version(self) -> int:
        """Return the live version; -1: none yet."""
        return self.subscriber.version

    @property
    def config(self) -> dict[str, Any]:
        """Return the content of `adapter_config.json` of the live version. ConfigError: there is none yet."""
        if self.version < 0:
            raise ConfigError(f"no version of {self.name!r} was received yet", hint="call update()")
        return _config_of(self.name, self.version, self.subscriber.metadata)

    @property
    def base(self) -> str:
        """Return the identity of the live version's base; empty: no version is live."""
        return self.subscriber.metadata.get(BASE, "")

    def update(self, version: int | None = None, timeout_s: float | None = None) -> UpdateReport:
        """Receive a version and make it live. See `penstock.sync.Subscriber.update`.

        Raises:
            BaseMismatch: the version is for another base than this receiver's; no byte of it was read. Or the base has
                changed while it was read; the version before is still live.
            PlanError: its configuration does not fit the target.
        """
        self._follow()
        return self.subscriber.update(version, timeout_s)

    def stage(self, version: int | None = None, timeout_s: float | None = None) -> int:
        """Receive and verify a version for `commit`; return it. Raises as `update`."""
        self._follow()
        return self.subscriber.stage(version, timeout_s)

    def _follow(self) -> None:
        if self._follow_target is not None:
            self._follow_target()

    def commit(self) -> UpdateReport:
        """Make the staged version live. Raises as `penstock.sync.Subscriber.commit`; BaseMismatch as `update`."""
        return self.subscriber.commit()

    def hooks(self) -> Hooks:
        """Return the caller's hooks, after the checks of an adapter."""
        return replace(self._hooks, before_read=self._before_read, before_pause=self._before_pause)

    def _before_read(self, version: int, metadata: Mapping[str, str]) -> None:
        config = _config_of(self.name, version, metadata)
        self._expected = metadata[BASE]
        self._check_here(version)
        if self._check is not None:
            self._check(config)
        if self._hooks.before_read is not None:
            self._hooks.before_read(version, metadata)

    def _before_pause(self, version: int) -> None:
        # Again: the base is synced by others, and may have moved since the version was staged. So may the target.
        self._check_here(version)
        if self._hooks.before_pause is not None:
            self._hooks.before_pause(version)

    def _check_here(self, version: int) -> None:
        """Raise unless this receiver's base and target are those that the version is for."""
        if self._check_target is not None:
            self._check_target()
        found = base_identity(self._base)
        if not is_same_base(self._expected, found):
            raise BaseMismatch(
                f"version {version} of the adapter {self.name!r} is for the base {self._expected!r}, and the base here "
                f"is {found!r}",
                expected=self._expected,
                found=found,
                hint="update the base first, or publish an adapter of this base",
            )

    def close(self) -> None:
        """Leave. The tensors keep their version. Idempotent."""
        self.subscriber.close()


def adapter_subscriber(
    name: str,
    *,
    base: Base,
    target: Target | None = None,
    check: Callable[[Mapping[str, Any]], None] | None = None,
    check_target: Callable[[], None] | None = None,
    follow_target: Callable[[], None] | None = None,
    hooks: Hooks | None = None,
    connection: ConnectionSettings | str | None = None,
    mode: UpdateMode = "staged",
    rank: tuple[int, int] | None = None,
    serve: bool = True,
    device: str | torch.device = "cpu",
) -> AdapterSubscriber:
    """Receive the versions of an adapter that is published under a name.

    Args:
        name: of the sync.
        base: this receiver's base; compared with that of each version, at the time of the update.
        target: the tensors to fill, by PEFT's names; None: `AdapterSubscriber.tensors` are made of what is published.
        check: called with the configuration before a byte is read; it refuses the version by raising.
        check_target: called before a byte is read, and again before a version goes live; it refuses by raising.
        follow_target: called before each update; it looks up the tensors of `target` again, which may have moved.
        hooks, connection, mode, rank, serve: see `penstock.subscriber`.
        device: of the tensors that are made.

    Raises:
        As `penstock.subscriber`.
    """
    require_name("name", name)
    base_identity(base)
    received = AdapterSubscriber(base, check, hooks or Hooks(), check_target, follow_target)

    def made(published: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        # Called again when the trainer's adapter has other tensors, as after a restart with another rank.
        received.tensors = {
            tensor_name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for tensor_name, tensor in published.items()
        }
        return received.tensors

    if isinstance(target, Mapping):
        received.tensors = target  # type: ignore[assignment]
    received.subscriber = penstock.subscriber(
        name,
        made if target is None else target,
        connection=connection,
        mode=mode,
        hooks=received.hooks(),
        rank=rank,
        serve=serve,
    )
    return received


class AdapterDirectory(Closeable):
    """Directories with versions of an adapter, as `save_pretrained` of PEFT writes them, each complete when it appears.

    A directory's name has the run of the trainer and the version, and its content never changes: engines key their
    caches by the path.

    Args:
        received: where the versions come from.
        root: the directory for them; None: one of this user's own in `/dev/shm`, else in the runtime directory. It is
            made for this process, and removed by `close`.
        keep: versions whose directories stay: the newest ones. An engine reads a directory again when a request needs
            an adapter that was evicted.
    """

    def __init__(self, received: AdapterSubscriber, root: Path | str | None = None, *, keep: int = 8) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}", hint="at least the newest version stays")
        self._received = received
        self._keep = keep
        self._root = None if root is None else Path(text_of(root))
        self._own: Path | None = None
        self._versions: list[Path] = []

    def write(self) -> Path:
        """Write the live version of the adapter, unless it is written already, and return its directory.

        Raises:
            DestinationError, DiskFull: it could not be written, or what was written is not what was received.
            ConfigError: no version was received yet.
        """
        config, received = self._received.config, self._received
        # With the run: the same number of a restarted trainer has other bytes.
        run = received.subscriber.revision.partition(":")[0]
        into = self._place() / f"{received.name.replace('/', '_')}-{run[:12]}-{received.version}"
        if into in self._versions:
            return into
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in received.tensors.items()}
        specs = [
            TensorSpec(name=name, dtype=dtype_of(one.dtype), shape=tuple(one.shape)) for name, one in tensors.items()
        ]
        files = lay_out_tensors(specs, shard_bytes=1 << 62)
        growing = into.with_name(f"{into.name}.penstock-{secrets.token_hex(4)}")
        out = OutputSet(growing, files.table, files.body_nbytes, {"format": "pt"})
        out.names = [WEIGHTS_FILE]
        try:
            out.create()
            out.open()
            for row, (name, at) in enumerate(zip(files.table.names, files.table.offset.tolist(), strict=True)):
                data = memoryview(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
                out.write(0, at, data)
                again = bytearray(int(files.table.nbytes[row]))
                out.read(0, at, memoryview(again))
                # The bytes were verified in memory: what engines read is compared with those.
                if again != data:
                    raise DestinationError("the file's bytes differ from those written", uri=str(growing), tensor=name)
            out.publish(into, {CONFIG_FILE: write_object(config)})
        except BaseException:
            out.remove()
            raise
        finally:
            out.close()
        self._versions.append(into)
        for old in self._versions[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        del self._versions[: -self._keep]
        return into

    def _place(self) -> Path:
        if self._own is None:
            if self._root is None:
                # Only the parent of a directory that `mkdtemp` makes.
                memory = Path("/dev/shm")  # nosec B108
                root = memory if os.access(memory, os.W_OK) else private_directory()
            else:
                root = self._root
                root.mkdir(parents=True, exist_ok=True)
            # `mkdtemp` makes a directory for this user alone: another user's engine needs a `root` that it may read.
            self._own = Path(tempfile.mkdtemp(prefix=ADAPTERS, dir=root))
            if self._root is not None:
                self._own.chmod(0o755)
        return self._own

    def close(self) -> None:
        """Remove all directories. Idempotent."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
        self._versions = []
