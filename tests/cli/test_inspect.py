import json
import textwrap

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file, save_model

import wellcond as wc
from wellcond.errors import ModelSpecError
from wellcond.lab.models.build import build_model, parse_values
from wellcond.linalg.spectrum import spectra

SMALL_VIT = ["--model-arg", "depth=2", "--model-arg", "embed_dim=24", "--model-arg", "num_heads=3"]
VIT = "timm:vit_tiny_patch16_224"


def small_vit():
    return timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=24, num_heads=3)


def test_inspect_prints_every_attention(run):
    code, out = run("inspect", VIT, *SMALL_VIT)
    assert code == 0
    for word in ("blocks.0.attn", "blocks.1.attn", "softmax", "8 x 24", "fused", "κ(W_Q)", "2 attention layers"):
        assert word in out


def test_inspect_json_holds_the_true_condition_numbers(run, tmp_path):
    model = wc.init_(small_vit(), "conditioned")
    save_model(model, tmp_path / "w.safetensors")
    code, out = run("inspect", VIT, *SMALL_VIT, "--weights", tmp_path / "w.safetensors", "--json")
    row = json.loads(out)["sites"][0]
    expected = max(s.condition_number for s in spectra(wc.find_attention(model)[0].k.read()))
    assert code == 0 and row["kappa_k"] == pytest.approx(expected) and row["kappa_v"] == 1.0
    assert (row["num_heads"], row["head_dim"], row["in_features"], row["scale"]) == (3, 8, 24, 8**-0.5)


def test_large_models_that_are_only_named_are_not_filled_with_random_weights(run):
    code, out = run("inspect", "timm:vit_giant_patch14_224")
    assert code == 0 and "blocks.39.attn" in out and "40 attention layers, 1,012,611,432 parameters" in out
    assert "--weights" in out
    code, out = run("inspect", "hf:llama", "--json")
    found = json.loads(out)
    assert code == 0 and found["parameters"] == 6_607_343_616 and "Built without weights" in found["note"]
    assert len(found["sites"]) == 32 and {row["kappa_q"] for row in found["sites"]} == {None}


def test_the_limit_of_random_weights_changes_no_small_model(run, monkeypatch):
    _, small = run("inspect", VIT, *SMALL_VIT, "--json")
    monkeypatch.setattr("wellcond.cli.inspect.MOST_RANDOM", 10**4)
    _, large = run("inspect", VIT, *SMALL_VIT, "--json")
    torch.manual_seed(0)
    kappa = max(s.condition_number for s in spectra(wc.find_attention(small_vit())[0].q.read().detach()))
    assert json.loads(small)["sites"][0]["kappa_q"] == kappa and "note" not in json.loads(small)
    assert json.loads(large)["sites"][0]["kappa_q"] is None and "note" in json.loads(large)


def test_inspect_shows_why_a_weight_is_singular_and_the_rest_of_its_spectrum(run, tmp_path):
    model = small_vit()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[1] = 0
        model.blocks[0].attn.qkv.weight[-1] = model.blocks[0].attn.qkv.weight[-2]
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    code, out = run("inspect", VIT, *SMALL_VIT, "--weights", tmp_path / "w.safetensors")
    site = wc.find_attention(model)[0]
    assert code == 0
    for role in "qv":
        worst = max(spectra(site.slots[role].read().detach()), key=lambda s: s.nullity)
        assert worst.nullity == 1 and f"inf ({worst.why_not_finite}, pseudo {worst.pseudo_condition_number:.3f})" in out
    code, out = run("inspect", VIT, *SMALL_VIT, "--weights", tmp_path / "w.safetensors", "--json")
    found = json.loads(out, parse_constant=pytest.fail)  # Infinity is no JSON
    row = found["sites"][0]
    assert row["kappa_v"] == "inf" and row["why_not_finite_v"] == worst.why_not_finite
    assert row["pseudo_kappa_v"] == worst.pseudo_condition_number and row["why_not_finite_k"] == ""
    assert found["version"] == wc.__version__ and "weights w.safetensors: VisionTransformer (vit" in found["model"]


def test_a_model_that_is_counted_first_has_the_same_weights(monkeypatch):
    def built():
        torch.manual_seed(3)
        return build_model(VIT, {"depth": 2, "embed_dim": 24, "num_heads": 3})

    plain = built()
    monkeypatch.setattr("wellcond.lab.models.memory_guard.LARGE", 10**4)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), built().parameters(), strict=True))


