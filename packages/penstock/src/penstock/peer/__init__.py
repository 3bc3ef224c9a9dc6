"""Peer: one process of a fleet: its weights, the server for other members, and the client for theirs.

`member` is one process life, with its `server` and `client`. `local_weights` has layout, regions, verified chunks
and log of weights in this process. `host_links` finds the RDMA devices of a host, and the nearest of a GPU.
"""
