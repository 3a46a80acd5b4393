"""Recipes that name code, or swell when they are read. `--trust-local-code` is the only way to run a file."""

import json

import pytest
import yaml

from lab.helpers import parse_recipe
from lab.small import SETTINGS
from wellcond.errors import ModelSpecError, RecipeError, WellcondError
from wellcond.lab.models.build import build_model
from wellcond.lab.recipe import load_recipe
from wellcond.lab.tokenizers import import_tokenizers, read_tokenizer, tokenizer_of

RECIPE = """
extends: tiny/digits
name: hostile
scale: tiny
"""


def parsed(*overrides):
    return parse_recipe(RECIPE, "hostile.yaml", overrides)


def write_recipe(folder, **fields):
    """A recipe that trains in a second, with other fields."""
    content = yaml.safe_load(RECIPE) | fields
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return [
        folder / "recipe.yaml",
        *(part for setting in SETTINGS if not setting.startswith("model.") for part in ("--set", setting)),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "name: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{path}']]",
        "name: !!python/name:os.system",
    ],
)
def test_yaml_makes_no_objects(text, canary, tmp_path, run):
    written = text.format(path=canary.path)
    (tmp_path / "recipe.yaml").write_text(written)
    code, _ = run("train", tmp_path / "recipe.yaml")
    assert "is not YAML" in str(code) and "could not determine a constructor" in str(code)
    with pytest.raises(RecipeError, match="--set"):
        parsed("optimizer.lr=" + written.removeprefix("name: "))


def laughs(levels):
    """Each line stands for ten times the one before."""
    lines = ["l0: &l0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text, problem",
    [
        (f"model: {{arguments: {{bomb: 1}}}}\n{laughs(9)}", "at most 100000 values"),
        ("model: &a {arguments: *a}", "at most 100000 values"),
        ("model: " + "[" * 3_000, "recursion"),
        ("description: " + "a" * 2**20, "at most 1048576 characters"),
        ("seeds: [" + "1" * 5000 + "]", "digits"),
    ],
    ids=["laughs", "self", "brackets", "long", "digits"],
)
def test_yaml_that_swells_is_refused(text, problem):
    with pytest.raises(RecipeError, match=problem) as caught:  # what it stands for would not fit into any memory
        parse_recipe(text, "hostile.yaml")
    assert "hostile.yaml" in str(caught.value) and len(str(caught.value)) < 10_000


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.name=os.system",
        "schedule={name: builtins.exec}",
        "data={source: os.system}",
        "data={source: generated, generator: os.system}",
        "methods=['{command}']",
        "method={init: os.system}",
        "model.norms={command}",
        "extends=tiny/../../x",
        "__class__=x",
    ],
)
def test_names_are_looked_up_in_registries_alone(override, canary):
    with pytest.raises(RecipeError, match=r"expected|unknown|Allowed|not YAML|valid"):
        parsed(override.replace("{command}", canary.command))


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "timm:os.system",
        "timm:hf-hub:evil/model",
        "timm:local-dir:{folder}",
        "hf:evil/model",
        "wellcond:../evil",
        "",
    ],
)
def test_a_model_that_is_in_no_registry_is_refused_even_with_trust(name, canary, tmp_path):
    (tmp_path / "evil.py").write_text(canary.code)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224"}))
    with pytest.raises(WellcondError, match=r"expected|unknown|no model|neither"):
        build_model(name.format(folder=tmp_path))


@pytest.mark.parametrize(
    "name", ["evil.py:build", "./evil.py:build", "{folder}/evil.py:build", "../here/evil.py:build"]
)
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_file_that_a_recipe_names_is_not_run_without_the_flag(command, name, canary, tmp_path, run):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "evil.py").write_text(canary.code)
    recipe, *settings = write_recipe(folder, model={"name": name.format(folder=folder)})
    named = [recipe] if command == "train" else ["--recipe", recipe, "--jobs", "1"]
    code, _ = run(command, *named, *settings, "-o", tmp_path / "out", "--cpu", "-q")
    assert str(code).startswith("error: ") and "pass --trust-local-code if you trust it" in str(code)
    assert not (tmp_path / "out").exists()


