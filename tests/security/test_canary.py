"""The attacks of these tests are real: where code is run, they leave their mark."""

import pickle

from security.conftest import Canary


def test_the_canary_sings(tmp_path):
    canary = Canary(tmp_path / "sprung")
    content = pickle.dumps(canary.payload)
    for spring in (lambda: pickle.loads(content), lambda: exec(canary.code), lambda: eval(canary.command)):
        spring()
        assert canary.sprung
        canary.path.unlink()
