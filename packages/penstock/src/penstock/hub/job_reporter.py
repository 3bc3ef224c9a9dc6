"""Reports conversions to a hub, which shows them in `status` and on the fleet page.

In: the states of a conversion (`job_state`). Out: requests of the hub, from a thread of its own.
Not here: the states (`jobs.watch`), the hub's list of conversions (`conversions`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.config import ConnectionSettings
from penstock.errors import HubUnavailable, PenstockError, SourceBusy
from penstock.hub.client import HubClient, resolve_connection
from penstock.hub.job_state import JobState
from penstock.logs import log_named
from penstock.waits import start_thread

ATTEMPT_S = 2.0
"""Deadline of one report. Also the longest time that the end of a conversion waits for its last report."""
PAUSE_S = 5.0
"""Until the next try, while the hub does not answer."""
_log = log_named("penstock.fleet")


class HubReporter:
    """Reports conversions to a hub: give it as `WorkerSettings(observer=...)`. Any number of them, one after the other.

    A hub that is away, or refuses the reports, never fails a conversion and never holds it up: that is logged once.

    Args:
        connection: the hub and the token for it; a str is the hub's address; None: `PENSTOCK_HUB`, else the hub of
            this host. See `ConnectionSettings`.

    Raises:
        ConfigError: the argument is wrong.
    """

    def __init__(self, connection: ConnectionSettings | str | None = None) -> None:
        self._connection = resolve_connection(connection)

    def begin(self) -> Callable[[JobState], None]:
        """Return the function that reports the states of one conversion; see `penstock.hub.job_state.JobObserver`."""
        return _Sender(self._connection).put


class _Sender:
    """The thread that sends the newest state of one conversion, and what it is handed over by."""

    def __init__(self, connection: ConnectionSettings) -> None:
        self._connection = connection
        self._state: JobState | None = None
        self._answers = False
        self._is_away = False
        self._came = threading.Condition()
        # A daemon: a coordinator that ends in another way than by a last state must not be held up by this thread.
        self._thread = threading.Thread(target=self._send_all, name="penstock-job-report", daemon=True)
        start_thread(self._thread)

    def put(self, state: JobState) -> None:
        """Hand a state over. With the last state, wait until it is sent, at most `ATTEMPT_S`; not for a silent hub."""
        with self._came:
            self._state = state
            self._came.notify()
        if state.is_over and self._answers:
            self._thread.join(ATTEMPT_S)

    def _send_all(self) -> None:
        """Send states until the last one: the body of the thread."""
        try:
            with HubClient.connect(self._connection.hub, self._connection.token) as client:
                while self._send_next(client):
                    pass
        except PenstockError as error:
            self._answers = False
            _log.warning("this conversion is not reported to the hub: %s", error)

    def _send_next(self, client: HubClient) -> bool:
        """Wait for a state and send it; return False after the last one."""
        with self._came:
            if self._is_away:
                # A newer state must not bring the next try forward; the last one is tried at once, and only once.
                self._came.wait_for(lambda: self._state is not None and self._state.is_over, PAUSE_S)
            else:
                self._came.wait_for(lambda: self._state is not None)
            state, self._state = self._state, None
        if state is None:
            return True
        try:
            client.job(state, within_s=ATTEMPT_S)
        except (HubUnavailable, SourceBusy) as error:
            if not self._is_away:
                _log.warning("the hub does not take reports of this conversion, which goes on: %s", error)
            self._is_away, self._answers = True, False
        else:
            self._is_away, self._answers = False, True
        return not state.is_over
