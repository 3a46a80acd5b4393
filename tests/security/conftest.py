"""A canary: a file that an attack would make if its code were run."""

from pathlib import Path

import pytest


class Payload:
    """Unpickled without care, it writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.write_text, (Path(self.path), "run")


class Canary:
    def __init__(self, path):
        self.path = path

    @property
    def payload(self):
        return Payload(self.path)

    @property
    def code(self):
        """A line of Python that writes the file."""
        return f"import pathlib; pathlib.Path({str(self.path)!r}).write_text('run')\n"

    @property
    def command(self):
        """An expression that writes the file."""
        return f"__import__('pathlib').Path({str(self.path)!r}).touch()"

    @property
    def sprung(self):
        return self.path.exists()


@pytest.fixture
def canary(tmp_path_factory):
    made = Canary(tmp_path_factory.mktemp("canary") / "sprung")
    yield made
    assert not made.sprung, "code of the attack was run"
