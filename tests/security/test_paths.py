"""Paths in recipes, records and manifests: none leads out of the folder that it belongs to."""

import json
import os
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lab.data.helpers import failure, load, write_csv
from lab.helpers import parse_recipe
from lab.report.fake_runs import FakeMethod, only_comparison, write_comparison
from lab.tasks.detection.coco_sets import coco, load_set, write_set
from wellcond.errors import DataError, ModelSpecError, RecipeError, RunRecordError
from wellcond.lab.models.build import build_model
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.figures import build_figures
from wellcond.lab.report.pack import pack
from wellcond.lab.report.page import build_report

OUT = ["../../out", "/etc/out", "..", "a\\b", ".hidden", "~", "C:\\out", "a\0b", ""]


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WELLCOND_DATA", raising=False)


def files_below(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", OUT)
def test_the_name_of_a_recipe_is_no_path(name):
    fields = {"extends": "tiny/digits", "name": name, "scale": "tiny"}
    with pytest.raises(RecipeError, match="expected a name for a folder"):
        parse_recipe(json.dumps(fields))


def test_a_report_is_written_beside_its_records_whatever_they_say(tmp_path):
    """Labels, slugs, names and recipes of stored records are text, never a place to write to."""
    methods = [FakeMethod("default", {0: 0.9, 1: 0.8}), FakeMethod("../../out", {0: 0.9})]
    folder = write_comparison(tmp_path / "deep" / "er" / "runs", methods, epochs=3, points=2, layers=1, heads=1)
    for path in folder.rglob("*.json"):
        stored = json.loads(path.read_text()) | {"name": "../../out", "recipe": "../../out", "slug": "../../../out"}
        if "methods" in stored:
            stored["methods"] = [method | {"slug": "../../../../out"} for method in stored["methods"]]
        else:
            stored["metric"]["name"] = "../../../out"
            stored["final"] = stored["best"] = stored["final"] | {"../../../out": stored["final"]["accuracy"]}
        path.write_text(json.dumps(stored))
    for path in folder.rglob("evaluations.jsonl"):
        path.write_text(path.read_text().replace('"accuracy"', '"../../../out"'))
    before = set(files_below(tmp_path))
    [page] = build_report(folder, pictures=False)
    assert page == folder / "report" / "report.md"
    names = [figure.name for figure in build_figures(analyse(only_comparison(folder)))]
    assert names and all(re.fullmatch(r"[a-z0-9_-]+", name) for name in names)  # each becomes files of that name
    new = set(files_below(tmp_path)) - before
    assert new and all(name.startswith("deep/er/runs/report/") for name in new)


@pytest.mark.parametrize("link", ["report", "report/tables", "report/figures"])
def test_a_report_is_not_written_through_a_link(link, tmp_path):
    folder = write_comparison(
        tmp_path / "runs", [FakeMethod("default", {0: 0.9})], epochs=3, points=2, layers=1, heads=1
    )
    (tmp_path / "precious" / "tables").mkdir(parents=True)
    (tmp_path / "precious" / "my.csv").write_text("keep")
    (tmp_path / "precious" / "tables" / "my.csv").write_text("keep")
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(tmp_path / "precious")
    before = files_below(tmp_path / "precious")
    with pytest.raises(RunRecordError, match="is a link that leads out"):
        build_report(folder, pictures=False)
    assert files_below(tmp_path / "precious") == before


@pytest.mark.parametrize("link", ["packed.jsonl", "below"])
def test_records_are_not_packed_through_a_link(link, tmp_path):
    """And a comparison before it is not written either."""
    few = {"points": 2, "layers": 1, "heads": 1}
    for name in ("alpha", "packed", "below/inner"):
        write_comparison(tmp_path / "runs" / name, [FakeMethod("default", {0: 0.9})], epochs=3, **few)
    output, precious = tmp_path / "output", tmp_path / "precious"
    precious.mkdir()
    (precious / "inner.jsonl").write_text("keep")
    (output / link).parent.mkdir(parents=True)
    (output / link).symlink_to(precious / "inner.jsonl" if link == "packed.jsonl" else precious)
    with pytest.raises(RunRecordError, match="is a link that leads out"):
        pack(tmp_path / "runs", output)
    assert (precious / "inner.jsonl").read_text() == "keep" and list(output.iterdir()) == [output / link]
    (output / link).unlink()
    (tmp_path / "elsewhere").mkdir()
    output.rename(tmp_path / "moved")
    output.symlink_to(tmp_path / "elsewhere")  # what the user names may be a link
    assert pack(tmp_path / "runs", output) and (tmp_path / "elsewhere" / "packed.jsonl").is_file()


def secret(folder):
    """A picture that lies outside of every data set."""
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(folder / "secret.png")
    return folder / "secret.png"


def test_a_link_of_coco_is_not_followed_out(tmp_path):
    root = write_set(tmp_path / "coco")
    linked = root / "train2017" / coco()["images"][0]["file_name"]
    linked.unlink()
    linked.symlink_to(secret(tmp_path))
    split = load_set(root).train
    at = next(n for n, image in enumerate(split.images) if image["file_name"] == linked.name)
    for read in (split.content, split.__getitem__):
        with pytest.raises(DataError, match="leads out of its folder"):
            read(at)


@pytest.mark.parametrize("name", ["../out", "/etc", "a/..", "owner/na/me"])
@pytest.mark.parametrize("field", ["id", "config"])
@pytest.mark.parametrize("source", ["hub", "text_stream"])
def test_names_of_data_sets_do_not_leave_the_mirror(source, field, name, tmp_path, monkeypatch):
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"pattern|such as"):
        load(**{"source": source, "id": "owner/name", field: name})


@pytest.mark.parametrize("source", ["hub", "text_stream"])
@pytest.mark.parametrize("place", ["../../../secret.csv", "{folder}/secret.csv", "../../../*.csv"])
def test_the_card_of_a_data_set_names_no_file_outside(place, source, tmp_path, monkeypatch):
    write_csv(tmp_path / "secret.csv", ["text", "label"], [["my password", "0"], ["another", "1"]])
    mirror = tmp_path / "mirror" / "evil" / "set"
    mirror.mkdir(parents=True)
    card = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": place}]}]}
    (mirror / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n".replace("{folder}", str(tmp_path)))
    monkeypatch.setenv("WELLCOND_DATA", str(tmp_path / "mirror"))
    fields = {"evaluation_split": "train"} if source == "hub" else {"evaluation_documents": 1}
    message = failure(source=source, id="evil/set", **fields)
    assert "there are no data files" in message
    write_csv(mirror / "train.csv", ["text", "label"], [["inside", "0"], ["also", "1"]])
    assert load(source=source, id="evil/set", **fields).train[-1]["text"] == "also"


@pytest.mark.parametrize("shard", ["../secret.safetensors", "{folder}/secret.safetensors", "a/b.safetensors"])
def test_the_index_of_a_checkpoint_names_no_file_outside(shard, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", **sizes}))
    index = {"weight_map": {"w": shard.format(folder=tmp_path)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelSpecError, match="may not lie outside its folder"):
        build_model(f"hf:{folder}")


def test_deleting_old_checkpoints_does_not_follow_links(tmp_path):
    from wellcond.lab.train.run_folder import save_checkpoint

    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    os.symlink(precious, folder / "step-00000001")
    save_checkpoint(folder, 2, {"model": {}}, {})
    assert (precious / "file").read_text() == "keep"
