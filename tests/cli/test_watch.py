"""`wellcond watch` and `wellcond doctor` on what a monitor wrote, and on weights alone."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file, save_model
from transformers import GPT2Config, GPT2LMHeadModel

import wellcond as wc
from wellcond.lab.models.build import build_model

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 4}
MODEL = [
    "timm:vit_tiny_patch16_224",
    *(part for key, value in SMALL.items() for part in ("--model-arg", f"{key}={value}")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with a rate that is too high, and its file."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    model = build_model(MODEL[0], SMALL).train()
    wc.init_(model, "gaussian", std=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    with wc.AttentionMonitor(model, every=1, weights_every=2, file=folder / "monitor.jsonl") as monitor:
        for _ in range(6):
            F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
            optimizer.step()
            monitor.step()
    return folder


def test_a_finished_run(run, folder, tmp_path):
    code, out = run("watch", folder)
    assert code == 0 and "step 6: max_logit of 6 heads" in out and "worst: blocks." in out and "alarm" in out
    code, by_file = run("watch", folder / "monitor.jsonl", "--column", "entropy", "--once")
    assert code == 0 and "entropy of 6 heads" in by_file
    code, _ = run("watch", folder, "--html", tmp_path / "page.html")
    assert code == 0 and "max_logit, step 6" in (tmp_path / "page.html").read_text()


def test_the_doctor_replays_a_run(run, folder):
    code, out = run("doctor", folder / "monitor.jsonl")
    assert code == 0 and "6 readings of 6 heads" in out and "5 alarms" in out and "do: " in out
    code, out = run("doctor", folder, "--json")
    expected = wc.Alarms.replay(wc.training.series.Series.read(folder / "monitor.jsonl"))
    assert code == 0 and [one["verdict"] for one in json.loads(out)] == [one.verdict for one in expected] != []


def test_the_doctor_s_page_of_a_run_has_its_maps(run, folder, tmp_path):
    code, _ = run("doctor", folder, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert code == 0 and page.count('<table class="heads">') >= 4 and "QKClip" in page


def test_what_the_weights_alone_say(run, tmp_path):
    sizes = {"vocab_size": 32, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "gpt")
    code, out = run("doctor", tmp_path / "gpt")
    assert code == 0 and "kappa(W)" in out and "SEC QK" in out and "no batch was given" in out
    code, out = run("doctor", *MODEL, "--data", "none")
    assert code == 0 and "SEC OV" in out


def test_two_checkpoints(run, tmp_path):
    model = build_model(MODEL[0], SMALL)
    save_model(model, str(tmp_path / "a.safetensors"))
    site = wc.find_attention(model)["blocks.1"]
    heads = site.q.read().detach().clone()
    heads[2] *= 3
    site.q.write_(heads)
    save_model(model, str(tmp_path / "b.safetensors"))
    code, out = run("doctor", *MODEL, "--weights", tmp_path / "a.safetensors", "--against", tmp_path / "b.safetensors")
    assert code == 0 and "1 of 6 heads changed by more than 1 %; most: blocks.1.attn head 2" in out


def test_mistakes(run, tmp_path):
    (tmp_path / "monitor.jsonl").write_text("{}\n")
    out, _ = run("watch", tmp_path)
    assert "is not what a monitor of wellcond writes" in out
    save_file({"a": torch.zeros(2)}, tmp_path / "w.safetensors")
    out, _ = run("doctor", tmp_path / "w.safetensors")
    assert "wellcond doctor MODEL --weights" in out and "--data none" in out
    out, _ = run("doctor", tmp_path / "w.safetensors", "--against", tmp_path / "w.safetensors")
    assert f"--against {tmp_path / 'w.safetensors'}" in " ".join(out.split())
