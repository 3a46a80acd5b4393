"""Waiting for a state, never for a time."""

import time

PATIENCE = 600
"""Seconds after which a test counts as hanging. It decides nothing: every wait ends with a state."""


def wait_until(reached, *, process=None):
    """Return `reached()` once it is true; fail if the process that brings it about ends without."""
    deadline = time.monotonic() + PATIENCE
    while True:
        ended = process is not None and process.poll() is not None
        if found := reached():
            return found
        assert not ended, (process.returncode, process.communicate())
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.02)
