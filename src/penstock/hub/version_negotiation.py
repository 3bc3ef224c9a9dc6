"""The version of the protocol between members and the hub, and the versions that are compatible.

In: a version that the other side announced. Out: the reason if it is not compatible.
Not here: the messages (`messages`, `sync_messages`).

Within one major version fields are only added, each with a default: unknown ones are ignored, missing ones take their
default, and both sides use the fields that both have. A change that an older side would misread is a new major version.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

PROTOCOL = "2.1"
"""This release's. 1.0 announced no version; 2 replaced grants that expire by the hub's clock by grants of the source's
epoch; 2.1 signs the digests in logs."""
ProtocolVersion = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}\Z")]


class AnnouncedVersion(msgspec.Struct, frozen=True):
    """The version in a message whose other fields may be of a version that is not known here."""

    protocol: ProtocolVersion = "1.0"


def version_fault(theirs: str, who: str, us: str) -> str:
    """Return why a version is not compatible; empty: it is.

    Args:
        theirs: what the other side announced.
        who: the other side, for the message.
        us: this side, for the message.
    """
    if theirs.partition(".")[0] == PROTOCOL.partition(".")[0]:
        return ""
    return f"{who} speaks protocol {theirs}, {us} speaks {PROTOCOL}: their major versions differ"


UPGRADE_HINT = "run releases of Penstock that speak the same major version; upgrade the older one"
