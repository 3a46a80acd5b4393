"""From a pre-trained run to scores."""

import json
import re
import shutil

import pytest
import torch

from lab.data.helpers import write_csv
from lab.tasks.glue.helpers import edit_record, pretrain, write_glue
from wellcond.errors import DataError, RecipeError, RunError, WellcondError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.weights import load_weights
from wellcond.lab.pool import run_jobs
from wellcond.lab.recipe import Recipe
from wellcond.lab.tokenizers import read_tokenizer
from wellcond.lab.train import glue
from wellcond.lab.train.glue import plan_glue, read_pretrained
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run_folder import last_checkpoint


def quiet(job, event):
    pass


def plan(folder, **options):
    return plan_glue(folder, cpu=True, **options)


def score(folder, **options):
    outcome = run_jobs(plan(folder, **options), num_workers=1, observer=quiet)
    assert not outcome.failures
    return outcome


@pytest.mark.parametrize("model", ["bert", "crammed"])
def test_a_pre_trained_run_is_fine_tuned_and_scored(pretrained, model):
    folder = pretrained(model)
    outcome = score(folder, tasks=["cola", "stsb"])
    assert [record["status"] for record in outcome.records] == ["finished"] * 2
    assert {record["metric"]["name"] for record in outcome.records} == {"matthews", "pearson"}
    assert (folder / "glue/cola/seed-0/run.json").is_file() and (folder / "glue/stsb/seed-0/steps.jsonl").is_file()
    # No checkpoints stay, and complete runs are not repeated.
    assert not list(folder.glob("glue/*/*/checkpoints"))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("glue/*/*/run.json")}
    score(folder, tasks=["cola", "stsb"])
    assert {path: path.stat().st_mtime_ns for path in folder.glob("glue/*/*/run.json")} == before


@pytest.mark.parametrize("link", ["glue", "glue/cola"])
def test_nothing_is_written_through_a_link(pretrained, tmp_path, link):
    folder = shutil.copytree(pretrained("bert"), tmp_path / "run")
    (tmp_path / "outside").mkdir()
    (folder / link).parent.mkdir(exist_ok=True)
    shutil.rmtree(folder / link, ignore_errors=True)
    (folder / link).symlink_to(tmp_path / "outside")
    with pytest.raises(RunError, match=f"{link} is a link"):
        score(folder, tasks=["cola"])
    assert not list((tmp_path / "outside").iterdir())


TINY = dict(glue.TINY)
FINE_TUNING = [("paper", 4e-5, 16, 5, None), ("tiny", 1e-3, 32, 3, 3000)]


@pytest.mark.parametrize(("scale", "rate", "batch_size", "epochs", "rows"), FINE_TUNING)
def test_fine_tuning_is_that_of_crammed_bert(pretrained, monkeypatch, scale, rate, batch_size, epochs, rows):
    monkeypatch.setattr(glue, "TINY", TINY)
    folder = pretrained("crammed")
    edit_record(folder, lambda record: record["config"].update(scale=scale))
    [job] = plan_glue(folder, tasks=["qqp"])
    config = job.recipe.config(job.method, job.seed)
    optimizer = {
        "name": "adamw",
        "lr": rate,
        "betas": [0.9, 0.98],
        "eps": 1e-6,
        "weight_decay": 0.0,
        "qk_lr_factor": 1.0,
    }
    assert optimizer.items() <= json.loads(json.dumps(config["optimizer"])).items()
    assert config["schedule"]["name"] == "cosine" and config["schedule"]["warmup"]["epochs"] == pytest.approx(
        epochs / 10
    )
    assert config["training"]["length"]["epochs"] == epochs and config["training"]["batch_size"] == batch_size
    assert config["training"]["clip_norm"] is None and config["scale"] == scale
    assert config["model"]["name"] == "wellcond:crammed_bert_classifier"
    assert "dropout" not in config["model"]["arguments"]  # 0.1, as the classifier has it
    assert config["data"]["limit_train"] == config["data"]["limit_evaluation"] == rows
    assert config["task"]["length"] == 24  # as long as pre-training, at most 128
    [job] = plan_glue(folder, tasks=["qqp"], limit=0)
    assert job.recipe.data.limit_train is None


