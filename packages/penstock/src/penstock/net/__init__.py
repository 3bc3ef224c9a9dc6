"""Sockets: credentials of the peer, deadlines of messages, and limits on the connections of a listener.

All listeners of Penstock and their clients use this package, so its limits hold everywhere. `admission` limits number
and age of connections, and `shares` divides a limited resource among callers. `listener` accepts connections, `timed`
has the deadlines of messages, and `unix_sockets` the runtime directory and the id of the host.
"""
