"""PEFT around a conditioned base model: the order that works, and that every other one is refused."""

import copy

import pytest
import timm
import torch

import wellcond as wc
from integrations.trainer_runs import bert, gpt2, inputs, make_trainer
from wellcond.integrations.transformers import prepare

peft = pytest.importorskip("peft", reason="peft is not installed")
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402

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
def test_condition_add_train_fold_merge(name, method, options):
    base, config, arguments = make(name, method, options)
    before = run(base, arguments)
    model = get_peft_model(base, config)
    assert torch.equal(run(model, arguments), before), "a new adapter adds nothing"
    raw = {key: value.clone() for key, value in base.state_dict().items() if "lora" not in key}
    train(model, arguments)
    trained = run(model, arguments)
    assert (trained - before).abs().max() > 1e-4
    assert all(torch.equal(value, raw[key]) for key, value in base.state_dict().items() if "lora" not in key)

    wc.fold_(model)
    torch.testing.assert_close(run(model, arguments), trained, **CLOSE)
    merged = model.merge_and_unload()
    torch.testing.assert_close(run(merged, arguments), trained, **CLOSE)
    plain = CASES[name][0]()
    assert list(merged.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(merged.state_dict())
    torch.testing.assert_close(run(plain, arguments), trained, **CLOSE)


@pytest.mark.parametrize("method, options", CONDITIONS)
def test_folding_before_the_adapter_is_the_same_training(method, options):
    results = []
    for fold_first in (True, False):
        base, config, arguments = make("gpt2", method, options)
        if fold_first:
            wc.fold_(base)
        torch.manual_seed(2)
        model = get_peft_model(base, config)
        train(model, arguments)
        results.append(run(model, arguments))
    assert torch.equal(*results)


@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter", "safe"])
@pytest.mark.parametrize("name", list(CASES))
def test_merging_before_folding_is_refused_and_changes_nothing(name, how):
    base, config, arguments = make(name, init_lora_weights=False)
    model = get_peft_model(base, config)
    trained = run(model, arguments)
    with pytest.raises(wc.ConditioningError, match=r"PEFT's merge .* Call wellcond.fold_\(model\) first"):
        if how == "safe":
            model.merge_and_unload(safe_merge=True)
        else:
            getattr(model, how)()
    assert torch.equal(run(model, arguments), trained)
    merged = wc.fold_(model).merge_and_unload()
    torch.testing.assert_close(run(merged, arguments), trained, **CLOSE)


@pytest.mark.parametrize("how", ["corda", "lora_ga", "loftq"])
@pytest.mark.filterwarnings("ignore:.*config.*:UserWarning")
def test_adapters_that_need_data_or_rounding_want_it_folded(how):
    more = {"loftq_config": {"loftq_bits": 4}} if how == "loftq" else {}
    base, config, _ = make("bert", init_lora_weights=how, **more)
    with pytest.raises(wc.ConditioningError, match=rf"PEFT's {how}_init .* wellcond.fold_\(model\) first"):
        get_peft_model(base, config)


@pytest.mark.parametrize("how", ["pissa", "olora", "gaussian", "orthogonal"])
def test_adapters_that_rewrite_the_base_want_it_folded(how):
    base, config, arguments = make("bert", init_lora_weights=how)
    before = run(base, arguments)
    folded = copy.deepcopy(base)
    if how in ("pissa", "olora"):
        with pytest.raises(wc.ConditioningError, match=rf"PEFT's {how}_init .* wellcond.fold_\(model\) first"):
            get_peft_model(base, config)
    else:
        torch.testing.assert_close(run(get_peft_model(base, config), arguments), before, **CLOSE)
    model = get_peft_model(wc.fold_(folded), config)
    torch.testing.assert_close(run(model, arguments), before, **CLOSE)


def test_multihead_attention_wants_it_folded():
    torch.manual_seed(0)
    base = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    wc.condition_(base, "balanced")
    config = LoraConfig(r=2, target_modules=["self_attn"])
    with pytest.raises(wc.ConditioningError, match="fold_"):
        get_peft_model(copy.deepcopy(base), config)
    model = get_peft_model(wc.fold_(base), config).base_model.model.eval()
    assert torch.isfinite(model(torch.randn(2, 5, 8))).all()


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
    model = get_peft_model(base, config)
    with pytest.raises(wc.WeightError, match="adapter of PEFT|holds no parameter"):
        wc.measure(model, arguments)
    merged = wc.fold_(model).merge_and_unload()
    assert wc.measure(merged, arguments if name != "timm" else IMAGES).layers


def test_an_adapter_on_other_layers_is_refused_too():
    model = get_peft_model(bert(), LoraConfig(r=2, target_modules=["dense"]))
    with pytest.raises(wc.WeightError, match="adapter of PEFT"):
        wc.condition_(model)
    model = get_peft_model(bert(), LoraConfig(r=2, target_modules=["intermediate.dense"]))
    with pytest.raises(wc.WeightError, match="frozen"):
        wc.condition_(model)


def test_an_adapter_loads_on_the_folded_base(tmp_path):
    base, config, arguments = make("bert")
    wc.fold_(base)
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, config)
    train(model, arguments)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    torch.testing.assert_close(run(loaded, arguments), run(model, arguments), **CLOSE)


