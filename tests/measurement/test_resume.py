"""What a measurement says it is of, and resuming one that was interrupted."""

import dataclasses
import json

import pytest
import timm
import torch

import wellcond as wc
from measurement.test_measure import X, vit
from wellcond.errors import ReportError
from wellcond.measurement.records import MeasurementReport

SETTINGS = {"samples": 2, "heads": [0, 1]}


class Stopped(Exception):
    pass


def stop_after(count):
    def progress(plan):
        for number, pair in enumerate(plan):
            if number == count:
                raise Stopped
            yield pair

    return progress


@pytest.mark.parametrize("torn", [False, True], ids=["whole lines", "a torn line"])
def test_an_interrupted_measurement_resumes_to_the_same_report(tmp_path, monkeypatch, torn):
    model, file = vit(depth=2), tmp_path / "heads.jsonl"
    expected = wc.measure(model, X, **SETTINGS)
    with pytest.raises(Stopped):
        wc.measure(model, X, resume=file, progress=stop_after(3), **SETTINGS)
    written = file.read_text().splitlines(keepends=True)
    assert len(written) == 1 + 3
    if torn:
        file.write_text("".join(written[:-1]) + written[-1][:50])

    measured, own = [], wc.measurement.measure._measure_head

    def note(group, part):
        measured.append((group.captured.site.name, part.kv_head))
        return own(group, part)

    monkeypatch.setattr(wc.measurement.measure, "_measure_head", note)
    assert repr_of(wc.measure(model, X, resume=file, **SETTINGS)) == repr_of(expected)
    assert measured == [("blocks.1.attn", 0), ("blocks.1.attn", 1)][0 if torn else 1 :]
    measured.clear()
    assert repr_of(wc.measure(model, X, resume=file, **SETTINGS)) == repr_of(expected) and not measured


def repr_of(report):
    return json.loads(report.to_json())


@pytest.mark.parametrize("what", ["weights", "input", "settings", "another file", "a damaged line", "a wrong value"])
def test_a_file_of_another_measurement_is_refused_and_kept(tmp_path, what):
    model, batch, settings, file = vit(depth=1), X[:1], {"heads": [0]}, tmp_path / "heads.jsonl"
    wc.measure(model, batch, resume=file, **settings)
    if what == "weights":
        with torch.no_grad():
            model.blocks[0].attn.qkv.weight[0, 0] += 1
    elif what == "input":
        batch = batch + 1
    elif what == "settings":
        settings["biases"] = True
    elif what == "another file":
        file.write_text("my notes\n")
    else:
        broken = '"rank":"x' if what == "a damaged line" else '"rank":null,"was":'
        file.write_text(file.read_text().replace('"rank":', broken))
    before = file.read_text()
    with pytest.raises(ReportError, match="heads.jsonl.*delete"):
        wc.measure(model, batch, resume=file, **settings)
    assert file.read_text() == before
    with pytest.raises(ReportError, match="cannot be used to resume"):
        wc.measure(model, batch, resume=tmp_path, **settings)


@pytest.mark.parametrize("options", [{"jacobian": False}, {"output": True}, {"convention": "stack"}])
def test_a_report_is_read_back_from_its_json(options):
    report = wc.measure(vit(depth=1), X[:2], samples=2, heads=[0], **options)
    again = MeasurementReport.from_json(report.to_json())
    assert type(again.layers[0].heads[0]) is wc.HeadReport and again.to_table() == report.to_table()
    assert dataclasses.asdict(again).keys() == dataclasses.asdict(report).keys()
    assert again.to_json() == report.to_json()


def test_what_is_no_report_is_named():
    for text in ("", "[]", '{"schema": 1}', '{"schema": 1, "layers": 3}', "[" * 100_000):
        with pytest.raises(ReportError, match="not a report"):
            MeasurementReport.from_json(text)


def test_the_command_resumes(tmp_path, run):
    model = ("timm:vit_tiny_patch16_224", "img_size=16", "patch_size=8", "embed_dim=24", "depth=1", "num_heads=3")
    arguments = [part for pair in model[1:] for part in ("--model-arg", pair)]
    file, first, second = (tmp_path / name for name in ("heads.jsonl", "first.json", "second.json"))
    for output in (first, second):
        code, _ = run("measure", model[0], *arguments, "--resume", file, "--output", output)
        assert code == 0
    assert len(file.read_text().splitlines()) == 1 + 3 and first.read_bytes() == second.read_bytes()
    code, _ = run("measure", model[0], *arguments, "--resume", file, "--seed", "1")
    assert "another model, input or settings" in code


# -- what it is of


def test_a_report_says_which_model_which_input_and_which_version():
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    said = json.loads(wc.measure(model, X, heads=[0]).to_json())["run"]
    size = sum(parameter.numel() for parameter in model.parameters())
    assert said["model"] == f"VisionTransformer (vit_tiny_patch16_224), {size:,} parameters"
    assert said["input"].startswith("float32 (3, 3, 16, 16), sha256 ") and said["version"] == wc.__version__
