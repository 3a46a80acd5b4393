"""Words of a method for what acts during training: what they set, and that it acts."""

import copy

import pytest
import torch

from lab.helpers import make_recipe, tiny_vit
from lab.small import assert_same_run, small_job, small_recipe, stop_after
from wellcond import find_attention
from wellcond.errors import OptionError, RecipeError, UnknownChoiceError
from wellcond.lab.methods import MethodSettings, parse_method, parse_methods
from wellcond.lab.optimizers import AdamW
from wellcond.lab.recipe import config_hash, override_recipe
from wellcond.lab.train.prepare import prepare_model, prepare_task
from wellcond.lab.train.run import run_job

WORDS = {
    "default+qk_clip": {"optimizer.qk_clip": {}},
    "default+qk_clip(tau=50)": {"optimizer.qk_clip": {"tau": 50}},
    "default+spectral_cap(w_max=2, projections=qk)": {"optimizer.spectral_cap": {"w_max": 2, "projections": "qk"}},
    "calibrated+muon": {"optimizer.name": "muon"},
    "calibrated+muon(heads=pairs)": {"optimizer.name": "muon", "optimizer.heads": "pairs"},
    "qk_rate(0.3)": {"optimizer.qk_lr_factor": 0.3},
    "default+qk_norm": {"model.qk_norm": True},
    "default+conditioned_tokens": {"model.token_correction": {"name": "conditioned", "options": {}}},
    "default+grayed_tokens(eps=0.9, of=samples)": {
        "model.token_correction": {"name": "grayed", "of": "samples", "options": {"eps": 0.9}}
    },
    "default+qk_norm(gain=true)+set(optimizer.lr=0.01)": {"model.qk_norm": "gain", "optimizer.lr": 0.01},
}


RESUMED = (
    "muon(each)+qk_clip(tau=0.01)+spectral_cap(w_max=0.05, projections=qk)+qk_rate(0.5)+grayed_tokens(by=dct)",
    "sigma_reparam+muon(each)+qk_norm(gain=true)",
)


@pytest.mark.parametrize("text", WORDS)
def test_words_set_fields_of_the_recipe(text):
    method = MethodSettings.model_validate(text)
    assert method.set == WORDS[text] and method.label == text
    assert method.is_same(MethodSettings.model_validate(method.canonical()))
    changed = override_recipe(make_recipe(), method)
    for field, value in WORDS[text].items():
        part, name = field.split(".")
        found = getattr(getattr(changed, part), name)
        found = found if not isinstance(value, dict) else {key: getattr(found, key) for key in value}
        assert found == value


def test_a_word_and_its_fields_are_the_same_method():
    with pytest.raises(RecipeError, match="are the same"):
        parse_methods("default+muon,default+set(optimizer.name=muon)")
    slugs = {method.slug for method in parse_methods(",".join(WORDS))}
    assert len(slugs) == len(WORDS)


def test_wrong_options_name_the_right_ones():
    with pytest.raises(UnknownChoiceError, match="'tau', 'alpha'"):
        parse_method("default+qk_clip(tua=5)")
    with pytest.raises(OptionError, match="w_max="):
        parse_method("default+spectral_cap")
    with pytest.raises(ValueError, match=r"optimizer\.name twice"):
        parse_method("default+muon+set(optimizer.name=adamw)")
    with pytest.raises(RecipeError, match="tau"):
        override_recipe(make_recipe(), MethodSettings.model_validate("default+qk_clip(tau=-1)"))


def test_runs_without_them_keep_their_hash():
    config = make_recipe().config(MethodSettings.model_validate("default"), 0)
    older = copy.deepcopy(config)
    del older["optimizer"]["qk_clip"], older["optimizer"]["spectral_cap"], older["model"]["token_correction"]
    assert config_hash(older) == config_hash(config)
    config["optimizer"]["qk_clip"] = {"tau": 50.0, "alpha": 0.5}
    assert config_hash(older) != config_hash(config)


def test_settings_reach_what_acts_after_a_step():
    """The numbers are those of tests/training/test_clip.py and test_cap.py."""
    torch.manual_seed(0)
    model = tiny_vit()
    settings = AdamW(lr=1e-30, qk_clip={"tau": 1e-6}, spectral_cap={"w_max": 0.01, "projections": "v"})
    optimizer = settings.build(model)
    settings.act_after_steps(model, optimizer)
    before = {role: find_attention(model)[0].slots[role].read().detach().clone() for role in "qkv"}
    model(torch.rand(4, 1, 8, 8)).square().sum().backward()
    optimizer.step()
    after = {role: find_attention(model)[0].slots[role].read() for role in "qkv"}
    assert all(after[role].norm() < 0.5 * before[role].norm() for role in "qk")
    assert torch.linalg.matrix_norm(after["v"], 2).max() <= 0.01 * 1.01


@pytest.mark.parametrize("text", RESUMED)
def test_a_run_that_was_interrupted_resumes_to_the_same_files(tmp_path, text):
    whole, parts = (small_job(tmp_path / name, text) for name in ("whole", "parts"))
    assert run_job(whole)["status"] == "finished"
    assert stop_after(parts, 8)["status"] == "interrupted"
    assert run_job(parts)["status"] == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_model_that_cannot_be_capped_is_refused():
    method = MethodSettings.model_validate("default+balanced+spectral_cap(w_max=1)")
    recipe = override_recipe(small_recipe(), method)
    task = prepare_task(recipe, seed=0, base=None)
    model = prepare_model(recipe, method, task, seed=0, base=None)
    with pytest.raises(RecipeError, match="conditioned"):
        recipe.optimizer.act_after_steps(model, recipe.optimizer.build(model))
