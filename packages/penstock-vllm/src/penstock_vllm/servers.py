"""Drive several vLLM servers as one client of vLLM's trainer interface.

The client is the coordinator of the core's two-phase commit (`spi.Ballot`). A server votes by receiving the version.
`finish_weight_update` makes the servers of a committed version go live. Only the trainer's process knows the outcome.

`trainer` publishes versions and calls the client. This module does not import vLLM. Any object with the methods of
vLLM's client can serve as the client of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from penstock.errors import ConfigError, VersionRefused
from penstock.spi import Ballot, Stragglers, wrong_argument


class FleetClient:
    """A client of several vLLM servers. Pass this object as `client` to `PenstockTrainerEngine.trainer_init`.

    Attributes:
        left_out: the servers that did not receive the last version, with the reasons.

    Args:
        clients: vLLM's clients by server name. The names appear in messages.
        stragglers: what happens if a server does not receive a version. If "withdraw", no server installs the version.
            If "leave_out", the remaining servers install the version, and the failed server keeps its previous version
            until the next update.
        init_info: further fields for the body of `/init_weight_transfer_engine`, by server, such as `listen` if the
            servers are on several hosts.
    """

    def __init__(
        self,
        clients: Mapping[str, Any],
        *,
        stragglers: Stragglers = "withdraw",
        init_info: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if not clients:
            raise ConfigError("a fleet needs at least one server", hint="pass one client for each server")
        if stragglers not in ("leave_out", "withdraw"):
            raise wrong_argument("stragglers", stragglers, "'leave_out' or 'withdraw'")
        self._clients = dict(clients)
        self._stragglers = stragglers
        self._init_info = dict(init_info or {})
        self._pool = ThreadPoolExecutor(len(self._clients), "penstock-fleet")
        self._subscription: Mapping[str, Any] | None = None
        # Servers with an open update, servers whose update did not start, and servers that received the version.
        self._started: set[str] = set()
        self._failed_starts: dict[str, BaseException] = {}
        self._prepared: tuple[str, ...] = ()
        self._version = -1
        self.left_out: dict[str, str] = {}

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Make every server subscribe. Raise the first failed server's error."""
        self._subscription = init_info
        _raise_first(self._all(list(self._clients), self._subscribe))

    def _subscribe(self, name: str, client: Any) -> None:
        client.init_weight_transfer_engine({**(self._subscription or {}), **self._init_info.get(name, {})})

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Start an update on the servers without an open update.

        A server whose update does not start counts as not receiving the version.

        If no server starts an update, the first failed server's error is raised.
        """

        def start(_: str, client: Any) -> None:
            client.start_weight_update(*args, **kwargs)

        def subscribe_and_start(name: str, client: Any) -> None:
            self._subscribe(name, client)
            start(name, client)

        names = [name for name in self._clients if name not in self._started]
        errors = self._all(names, start)
        if errors and self._subscription is not None:
            # A restarted server has no subscription, so subscribe again.
            errors = self._all(list(errors), subscribe_and_start)
        self._started |= set(names) - errors.keys()
        self._failed_starts = errors
        if not self._started:
            _raise_first(errors)

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Make every server receive a version. Until `finish_weight_update`, each server serves its previous version.

        Raises:
            VersionRefused: no server will install the version. The message names the failed servers and the reasons.
        """
        self._version = int(update_info["version"])
        self._prepared = ()
        errors = dict(self._failed_starts)
        errors |= self._all(sorted(self._started), lambda _, client: client.update_weights(dict(update_info)))
        # vLLM closes a server's failed update. The other servers' updates stay open for the next version.
        self._started -= errors.keys()
        ballot = Ballot(stragglers=self._stragglers).begun(self._clients, self._version)
        for name in self._clients:
            error = errors.get(name)
            ballot = (
                ballot.reported(name, "prepared") if error is None else ballot.reported(name, "failed", _reason(error))
            )
        # Every server has replied, so no report is missing.
        outcome = ballot.decide(is_due=True)
        assert outcome is not None
        self.left_out, self._prepared = dict(outcome.failed), outcome.committed
        if not outcome.committed:
            name, error = next(iter(errors.items()))
            why = "; ".join(f"{failed}: {reason}" for failed, reason in self.left_out.items())
            message = f"version {self._version} was withdrawn from all {len(self._clients)} servers: {why}"
            hint = "every server keeps its previous version, send a later version"
            raise VersionRefused(message, version=self._version, member=name, reason=why, hint=hint) from error

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Make all servers that have received the version install it at the same time.

        Raises:
            ConfigError: no server has received a version.
            Exception: the first failed server's error. That server must not serve. All other servers have the version.
        """
        if not self._prepared:
            raise ConfigError("no server has received a version", hint="call update_weights first")
        names, self._prepared = self._prepared, ()
        self._started -= set(names)
        _raise_first(self._all(names, lambda _, client: client.finish_weight_update(*args, **kwargs)))

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        self._pool.shutdown(wait=False)

    def _all(self, names: Sequence[str], call: Callable[[str, Any], object]) -> dict[str, BaseException]:
        """Call these servers in parallel, wait for all of their responses, and return the errors by server."""
        running = {name: self._pool.submit(call, name, self._clients[name]) for name in names}
        # Each call is limited by the server's stall deadline and the client's deadline.
        wait(running.values())
        return {name: error for name, done in running.items() if (error := done.exception()) is not None}


def _reason(error: BaseException) -> str:
    """Return the text of a client's error, with vLLM's response if the error contains it."""
    response = getattr(getattr(error, "response", None), "text", "")
    return f"{error}: {response}"[:1000] if response else str(error)[:1000] or type(error).__name__


def _raise_first(errors: Mapping[str, BaseException]) -> None:
    for name, error in errors.items():
        error.add_note(f"server {name}" + (f", also failed: {', '.join([*errors][1:])}" if len(errors) > 1 else ""))
        raise error
