"""Numbers of bytes. They are not in `types`, because the command line needs these numbers without numpy."""

GB = 10**9
MIB = 1 << 20
GIB = 1 << 30
