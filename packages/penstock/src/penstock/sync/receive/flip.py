"""The flip: the steps that make a version live, in the same order for staged, direct and restored versions.

1. Wait until all leases of readers end. New readers wait.
2. Call the hook `before_pause`. If `before_pause` raises an error, the engine continues to serve.
3. Withdraw the live version, because peers must not read bytes that are about to change.
4. Check that the tensors did not move, because the hook may restore offloaded weights.
5. Move the bytes from the staging copy, from the sources, or from a stored version.
6. Install: permute, cast, and run the loader.
7. Record the version as live, even if a later hook raises an error.
8. Call `at_commit` before requests resume, because caches of the old weights must not be used with the new weights.
9. Serve the version to peers and admit readers, before the last hook, which may run requests or raise an error.
10. Call `after_resume`.

If a later step than step 2 fails before a byte of the target was written, the previous version is served again and the
engine resumes with it. If a step fails after a byte was written, the target is dirty, or still released.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from penstock.errors import PenstockError
from penstock.sync.receive.hooks import Around, Hooks
from penstock.sync.receive.leases import Leases
from penstock.sync.receive.staged import Staged
from penstock.sync.receive.states import LiveVersion, SubscriberState, SubscriberStates
from penstock.sync.receive.update import UpdateLoop
from penstock.sync.report import UpdateReport

S = SubscriberState
Pause = Callable[[int], None]
"""Executes steps 1 to 4 for a version. Further calls in the same flip have no effect."""


class FlipOrder(msgspec.Struct, eq=False):
    """The steps of a subscriber's flips. `on_live` is called before hooks report a new version to the engine."""

    states: SubscriberStates
    update_loop: UpdateLoop
    leases: Leases
    hooks: Hooks
    on_live: Callable[[], None]
    report_now: Callable[[], None]

    # For the running flip: the state to return to, and the time at which the engine was paused.
    previous: SubscriberState = S.IDLE
    paused_at: float | None = None

    def run(self, move_bytes: Callable[[Pause], Staged]) -> UpdateReport:
        """Make a version live. `move_bytes` moves the version's bytes to the target.

        `move_bytes` calls its argument before it writes. A PenstockError with `mutated` means that bytes were written.
        """
        self.previous, self.paused_at = self.states.now, None
        try:
            staged = move_bytes(self._pause)
            if staged.origin == "here":
                self._resume_previous()
                return staged.report_now()
            self.states.enter(S.WRITING)
            moved = time.perf_counter()
            if staged.origin == "sync":
                self.update_loop.install()
            install_s = time.perf_counter() - moved
            begun = staged.begun if self.paused_at is None else self.paused_at
            self._go_live(staged, begun)
            return staged.report_now(install_s=install_s, pause_s=time.perf_counter() - begun)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self.leases.open_to_readers()

    def _pause(self, version: int) -> None:
        if self.paused_at is not None:
            return
        self.leases.close_to_readers()
        at = time.perf_counter()
        self._call("before_pause", version)
        self.paused_at, self.previous = at, self.states.now
        self.states.enter(S.FLIPPING)
        self.update_loop.withdraw()
        self.update_loop.require_in_place()

    def _go_live(self, staged: Staged, begun: float) -> None:
        now = time.perf_counter()
        live = LiveVersion(
            epoch=staged.epoch,
            version=staged.version,
            metadata=staged.metadata,
            path=staged.report.path,
            took_s=now - staged.begun,
            pause_s=now - begun,
        )
        # After a restore, the version may be -1: the weights that the engine had before the first version.
        self.states.enter(S.LIVE if staged.version >= 0 else S.IDLE, live)
        if staged.origin == "sync":
            self.update_loop.note_live()
        self.on_live()
        self._call("at_commit", staged.version)
        if self.states.now is not S.CLOSED:
            self.update_loop.serve()
            self.report_now()
        self.leases.open_to_readers()
        self._call("after_resume", staged.version)

    def _give_up(self, error: BaseException) -> None:
        known = error if isinstance(error, PenstockError) else None
        # Assume that bytes were written after an interrupt or another error without the attribute `mutated`.
        if self.states.now is S.FLIPPING and (known is None or known.mutated):
            self.states.enter(S.WRITING)
        if self.states.now is S.WRITING:
            self.states.enter(self.states.damaged)
            if known is not None:
                known.mutated = True
            self.report_now()
        else:
            self._resume_previous()

    def _resume_previous(self) -> None:
        states = self.states
        if states.now is not S.FLIPPING:
            return
        states.enter(self.previous if self.previous in (S.STAGED, S.PREPARED) else states.at_rest)
        if states.at_rest in (S.DIRTY, S.RELEASED):
            return
        # Serve only a live version. Without one, the engine has weights from elsewhere, such as files.
        if states.is_current and states.version >= 0:
            self.update_loop.serve()
        self.leases.open_to_readers()
        self._call("after_resume", states.version)

    def _call(self, hook: Around, version: int) -> None:
        states = self.states
        self.hooks.call(hook, version, live=states.version, is_dirty=states.at_rest is S.DIRTY)
