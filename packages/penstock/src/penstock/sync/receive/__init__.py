"""The receiving side of sync: engines read a version, verify it and make it live.

`subscribe` and `subscriber` contain the public functions. `update` requests and reads a version, and `flip` makes the
version live.
"""
