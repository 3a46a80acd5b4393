"""Every Hugging Face family against its own forward pass: places, facts, writing."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contracts.cases_hf import CASES, Case
from contracts.harness import assert_heads_multiplied, heads_of, randomise_, watch
from wellcond.attention.find import find_attention
from wellcond.attention.record import SiteRecord
from wellcond.attention.site import AttentionSite
from wellcond.attention.structure import proportional
from wellcond.errors import UnsupportedLayoutError

PAIRS = [pytest.param(case, part, id=f"{case.name}:{part}") for case in CASES for part in case.sites]
FIRST_TOKEN = slice(0, 1)


@cache
def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    [case] = [case for case in CASES if case.name == name]
    return randomise_(case.build())


def site_of(model: nn.Module, part: str) -> AttentionSite:
    return next(site for site in find_attention(model) if part in site.name)


def tokens_of(call: SiteRecord) -> Tensor:
    return call.args[0] if call.args else call.kwargs["hidden_states"]


def memory_of(site: AttentionSite, call: SiteRecord) -> Tensor | None:
    if not site.cross:
        return None
    named = {**call.kwargs}
    given = named.get("encoder_hidden_states", named.get("key_value_states"))
    return call.args[1] if given is None else given


def captured(modules: dict[str, nn.Module], model: nn.Module, case: Case) -> dict[str, tuple[Tensor, Any]]:
    """Input and output of the first call of each module."""
    seen: dict[str, tuple[Tensor, Any]] = {}

    def keep(name: str) -> Any:
        return lambda _, args, output: seen.setdefault(name, (args[0].clone(), output)) and None

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            case.run(model)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@cache
def seen(name: str, part: str) -> tuple[AttentionSite, SiteRecord]:
    """One site of a family in its model's forward pass."""
    [case] = [case for case in CASES if case.name == name]
    model = built(name)
    site = site_of(model, part)
    return site, watch(site, lambda: model(**case.inputs()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_attention_is_found_with_the_facts_of_its_family(case: Case):
    sites = find_attention(built(case.name))
    assert len({id(site.module) for site in sites}) == len({id(site.o.owner) for site in sites}) == len(sites)
    for part, expected in case.sites.items():
        site = next(site for site in sites if part in site.name)
        assert (site.num_heads, site.num_kv_heads, site.head_dim) == case.heads
        found = {name: getattr(site, name) for name in expected}
        assert found == {**expected, "scale": pytest.approx(expected["scale"])}, part


@pytest.mark.parametrize(("case", "part"), [p for p in PAIRS if p.values[0].sites[p.values[1]]["qk_norm"]])
def test_normalised_queries_and_keys_enter_the_norm_as_described(case: Case, part: str):
    site, call = seen(case.name, part)
    model = built(case.name)
    norms = {"q": site.module.q_norm, "k": site.module.k_norm}
    for role, (entering, _) in captured(norms, model, case).items():
        slot = site.slots[role]
        heads = torch.einsum("bnc,hdc->bnhd", tokens_of(call), slot.read())
        assert torch.allclose(entering.reshape(heads.shape), heads, rtol=1e-10, atol=1e-12), role


def softmax_of(site: AttentionSite, call: SiteRecord) -> tuple[Tensor, Tensor]:
    """Logits and weights of the call's softmax, (leading * heads, queries, keys)."""
    logits, weights = call.softmaxes[0]
    shape = (-1, *weights.shape[-2:])
    return logits.reshape(shape), weights.reshape(shape)


@pytest.mark.parametrize(("case", "part"), PAIRS)
def test_heads_and_causality_are_what_the_forward_shows(case: Case, part: str):
    site, call = seen(case.name, part)
    x, memory = tokens_of(call), memory_of(site, call)
    roles = "v" if site.qk_norm else "qkv"
    # A rotation leaves position 0 alone; everything else is compared at every position.
    chosen = FIRST_TOKEN if site.rotary else slice(None)
    assert_heads_multiplied(site, call, x, memory, roles=roles, tokens=chosen)
    if site.rotary and not site.qk_norm:
        with pytest.raises(AssertionError, match="did not multiply"):
            assert_heads_multiplied(site, call, x, memory, roles="q")
    if site.kind == "nystrom":  # its softmax maps are between tokens and landmarks
        return
    _, weights = softmax_of(site, call)
    future = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
    # GPT-OSS appends a column for its sink, which is no future token.
    future[:, weights.shape[-2] :] = False if not site.cross else future[:, weights.shape[-2] :]
    assert bool((weights[:, future] == 0).all()) == site.causal


@pytest.mark.parametrize(("case", "part"), PAIRS)
@torch.no_grad()
def test_scale_is_what_the_forward_shows(case: Case, part: str):
    site, call = seen(case.name, part)
    if site.kind == "nystrom" or site.qk_norm:
        return  # its logits are not products of projected tokens
    if any("relative" in name for name, _ in built(case.name).named_parameters()):
        model = copy.deepcopy(built(case.name))
        for name, parameter in model.named_parameters():
            if "relative" in name:
                nn.init.zeros_(parameter)
        site = site_of(model, part)
        call = watch(site, lambda: model(**case.inputs()))
    logits, _ = softmax_of(site, call)
    x, memory = tokens_of(call), memory_of(site, call)
    q, k = heads_of(site, "q", x), heads_of(site, "k", x if memory is None else memory)
    if site.relative_position_bias:
        # Token 1 and token 0, both against token 0: a bias that depends on the key alone (ALiBi) drops out.
        products, logits_seen = ((q[:, 1] - q[:, 0]) * k[:, 0]).sum(-1), logits[:, 1, 0] - logits[:, 0, 0]
    else:
        # Position 0 against itself: no rotation, no distance, no mask.
        products, logits_seen = (q[:, 0] * k[:, 0]).sum(-1), logits[:, 0, 0]
    if hasattr(site.module, "sinks"):
        # GPT-OSS subtracts each row's maximum; its last column is the sink, whose logit is a parameter.
        logits_seen = logits[:, 0, 0] - logits[:, 0, -1] + site.module.sinks
    factor = proportional(logits_seen, products)
    assert factor == (None if site.scale is None else pytest.approx(site.scale, rel=1e-5))


def test_wrong_reading_of_a_fused_weight_is_noticed():
    """The contract itself can fail: GPT-NeoX's rows read as blocks are not what the model multiplies."""
    from wellcond.attention.layout import build_site
    from wellcond.attention.site import ModuleContext

    [case] = [case for case in CASES if case.name == "gpt-neox"]
    model = built(case.name)
    right = site_of(model, "layers.0")
    place = ModuleContext(right.name, right.module, model)
    wrong = build_site(place, {"qkv": right.q.owner}, num_heads=3, arrangement="blocks")
    call = watch(wrong, lambda: model(**case.inputs()))
    with pytest.raises(AssertionError, match="calls v"):
        assert_heads_multiplied(wrong, call, tokens_of(call), roles="v")


def refused_models() -> dict[str, Any]:
    import transformers as tf

    from contracts.cases_hf import BERT, LLAMA, SPECIAL

    layers = {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    return {
        "low-rank": lambda: tf.DeepseekV3Model(
            tf.DeepseekV3Config(**layers, num_key_value_heads=3, n_routed_experts=8)
        ),
        "disentangled": lambda: tf.DebertaV2Model(tf.DebertaV2Config(**BERT)),
        "differential": lambda: tf.DiffLlamaModel(tf.DiffLlamaConfig(**LLAMA)),
        "global tokens": lambda: tf.LongformerModel(tf.LongformerConfig(**BERT, attention_window=4)),
        "three-dimensional": lambda: tf.XLNetModel(tf.XLNetConfig(d_model=24, n_layer=2, n_head=3, d_inner=16)),
        "convolutions": lambda: tf.ConvBertModel(tf.ConvBertConfig(**BERT | {"num_attention_heads": 6})),
        "hashing": lambda: tf.YosoModel(tf.YosoConfig(**BERT)),
        "entity-aware": lambda: tf.LukeModel(tf.LukeConfig(**BERT, entity_vocab_size=8, entity_emb_size=8, **SPECIAL)),
    }


@pytest.mark.parametrize("reason", refused_models())
def test_what_slots_cannot_express_is_refused_with_the_reason(reason: str):
    with warnings.catch_warnings():
        # DeBERTa scripts functions when its file is imported.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
        model = refused_models()[reason]()
    with pytest.raises(UnsupportedLayoutError, match=reason):
        find_attention(model)


def test_recurrent_models_have_no_attention():
    import transformers as tf

    from wellcond.attention.find import scan_attention

    model = tf.RwkvModel(tf.RwkvConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, intermediate_size=16))
    scan = scan_attention(model)
    assert scan.sites == [] and scan.refusals == []


@pytest.mark.parametrize(
    ("model_type", "status"),
    [
        ("bert", "found"),
        pytest.param("falcon", "found", marks=pytest.mark.slow),  # layers of its full size
        ("detr", "found"),
        ("reformer", "partly"),
        ("deepseek_v3", "refused"),
        ("resnet", "no attention"),
        ("mamba", "no attention"),
        ("timm_backbone", "not built"),
    ],
)
def test_zoo_reports_what_became_of_a_model(model_type: str, status: str, capfd: pytest.CaptureFixture[str]):
    from wellcond.cli.zoo.walk import walk_one

    row = walk_one(model_type)
    assert row.status == status
    assert (row.num_sites > 0) == (status in ("found", "partly"))
    assert bool(row.detail) == (status in ("partly", "refused", "not built"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("model_type", "forms"),
    [("bert", "plain softmax"), ("phi", "rotary"), ("qwen3", "rotary, rms norm on queries and keys"),
     ("sam_vision_model", "query position term")],
)  # fmt: skip
def test_zoo_says_which_form_measures_a_model(model_type: str, forms: str):
    """Tried on the attention itself, with random weights and a few tokens; SAM's positions multiply its queries."""
    from wellcond.cli.zoo.forms import is_structured
    from wellcond.cli.zoo.walk import walk_one

    row = walk_one(model_type)
    assert row.forms == forms
    assert is_structured(row.forms) == (forms != "generic")


def test_registered_names_exist_in_transformers():
    import importlib

    from wellcond.attention.families import table_of

    sample = list(table_of("transformers"))[::15]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing forty old families warns about everything from jit to natten
        missing = [
            name
            for name in sample
            if not hasattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
        ]
    assert len(sample) > 30 and missing == []
