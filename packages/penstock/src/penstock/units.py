"""Numbers of bytes. A module of its own, because most of the command line needs these numbers and no numpy."""

GB = 10**9
MIB = 1 << 20
GIB = 1 << 30
