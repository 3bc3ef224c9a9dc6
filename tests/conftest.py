"""What every test may count on."""

from __future__ import annotations

import signal

# A shell that starts pytest in the background has it ignore SIGINT, and so would every command that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
