"""One thread for torch and BLAS, and no network: results repeat, and parallel workers do not fight."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A CPU may name matrix instructions that its virtual machine does not run: products of bfloat16 would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

os.environ.pop("COLUMNS", None)  # of the terminal that tests are started from, which pytest-xdist hands on
import hypothesis
import pytest
import torch

torch.set_num_threads(1)
# The same examples every time, however slow the machine; --hypothesis-profile=default looks for others.
REPEATABLE = {"derandomize": True, "deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeatable", max_examples=25, **REPEATABLE)
hypothesis.settings.register_profile("thorough", max_examples=500, **REPEATABLE)  # of make test-slow
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config):
    """Tests of weights do not mind which start trains worse; those of this warning use `pytest.warns`."""
    config.addinivalue_line("filterwarnings", "ignore::wellcond.EvidenceWarning")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    os.environ["WELLCOND_CACHE"] = str(tmp_path_factory.mktemp("wellcond_cache"))


@pytest.fixture
def hold(tmp_path_factory):
    """Holds runs at a step; ends with the test, so that no process waits for ever."""
    from lab.held_runs import Hold

    made = Hold(tmp_path_factory.mktemp("hold"))
    yield made
    made.end()


@pytest.fixture
def run(monkeypatch, capsys):
    """Call the command as the console script does: (exit code or message, standard output).

    A message stands for exit code 2, which every mistake of a user must have.
    """

    from wellcond.cli.main import main  # not for tests that hide what it needs

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["wellcond", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        _, said, message = err.rpartition("error: ")
        return f"error: {message}".strip() if said and end.value.code == 2 else end.value.code, out

    return call
