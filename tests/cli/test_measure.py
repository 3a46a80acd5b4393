import functools
import json
import sys

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import wellcond as wc
from lab.small import small_job
from wellcond.cli.inputs import images_in, make_batch, what_it_reads
from wellcond.cli.measure import read_numbers
from wellcond.errors import OptionError
from wellcond.lab.data.images import load_digits
from wellcond.lab.train.prepare import rebuild_run
from wellcond.lab.train.run import run_job

SOURCE = """
import torch
from timm.models.vision_transformer import VisionTransformer

def vit(channels=1, dead=False, depth=2):
    model = VisionTransformer(
        img_size=8, patch_size=4, in_chans=channels, num_classes=3, embed_dim=12, depth=depth, num_heads=2
    )
    if dead:
        with torch.no_grad():
            for start in (6, 18):
                model.blocks[1].attn.qkv.weight[start : start + 6] = 200 * torch.eye(12)[:6]
    return model

def layer():
    return torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
"""


@pytest.fixture
def run(run):
    """The command `wellcond measure`."""
    return functools.partial(run, "measure")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "tiny.py").write_text(SOURCE)
    return tmp_path / "tiny.py"


def tiny(name="vit", **arguments):
    space = {}
    exec(SOURCE, space)
    torch.manual_seed(0)
    return space[name](**arguments)


def same(path, report):
    """JSON of the command and of the library; times and rounding do not enter it. The command knows more names."""
    written, expected = json.loads(path.read_text()), json.loads(report.to_json())
    for name, said in expected.pop("run").items():
        assert written["run"][name].endswith(said)
    written.pop("run")
    assert written == expected


def test_digits_json_and_page(run, file, tmp_path):
    output, html = tmp_path / "r.json", tmp_path / "r.html"
    code, out = run(f"{file}:vit", "--data", "digits", "--samples", 2, "-o", output, "--html", html)
    assert code == 0
    same(output, wc.measure(tiny(), load_digits()[0].inputs[:2], samples=2))
    assert out.startswith(wc.measure(tiny(), load_digits()[0].inputs[:2], samples=2).to_table())
    assert "4 heads of 2 attention layers" in out and "dead heads: none" in out
    page = html.read_text()
    version = f"<dd>wellcond {wc.__version__}</dd>"
    for name in (
        "blocks.0.attn, head 0",
        "blocks.1.attn, head 1",
        "scikit-learn&#39;s digits",
        f"{file}:vit",
        version,
    ):
        assert name in page
    said = json.loads(output.read_text())["run"]
    assert said["model"].startswith(f"{file}:vit, seed 0: VisionTransformer, ") and said["version"] == wc.__version__
    assert "scikit-learn's digits" in said["input"] and "float32 (2, 1, 8, 8), sha256 " in said["input"]
    assert f"model: {said['model']}" in out.replace("\n", " ")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["r.html", "r.json", "tiny.py"]


def test_options_reach_measure(run, file, tmp_path):
    output = tmp_path / "r.json"
    options = ["--layers", "1", "--heads", "0", "--samples", 2, "--seed", 3]
    code, _ = run(f"{file}:vit", *options, "--data", "random", "-o", output)
    assert code == 0
    torch.manual_seed(3)
    space = {}
    exec(SOURCE, space)
    model = space["vit"]()
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    same(output, wc.measure(model, x, layers=[1], heads=[0], samples=2))
    code, _ = run(f"{file}:vit", "--convention", "stack", "--layers", "0", "-o", output, "--force")
    assert code == 0 and json.loads(output.read_text())["convention"] == "stack"


def test_a_finished_run_is_measured_as_it_was_evaluated(run, tmp_path):
    quick = ("training={length: {steps: 2}, batch_size: 8, threads: 1}", "tracking={jacobian_points: 0}")
    folder, output = tmp_path / "run", tmp_path / "r.json"
    run_job(small_job(folder, "conditioned+balanced", *quick))
    code, out = run(folder, "-o", output)
    model, task, _ = rebuild_run(folder)
    assert code == 0 and wc.conditioning_of(model) is not None
    same(output, wc.measure(model, task.probe(1)))
    assert "conditioned+balanced, seed 0, step 2" in out.replace("\n", " ")
    error, _ = run(folder, "--data", "digits")
    assert "leave out other options" in error


def test_what_takes_long_is_announced_with_the_options_that_change_it(file, monkeypatch, capsys):
    from wellcond.cli.main import main

    monkeypatch.setattr(sys, "argv", ["wellcond", "measure", f"{file}:vit", "--layers", "0"])
    said = []
    for slow in (10.0, 0.0):
        monkeypatch.setattr("wellcond.measurement.measure.SLOW_SECONDS", slow)
        with pytest.raises(SystemExit):
            main()
        said.append([line for line in capsys.readouterr().err.splitlines() if "expected to take up to" in line])
    assert not said[0] and len(said[1]) == 1
    assert "--layers, --heads or fewer --tokens" in said[1][0] and "--resume FILE" in said[1][0]


