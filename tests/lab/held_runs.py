"""Runs that wait at a step until a test lets them go on: what it does to them meanwhile never comes too late."""

from lab import held_model
from patience import wait_until

HELD = f"model.name={held_model.__file__}:build"
"""The change of a recipe; the command needs --trust-local-code."""


class Hold:
    """Holds the runs of processes that were started with its `environment`."""

    def __init__(self, folder):
        self._folder = folder
        self.environment = {held_model.FOLDER: str(folder)}

    def wait_for(self, count, process=None):
        """Ids of the processes whose runs are held, once there are so many."""

        def held():
            return [int(path.name) for path in self._folder.glob("[0-9]*")]

        return wait_until(lambda: len(held()) == count and held(), process=process)

    def end(self):
        """Let them go on, and hold no others."""
        (self._folder / "open").touch()
