"""The journey from peers: discovery, coordination, transfer, verification."""
