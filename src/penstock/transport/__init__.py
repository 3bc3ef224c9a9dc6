"""How bytes cross between two address spaces: one protocol, one room.

In / Out: nothing here; see `protocol`. Not here: what crosses and when (`plan`, `fleet`).
"""
