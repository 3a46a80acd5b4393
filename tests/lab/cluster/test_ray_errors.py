"""What cannot run on Ray says so, and what to do."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from PIL import Image

from lab.cluster.two_machines import Cluster, compare_command, finish, start
from lab.small import small_job
from wellcond.cli.experiments import compare as compare_command_line
from wellcond.errors import MissingExtraError, OptionError, WellcondError
from wellcond.lab.cluster import RayPool, RaySettings, connected, worker_environment

pytestmark = pytest.mark.processes

SHORT = ("training.length={steps: 20}", "tracking={weights_every: null, jacobian_points: 0}")
GPU_MACHINES = [{"CPU": 4.0}, {"CPU": 16.0, "GPU": 2.0}]


def test_what_a_stopped_run_sends_home_is_not_cancelled_with_it(tmp_path):
    pool, cancelled = RayPool(RaySettings(), [small_job(tmp_path)]), []
    pool._ray = SimpleNamespace(cancel=lambda task, **options: cancelled.append((task, options)))
    pool._running = {"a task": small_job(tmp_path)}
    pool.stop()
    assert cancelled == [("a task", {"recursive": False})]


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="run the command once, without torchrun"):
        compare_command_line("digits", folder=tmp_path / "runs", engine="ray")


def test_a_missing_ray_names_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'wellcond\[ray\]'"), connected(None):
        pass


@pytest.mark.parametrize(
    ("settings", "cpu", "machines", "share"),
    [
        (RaySettings(), False, [{"CPU": 4.0}], (1, 0)),
        (RaySettings(), False, GPU_MACHINES, (1, 1)),
        (RaySettings(), True, GPU_MACHINES, (1, 0)),
        (RaySettings(cpus_per_run=3, gpus_per_run=0.5), False, GPU_MACHINES, (3, 0.5)),
    ],
)
def test_a_run_gets_what_its_recipe_needs(tmp_path, settings, cpu, machines, share):
    job = small_job(tmp_path)
    object.__setattr__(job, "cpu", cpu)
    assert settings.resources(job, machines) == dict(zip(("num_cpus", "num_gpus"), share, strict=True))


def test_a_recipe_without_threads_gets_a_machine(tmp_path):
    job = small_job(tmp_path, "polar", "training.threads=null")
    assert RaySettings().resources(job, [{"CPU": 8.0}]) == {"num_cpus": 8, "num_gpus": 0}


def test_folders_in_variables_are_those_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"WELLCOND_DATA": f"data{os.pathsep}/all", "HF_HOME": "hf", "HF_HUB_OFFLINE": "1", "HF_TOKEN": "secret"}
    passed = worker_environment(given)
    assert "HF_TOKEN" not in passed
    assert passed["WELLCOND_DATA"].split(os.pathsep) == [str(tmp_path / "data"), "/all"]
    assert passed["HF_HOME"] == str(tmp_path / "hf") and passed["HF_HUB_OFFLINE"] == "1"


def test_a_cluster_that_ended_without_a_word_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    with pytest.raises(WellcondError, match="no Ray cluster answers at 'auto'"), connected("auto"):
        pass


def test_a_client_from_elsewhere_is_told_another_way():
    pytest.importorskip("ray", reason="ray is not installed")
    with pytest.raises(WellcondError, match="use `ray job submit`"), connected("ray://127.0.0.1:10001"):
        pass


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="ray is not installed")
    started = Cluster()
    yield started
    started.end()


@pytest.fixture
def machine(cluster):
    """Makes a machine that is gone after the test."""
    made = []

    def make(**options):
        made.extend(cluster.add(1, **options))
        return cluster.address

    yield make
    for each in made:
        cluster.machines.remove(each)
        each.kill()


def compare(folder, address, *arguments, changes=SHORT):
    return finish(start(compare_command(folder, "--ray-address", address, *arguments, changes=changes)))


@pytest.mark.slow
def test_a_worker_runs_the_wellcond_of_the_command(machine, tmp_path):
    (tmp_path / "wellcond.py").write_text("raise ImportError('another version')\n")
    code, _, errors = compare(tmp_path / "runs", machine(PYTHONPATH=str(tmp_path)))
    assert code == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("package", ["accelerate", "safetensors"])  # of a run, and of all that is imported
def test_a_worker_needs_what_wellcond_needs(machine, tmp_path, package):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}')\n")
    code, _, errors = compare(tmp_path / "runs", machine(PYTHONPATH=str(tmp_path)))
    assert code == 2 and errors.startswith("error:") and package in errors and "pip install" in errors


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True).returncode != 0,
    reason="this system has no mount namespaces to hide a folder in",
)
def test_a_worker_needs_the_code_and_the_data_that_a_recipe_names(machine, tmp_path):
    (tmp_path / "hidden").mkdir()
    script = tmp_path / "hidden" / "mine.py"
    script.write_text(
        "import timm\n\n\ndef build(**given):\n    return timm.create_model('vit_tiny_patch16_224', **given)\n"
    )
    address = machine(before=f"mount -t tmpfs tmpfs {tmp_path / 'hidden'}")
    local = (*SHORT, f"model.name={script}:build")
    code, _, errors = compare(tmp_path / "runs", address, "--trust-local-code", changes=local)
    assert code == 2 and str(script) in errors and "(on " in errors
    images = tmp_path / "hidden" / "images"
    for folder in (images / split / label for split in ("train", "val") for label in "ab"):
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "0.png")
    code, _, errors = compare(tmp_path / "hidden" / "runs", address, "--data", images)
    assert code == 2 and str(images) in errors and "(on " in errors


@pytest.mark.slow
def test_one_failing_run_is_listed_beside_the_others(machine, tmp_path):
    (tmp_path / "conditioned/seed0").mkdir(parents=True)
    (tmp_path / "conditioned/seed0/checkpoints").symlink_to(tmp_path)
    code, output, errors = compare(tmp_path, machine(), "--methods", "default,conditioned", "--seeds", "1", "--json")
    rows = {row["status"]: row for row in json.loads(output)["runs"]}
    assert code == 1 and set(rows) == {"finished", "failed"} and errors == ""
    assert "checkpoints is a link" in rows["failed"]["reason"]
    # and what is complete needs no cluster
    code, output, _ = compare(tmp_path, "127.0.0.1:1", "--methods", "default", "--json")
    assert code == 0 and [row["status"] for row in json.loads(output)["runs"]] == ["finished"]


@pytest.mark.slow
def test_an_error_of_the_recipe_ends_the_comparison(machine, tmp_path):
    code, _, errors = compare(tmp_path, machine(), changes=(*SHORT, "training.batch_size=5000"))
    assert code == 2 and errors.startswith("error:") and "at most the 1038 training samples" in errors
