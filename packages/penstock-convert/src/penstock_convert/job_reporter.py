"""Reports conversions to a hub, which shows the progress in `penstock status` and on the fleet page."""

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
"""Deadline for one report in seconds. At its end, a conversion waits at most this long for its last report."""
PAUSE_S = 5.0
"""Time in seconds until the next attempt if the hub does not respond."""
_log = log_named("penstock.fleet")


class HubReporter:
    """Reports conversions to a hub.

    Pass the reporter as `WorkerSettings(observer=...)`, to one conversion or several successive conversions. If the
    hub is unreachable or refuses the reports, the conversion continues and one warning is logged.

    Args:
        connection: the hub and its token, or the hub's address as a string. None means `PENSTOCK_HUB`, or this host's
            hub if the variable is not set. See `ConnectionSettings`.

    Raises:
        ConfigError: the connection is invalid.
    """

    def __init__(self, connection: ConnectionSettings | str | None = None) -> None:
        self._connection = resolve_connection(connection)

    def begin(self) -> Callable[[JobState], None]:
        """Return a function that reports the states of one conversion. See `watch.JobObserver`."""
        return _Sender(self._connection).put


class _Sender:
    """A thread that sends the newest state of one conversion."""

    def __init__(self, connection: ConnectionSettings) -> None:
        self._connection = connection
        self._state: JobState | None = None
        self._answers = False
        self._is_away = False
        self._came = threading.Condition()
        # Use a daemon thread, because a coordinator that exits without a last state must not wait for the thread.
        self._thread = threading.Thread(target=self._send_all, name="penstock-job-report", daemon=True)
        start_thread(self._thread)

    def put(self, state: JobState) -> None:
        """Pass a state to the thread. If the hub responds, wait up to `ATTEMPT_S` for the last state to be sent."""
        with self._came:
            self._state = state
            self._came.notify()
        if state.is_over and self._answers:
            self._thread.join(ATTEMPT_S)

    def _send_all(self) -> None:
        """Send states up to and including the last state, as the body of the thread."""
        try:
            with HubClient.connect(self._connection.hub, self._connection.token) as client:
                while self._send_next(client):
                    pass
        except PenstockError as error:
            self._answers = False
            _log.warning("the hub gets no reports about this conversion: %s", error)

    def _send_next(self, client: HubClient) -> bool:
        """Wait for a state and send it. Return False after the last state."""
        with self._came:
            if self._is_away:
                # A newer state does not shorten the pause. The last state is sent without a pause, in a single attempt.
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
                _log.warning("the hub refuses reports about this conversion, which continues: %s", error)
            self._is_away, self._answers = True, False
        else:
            self._is_away, self._answers = False, True
        return not state.is_over
