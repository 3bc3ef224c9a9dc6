"""Maps each number to a kind of round, independent of the other rounds that run."""

from __future__ import annotations

from tests.chaos.adapters import AdapterRound
from tests.chaos.conversions import ConvertRound
from tests.chaos.downloads import StorageRound
from tests.chaos.fleets import ClockRound, FleetRound, HubRound, RedisRound
from tests.chaos.harness import Round
from tests.chaos.keepers import KeeperRound
from tests.chaos.strangers import StrangerRound
from tests.chaos.syncs import SyncRound, TogetherRound

KINDS: dict[str, type[Round]] = {
    one.kind: one
    for one in (
        FleetRound,
        KeeperRound,
        HubRound,
        RedisRound,
        ClockRound,
        SyncRound,
        TogetherRound,
        AdapterRound,
        ConvertRound,
        StrangerRound,
        StorageRound,
    )
}
ORDER = ("fetch", "sync", "convert", "hub", "fetch", "storage", "keeper", "redis", "sync", "fetch", "convert", "clock",
         "users", "fetch", "sync", "storage", "hub", "fetch", "keeper", "redis", "together",
         "adapters")  # fmt: skip
"""The sequence of kinds. A fifth are plain fetches."""


def kind_of(number: int) -> str:
    """Return the kind of a round."""
    return ORDER[number % len(ORDER)]
