"""Settings of a publisher and of a subscriber that most programs leave at their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.arguments import require_type
from penstock.config import parse_bytes
from penstock.errors import BudgetTooSmall
from penstock.plan.packing import LEAST_PACK_BYTES, PACK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """The buffers of a publisher, for the argument `settings` of `publisher`.

    Attributes:
        arena: whether the parameters are moved into one arena per device (`memory.rehome`), so that peers reach them
            with one registration. The transport `shm` reaches host memory only in arenas.
        memory_bytes: limit in bytes for a snapshot's copy and the transformed tensors together. None means no limit.
        pack_bytes: limit in bytes for device memory into which runs below 8 KiB, such as columns of a tensor, are
            packed for receivers on other hosts. If `pack_bytes` is 0, receivers read short runs one by one.

    Raises:
        ConfigError: a field has the wrong type, or is not a number of bytes.
        BudgetTooSmall: `pack_bytes` is above 0 but too small to help.
    """

    arena: bool = False
    memory_bytes: int | str | None = None
    pack_bytes: int | str = PACK_BYTES

    def __post_init__(self) -> None:
        require_type("arena", self.arena, bool, "True or False")
        if self.memory_bytes is not None:
            parse_bytes(self.memory_bytes)
        pack_bytes = parse_bytes(self.pack_bytes)
        if 0 < pack_bytes < LEAST_PACK_BYTES:
            message = f"pack_bytes={pack_bytes} is too small for a useful buffer"
            raise BudgetTooSmall(message, minimum_bytes=LEAST_PACK_BYTES, budget="pack_bytes")

    @classmethod
    def of(cls, settings: PublisherSettings | None) -> PublisherSettings:
        """Return the settings for the argument of `publisher`. None means the defaults."""
        require_type("settings", settings, (cls, type(None)), "a penstock.sync.PublisherSettings, or None")
        return cls() if settings is None else settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberSettings:
    """The buffers of a subscriber, for the argument `settings` of `subscriber`.

    Attributes:
        arena: whether the target is moved into one arena per device. See `PublisherSettings`.
        memory_bytes: limit in bytes for the staging copy, or in direct mode for bytes that are read and not yet
            verified. None means the default.
        serve: whether other receivers may read from this process between updates. Set `serve=False` for engines that
            change weights in place.

    Raises:
        ConfigError: a field has the wrong type, or is not a number of bytes.
    """

    arena: bool = False
    memory_bytes: int | str | None = None
    serve: bool = True

    def __post_init__(self) -> None:
        require_type("arena", self.arena, bool, "True or False")
        require_type("serve", self.serve, bool, "True or False")
        if self.memory_bytes is not None:
            parse_bytes(self.memory_bytes)

    @classmethod
    def of(cls, settings: SubscriberSettings | None) -> SubscriberSettings:
        """Return the settings for the argument of `subscriber`. None means the defaults."""
        require_type("settings", settings, (cls, type(None)), "a penstock.sync.SubscriberSettings, or None")
        return cls() if settings is None else settings
