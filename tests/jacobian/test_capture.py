"""What is captured from a model's own forward pass rebuilds its heads, and their Jacobian, in float64."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import timm
import torch
import transformers as tf
from torch import Tensor, nn

import wellcond as wc
from contracts import cases_hf, cases_timm
from contracts.harness import randomise_
from jacobian.families import BUILD, family, read_by_output, recomputed
from models import NanoGPTAttention, XTransformersAttention
from wellcond.errors import NotPlainError, WeightError
from wellcond.jacobian.capture import CapturedAttention, capture_attention
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.softmax import dense_jacobian

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

# What the recorded products cannot show to be softmax(s Q K^T + bias) V of the captured tokens, and why.
NOT_PLAIN = {
    "rotary": (
        "timm-eva_fused", "timm-eva_separate", "timm-rope_grouped", "timm-rope_fused", "timm-pool_2d_rotary",
        "hf-modernbert", "hf-gpt-neox", "hf-falcon-new", "hf-falcon-multi-query", "hf-llama", "hf-mistral", "hf-qwen2",
        "hf-qwen3", "hf-phi3", "hf-codegen", "hf-gptj", "hf-persimmon", "hf-esm", "hf-olmo2",
    ),
    "normalised": ("timm-vit_qk_norm", "timm-vit_rms_norm", "timm-swin_v2", "timm-swin_v2_cr"),
    "query position term": ("timm-sam", "timm-bottleneck", "timm-halo"),
    "gated output": ("hf-qwen3-next",), "output norm": ("timm-vit_scale_norm",), "nystrom": ("hf-nystromformer",),
    "cross_covariance": ("timm-edgenext",), "different tokens": ("timm-multi_query",),
    "logit softcap": ("hf-gemma2",), "attention sinks": ("hf-gpt-oss",),
}  # fmt: skip
REASONS = {name: reason for reason, names in NOT_PLAIN.items() for name in names}
PARTLY = {"timm-xcit", "timm-davit", "timm-davit_v2", "timm-cait", "hf-cohere2"}


@pytest.mark.parametrize("name", BUILD)
def test_heads_of_every_family_are_rebuilt(name):
    found = family(name)
    for captured, expected in zip(found.captured, found.heads, strict=True):
        assert captured.is_plain == (not captured.why_not_plain)
        if name in REASONS:
            assert REASONS[name] in captured.why_not_plain
        if not captured.is_plain:
            assert name in REASONS or name in PARTLY
        elif expected is not None:  # SigLIP's nn.MultiheadAttention does not call its out_proj
            mine, close = recomputed(captured), {"rtol": found.tolerance, "atol": found.tolerance}
            if name == "timm-hiera":  # its windows are every sixteenth token: the same rows in another order
                mine, expected = (rows[rows[:, 0, 0].argsort()] for rows in (mine, expected))
            torch.testing.assert_close(mine, expected, **close)


def autograd_jacobian(name: str, index: int, kv_head: int) -> dict[str, Tensor]:
    """Derivatives of the model's own heads by the rows of its stored weights, in the order of `dense_jacobian`."""
    model, captured = family(name).model, family(name).captured[index]
    site, group = captured.site, captured.query_heads(kv_head)
    slots = {role: site.by_role(of) for role, of in (("q", "query"), ("k", "key"), ("v", "value"))}
    [heads] = read_by_output(model, [site], family(name).batch, grad=True)
    outputs = heads[:, group].transpose(0, 1).flatten()
    parameters = {id(slot.parameter): slot.parameter for slot in slots.values()}
    units = torch.eye(len(outputs), dtype=outputs.dtype)
    found = torch.autograd.grad(outputs, tuple(parameters.values()), units, is_grads_batched=True)
    gradients = dict(zip(parameters, found, strict=True))
    blocks = {}
    for role, slot in slots.items():
        rows = torch.stack([slot.take_heads(gradient) for gradient in gradients[id(slot.parameter)]])
        heads = rows[:, group] if role == "q" else rows[:, kv_head : kv_head + 1]
        blocks[role] = heads.mT.flatten(1)
    return blocks


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("timm-vit", 0),
        ("timm-swin", 1),  # shifted windows
        ("timm-vit_map_pool", 1),
        ("timm-attention_2d", 0),
        ("hf-gpt2", 0),
        ("hf-t5", 3),
        ("hf-cohere2", 1),
    ],
)
def test_jacobian_is_that_of_the_stored_weights(name, index):
    captured = family(name).captured[index]
    kv_head = captured.site.num_kv_heads - 1
    found, expected = dense_jacobian(captured.head(kv_head, None)), autograd_jacobian(name, index, kv_head)
    for role in "qkv":
        torch.testing.assert_close(found[role], expected[role], rtol=1e-8, atol=1e-8, msg=role)
    plain = torch.cat(list(found.values()), dim=1)
    torch.testing.assert_close(ModuleJacobian(captured, kv_head).as_matrix(), plain, rtol=1e-10, atol=1e-10)


