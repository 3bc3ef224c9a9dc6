"""Reading from several holders at once: which source is to blame for a failure, and when it is read again.

Fetch and sync stand on this room. They decide who reads which range, and when a range is ready.
"""