def test_the_flag_runs_the_file(tmp_path, run):
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(
        f"import pathlib, timm\npathlib.Path({str(ran)!r}).touch()\n\n\n"
        "def build(num_labels, num_channels, image_size):\n"
        "    return timm.create_model('vit_tiny_patch16_224', img_size=image_size, patch_size=4, embed_dim=16,\n"
        "                             depth=1, num_heads=2, in_chans=num_channels, num_classes=num_labels)\n"
    )
    recipe = write_recipe(tmp_path, model={"name": "mine.py:build"})
    refused, _ = run("train", *recipe, "-o", tmp_path / "out", "--cpu", "-q")
    assert "--trust-local-code" in str(refused) and not ran.exists()
    code, _ = run("train", *recipe, "-o", tmp_path / "out", "--cpu", "-q", "--trust-local-code")
    assert not code and ran.exists()


def hf_folder(folder, code, **config):
    """A folder of transformers with code of its own."""
    folder.mkdir(exist_ok=True)
    for name in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py"):
        (folder / name).write_text(code)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


AUTO_MAP = {
    "AutoConfig": "configuration_evil.EvilConfig",
    "AutoModel": "modeling_evil.EvilModel",
    "AutoModelForCausalLM": "modeling_evil.EvilModel",
}
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11}


@pytest.mark.parametrize("arguments", [{}, {"trust_remote_code": True}, {"auto_map": AUTO_MAP}, {"code_revision": "x"}])
def test_code_in_a_folder_of_transformers_is_never_run(arguments, canary, tmp_path):
    folder = hf_folder(tmp_path / "model", canary.code, model_type="evil", auto_map=AUTO_MAP)
    with pytest.raises(ModelSpecError, match=r"never runs|remove it"):
        build_model(f"hf:{folder}", arguments, auto_class="AutoModelForCausalLM")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_kernels_are_not_fetched(key, tmp_path):
    with pytest.raises(ModelSpecError, match="fetched from the hub"):
        build_model("hf:gpt2", {**TINY, key: "evil/kernel"})
    folder = hf_folder(tmp_path / "model", "", model_type="gpt2", **TINY, **{key: "evil/kernel"})
    with pytest.raises(ModelSpecError, match="fetched from the hub"):
        build_model(f"hf:{folder}")


@pytest.mark.parametrize(
    "arguments",
    [
        {"_attn_implementation_internal": "evil/kernel"},
        {"subfolder": "inner"},
        {"_configuration_file": "inner/config.json"},
        {"attn_implementation": "flash_attention_3"},
    ],
)
def test_kernels_are_not_fetched_by_a_back_door(arguments, tmp_path):
    folder = hf_folder(tmp_path / "model", "", model_type="gpt2", **TINY)
    hf_folder(folder / "inner", "", model_type="gpt2", **TINY, attn_implementation="evil/kernel")
    with pytest.raises(ModelSpecError, match=r"fetched from the hub|remove it"):
        build_model(f"hf:{folder}", arguments)


def test_code_beside_a_tokeniser_is_not_run(canary, tmp_path):
    folder = hf_folder(tmp_path / "tokeniser", canary.code)
    auto_map = {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map, "trust_remote_code": True}))
    words = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "a", "b")
    vocabulary = {word: number for number, word in enumerate(words)}
    pieces = tokenizer_of(import_tokenizers().models.WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.inner.save(str(folder / "tokenizer.json"))
    assert read_tokenizer(folder).vocabulary_size == 6
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": canary.command}}))
    with pytest.raises(WellcondError, match="the tokeniser cannot be read"):
        read_tokenizer(folder)


def test_shipped_recipes_need_no_trust():
    from wellcond.lab.settings import shipped_recipes

    for scale, name in (shipped.split("/") for shipped in shipped_recipes()):
        recipe, base = load_recipe(name, scale=scale)
        assert base is None and recipe.model.name.partition(":")[0] in ("timm", "hf", "wellcond")
