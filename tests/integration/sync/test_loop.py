"""The loop of a serving engine receives each new version across restarts of the trainer."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import penstock as ps
from penstock.errors import Cancelled


def test_update_loop_yields_versions_until_closed() -> None:
    target = {"w": torch.zeros(4)}
    with ps.subscriber("loop", target) as subscriber:
        weights = {"w": torch.zeros(4)}
        seen = []
        for numbers in ((1, 2), (3,)):  # the trainer restarts between them
            with ps.publisher("loop", weights) as publisher:
                for version in numbers:
                    weights["w"].fill_(version)
                    publisher.publish(version)
                    report = next(iter(subscriber))
                    seen.append((report.version, target["w"][0].item()))
        assert seen == [(1, 1.0), (2, 2.0), (3, 3.0)]
        closing = threading.Timer(0.3, subscriber.close)
        closing.start()
        assert list(subscriber) == []
        closing.join()


def test_update_loop_skips_refused_versions(caplog: pytest.LogCaptureFixture) -> None:
    hooks = ps.Hooks(check=lambda version, staged: "it is bad" if version == 1 else "")
    with (
        ps.publisher("refused", {"w": torch.ones(4)}) as publisher,
        ps.subscriber("refused", {}, hooks=hooks) as subscriber,
    ):
        publisher.publish(1)
        later = threading.Timer(0.5, publisher.publish, (2,))
        later.start()
        assert next(iter(subscriber)).version == 2
        later.join()
    assert caplog.text.count("it is bad") == 1


def test_update_loop_raises_permanent_errors() -> None:
    with (
        ps.publisher("misfit", {"w": torch.ones(4)}) as publisher,
        ps.subscriber("misfit", {"w": torch.ones(5)}) as subscriber,
    ):
        publisher.publish(1)
        with pytest.raises(ps.PlanError, match=r"w: wanted as F32 \[5\]"):
            next(iter(subscriber))


def test_update_loop_waits_for_absent_trainer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    connection = ps.ConnectionSettings(stall_s=0.3)
    with ps.subscriber("away", {}, connection=connection) as subscriber:
        closing = threading.Timer(2.5, subscriber.close)
        closing.start()
        assert list(subscriber) == []
        closing.join()
    assert "'away' has no version yet and waits for the next one: version 0 of 'away' was not announced" in caplog.text


def test_wait_returns_newer_version_or_times_out() -> None:
    with ps.publisher("wait", {"w": torch.ones(4)}) as publisher, ps.subscriber("wait", {}) as subscriber:
        publisher.publish(3)
        assert subscriber.wait() == 3
        subscriber.update()
        begun = time.monotonic()
        with pytest.raises(ps.errors.SourceStalled, match="version 4 of 'wait' was not announced"):
            subscriber.wait(timeout_s=0.2)
        assert time.monotonic() - begun < 5
        later = threading.Timer(0.2, publisher.publish, (5,))
        later.start()
        assert subscriber.wait(timeout_s=20) == 5
        later.join()


@pytest.mark.parametrize("version", [2, None])
def test_update_that_waits_ends_when_subscriber_is_closed(version: int | None) -> None:
    with ps.publisher("closing", {"w": torch.zeros(4)}), ThreadPoolExecutor(1) as pool:
        subscriber = ps.subscriber("closing", {"w": torch.zeros(4)})
        update = pool.submit(subscriber.update, version)
        with pytest.raises(TimeoutError):
            update.result(0.3)
        subscriber.close()
        with pytest.raises(Cancelled):
            update.result(10)