def test_init_writes_a_plain_checkpoint(run, tmp_path):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_model(small_vit(), source)
    code, out = run(
        "init", VIT, *SMALL_VIT, "--method", "conditioned", "--option", "value=joint", "--weights", source, "-o", target
    )
    assert code == 0 and "2 attention layers" in out
    before, after = load_file(source), load_file(target)
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"}
    torch.testing.assert_close(after["blocks.0.attn.qkv.weight"][48:], torch.eye(24))


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_fold_reads_the_correction_from_the_checkpoint(run, tmp_path, suffix):
    model = wc.condition_(small_vit().eval(), "balanced", target=1.5)
    source, target = tmp_path / f"conditioned.{suffix}", tmp_path / "plain.safetensors"
    if suffix == "pt":
        torch.save({"state_dict": model.state_dict()}, source)
    else:
        save_file(model.state_dict(), source)
    code, out = run("fold", VIT, *SMALL_VIT, "--weights", source, "-o", target)
    assert code == 0 and "folded 'balanced' into 2 attention layers" in out
    plain = small_vit().eval()
    plain.load_state_dict(load_file(target))
    x = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-6)
    code, _ = run("fold", VIT, *SMALL_VIT, "--weights", target, "-o", tmp_path / "again.safetensors")
    assert "plain checkpoint already" in code


def test_outputs_are_never_overwritten_by_accident(run, tmp_path):
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"precious")
    code, _ = run("init", VIT, *SMALL_VIT, "-o", target)
    assert "exists; give another name or --force" in code and target.read_bytes() == b"precious"
    code, _ = run("init", VIT, *SMALL_VIT, "--method", "gaussian", "-o", target, "--force")
    assert code == 0 and list(tmp_path.iterdir()) == [target]


def test_hugging_face_types_and_folders(run, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    arguments = ["n_layer=1", "n_embd=24", "n_head=3", "vocab_size=50"]
    pairs = [part for argument in arguments for part in ("--model-arg", argument)]
    code, out = run("inspect", "hf:gpt2", *pairs)
    assert code == 0 and "h.0.attn" in out and "fused" in out
    model = GPT2LMHeadModel(GPT2Config(**parse_values(arguments)))
    model.save_pretrained(tmp_path / "gpt2")
    loaded = build_model(f"hf:{tmp_path / 'gpt2'}")
    assert type(loaded) is GPT2LMHeadModel
    assert torch.equal(loaded.transformer.h[0].attn.c_attn.weight, model.transformer.h[0].attn.c_attn.weight)
    # tied lm_head: saved once, loaded whole
    code, _ = run(
        "init",
        f"hf:{tmp_path / 'gpt2'}",
        "--method",
        "conditioned",
        "--option",
        "projections=qk",
        "-o",
        tmp_path / "tied.safetensors",
    )
    code, out = run("inspect", f"hf:{tmp_path / 'gpt2'}", "--weights", tmp_path / "tied.safetensors", "--json")
    assert code == 0 and json.loads(out)["sites"][0]["kappa_q"] == pytest.approx(1.0, abs=1e-4)


def test_models_from_a_python_file(run, tmp_path):
    source = tmp_path / "mine.py"
    source.write_text(
        textwrap.dedent("""
        from torch import nn
        def build(heads=2):
            return nn.TransformerEncoderLayer(8, heads)
        number = 3
        """)
    )
    code, out = run("inspect", f"{source}:build", "--model-arg", "heads=4")
    assert code == 0 and "self_attn" in out
    assert "It defines: build" in run("inspect", f"{source}:biuld")[0]


def test_weights_that_do_not_fit(run, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"not a checkpoint")
    assert "not a readable safetensors" in run("inspect", VIT, "--weights", tmp_path / "bad.safetensors")[0]
    save_model(small_vit(), tmp_path / "small.safetensors")
    assert "missing blocks.2" in run("inspect", VIT, "--weights", tmp_path / "small.safetensors")[0]
    assert run("inspect", VIT, "--weights", tmp_path / "none.safetensors")[0] == 2


def test_inspect_needs_exactly_one_of_model_and_zoo(run):
    assert run("inspect")[0] == 2
    assert run("inspect", VIT, "--zoo", "timm")[0] == 2


def test_sharded_and_unknown_folders(tmp_path):
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_layer=1, n_embd=24, n_head=3, vocab_size=50, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    loaded = build_model(f"hf:{tmp_path / 'sharded'}")
    assert torch.equal(loaded.h[0].attn.c_attn.weight, model.h[0].attn.c_attn.weight)
    model.config.save_pretrained(tmp_path / "strange")
    (tmp_path / "strange" / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ModelSpecError, match="found weights.safetensors"):
        build_model(f"hf:{tmp_path / 'strange'}")
