"""Sockets: credentials of the peer, deadlines of messages, and limits on the connections of a listener."""