@pytest.mark.parametrize("fold_first", [True, False])
def test_in_the_real_trainer(fold_first, tmp_path):
    torch.manual_seed(0)
    base = prepare(gpt2(), init="conditioned", condition="balanced")
    if fold_first:
        wc.fold_(base)
    _, targets, arguments = CASES["gpt2"]
    model = get_peft_model(base, LoraConfig(r=2, task_type="CAUSAL_LM", **targets))
    trainer = make_trainer(model, "gpt2", tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()
    trained = run(model, arguments)
    if not fold_first:
        wc.fold_(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(run(merged, arguments), trained, **CLOSE)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("tuner", ["VeraConfig", "ShiraConfig", "MissConfig", "LoraConfig", "IA3Config", "HiraConfig"])
def test_no_adapter_of_any_kind_is_lost_by_merging_first(tuner):
    base, _, arguments = make("bert")
    options = {
        "IA3Config": {"feedforward_modules": []},
        "ShiraConfig": {"r": 2},
        "MissConfig": {"r": 2},
        "HiraConfig": {"r": 2},
    }
    config = getattr(peft, tuner)(target_modules=["query", "value"], **options.get(tuner, {}))
    model = get_peft_model(base, config)
    train(model, arguments)
    trained = run(model, arguments)
    with pytest.raises(wc.ConditioningError, match=r"wellcond\.fold_\(model\) first"):
        model.merge_adapter()
    torch.testing.assert_close(run(model, arguments), trained, rtol=0, atol=0)
    wc.fold_(model)
    torch.testing.assert_close(run(model.merge_and_unload(), arguments), trained, rtol=1e-3, atol=1e-4)


def test_an_adapter_that_truncates_the_base_wants_it_folded():
    base, _, _ = make("bert")
    config = LoraConfig(r=2, target_modules=["query"], kasa_config=peft.KasaConfig())
    with pytest.raises(wc.ConditioningError, match=r"PEFT's _truncate_base_weight .* wellcond.fold_\(model\) first"):
        get_peft_model(base, config)


@pytest.mark.filterwarnings("ignore:.*target_parameters:UserWarning")
def test_an_adapter_on_a_parameter_leaves_it_in_the_model():
    base, _, arguments = make("bert")
    model = get_peft_model(base, LoraConfig(r=2, target_modules=[], target_parameters=["query.weight"]))
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(wc.ConditioningError, match=r"wellcond.fold_\(model\) first"):
        run(model, arguments)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.isfinite(run(wc.fold_(model), arguments)).all()
