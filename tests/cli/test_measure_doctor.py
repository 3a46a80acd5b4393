"""`wellcond doctor`."""

import importlib
import json

import pytest
import timm
import torch
from safetensors.torch import save_model

import wellcond as wc
from wellcond.attention import find, record
from wellcond.init import tokens
from wellcond.lab.models.build import build_model

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 4}
MODEL = [
    "timm:vit_tiny_patch16_224",
    *(part for key, value in SMALL.items() for part in ("--model-arg", f"{key}={value}")),
]


def test_text_json_and_page(run, tmp_path):
    output, page = tmp_path / "found.json", tmp_path / "page.html"
    code, out = run("doctor", *MODEL, "--samples", 4, "-o", output, "--html", page)
    assert code == 0
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 100
    assert "1. warning: Position embeddings" in out and 'wc.init_(model, "calibrated", batch=batch)' in out
    found = wc.Diagnosis.from_json(output.read_text())
    assert found.run["model"].startswith("timm:vit_tiny_patch16_224 img_size=32") and len(found.layers) == 2
    assert page.read_text().startswith("<!DOCTYPE html>")
    refused, _ = run("doctor", *MODEL, "-o", output)
    assert "--force" in refused


def test_json_on_standard_output(run):
    code, out = run("doctor", *MODEL, "--samples", 2, "--json")
    assert code == 0 and json.loads(out)["findings"][0]["kind"] == "positions"


def test_a_checkpoint_in_training(run, tmp_path):
    model = build_model(MODEL[0], SMALL)
    for parameter in model.norm.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_model(model, str(tmp_path / "weights.safetensors"))
    code, out = run("doctor", *MODEL, "--samples", 2, "--weights", tmp_path / "weights.safetensors")
    assert code == 0 and "state: trained" in out and "Nothing to fix in 2 attention layers." in out
    code, out = run("doctor", *MODEL, "--samples", 2, "--weights", tmp_path / "weights.safetensors", "--fresh")
    assert "2 findings" in out


@pytest.mark.filterwarnings("ignore::wellcond.NumericalWarning")
def test_a_checkpoint_of_a_conditioned_model(run, tmp_path):
    model = wc.condition_(build_model(MODEL[0], SMALL), "identity", lam=10.0)
    save_model(model, str(tmp_path / "raw.safetensors"))
    code, out = run("doctor", *MODEL, "--samples", 2, "--weights", tmp_path / "raw.safetensors")
    assert code == 0 and "conditioned by: identity" in out and "1. fault: The correction lam I" in out


def test_data_that_are_not_there(run, tmp_path):
    assert "none.npy" in run("doctor", *MODEL, "--data", tmp_path / "none.npy")[0]


def test_one_scan_and_one_forward_pass(monkeypatch):
    scans, passes = [], []
    for module in (find, importlib.import_module("wellcond.doctor.diagnose"), tokens):
        scan = module.scan_attention
        monkeypatch.setattr(module, "scan_attention", lambda model, scan=scan: scans.append(1) or scan(model))
    run = record.run
    monkeypatch.setattr(record, "run", lambda model, batch: passes.append(1) or run(model, batch))
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    found = wc.diagnose(model, torch.randn(2, 3, 32, 32))
    assert found.tokens.positions == ("pos_embed",) and len(scans) == len(passes) == 1
