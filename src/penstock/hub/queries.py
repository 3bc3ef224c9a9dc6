"""The verbs `status` and `why`: the members of a fleet with their holdings, and the reasons for their upstreams.

In: connection settings. Out: the hub's answers, as values.
Not here: the answers (`directory`, `explain`), how a command prints them (`cli.status`).
"""

from __future__ import annotations

from penstock.arguments import require_name
from penstock.config import ConnectionSettings
from penstock.hub.client import HubClient, resolve_connection
from penstock.hub.messages import Status, Why, WhyRequest


def status(model: str | None = None, *, connection: ConnectionSettings | str | None = None) -> Status:
    """Return the members of a fleet: what they hold, how far they are, and where their bytes come from.

    Args:
        model: only members that have or get it; None: all.
        connection: the hub and the token for it; a str is the hub's address; None: `PENSTOCK_HUB`, else the hub of
            this host. See `ConnectionSettings`.

    Raises:
        HubUnavailable: there is no hub. PermissionDenied: it does not take the token.
        ConfigError, MissingExtra: an argument is wrong, or a package is not installed.
    """
    settings = resolve_connection(connection)
    if model is not None:
        require_name("model", model)
    with HubClient.connect(settings.hub, settings.token) as client:
        return client.status(model)


def why(model: str, *, member: str | None = None, connection: ConnectionSettings | str | None = None) -> Why:
    """Return the reasons why members read a model from their upstreams, and why not from others, one in each line.

    Args:
        model: the name that its members agree on.
        member: only of this member, by its id.
        connection: see `status`.

    Raises:
        NotFound: no such member. Others as `status`.
    """
    settings = resolve_connection(connection)
    require_name("model", model)
    with HubClient.connect(settings.hub, settings.token) as client:
        return client.why(WhyRequest(model=model, member=member))
