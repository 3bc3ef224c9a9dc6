"""Sockets: who is at the other end, how long a message may take, and how many connections a listener holds.

One implementation for every listener of Penstock (the hub, members' doors, data ports, a job's coordinator) and for
every reader of theirs, so that a limit holds for all of them or for none.
"""
