"""One-sided reads between address spaces, by one protocol.

In / Out: nothing here; see `protocol`. Not here: what crosses and when (`plan`, `fleet`).
"""
