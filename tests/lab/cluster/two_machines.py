"""A real Ray cluster whose machines are processes on this one, and ways to hurt it; Ray stays out of this process."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.held_runs import HELD
from lab.small import SETTINGS, assert_same_run, command, record, small_recipe
from patience import PATIENCE, wait_until
from wellcond.lab.plan import plan_comparison, write_comparison
from wellcond.lab.pool import run_jobs

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ANYWHERE = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
PLACE = ["--node-ip-address=127.0.0.1", f"--object-store-memory={80 * 2**20}", "--block", "--disable-usage-stats"]
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # nothing is written to the home folder
    "RAY_worker_niceness": "0",  # training is what these machines are for
    "RAY_health_check_period_ms": "500",  # the dead are noticed soon ...
    "RAY_health_check_timeout_ms": str(1000 * PATIENCE),  # ... and the slow are not dead
    "RAY_raylet_start_wait_time_s": str(PATIENCE),
    "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": str(PATIENCE),
    "RAY_worker_register_timeout_seconds": str(PATIENCE),
}
METHODS = ("default", "conditioned")
OF_A_SESSION = (
    "seconds",
    "samples_per_second",
    "seconds_per_step",
    "peak_memory_bytes",
    "sessions",
    "logs",
    "checksum",
)


def compare_command(folder, *arguments, changes=(HELD,)):
    """Two runs, one of each method."""
    settings = [part for change in (*SETTINGS, *changes) for part in ("--set", change)]
    return command("compare", "--recipe", "digits", "-o", folder, "--seeds", 1, "--cpu", "--no-report",
                   "--trust-local-code", *settings, "--engine", "ray", *arguments)  # fmt: skip


def run_here(folder):
    """The same comparison on the local engine."""
    recipe = small_recipe(HELD)
    write_comparison(folder, recipe, recipe.methods, (0,))
    jobs = plan_comparison(recipe, recipe.methods, (0,), folder, cpu=True, local_code=True)
    outcome = run_jobs(jobs, num_workers=1, observer=lambda job, event: None)
    assert {row["status"] for row in outcome.records} == {"finished"}
    return folder


def start(arguments, *, output=subprocess.PIPE, **environment):
    """A process in a session of its own: signals that pytest gets are not for it."""
    return subprocess.Popen(
        [str(word) for word in arguments],
        env=os.environ | ENVIRONMENT | environment,
        stdout=output,
        stderr=output,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Exit code, standard output and standard error of a process."""
    output, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, output, errors


def family(process):
    """Ids and command lines of a process and all its descendants."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [(int(pid), int(parent), text) for pid, parent, text in (r.split(None, 2) for r in listed.splitlines()[1:])]
    members, found = {process.pid}, -1
    while found != len(members):
        found = len(members)
        members |= {pid for pid, parent, _ in rows if parent in members}
    return {pid: text for pid, _, text in rows if pid in members}


class Machine:
    """A Ray node, started as an administrator does. `before` are shell commands in a mount namespace of its own."""

    def __init__(self, *arguments, before=None, **environment):
        words = [*RAY, "start", *PLACE, *ANYWHERE, *arguments]
        if before is not None:
            words = ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{before} && exec {shlex.join(words)}"]
        self.log = tempfile.TemporaryFile("w+")
        self.process = start(words, output=self.log, **environment)

    def wait_until_up(self):
        wait_until(lambda: "Ray runtime started" in self.told() or self.process.poll() is not None)
        assert self.process.poll() is None, self.told()

    def told(self):
        self.log.seek(0)
        return self.log.read()

    def kill(self):
        """As if the power failed."""
        for pid in family(self.process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def free_ports(count):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


class Cluster:
    """A head without a share in the work, and machines with one CPU each."""

    def __init__(self):
        port, client_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self.temporary = Path(tempfile.mkdtemp(prefix="wcray", dir="/tmp"))  # short: it holds sockets
        ports = [f"--port={port}", f"--ray-client-server-port={client_port}"]
        shape = ["--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self.temporary}"]
        self.machines = [Machine("--head", *ports, *shape)]
        try:
            self.machines[0].wait_until_up()
        except BaseException:
            self.end()
            raise

    def add(self, count=1, **options):
        """Start machines, one after the other: on one machine they would take each other's sockets."""
        added = []
        for _ in range(count):
            added.append(Machine("--address", self.address, "--num-cpus=1", **options))
            self.machines.append(added[-1])
            added[-1].wait_until_up()
        return added

    def end(self):
        for machine in reversed(self.machines):
            machine.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in OF_A_SESSION}
    return value


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def comparison_of(folder):
    """Without what the command adds about searched rates."""
    content = json.loads((folder / "comparison.json").read_text("utf-8"))
    return {key: value for key, value in content.items() if key not in ("rates", "checksum")}


def assert_same_comparison(ours, theirs):
    """Same files, rows, weights and records, but for times and machines."""
    for run in (f"{method}/seed0" for method in METHODS):
        assert_same_run(ours / run, theirs / run)
        assert without_times(record(ours / run)) == without_times(record(theirs / run))
    assert comparison_of(ours) == comparison_of(theirs)
    assert files_of(ours) == files_of(theirs)
