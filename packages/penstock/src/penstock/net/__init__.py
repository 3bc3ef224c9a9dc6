"""Sockets: credentials of the peer, deadlines of messages, and limits on the connections of a listener.

Every listener of Penstock (the hub, the servers of members, data ports, a job's coordinator) and every client of theirs
uses this one implementation, so a limit holds for all of them.

`admission` limits number and age of connections, `shares` what each caller may take of a scarce thing. `listener`
accepts, `timed` has the deadlines of messages, `unix_sockets` the runtime directory and the host's id.
"""
