"""The flip: the steps that make a version live. Their order is the same for all ways in which the bytes arrive.

    1. close to readers: leases end, and new readers wait
    2. hook before_pause: if it raises, the engine continues
    3. withdraw: peers must not read bytes that are about to change
    4. require in place: after the hook, which may restore offloaded weights
    5. move the bytes: staged from the staging copy, direct from the sources, restored from elsewhere
    6. install: permute, cast, and the loader's work
    7. live: from here on the target has the version, whatever a hook does
    8. hook at_commit: before requests resume, because caches of the old weights must not be used with the new ones
    9. serve to others: before the last hook, which may take long or raise
    10. open to readers: before the last hook, which may run requests
    11. hook after_resume

A flip can fail in two ways after step 2. If no byte of the target was written, the previous version is served again and
the engine resumes with it. Otherwise the target is dirty, or still released.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.sync.receive.hooks import Around, Hooks
from penstock.sync.receive.leases import Leases
from penstock.sync.receive.serving import Serving
from penstock.sync.receive.staged import Staged
from penstock.sync.receive.states import LiveVersion, SubscriberState, SubscriberStates
from penstock.sync.receive.update import UpdateLoop

S = SubscriberState
Pause = Callable[[int], None]
"""Executes steps 1 to 4 for a version. A second call in the same flip does nothing, so several attempts pause the
engine once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flipped:
    """A version after its flip, with the duration of the flip."""

    staged: Staged
    pause_s: float = 0.0
    install_s: float = 0.0


class FlipOrder:
    """The steps of each flip of a subscriber. One thread at a time flips.

    Args:
        states, update_loop, leases, serving, hooks: parts of the subscriber.
        on_live: called when the target has a new version, before the engine learns of it.
        report_now: reports the state to the hub soon.
    """

    def __init__(
        self,
        states: SubscriberStates,
        update_loop: UpdateLoop,
        leases: Leases,
        serving: Serving,
        hooks: Hooks,
        *,
        on_live: Callable[[], None],
        report_now: Callable[[], None],
    ) -> None:
        self._states = states
        self._update_loop = update_loop
        self._leases = leases
        self._serving = serving
        self._hooks = hooks
        self._on_live = on_live
        self._report_now = report_now

    def run(self, move_bytes: Callable[[Pause], Staged]) -> Flipped:
        """Make a version live.

        Args:
            move_bytes: moves the bytes to the target and returns the version. It calls its argument before it writes to
                the target of a serving engine.

        Raises:
            BaseException: an error of `move_bytes`, the installation or a hook. `mutated` of a PenstockError tells
                whether the target was written to.
        """
        flip = _Flip(before=self._states.now)
        try:
            staged = move_bytes(lambda version: self._pause(flip, version))
            if staged.origin == "here":
                # An earlier attempt in the same update may have paused the engine.
                self._go_on_with_former(flip)
                return Flipped(staged=staged)
            self._states.enter(S.WRITING)
            moved = time.perf_counter()
            if staged.origin == "sync":
                self._update_loop.install()
            install_s = time.perf_counter() - moved + staged.install_s
            begun = staged.begun if flip.paused_at is None else flip.paused_at
            self._go_live(staged, begun)
            return Flipped(staged=staged, pause_s=time.perf_counter() - begun, install_s=install_s)
        except BaseException as error:
            self._give_up(flip, error)
            raise
        finally:
            self._leases.open_to_readers()

    def _pause(self, flip: _Flip, version: int) -> None:
        if flip.paused_at is not None:
            return
        self._leases.close_to_readers()
        at = time.perf_counter()
        self._call("before_pause", version)
        flip.paused_at, flip.before = at, self._states.now
        self._states.enter(S.FLIPPING)
        live = self._states.live
        self._serving.withdraw(live.epoch, self._states.version)
        self._update_loop.require_in_place()

    def _go_live(self, staged: Staged, begun: float) -> None:
        now = time.perf_counter()
        live = LiveVersion(
            epoch=staged.epoch,
            version=staged.version,
            metadata=staged.metadata,
            path=staged.path,
            took_s=now - staged.begun,
            pause_s=now - begun,
        )
        # An engine may restore weights from before the first version.
        self._states.enter(S.LIVE if staged.version >= 0 else S.IDLE, live)
        if staged.origin == "sync":
            self._update_loop.note_live()
        self._on_live()
        self._call("at_commit", staged.version)
        if self._states.now is not S.CLOSED:
            self._serving.begin(live.epoch, live.version, live.metadata)
            self._report_now()
        self._leases.open_to_readers()
        self._call("after_resume", staged.version)

    def _give_up(self, flip: _Flip, error: BaseException) -> None:
        """End a failed flip, with the previous version or with a dirty target."""
        known = error if isinstance(error, PenstockError) else None
        # After an interrupt, or an error of other code, some bytes may have been written.
        if self._states.now is S.FLIPPING and (known is None or known.mutated):
            self._states.enter(S.WRITING)
        if self._states.now is S.WRITING:
            self._states.enter(self._states.damaged)
            if known is not None:
                known.mutated = True
            self._report_now()
        else:
            self._go_on_with_former(flip)

    def _go_on_with_former(self, flip: _Flip) -> None:
        """If the engine is paused, serve the previous version and resume the engine. A staged version stays staged."""
        states = self._states
        if states.now is not S.FLIPPING:
            return
        states.enter(flip.before if flip.before in (S.STAGED, S.PREPARED) else states.at_rest)
        if states.at_rest in (S.DIRTY, S.RELEASED):
            return
        # Without a live version the engine has other weights, from files for example, and resumes with them.
        if states.is_current and states.version >= 0:
            self._serving.begin(states.live.epoch, states.version, states.live.metadata)
        self._leases.open_to_readers()
        self._call("after_resume", states.version)

    def _call(self, hook: Around, version: int) -> None:
        states = self._states
        self._hooks.call(hook, version, live=states.version, is_dirty=states.at_rest is S.DIRTY)


@dataclass(slots=True)
class _Flip:
    """A running flip."""

    before: SubscriberState
    """The state to return to."""
    paused_at: float | None = None