def test_dropout_of_a_model_of_transformers_is_on(pretrained):
    [job] = plan(pretrained("bert"), tasks=["cola"])
    task = prepare_task(job.recipe, seed=0, base=job.base)
    config = prepare_model(job.recipe, job.method, task, seed=0, base=job.base).config
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0.1
    assert config.max_position_embeddings == 24 and config.hidden_size == 16


@pytest.mark.parametrize("method", ["default", "conditioned", "identity(lam=2)", "conditioned+balanced"])
@pytest.mark.parametrize("model", ["bert", "crammed"])
def test_fine_tuning_starts_from_the_function_that_pre_training_found(pretrained_folders, model, method, tmp_path):
    folder = shutil.copytree(pretrained_folders(model, method), tmp_path / "run")
    record = json.loads((folder / "run.json").read_text())
    recipe = Recipe.model_validate({k: v for k, v in record["config"].items() if k not in ("method", "seed")})
    task = prepare_task(recipe, seed=0, base=None)
    masked = prepare_model(recipe, MethodSettings.model_validate(method), task, seed=0, base=None)
    load_weights(masked, last_checkpoint(folder / "checkpoints") / "model.safetensors")
    [job] = plan(folder, tasks=["cola"])
    task = prepare_task(job.recipe, seed=0, base=job.base)
    classifier = prepare_model(job.recipe, job.method, task, seed=0, base=job.base)
    batch = task.evaluation.fetch([(row, -1) for row in range(4)])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    part = "bert" if model == "bert" else "encoder"
    with torch.no_grad():
        found, expected = (getattr(one.eval(), part)(**inputs) for one in (classifier, masked))
    if model == "bert":
        found, expected = found.last_hidden_state, expected.last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # Plain weights: nothing acts on them in a forward pass any more.
    assert not [name for name in classifier.state_dict() if "wellcond" in name or "parametrizations" in name]


def test_mnli_is_scored_on_its_matched_split_and_rows_are_limited(pretrained, fine_tuning):
    fine_tuning["batch_size"] = 4
    [mnli] = score(pretrained("bert"), tasks=["mnli"], limit=8).records
    assert mnli["config"]["data"]["evaluation_split"] == "validation_matched" and "accuracy" in mnli["final"]
    assert mnli["data"]["train"] == mnli["data"]["evaluation"] == 8


def test_the_tokeniser_of_pre_training_is_kept_with_the_scores(pretrained):
    folder = pretrained("bert")
    record, path = read_pretrained(folder)
    assert read_tokenizer(path).fingerprint == record["tokenizer"]["fingerprint"]
    text = folder.parent / "gone.txt"
    edit_record(folder, lambda record: record["config"]["data"].update(train=str(text)))
    assert read_pretrained(folder)[1] == path
    path.unlink()
    with pytest.raises(DataError, match="gone.txt: no such file"):
        read_pretrained(folder)


def test_a_tokeniser_of_a_file_needs_no_text_of_pre_training(pretrained, tmp_path):
    folder = pretrained("bert")
    record, path = read_pretrained(folder)
    path.rename(tmp_path / "tokenizer.json")
    edit_record(folder, lambda record: record["config"]["data"].update(train="gone.txt"))
    for sha256 in (None, record["tokenizer"]["fingerprint"]):
        choice = {"name": "tokenizer.json", "sha256": sha256}
        edit_record(folder, lambda record, choice=choice: record["config"]["task"].update(tokenizer=choice))
        assert read_pretrained(folder, base=tmp_path)[1] == path
        path.unlink()
    choice = {"name": "tokenizer.json", "sha256": "0" * 64}
    edit_record(folder, lambda record: record["config"]["task"].update(tokenizer=choice))
    with pytest.raises(RecipeError, match="another tokeniser"):
        read_pretrained(folder, base=tmp_path)