def vit() -> nn.Module:
    torch.manual_seed(0)
    return randomise_(timm.create_model("vit_tiny_patch16_224", num_classes=3, **cases_timm.VIT | {"depth": 2}))


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()


def check_rebuilt(model: nn.Module, captured: CapturedAttention, batch, tolerance=1e-8):
    [expected] = read_by_output(model, [captured.site], batch)
    torch.testing.assert_close(recomputed(captured), expected, rtol=tolerance, atol=tolerance)


def test_position_biases_kept_for_evaluation_are_forgotten_again():
    """EfficientFormer keeps its biases in evaluation mode until train() is called; they must not become stale."""
    model = cases_timm.CASES["efficientformer"].build()
    model[0].train()
    x = torch.randn(1, 9, 12)
    capture_attention(model, x)
    with torch.no_grad():
        model[0].attention_biases.add_(torch.randn_like(model[0].attention_biases))
    fresh = cases_timm.CASES["efficientformer"].build()
    fresh.load_state_dict(model.state_dict())
    for each in (model[0], fresh[0]):
        each.eval()
    assert torch.equal(model[0](x), fresh[0](x))


def test_samples_of_a_batch_are_apart_and_can_be_stacked():
    model, x = vit(), images(3)
    captured = capture_attention(model, x)[0]
    assert captured.x.shape == (3, 5, 12) and captured.memory is None and captured.logit_bias is None
    check_rebuilt(model, captured, x, 1e-10)
    stacked = captured.head(1, None)
    torch.testing.assert_close(stacked.output()[0], recomputed(captured)[:, 1])
    two = captured.head(1, [2, 0])
    torch.testing.assert_close(two.output()[0, :5], captured.head(1, 2).output()[0])
    assert [c.num_samples for c in capture_attention(model, x, max_samples=2)] == [2, 2]
    for role, block in dense_jacobian(stacked).items():
        rows = [dense_jacobian(captured.head(1, sample))[role] for sample in range(3)]
        torch.testing.assert_close(block, torch.cat(rows))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_is_masked(implementation):
    model = randomise_(tf.BertModel(tf.BertConfig(**cases_hf.BERT, attn_implementation=implementation)))
    batch = {"input_ids": torch.randint(5, 32, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    for captured in capture_attention(model, batch):
        hidden = captured.logit_bias == -torch.inf
        assert not hidden[0].any() and hidden[1, :, :, 4:].all() and not hidden[1, :, :, :4].any()
        assert torch.equal(captured.logit_bias.nan_to_num(neginf=0.0), torch.zeros_like(captured.logit_bias))
        check_rebuilt(model, captured, batch)


@pytest.mark.parametrize(("implementation", "dtype"), [("sdpa", torch.float64), ("eager", torch.float16)])
def test_queries_that_see_nothing_are_left_out(implementation, dtype):
    model = randomise_(tf.GPT2Model(tf.GPT2Config(**cases_hf.GPT2, attn_implementation=implementation))).to(dtype)
    batch = {"input_ids": torch.randint(5, 32, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    batch["attention_mask"][0, :2] = 0  # padding on the left of a causal model
    captured = capture_attention(model, batch)[0]
    padded, whole = captured.head(0, 0), captured.head(0, 1)
    assert padded.num_tokens == 4 and padded.memory.shape[0] == 6 and whole.num_tokens == 6 and whole.y is None
    stacked = captured.head(0, None)
    assert stacked.num_tokens == 10
    expected = read_by_output(model, [captured.site], batch)[0][2:, 0].double()
    close = {"rtol": 1e-8, "atol": 1e-8} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(stacked.output()[0], expected, **close)


@pytest.mark.parametrize("role", ["q", "k", "v"])
def test_weights_of_zero_do_not_lose_the_order_of_the_tokens(role):
    """Hiera's windows are every sixteenth token; a projection of zero (muP's queries) agrees with any order."""
    case = cases_timm.CASES["hiera"]
    model = randomise_(case.build())
    site = wc.find_attention(model, strict=False)[0]
    expected = capture_attention(model, case.input(), sites=[site])[0].x
    slot = site.slots[role]
    slot.write_(torch.zeros_like(slot.read()))
    slot.write_bias_(torch.zeros_like(slot.read_bias()))
    [captured] = capture_attention(model, case.input(), sites=[site])
    assert captured.is_plain and torch.equal(captured.x, expected) and captured.memory is None


def test_keys_and_values_of_different_tokens_are_not_plain():
    """Also with W_V = 0, where the values are the same: the Jacobian by W_V is that of the tokens that made them."""
    module = nn.MultiheadAttention(8, 2)
    x = torch.randn(5, 8)
    for weight in (1.0, 0.0):
        with torch.no_grad():
            module.in_proj_weight[16:] *= weight
        assert "different tokens" in capture_attention(module, (x, x, x + 1))[0].why_not_plain
        assert capture_attention(module, (x, x, x))[0].is_plain


def test_masks_and_biases_are_exact():
    causal = family("hf-gpt2").captured[0].logit_bias
    above = torch.ones(6, 6, dtype=torch.bool).triu(1)
    assert causal.shape == (1, 3, 6, 6)
    assert (causal[..., above] == -torch.inf).all() and (causal[..., ~above] == 0).all()
    model = family("timm-swin").model
    plain, shifted, _ = capture_attention(model, torch.cat([cases_timm.image(), -cases_timm.image()]))
    assert plain.x.shape == shifted.x.shape == (8, 16, 8)
    with torch.no_grad():
        table = plain.site.module._get_rel_pos_bias()
        mask = shifted.site.module._get_rel_pos_bias() + model.layers[0].blocks[1].attn_mask[:, None].repeat(2, 1, 1, 1)
    torch.testing.assert_close(plain.logit_bias, table.expand(8, -1, -1, -1))
    torch.testing.assert_close(shifted.logit_bias, mask.expand(8, -1, -1, -1))
    torch.testing.assert_close(shifted.head(1, None).output()[0], recomputed(shifted)[:, 1])


def test_cross_attention_and_grouped_queries():
    crossing = [c for c in family("hf-bert-decoder").captured if c.site.cross]
    assert [c.memory.shape for c in crossing] == [(1, 4, 24)] * 2 and all(c.is_plain for c in crossing)
    grouped = family("hf-cohere2").captured[1]
    assert grouped.head(1).num_query_heads == 3 and grouped.query_heads(1) == slice(3, 6)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = XTransformersAttention()
        self.unused = XTransformersAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(self.attn(x))


def test_first_call_is_kept_and_a_site_that_is_not_called_says_so():
    model = randomise_(Twice())
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    used, unused = capture_attention(model, x)
    assert used.is_plain and "called 2 times" in used.note and torch.equal(used.x, x)
    assert not unused.is_plain and unused.x is None and "does not call it" in unused.why_not_plain
    with pytest.raises(NotPlainError, match="does not call it"):
        unused.head(0)
    with pytest.raises(ValueError, match="never calls unused"):
        capture_attention(model, x, sites=[unused.site])
    with pytest.raises(ValueError, match="does not call it"):
        ModuleJacobian(unused)
    for kv_head, sample, what in ((4, 0, "head below 4"), (0, 2, "sample below 1"), (-1, 0, "head")):
        with pytest.raises(IndexError, match=what):
            used.head(kv_head, sample)
    with pytest.raises(IndexError, match="below"):
        ModuleJacobian(used, 99)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["vit", "swin"])
def test_other_dtypes_agree_to_their_rounding(name, dtype):
    torch.manual_seed(0)
    model = cases_timm.CASES[name].build().to(dtype)
    batch = cases_timm.CASES[name].input().to(dtype)
    for captured in capture_attention(model, batch):
        assert captured.is_plain, captured.why_not_plain
        assert captured.dtype == captured.x.dtype == dtype
        assert captured.site.relative_position_bias == (captured.logit_bias is not None)
        found = torch.stack([captured.head(h).probabilities()[0] for h in range(captured.site.num_heads)])
        torch.testing.assert_close(found, captured.probabilities[0].double(), rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("method, options", [("balanced", {}), ("identity", {"lam": 0.5})])
def test_conditioned_models_give_their_effective_weights(method, options):
    model, x = vit(), images()
    wc.condition_(model, method, **options)
    conditioned = capture_attention(model, x)[1]
    torch.testing.assert_close(conditioned.head(2).w_k, conditioned.site.k.read()[2])
    assert not torch.allclose(conditioned.head(2).w_k, conditioned.site.k.read_raw()[2])
    check_rebuilt(model, conditioned, x)
    found = ModuleJacobian(conditioned, 1).as_matrix()
    wc.fold_(model)
    for late in (lambda: conditioned.head(2), lambda: ModuleJacobian(conditioned, 1)):
        with pytest.raises(WeightError, match="not those that the forward pass used"):
            late()
    folded = ModuleJacobian(capture_attention(model, x)[1], 1)
    torch.testing.assert_close(found, folded.as_matrix(), rtol=1e-8, atol=1e-9)


def test_conditioned_weights_that_are_used_without_their_module():
    model = randomise_(cases_timm.CASES["beit"].build())
    wc.condition_(model, "polar")
    [captured] = capture_attention(model, cases_timm.image())
    check_rebuilt(model, captured, cases_timm.image())


def test_numbers_that_are_not_finite_name_their_layer():
    model = vit()
    with torch.no_grad():
        model.blocks[1].norm1.weight[3] = torch.nan
    with pytest.raises(WeightError, match=r"blocks\.1\.attn: the query projection reads NaN"):
        capture_attention(model, images())
    module, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 3, 8)
    mask = torch.zeros(3, 3)
    mask[0] = -torch.inf
    with pytest.raises(WeightError, match="masked from everything"):
        capture_attention(module, {"query": x, "key": x, "value": x, "attn_mask": mask})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_attention_in_every_calling_style(batch_first, need_weights):
    module = randomise_(nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=batch_first))
    x, y = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 5, 6, dtype=torch.float64)
    mask = torch.randn(4, 5, dtype=torch.float64)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    shaped = (x, y) if batch_first else (x.transpose(0, 1), y.transpose(0, 1))
    batch = {"query": shaped[0], "key": shaped[1], "value": shaped[1], "attn_mask": mask, "need_weights": need_weights}
    # torch wants both masks in one dtype
    batch["key_padding_mask"] = torch.zeros(3, 5, dtype=torch.float64).masked_fill(padding, -torch.inf)
    [captured] = capture_attention(module, batch)
    assert captured.is_plain and torch.equal(captured.x, x) and torch.equal(captured.memory, y)
    expected = mask.expand(3, 2, 4, 5).masked_fill(padding[:, None, None], -torch.inf)
    torch.testing.assert_close(captured.logit_bias, expected)
    with torch.no_grad():
        output = module(**batch)[0]
        rebuilt = recomputed(captured).flatten(1).view(3, 4, 8) @ module.out_proj.weight.T + module.out_proj.bias
    torch.testing.assert_close(rebuilt, output if batch_first else output.transpose(0, 1))


def test_transformer_layers_of_torch_do_not_take_the_fast_path():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    captured = capture_attention(encoder, {"src": x, "src_key_padding_mask": padding})
    assert all(c.is_plain for c in captured) and torch.equal(captured[0].x, x)
    assert (captured[1].logit_bias[1, :, :, 3:] == -torch.inf).all()


def test_one_token():
    module = randomise_(nn.MultiheadAttention(8, 2))
    x = torch.randn(1, 8, dtype=torch.float64)
    [captured] = capture_attention(module, (x, x, x))
    jacobian = dense_jacobian(captured.head(0))
    assert captured.x.shape == (1, 1, 8) and not jacobian["q"].any() and not jacobian["k"].any()


def test_logits_that_nothing_declared_explains_are_not_plain():
    class Tilted(NanoGPTAttention):
        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.shape
            q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, dim=2))
            att = q @ k.mT * self.scale + self.tilt * torch.arange(T)
            return self.c_proj((att.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))

    module = randomise_(Tilted())
    module.scale, module.tilt = 0.5, 0.0
    [site] = wc.find_attention(module)
    assert site.evidence == "forward" and site.scale == pytest.approx(0.5)
    x = torch.randn(1, 4, 12, dtype=torch.float64)
    assert capture_attention(module, x, sites=[site])[0].is_plain
    module.tilt = 0.1
    assert "nothing declared" in capture_attention(module, x, sites=[site])[0].why_not_plain
    module.scale, module.tilt = 0.7, 0.0
    assert "nothing declared" in capture_attention(module, x, sites=[site])[0].why_not_plain


def test_unknown_classes_seen_by_structure_only_are_not_plain():
    module = copy.deepcopy(XTransformersAttention())
    guessed = dataclasses.replace(wc.find_attention(module)[0], evidence="structure")
    [captured] = capture_attention(module, torch.randn(1, 4, 12), sites=[guessed])
    assert "only the place" in captured.why_not_plain and captured.x.shape == (1, 4, 12)


def test_compiled_models_are_run_as_they_were_written():
    captured = capture_attention(torch.compile(vit(), backend="eager"), images())
    assert [c.is_plain for c in captured] == [True, True]
