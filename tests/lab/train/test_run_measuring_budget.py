"""A run measures within the budget of its recipe; what that leaves out is said, and nothing of the training changes."""

import json
import re

import pytest

import wellcond
from lab.small import small_job
from wellcond.errors import RecipeError
from wellcond.lab.train.prepare import rebuild_run
from wellcond.lab.train.run import run_job

# 65 tokens of a head with 48 dimensions: a Jacobian of 3120 rows, which is expected to take half a minute.
LARGE = "model.arguments={img_size: 8, patch_size: 1, embed_dim: 48, depth: 1, num_heads: 1, mlp_ratio: 1.0}"
SHORT = "training={length: {steps: 4}, batch_size: 8, threads: 1, log_every: 1}"
RARELY = "evaluation={every: {steps: 4}, batch_size: 250, samples: 50}"


def run(folder, tracking, **options):
    events = []
    record = run_job(
        small_job(folder, "default", LARGE, SHORT, RARELY, f"tracking={tracking}"), events.append, **options
    )
    notes = [event["text"] for event in events if event["event"] == "note"]
    logs = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("steps", "conditioning")
    }
    return record, logs, notes


def test_a_jacobian_beyond_the_budget_is_left_out_and_that_is_said(tmp_path):
    record, logs, notes = run(tmp_path / "measured", "{weights_every: null, jacobian_points: 3}")
    assert record["status"] == "finished"
    assert [row["step"] for row in logs["conditioning"]] == [0, 1, 4]
    assert all(row["condition_number"] is None and row["rank"] is None for row in logs["conditioning"])
    assert all(row["kappa_q"] >= 1 and row["entropy"] > 0 for row in logs["conditioning"])
    [note] = notes
    assert re.match(r"kappa\(J\) was not measured at step 0: it may take \d+ s, and tracking.budget=0.1 leaves ", note)
    assert "--set tracking.budget (null for no limit)" in note and "tracking.heads" in note
    _, blind, quiet = run(tmp_path / "blind", "{weights_every: null, jacobian_points: 0}")
    assert logs["steps"] == blind["steps"] and not blind["conditioning"] and not quiet


def test_one_head_a_layer_unless_others_are_asked_for(tmp_path):
    quick = "model.arguments={img_size: 8, patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2, mlp_ratio: 1.0}"
    for heads, expected in (("null", [0, 0]), ("all", [0, 1, 0, 1]), ("[1]", [1, 1])):
        folder = tmp_path / expected.__repr__()
        tracking = f"tracking={{weights_every: null, jacobian_points: 1, heads: {heads}, budget: null}}"
        run_job(small_job(folder, "default", quick, SHORT, RARELY, tracking))
        rows = [json.loads(line) for line in (folder / "conditioning.jsonl").read_text().splitlines()]
        assert [row["head"] for row in rows] == expected and {row["step"] for row in rows} == {4}
        assert all(row["condition_number"] is not None for row in rows)


def test_the_papers_stacked_jacobian_is_a_setting(tmp_path):
    """At the last step, of the weights that were saved: what `measure` finds in that convention."""
    quick = "model.arguments={img_size: 8, patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2, mlp_ratio: 1.0}"
    tracking = "tracking={weights_every: null, jacobian_points: 1, stacked: true, budget: null}"
    run_job(small_job(tmp_path, "conditioned+balanced", quick, SHORT, RARELY, tracking))
    [row] = [json.loads(line) for line in (tmp_path / "conditioning.jsonl").read_text().splitlines()]
    model, task, _ = rebuild_run(tmp_path)
    expected = wellcond.measure(model, task.probe(1), heads=[0], convention="stack").layers[0].heads[0]
    assert row["pseudo_condition_number"] == pytest.approx(expected.jacobian.pseudo_condition_number, rel=1e-6)
    wide = wellcond.measure(model, task.probe(1), heads=[0]).layers[0].heads[0]
    assert row["pseudo_condition_number"] != pytest.approx(wide.jacobian.pseudo_condition_number, rel=1e-2)


def test_a_stacked_jacobian_that_is_not_defined_is_refused_before_training(tmp_path):
    channel = (
        "model.name=timm:xcit_nano_12_p8_224",
        "model.arguments={img_size: 8, embed_dim: 16, depth: 1, num_heads: 2}",
    )
    with pytest.raises(RecipeError, match=r"tracking\.stacked=false"):
        run_job(small_job(tmp_path, "default", *channel, SHORT, RARELY, "tracking={jacobian_points: 1, stacked: true}"))
    assert not (tmp_path / "steps.jsonl").exists() or not (tmp_path / "steps.jsonl").read_text()
