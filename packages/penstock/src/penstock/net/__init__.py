"""Sockets: the peer's credentials, listeners, and limits on the connections of a listener."""
