"""model.qk_norm: queries and keys of root mean square 1, in whatever attention."""

import copy
import math
import pickle

import pytest
import timm
import torch
from torch import nn

import wellcond as wc
from lab.helpers import tiny_bert, tiny_gpt2, tiny_vit
from wellcond import find_attention
from wellcond.errors import RecipeError
from wellcond.jacobian.capture import capture_attention
from wellcond.jacobian.select import select_operator
from wellcond.lab.models.build import build_model
from wellcond.lab.models.changes import add_qk_norm_
from wellcond.lab.models.head_norm import EPS

SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
XCIT = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2, "cls_attn_layers": 1}
CRAMMED = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 16, "vocab_size": 20, "length": 16}
LONG = {"length": 16, "landmarks": 4, "vocab_size": 20, "num_labels": 2, "width": 16, "feed_forward": 8}
LLAMA = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 8, "vocab_size": 20,
}  # fmt: skip
IMAGE, TOKENS = torch.rand(2, 3, 32, 32), torch.arange(1, 17)[None]
MODELS = {
    "vit": (tiny_vit, torch.rand(2, 1, 8, 8)),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN), IMAGE),
    "xcit": (lambda: timm.create_model("xcit_nano_12_p8_224", **XCIT), IMAGE),
    "gpt2": (lambda: tiny_gpt2(20, 16), TOKENS),
    "bert": (lambda: tiny_bert(20), TOKENS),
    "llama": (lambda: build_model("hf:llama", LLAMA, auto_class="AutoModelForCausalLM"), TOKENS),
    "crammed": (lambda: build_model("wellcond:crammed_bert", CRAMMED), TOKENS),
    "long range": (lambda: build_model("wellcond:long_range", LONG), TOKENS),
}


def normed(name="vit"):
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build().eval()
    add_qk_norm_(model, lambda: model(inputs))
    return model, inputs


def output(model, inputs):
    with torch.no_grad():
        found = model(inputs)
    return getattr(found, "logits", found)


def projected(site, model, inputs):
    """What the query and the key projection return, by head."""
    seen = {}
    slots = {role: site.by_role(role) for role in ("query", "key", "value")}
    owners = {id(slot.owner): slot.owner for slot in slots.values()}
    handles = [owner.register_forward_hook(lambda m, _, out: seen.update({id(m): out})) for owner in owners.values()]
    output(model, inputs)
    for handle in handles:
        handle.remove()
    return {role: seen[id(slot.owner)][..., slot.rows] for role, slot in slots.items()}


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_queries_and_keys_have_root_mean_square_1_and_values_stay(name):
    plain = MODELS[name][0]().eval()
    model, inputs = normed(name)
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(output(model, inputs), output(plain, inputs))
    site, other = find_attention(model)[0], find_attention(plain)[0]
    heads, before = projected(site, model, inputs), projected(other, plain, inputs)
    for role in ("query", "key"):
        expected = before[role] / (before[role].square().mean(-1, keepdim=True) + EPS).sqrt()
        torch.testing.assert_close(heads[role], expected)
    torch.testing.assert_close(heads["value"], before["value"])


def test_logits_do_not_depend_on_the_scale_of_queries_and_keys():
    model, inputs = normed()
    before = output(model, inputs)
    with torch.no_grad():
        for site in find_attention(model):
            site.q.write_(30 * site.q.read())
            site.k.write_(30 * site.k.read())
    torch.testing.assert_close(output(model, inputs), before, rtol=1e-3, atol=1e-4)


def test_copies_and_pickles_keep_the_norm():
    model, inputs = normed()
    wc.condition_(model, "balanced")
    expected = output(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(output(other, inputs), expected)
        assert find_attention(other)[0].qk_norm == "rms"
        with torch.no_grad():  # a copy has weights of its own
            for parameter in other.parameters():
                parameter.zero_()
    torch.testing.assert_close(output(model, inputs), expected)


@pytest.mark.parametrize("name", ["vit", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_it_compiles(name):
    model, inputs = normed(name)
    expected = output(model, inputs)
    torch.testing.assert_close(output(torch.compile(model, backend="eager", fullgraph=name == "vit"), inputs), expected)


def randomised(name):
    model, inputs = normed(name)
    with torch.no_grad():
        for site in find_attention(model):
            for slot in (site.q, site.k, site.v):
                slot.write_(torch.randn(slot.read().shape))
    return model, inputs[:1]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("swin", "structured"),
        ("xcit", "generic derivatives"),
        ("llama", "structured: rotary"),
        ("long range", "generic derivatives: its kind is nystrom"),
    ],
)
def test_other_attentions_are_compared_with_their_module(name, how):
    """A form is believed only where a copy of the module gives again what the model gave: see ModuleJacobian."""
    model, inputs = randomised(name)
    captured = capture_attention(model, inputs)[0]
    found = select_operator(captured, 0).how
    assert not captured.is_plain and found.startswith(how), found
    assert all(math.isfinite(head.mean_kappa()) or head.status for head in wc.measure(model, inputs).layers[0].heads)


def test_what_has_a_norm_already_or_no_module_for_its_projections_is_refused():
    model = tiny_vit(qk_norm=True)
    with pytest.raises(RecipeError, match="already"):
        add_qk_norm_(model, lambda: None)
    assert not any("forward" in vars(module) for module in model.modules())
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    with pytest.raises(RecipeError, match="linear module"):
        add_qk_norm_(layer, lambda: layer(torch.rand(1, 3, 8)))


def test_projections_that_are_read_but_not_called_are_refused():
    model = timm.create_model("beit_base_patch16_224", img_size=32, embed_dim=8, depth=1, num_heads=2)
    with pytest.raises(RecipeError, match="without calling"):
        add_qk_norm_(model, lambda: model(IMAGE))


@pytest.mark.parametrize("name", ["vit", "gpt2", "llama"])
def test_a_gain_is_a_parameter_that_multiplies_normalised_heads(name):
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build().eval()
    plain = copy.deepcopy(model)
    add_qk_norm_(plain, lambda: plain(inputs))
    add_qk_norm_(model, lambda: model(inputs), gain=True)
    torch.testing.assert_close(output(model, inputs), output(plain, inputs))
    site = find_attention(model)[0]
    before = projected(site, model, inputs)
    for role in ("query", "key"):
        gain = site.by_role(role).owner.get_parameter(f"{role}_gain")
        assert gain.shape == (site.head_dim,) and any(gain is parameter for parameter in model.parameters())
        with torch.no_grad():
            gain.copy_(torch.linspace(0.5, 2.0, site.head_dim))
    after = projected(site, model, inputs)
    for role in ("query", "key"):
        torch.testing.assert_close(after[role], before[role] * torch.linspace(0.5, 2.0, site.head_dim))
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(output(twin, inputs), output(model, inputs))
