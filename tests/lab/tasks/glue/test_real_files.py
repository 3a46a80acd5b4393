"""The real tasks, where a mirror is at hand: WELLCOND_DATA, or the folder shared/data beside the repository."""

import os
from pathlib import Path

import pytest
import torch

from wellcond.lab.pool import run_jobs
from wellcond.lab.tasks.glue import NAMES
from wellcond.lab.train.glue import plan_glue
from wellcond.lab.train.prepare import prepare_task

ROOT = os.environ.get("WELLCOND_DATA") or str(Path(__file__).parents[4] / "../shared/data")


@pytest.fixture
def mirror(monkeypatch):
    if not (Path(ROOT) / "nyu-mll/glue").is_dir():
        pytest.skip("no mirror of nyu-mll/glue: set WELLCOND_DATA to a folder that holds it")
    monkeypatch.setenv("WELLCOND_DATA", ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_every_task_is_read_and_balanced_as_known(mirror, pretrained, name):
    [job] = plan_glue(pretrained("bert"), tasks=[name], limit=400)
    task = prepare_task(job.recipe, seed=0, base=job.base)
    labels = task.train.labels
    assert len(task.train) == 400 and len(task.evaluation) >= 277
    if name == "stsb":
        assert labels.min() >= 0 and labels.max() == 5 and 2.2 < labels.mean() < 3.2
    else:
        shares = labels.bincount().double() / 400
        # Of CoLA 70 % are acceptable, of MRPC 67 % equivalent, of QQP 37 % duplicates; the others are balanced.
        expected = {"cola": [0.3, 0.7], "mrpc": [0.33, 0.67], "qqp": [0.63, 0.37], "mnli": [1 / 3] * 3}
        torch.testing.assert_close(shares, torch.tensor(expected.get(name, [0.5, 0.5])).double(), atol=0.09, rtol=0)
    batch = task.train.fetch([(row, 0) for row in range(16)])
    assert (batch["input_ids"][:, 0] == 2).all()  # [CLS]
    assert bool(batch["token_type_ids"].any()) == (name not in ("cola", "sst2"))


def test_two_real_tasks_are_scored(mirror, pretrained):
    planned = plan_glue(pretrained("crammed"), tasks=["rte", "stsb"], limit=32, cpu=True)
    outcome = run_jobs(planned, num_workers=1, observer=lambda job, event: None)
    assert [record["status"] for record in outcome.records] == ["finished", "finished"]
    assert [record["metric"]["name"] for record in outcome.records] == ["accuracy", "pearson"]
