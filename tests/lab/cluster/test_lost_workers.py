"""A comparison on two Ray workers goes on when one is killed, and ends with the records of the local engine."""

import importlib.util
import os
import signal
import subprocess

import pytest

from lab.cluster.two_machines import (
    METHODS,
    Cluster,
    assert_same_comparison,
    compare_command,
    finish,
    run_here,
    start,
)
from lab.small import record
from patience import wait_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]


@pytest.fixture
def cluster():
    started = Cluster()
    yield started
    started.end()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return run_here(tmp_path_factory.mktemp("here"))


def sessions(folder):
    return {method: record(folder / method / "seed0")["sessions"] for method in METHODS}


def the_lost(errors):
    """Method of the run that lost its worker; the comparison says so in one line."""
    [line] = [line for line in errors.splitlines() if "starting again, its worker was lost" in line]
    return line.partition(",")[0]


def assert_resumed(folder, lost):
    counts = {method: len(rows) for method, rows in sessions(folder).items()}
    assert counts == {method: 2 if method == lost else 1 for method in METHODS}
    assert sessions(folder)[lost][1]["resumed_at_step"] == 7


@pytest.mark.slow
def test_the_run_of_a_killed_machine_is_resumed_on_another(cluster, here, hold, tmp_path):
    [victim, _] = cluster.add(2)
    process = start(compare_command(tmp_path, "--ray-address", cluster.address), **hold.environment)
    hold.wait_for(2, process)
    victim.kill()
    hold.end()
    code, output, errors = finish(process)
    assert code == 0, errors
    assert_resumed(tmp_path, the_lost(errors))
    assert_same_comparison(tmp_path, here)
    # what Ray has to say of its dead stays out of what we print
    assert len(errors.splitlines()) == 3 and len(output.splitlines()) == 2, (output, errors)


@pytest.mark.slow
def test_the_run_of_a_killed_process_is_resumed(cluster, here, hold, tmp_path):
    cluster.add(2)
    process = start(compare_command(tmp_path, "--ray-address", cluster.address), **hold.environment)
    os.kill(hold.wait_for(2, process)[0], signal.SIGKILL)
    hold.end()
    code, _, errors = finish(process)
    assert code == 0, errors
    assert_resumed(tmp_path, the_lost(errors))
    assert_same_comparison(tmp_path, here)


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode != 0,
    reason="this system has no mount namespaces to hide a folder in",
)
def test_machines_without_a_common_folder_send_their_runs_back(cluster, here, hold, tmp_path):
    # Each machine has an empty disk where the comparison is.
    [victim, other] = cluster.add(2, before=f"mount -t tmpfs tmpfs {tmp_path}")
    process = start(compare_command(tmp_path, "--ray-address", cluster.address), **hold.environment)
    hold.wait_for(2, process)
    # they are sent while the runs go on
    wait_until(lambda: len(list(tmp_path.glob("*/seed0/checkpoints/step-*7"))) == 2, process=process)
    seen = subprocess.run(["ls", f"/proc/{other.process.pid}/root{tmp_path}"], capture_output=True, text=True)
    assert seen.returncode == 0 and seen.stdout == ""
    victim.kill()
    hold.end()
    code, _, errors = finish(process)
    assert code == 0, errors
    assert_resumed(tmp_path, the_lost(errors))
    assert_same_comparison(tmp_path, here)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_comparison_that_is_stopped_resumes_with_the_same_command(here, hold, tmp_path, number):
    # on a cluster of its own
    process = start(compare_command(tmp_path, "--jobs", 2), FORCE_COLOR="1", **hold.environment)
    hold.wait_for(2, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    code, output, bars = finish(process)
    assert code == 130 and "the same command resumes from here" in output, (output, bars)
    assert "SIGTERM received" not in bars  # Ray's handler, which may abort the process, is not asked
    assert {record(tmp_path / method / "seed0")["status"] for method in METHODS} == {"interrupted"}
    code, _, more_bars = finish(start(compare_command(tmp_path, "--jobs", 1), FORCE_COLOR="1"))
    assert code == 0, more_bars
    assert "waiting for a machine with 1 CPUs and 0 GPUs" in bars + more_bars
    assert [len(rows) for rows in sessions(tmp_path).values()] == [2, 2]
    assert_same_comparison(tmp_path, here)
