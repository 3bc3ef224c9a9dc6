"""Peer: one process of a fleet: its weights, the server for other members, and the client for theirs."""