def test_relative_paths_of_pre_training_start_at_its_recipe(tmp_path):
    folder = pretrain(tmp_path / "recipes/run")
    edit_record(folder, lambda record: record["config"]["data"].update(train="text.txt"))
    with pytest.raises(DataError, match="text.txt: no such file"):
        plan(folder, tasks=["cola"])
    assert plan(folder, tasks=["cola"], base=tmp_path / "recipes")


# What cannot be scored


def no_checkpoint(folder):
    shutil.rmtree(folder / "checkpoints")


def damaged(folder):
    place = last_checkpoint(folder / "checkpoints") / "model.safetensors"
    place.write_bytes(place.read_bytes()[:100])


def changed(*path, to):
    def change(folder):
        def edit(record):
            place = record
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = to

        edit_record(folder, edit)

    return change


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (no_checkpoint, RecipeError, "has no checkpoint"),
        (damaged, RunError, "is damaged .model.safetensors .*delete"),
        (changed("config", "task", to={"name": "language_modelling"}), RecipeError, "found one of language_modelling"),
        (
            changed("config", "task", "tokenizer", to="bytes"),
            RecipeError,
            r"needs the tokens \[PAD\], \[CLS\] and \[SEP\]",
        ),
        (changed("tokenizer", "fingerprint", to="0" * 64), RunError, "is not the tokeniser of pre-training"),
        (lambda folder: (folder / "run.json").unlink(), RecipeError, "no run in .*expected run.json"),
    ],
)
def test_a_run_that_cannot_be_the_start_is_refused(pretrained, spoil, error, message):
    folder = pretrained("bert")
    spoil(folder)
    with pytest.raises(error, match=message):
        run_jobs(plan(folder, tasks=["cola"]), num_workers=1, observer=quiet)
    assert not list(folder.glob("glue/*/seed-0"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("config", "model", "arguments", "num_hidden_layers", to=3), "missing encoder.layer.2"),
        (changed("config", "model", "arguments", "hidden_size", to=32), r"\(60, 16\) in the file, \(60, 32\)"),
    ],
)
def test_weights_that_do_not_fit_the_classifier_are_refused(pretrained, change, message):
    folder = pretrained("bert")
    change(folder)
    [(_, problem)] = run_jobs(plan(folder, tasks=["cola"]), num_workers=1, observer=quiet).failures
    assert re.search(rf"model.safetensors does not fit this model: .*{message}", problem)


def bad_file(header, *rows):
    return lambda folder: write_csv(folder / "cola/validation.tsv", header, rows)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "cola/train.tsv").unlink(), "there is no split 'train'.*splits validation"),
        (
            bad_file(["text", "label"], ["the cat", 1]),
            "validation.tsv: column 'sentence' cannot be the input.*columns text, label",
        ),
        (
            bad_file(["sentence", "label"], ["the cat", 1], ["a mat", 2]),
            "row 1 .*not a class of the training split.*one of 0, 1.*found:    '2'",
        ),
        (bad_file(["sentence", "label"]), "this cannot be read.*not empty"),
    ],
)
def test_bad_files_are_named(pretrained, tmp_path, monkeypatch, spoil, message):
    data = write_glue(tmp_path / "mirror/nyu-mll/glue")
    spoil(data)
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path / "mirror"))
    with pytest.raises(DataError, match=f"(?s){message}"):
        score(pretrained("bert"), tasks=["cola"])


def test_a_comparison_without_a_finished_run_is_refused(pretrained, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(pretrained("bert"), folder / "default/seed0")
    (folder / "comparison.json").write_text("{}")
    changed("status", to="diverged")(folder / "default/seed0")
    with pytest.raises(WellcondError, match="expected finished runs"):
        plan_glue(folder, tasks=["cola"])
