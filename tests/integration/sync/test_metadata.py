"""A receiver gets a version's metadata before its bytes, and may refuse the version."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tests.integration.conftest import Host

import penstock as ps


def value(version: int) -> torch.Tensor:
    return torch.full((64, 48), float(version))


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_metadata_hook_rejects_version_before_weights_are_read(host: Host, mode: str) -> None:
    held, mine, called = {"w": value(1)}, {"w": value(0)}, list[object]()

    def before_read(version: int, metadata: Mapping[str, str]) -> None:
        called.append((version, dict(metadata)))
        if metadata.get("for") == "others":
            raise ps.ConfigError("it is for others")

    hooks = ps.Hooks(before_read=before_read, before_pause=lambda version: called.append("pause"))
    with (
        ps.publisher("p", held, mode="snapshot") as publisher,
        ps.subscriber("p", mine, mode=mode, hooks=hooks) as subscriber,
    ):
        with pytest.raises(ps.ConfigError, match="version is '1'"):
            publisher.publish("1")  # type: ignore[arg-type]
        publisher.publish(1, metadata={"for": "all", "note": "a\n\N{SNOWMAN}"})
        subscriber.update()
        assert called == [(1, {"for": "all", "note": "a\n\N{SNOWMAN}"}), "pause"]
        assert subscriber.metadata == {"for": "all", "note": "a\n\N{SNOWMAN}"}
        called.clear()
        held["w"].copy_(value(2))
        publisher.publish(2, metadata={"for": "others"})
        with pytest.raises(ps.ConfigError, match="it is for others"):
            subscriber.update()
        assert called == [(2, {"for": "others"})]
        assert (subscriber.version, subscriber.is_dirty, subscriber.metadata["for"]) == (1, False, "all")
        assert torch.equal(mine["w"], value(1))
        held["w"].copy_(value(3))
        publisher.publish(3)
        assert subscriber.update().version == 3
        assert (subscriber.metadata, float(mine["w"][0, 0])) == ({}, 3.0)


def test_receiver_serves_metadata_to_next_receiver(host: Host) -> None:
    mine, late = {"w": value(0)}, {"w": value(0)}
    with ps.subscriber("p", mine) as first:
        with ps.publisher("p", {"w": value(4)}, mode="snapshot") as publisher:
            publisher.publish(4, metadata={"base": "b1"})
            first.update()
        with ps.subscriber("p", late) as second:
            second.update()
            assert (second.metadata, float(late["w"][0, 0])) == ({"base": "b1"}, 4.0)
            assert second.revision == first.revision


def test_conflicting_or_too_long_metadata_is_refused(host: Host) -> None:
    parts = [
        {"w": ps.Shard(tensor=value(1)[:32], global_shape=(64, 48), offset=(0, 0))},
        {"w": ps.Shard(tensor=value(1)[32:], global_shape=(64, 48), offset=(32, 0))},
    ]
    mine = {"w": value(0)}
    with (
        ps.publisher("p", parts[0], mode="snapshot", rank=(0, 2)) as zero,
        ps.publisher("p", parts[1], mode="snapshot", rank=(1, 2)) as one,
        ps.subscriber("p", mine) as subscriber,
    ):
        zero.publish(1, metadata={"base": "b1", "same": "s"})
        one.publish(1, metadata={"base": "b2", "same": "s"})
        with pytest.raises(ps.PlanError, match="different metadata: base"):
            subscriber.update()
        assert torch.equal(mine["w"], value(0))
        for metadata, why in (
            ({"long": "x" * 65537}, "'long' of a version has 65537 characters"),
            ({str(at): "" for at in range(17)}, "at most 16 metadata"),
            ({"number": 7}, "'number' has type int"),
        ):
            with pytest.raises(ps.ConfigError, match=why):
                zero.publish(2, metadata=metadata)  # type: ignore[arg-type]
        assert zero.version == 1
