"""Memory: staging buffers that bytes pass through, arenas in which they stay, tiers between which they move."""

SOURCE = "source"
"""Tier name for a block that is in no tier and can be read again from its source."""
