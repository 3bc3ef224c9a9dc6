"""Damages another process's weights from outside, as a bad DIMM does: a bit flips without notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ARENA = "memfd:penstock-arena"


@dataclass(frozen=True, slots=True)
class ArenaMap:
    """A mapping of an arena in a process."""

    pid: int
    address: int
    nbytes: int

    def flip(self, offset: int = 0) -> None:
        """Flip the lowest bit of the byte at `offset`."""
        # Write through the process's own mapping, because a sealed memfd cannot be written through a descriptor.
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(self.address + offset)
            byte = memory.read(1)[0]
            memory.seek(self.address + offset)
            memory.write(bytes([byte ^ 1]))


def arenas(pid: int) -> list[ArenaMap]:
    """Return the arenas that a process shares, largest first."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split()
        if fields[-1] == "(deleted)" and _ARENA in fields[-2] and fields[1] == "rw-s":
            start, _, stop = fields[0].partition("-")
            found.append(ArenaMap(pid, int(start, 16), int(stop, 16) - int(start, 16)))
    return sorted(found, key=lambda one: -one.nbytes)
