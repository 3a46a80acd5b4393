"""PEFT around a base model that was conditioned: fold, then add the adapter; every other order is refused."""

import copy

import pytest
import timm
import torch

import wellcond as wc
from integrations.trainer_runs import bert, gpt2, inputs

peft = pytest.importorskip("peft", reason="peft is not installed")
from peft import LoraConfig, get_peft_model  # noqa: E402

CONDITIONS = [("balanced", {}), ("identity", {"lam": 0.5}), ("polar", {"frozen": True})]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def vit():
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 2}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


# A Conv1D that holds q, k, v transposed; separate query and value; a fused Linear.
CASES = {
    "gpt2": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}, inputs("gpt2")),
    "bert": (bert, {"target_modules": ["query", "value"]}, inputs("bert")),
    "timm": (vit, {"target_modules": ["qkv"]}, {"x": IMAGES}),
}


def run(model, arguments):
    out = model.eval()(**arguments)
    return getattr(out, "logits", out)


def train(model, arguments, steps=3):
    """Adapters only: everything else is frozen by PEFT."""
    torch.manual_seed(1)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(**arguments)
        getattr(out, "logits", out).square().mean().backward()
        optimizer.step()


def make(name, method="balanced", options=None, **config):
    build, targets, arguments = CASES[name]
    torch.manual_seed(0)
    base = wc.condition_(wc.init_(build(), "gaussian"), method, **(options or {}))
    return base, LoraConfig(r=2, **(targets | config)), arguments


@pytest.mark.parametrize("method, options", CONDITIONS)
@pytest.mark.parametrize("name", list(CASES))
def test_condition_fold_add_train_merge(name, method, options):
    base, config, arguments = make(name, method, options)
    before = run(base, arguments)
    model = get_peft_model(wc.fold_(base), config)
    torch.testing.assert_close(run(model, arguments), before, **CLOSE)
    train(model, arguments)
    trained = run(model, arguments)
    assert (trained - before).abs().max() > 1e-4

    merged = model.merge_and_unload()
    torch.testing.assert_close(run(merged, arguments), trained, **CLOSE)
    plain = CASES[name][0]()
    assert list(merged.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(merged.state_dict())
    torch.testing.assert_close(run(plain, arguments), trained, **CLOSE)


@pytest.mark.parametrize("how", [True, "pissa", "olora", "corda", "lora_ga", "loftq", "gaussian"])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.filterwarnings("ignore:.*config.*:UserWarning")
def test_an_adapter_around_a_conditioned_layer_is_refused_and_changes_nothing(name, how):
    more = {"loftq_config": {"loftq_bits": 4}} if how == "loftq" else {}
    base, config, arguments = make(name, init_lora_weights=how, **more)
    before, state = run(base, arguments), {key: value.clone() for key, value in base.state_dict().items()}
    with pytest.raises(wc.ConditioningError, match=r"PEFT's .* around a conditioned .* wellcond.fold_\(model\) first"):
        get_peft_model(base, config)
    assert torch.equal(run(base, arguments), before)
    assert all(torch.equal(value, state[key]) for key, value in base.state_dict().items())


TUNERS = ["VeraConfig", "ShiraConfig", "MissConfig", "LoraConfig", "IA3Config", "HiraConfig", "OFTConfig"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("tuner", TUNERS)
def test_adapters_of_every_kind_want_it_folded(tuner):
    options = {
        "IA3Config": {"feedforward_modules": []},
        "ShiraConfig": {"r": 2},
        "MissConfig": {"r": 2},
        "HiraConfig": {"r": 2},
        "OFTConfig": {"oft_block_size": 0, "r": 2},
    }
    config = getattr(peft, tuner)(target_modules=["query", "value"], **options.get(tuner, {}))
    base, _, arguments = make("bert")
    with pytest.raises(wc.ConditioningError, match=r"wellcond\.fold_\(model\) first"):
        get_peft_model(copy.deepcopy(base), config)
    model = get_peft_model(wc.fold_(base), config)
    train(model, arguments)
    trained = run(model, arguments)
    torch.testing.assert_close(run(model.merge_and_unload(), arguments), trained, rtol=1e-3, atol=1e-4)


def test_adapters_on_other_layers_leave_the_correction_alone():
    base, _, arguments = make("bert")
    before = run(base, arguments)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["intermediate.dense"]))
    torch.testing.assert_close(run(model, arguments), before, **CLOSE)
    train(model, arguments)
    trained = run(model, arguments)
    merged = model.merge_and_unload()
    torch.testing.assert_close(run(merged, arguments), trained, **CLOSE)
    assert wc.conditioning_of(merged)
    torch.testing.assert_close(run(wc.fold_(merged), arguments), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("verb", [wc.condition_, wc.init_])
@pytest.mark.parametrize("name", list(CASES))
def test_an_adapter_before_the_verb_is_refused(name, verb):
    build, targets, _ = CASES[name]
    base = build()
    model = get_peft_model(base, LoraConfig(r=2, **targets))
    for given in (model, base):
        with pytest.raises(wc.WeightError, match=r"carries an adapter of PEFT.*base model before the adapter"):
            verb(given)


@pytest.mark.parametrize("name", list(CASES))
def test_an_adapter_hides_the_weights_from_measuring(name):
    base, config, arguments = make(name)
    model = get_peft_model(wc.fold_(base), config)
    with pytest.raises(wc.WeightError, match="adapter of PEFT|holds no parameter"):
        wc.measure(model, arguments)
    merged = model.merge_and_unload()
    assert wc.measure(merged, arguments if name != "timm" else IMAGES).layers
