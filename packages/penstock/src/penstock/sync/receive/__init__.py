"""The receiving side of sync: engines read a version, verify it and make it live."""