def test_an_infinite_condition_number_comes_with_its_reason_and_the_pseudo_one(run, file):
    code, out = run(f"{file}:vit", "--data", "digits", "--convention", "stack")
    assert code == 0
    report = wc.measure(tiny(), load_digits()[0].inputs[:1], convention="stack")
    rows = [line for line in out.splitlines() if line.strip().startswith("blocks.")]
    heads = [head for layer in report.layers for head in layer.heads]
    for row, head in zip(rows, heads, strict=True):
        assert head.mean_kappa() == float("inf") and head.why_not_finite.startswith("rank ")
        assert row.split()[2:4] == ["inf", f"{head.mean_kappa('pseudo'):.4g}"] and head.why_not_finite in row


def test_a_folder_of_images(run, file, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    pixels = {name: rng.integers(0, 256, (8, 8, 3), dtype=np.uint8) for name in ("b.png", "a.PNG", "c.png")}
    for name, array in pixels.items():
        Image.fromarray(array).save(folder / name)
    Image.fromarray(pixels["b.png"]).resize((20, 11)).save(folder / "d.jpg")
    (folder / "notes.txt").write_text("not an image")
    output = tmp_path / "r.json"
    code, _ = run(f"{file}:vit", "--model-arg", "channels=3", "--data", folder, "--samples", 2, "-o", output)
    assert code == 0
    x = torch.stack([torch.tensor(pixels[name]).permute(2, 0, 1).float() / 255 for name in ("a.PNG", "b.png")])
    same(output, wc.measure(tiny(channels=3), (x - 0.5) / 0.5, samples=2))
    code, _ = run(f"{file}:vit", "--data", folder, "--samples", 4)  # one channel, another size
    assert code == 0
    assert "expected at least 5 samples, found 4" in run(f"{file}:vit", "--data", folder, "--samples", 5)[0]
    classes = folder.parent / "classes"
    for name in ("cat/2.png", "cat/1.png", "dog/3.png"):
        (classes / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels["b.png"]).save(classes / name)
    assert [str(found.relative_to(classes)) for found in images_in(classes)] == ["cat/1.png", "dog/3.png", "cat/2.png"]
    (folder / "0.png").write_bytes(b"damaged")
    assert "0.png" in run(f"{file}:vit", "--data", folder)[0]


def test_images_take_the_models_own_mean_and_size(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=2, img_size=32)
    model.pretrained_cfg = model.pretrained_cfg | {"mean": (0.1, 0.2, 0.3), "std": (0.5, 1.0, 2.0)}
    Image.fromarray(np.full((40, 30, 3), 255, dtype=np.uint8)).save(tmp_path / "white.png")
    batch, text = make_batch(model, str(tmp_path), samples=1)
    assert batch.shape == (1, 3, 32, 32) and f"the first 1 images of {tmp_path}" in text
    torch.testing.assert_close(batch[0, :, 5, 5], torch.tensor([1.8, 0.8, 0.35]))
    digits, _ = make_batch(model, "digits", samples=3)
    assert digits.shape == (3, 3, 32, 32) and torch.equal(digits[:, 0], digits[:, 2])


def test_arrays(run, file, tmp_path):
    x = torch.randn(3, 1, 8, 8)
    np.save(tmp_path / "x.npy", x.numpy())
    output = tmp_path / "r.json"
    code, _ = run(f"{file}:vit", "--data", tmp_path / "x.npy", "--samples", 2, "-o", output)
    assert code == 0
    same(output, wc.measure(tiny(), x[:2], samples=2))
    np.save(tmp_path / "embeddings.npy", torch.randn(1, 5, 8).numpy())
    code, out = run(f"{file}:layer", "--data", tmp_path / "embeddings.npy")
    assert code == 0 and "self_attn" in out


def test_arrays_that_do_not_fit(run, file, tmp_path):
    def said(array, name="vit"):
        np.save(tmp_path / "x.npy", array, allow_pickle=True)
        return run(f"{file}:{name}", "--data", tmp_path / "x.npy")[0]

    assert "(samples, 1, 8, 8), found float32 (1, 3, 8, 8)" in said(np.zeros((1, 3, 8, 8)))
    assert "wellcond.measure(model, batch)" in said(np.zeros((1, 5, 9)), "layer")
    for array in (np.array([{"a": 1}], dtype=object), np.zeros((1, 1, 8, 8), dtype=complex), np.zeros(())):
        assert "pickles are not loaded" in said(array)
    missing = tmp_path / "missing.npy"
    assert "which does not exist" in run(f"{file}:vit", "--data", missing)[0]
    missing.write_bytes(b"")
    assert str(missing) in run(f"{file}:vit", "--data", missing)[0]


GPT2 = [
    p for a in ("n_layer=1", "n_embd=12", "n_head=2", "vocab_size=40", "n_positions=16") for p in ("--model-arg", a)
]


def test_text_models_read_random_ids_or_a_file(run, tmp_path):
    output = tmp_path / "r.json"
    code, out = run("hf:gpt2", *GPT2, "--tokens", 6, "-o", output)
    assert code == 0 and "h.0.attn" in out
    assert json.loads(output.read_text())["layers"][0]["num_tokens"] == 6
    np.save(tmp_path / "ids.npy", np.arange(10).reshape(2, 5))
    code, _ = run("hf:gpt2", *GPT2, "--data", tmp_path / "ids.npy", "-o", output, "--force")
    assert code == 0 and json.loads(output.read_text())["layers"][0]["num_tokens"] == 5
    np.save(tmp_path / "ids.npy", np.array([[0, 40]]))
    expected = "integer token ids below 40 (samples, at most 16 tokens)"
    assert expected in run("hf:gpt2", *GPT2, "--data", tmp_path / "ids.npy")[0]
    assert expected in run("hf:gpt2", *GPT2, "--data", "digits")[0]
    assert f"{expected}, found int64 (1, 32)" in run("hf:gpt2", *GPT2)[0]


def test_text_models_read_a_text_by_bytes_or_by_their_own_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_layer": 1, "n_embd": 12, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 10)

    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, **small))
    batch, said = make_batch(model, str(text), samples=2, tokens=6)
    assert batch["input_ids"][0].tolist() == [byte + 1 for byte in b"one tw"]
    assert batch["input_ids"][1].tolist() == [byte + 1 for byte in b"three "]
    assert "bytes" in said

    own = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "?": 3}, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "tokenizer.json"))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=4, **small))
    batch, said = make_batch(model, str(text), samples=3, tokens=3, folder=tmp_path)
    assert batch["input_ids"][0].tolist() == [0, 1, 2] and str(tmp_path) in said
    with pytest.raises(OptionError, match="at most 4 tokens"):
        make_batch(model, str(text), samples=3, tokens=3)
    with pytest.raises(OptionError, match="at least 20 x 6 tokens, found 30"):
        make_batch(model, str(text), samples=20, tokens=6, folder=tmp_path)


