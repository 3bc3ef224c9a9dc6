"""The starts of a fleet's processes: `/v1/phases` of the hub, as JSON or as server-sent events.

In: the boots that members report with their beats. Out: a `PhasesReply`; the latest starts, for the fleet page.
Not here: what a process reports (`penstock.phases`), the phases of one process at its own address (`http.phases`).

Members repeat their start with each beat, as all that they report. The entry of a member that leaves after a failure is
kept for `FAILED_TTL_S`: an autoscaler that looks once a minute sees why a replica never became ready.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec

from penstock.hub.auth import Caller
from penstock.hub.messages import PhasesReply, Replica
from penstock.hub.snapshot import BOOT_DECODER, MEMBER_DECODER, MemberEntry
from penstock.hub.store import Store
from penstock.phases import Boot

FAILED_TTL_S = 600.0
INTERVAL_S = 1.0
"""Shortest time between two looks at the store for all streams together."""
MANY, SLOW_INTERVAL_S = 200, 2.0
"""The interval for more replicas than `MANY`: a look at 1,000 takes 15 to 60 ms."""
SILENT_S = 5.0
"""Steps of `silent_s` in streams: a clock that runs is no change."""
_REPLICA = msgspec.msgpack.Decoder(Replica)
_encode = msgspec.msgpack.encode
BootKind = TypeVar("BootKind", bound=Boot)


def encoded(boot: Boot | None, caller: Caller | None) -> bytes:
    """Return a boot for the store, without models that the reporting member has no right to; empty: none."""
    if boot is not None and caller is not None:
        boot = visible_to(boot, caller)
    return b"" if boot is None else _encode(boot)


def record_failure(store: Store, member: str, known: MemberEntry) -> str:
    """Keep the start of a member that leaves, if it failed; return the name of the entry, or an empty text."""
    if not known.boot:
        return ""
    boot = BOOT_DECODER.decode(known.boot)
    if boot.state != "failed":
        return ""
    gone = msgspec.structs.replace(_replica(member, known, boot, 0.0), has_left=True)
    name = f"failed/{member}"
    store.write(name, _encode(gone), ttl_s=FAILED_TTL_S)
    return name


def replicas(store: Store, now: float, *, model: str | None = None, caller: Caller | None = None) -> PhasesReply:
    """Return the starts of live processes, and of those that left after a failure, by the time of their begin.

    Args:
        store: the hub's.
        now: by the hub's clock.
        model: only of processes that load it.
        caller: what others load is left out; None: it may see everything.

    Raises:
        HubUnavailable: the store did not answer.
    """
    live = []
    for name, entry in store.scan("member/").items():
        known = MEMBER_DECODER.decode(entry.value)
        if known.boot:
            live.append(_replica(name, known, BOOT_DECODER.decode(known.boot), max(0.0, now - known.seen)))
    left = [_REPLICA.decode(entry.value) for entry in store.scan("failed/").values()]
    # A process may be several members, as one that loads a model and a draft of it: it is one replica. One that tries
    # again after a failure is another member: the one that lives counts, else the one that failed last.
    seen: dict[tuple[str, str, float], Replica] = {}
    for replica in [*live, *sorted(left, key=lambda replica: -replica.seconds)]:
        if model is None or model in replica.models:
            seen.setdefault((replica.host, replica.name, replica.started_at), replica)
    caller = caller or Caller()
    visible = (visible_to(replica, caller) for replica in seen.values())
    shown = (replica for replica in visible if replica is not None)
    return reply_of(sorted(shown, key=lambda replica: (replica.started_at, replica.member)))


def _replica(member: str, known: MemberEntry, boot: Boot, silent_s: float) -> Replica:
    fields = {name: getattr(boot, name) for name in boot.__struct_fields__}
    return Replica(**fields, member=member, name=known.hello.name, host=known.hello.host, silent_s=silent_s)


def reply_of(shown: Iterable[Replica]) -> PhasesReply:
    """Return replicas with their counts."""
    shown = tuple(shown)
    count = Counter(replica.state for replica in shown)
    return PhasesReply(ready=count["ready"], starting=count["starting"], failed=count["failed"], replicas=shown)


def visible_to(boot: BootKind, caller: Caller) -> BootKind | None:
    """Return the part of a boot that is of models that a caller may access; None if it loads no such model."""
    if caller.models is None:
        return boot
    models = tuple(model for model in boot.models if caller.may_ask((model,)))
    if not models:
        return None
    error = boot.error
    # An engine's own phases and errors have no model. Such an error may be that of a load inside of the phase, whose
    # text names a model that is hidden here.
    if error is not None and error.model not in models and (error.model or len(models) < len(boot.models)):
        error = None
    return msgspec.structs.replace(
        boot,
        models=models,
        phases=tuple(phase for phase in boot.phases if phase.model in ("", *models)),
        error=error,
    )


class ReplicaFeed:
    """The replicas as streams and the fleet page have them; any number of viewers share one look at the store.

    Args:
        look: returns all replicas; may raise what the hub's store raises.
        clock: seconds.
    """

    def __init__(self, look: Callable[[], PhasesReply], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_s = float("-inf")
        self._replicas: dict[str, Replica] = {}

    def look(self) -> Mapping[str, Replica]:
        """Return the replicas by member, one or two intervals old at most."""
        with self._lock:
            interval_s = SLOW_INTERVAL_S if len(self._replicas) > MANY else INTERVAL_S
            if self._clock() - self._looked_s >= interval_s * 0.9:
                before, reply = self._replicas, self._look()
                self._looked_s = self._clock()
                self._replicas = {}
                for replica in reply.replicas:
                    steady = msgspec.structs.replace(replica, silent_s=replica.silent_s // SILENT_S * SILENT_S)
                    # The same object for an unchanged replica: viewers compare by identity.
                    old = before.get(replica.member)
                    self._replicas[replica.member] = old if old == steady and old is not None else steady
            return self._replicas

    def changes(
        self, had: Mapping[str, Replica] | None, caller: Caller, *, model: str | None, limit: int
    ) -> tuple[dict[str, Replica], bytes]:
        """Return the replicas that a viewer may see now, and an event with what changed; empty if nothing did.

        Args:
            had: what this returned before; None at first.
            caller: who asks.
            model: only of processes that load it.
            limit: most replicas; those that are not ready come first, then the newest. The counts are of all.
        """
        present: dict[str, Replica] = {}
        for member, replica in self.look().items():
            shown = visible_to(replica, caller) if model is None or model in replica.models else None
            if shown is not None:
                present[member] = shown
        counts = reply_of(present.values())
        if len(present) > limit:
            first = sorted(counts.replicas, key=lambda replica: (replica.ready, -replica.started_at))[:limit]
            present = {replica.member: replica for replica in first}
        before = had or {}
        changed = [
            replica
            for member, replica in present.items()
            # Mostly the same object; a comparison of two equal ones takes 40 us.
            if (old := before.get(member)) is not replica and old != replica
        ]
        gone = [member for member in before if member not in present]
        if not changed and not gone and had is not None:
            return present, b""
        event = msgspec.structs.replace(counts, replicas=tuple(changed), gone=tuple(gone))
        return present, msgspec.json.encode(event)
