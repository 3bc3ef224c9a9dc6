"""Memory: mapped ranges, staging buffers, arenas in which bytes stay, and tiers between which bytes move."""

SOURCE = "source"
"""Tier name for a block that is in no tier and can be read again from its source."""