def test_encoder_decoders_get_both_inputs(run):
    from transformers import AutoConfig, AutoModel

    arguments = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 30}
    model = AutoModel.from_config(AutoConfig.for_model("t5", **arguments))
    batch, _ = make_batch(model, "random", samples=2, tokens=5)
    assert {key: tuple(value.shape) for key, value in batch.items()} == {
        "input_ids": (2, 5),
        "decoder_input_ids": (2, 5),
    }
    assert not torch.equal(batch["input_ids"], batch["decoder_input_ids"])
    code, out = run("hf:t5", *[p for k, v in arguments.items() for p in ("--model-arg", f"{k}={v}")], "--tokens", 5)
    assert code == 0 and "EncDecAttention" in out


def test_what_models_read():
    assert what_it_reads(nn.Linear(2, 2)).image == ()
    reads = what_it_reads(timm.create_model("vit_tiny_patch16_224", depth=1, img_size=(32, 48), in_chans=1))
    assert reads.image == (1, 32, 48)
    reads = what_it_reads(timm.create_model("levit_128s"))
    assert reads.image == (3, 224, 224)
    with pytest.raises(OptionError, match="inputs that its configuration does not name"):
        make_batch(nn.Linear(2, 2), "random", samples=1)
    half = timm.create_model("test_vit").half()
    assert make_batch(half, "random", samples=1)[0].dtype == torch.float16


def test_dead_heads_are_named(run, file, tmp_path):
    html = tmp_path / "r.html"
    code, out = run(f"{file}:vit", "--model-arg", "dead=true", "--html", html)
    assert code == 0 and "dead heads: 1 (blocks.1.attn head 1)" in out and "dead head" in out
    assert "1 dead head:" in html.read_text()


def test_conditioned_checkpoints_are_measured_with_their_correction(run, file, tmp_path):
    model = wc.condition_(tiny(), "balanced", target=1.5)
    save_file(model.state_dict(), tmp_path / "c.safetensors")
    output, html = tmp_path / "r.json", tmp_path / "r.html"
    weights = tmp_path / "c.safetensors"
    code, out = run(f"{file}:vit", "--data", "digits", "--weights", weights, "-o", output, "--html", html)
    assert code == 0 and "conditioned by 'balanced'" in out
    found = json.loads(output.read_text())
    assert found["conditioning"]["method"] == "balanced" and "balanced" in html.read_text()
    assert found["layers"][0]["heads"][0]["weights"]["q"]["condition_number"] <= 1.5 + 1e-4


def test_bad_options_say_what_to_do(run, file):
    assert "expected 'digits', 'random'" in run(f"{file}:vit", "--data", file)[0]
    with pytest.raises(OptionError):
        read_numbers("", "--layers")
