import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import wellcond as wc
from models import NanoGPTAttention, XTransformersAttention, stack
from wellcond.init.apply import METHODS
from wellcond.init.positions import sincos_2d
from wellcond.init.selection import select_indices
from wellcond.linalg.spectrum import singular_values

EVERY_METHOD = sorted(set(METHODS) - {"weight_selection", "calibrated"})  # these need more than a model


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tiny_vit(**kwargs):
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.models.VisionTransformer(**arguments | kwargs)


def first(model):
    return wc.find_attention(model)[0]


def assert_semi_orthogonal(heads, atol=5e-6):
    torch.testing.assert_close(
        singular_values(heads), torch.ones(len(heads), min(heads.shape[1:])).double(), rtol=0, atol=atol
    )


def test_conditioned_is_paper_c():
    model = tiny_vit()
    others = {n: p.clone() for n, p in model.named_parameters() if "qkv.weight" not in n}
    wc.init_(model, "conditioned", generator=generator())
    for site in wc.find_attention(model):
        assert_semi_orthogonal(site.q.read())
        assert_semi_orthogonal(site.k.read())
        # W_V^T is the d x D identity, the same in every head.
        assert torch.equal(site.v.read(), torch.eye(8, 24).expand(3, 8, 24))
        assert not torch.allclose(site.q.read()[0], site.q.read()[1]) and not torch.allclose(
            site.q.read(), site.k.read()
        )
    assert all(torch.equal(p, others[n]) for n, p in model.named_parameters() if n in others)


@pytest.mark.parametrize("orthogonal", ["svd", "qr"])
def test_conditioned_options(orthogonal):
    model = tiny_vit()
    wc.init_(model, "conditioned", orthogonal=orthogonal, value="joint", value_scale=0.5, output="identity")
    site = first(model)
    assert_semi_orthogonal(site.q.read())
    torch.testing.assert_close(site.v.read().reshape(24, 24), 0.5 * torch.eye(24))
    assert torch.equal(site.module.proj.weight, torch.eye(24))

    wc.init_(model, "conditioned", value="orthogonal", output=True, heads="joint", orthogonal=orthogonal)
    assert_semi_orthogonal(first(model).v.read().reshape(1, 24, 24))
    assert_semi_orthogonal(site.module.proj.weight[None])


@pytest.mark.parametrize("projections", ["q", "k", "v", "qk"])
def test_projections_touch_nothing_else(projections):
    model = tiny_vit()
    before = {role: slot.read().clone() for role, slot in first(model).slots.items()}
    wc.init_(model, "conditioned", projections=projections)
    for role, slot in first(model).slots.items():
        assert torch.equal(slot.read(), before[role]) is (role not in projections)


def test_match_norm_keeps_the_frobenius_norm_of_every_head():
    model = tiny_vit()
    norms = [slot.read().flatten(1).norm(dim=1) for slot in (first(model).q, first(model).v)]
    wc.init_(model, "conditioned", match_norm=True)
    for slot, norm in zip((first(model).q, first(model).v), norms, strict=True):
        torch.testing.assert_close(slot.read().flatten(1).norm(dim=1), norm)
        assert wc.spectrum(slot.read()[0]).condition_number == pytest.approx(1.0, abs=1e-5)


def test_gaussian_matches_the_scale_of_semi_orthogonal():
    model = tiny_vit(embed_dim=96, num_heads=3)
    wc.init_(model, "gaussian", generator=generator())
    for slot in (first(model).q, first(model).k, first(model).v):
        assert slot.read().std().item() == pytest.approx(96**-0.5, rel=0.05)
    wc.init_(model, "gaussian", std=0.3, value="per_head", projections="qv", generator=generator())
    assert first(model).q.read().std().item() == pytest.approx(0.3, rel=0.05)
    assert torch.equal(first(model).v.read()[1], torch.eye(32, 96))


def test_orthogonal_makes_all_three_semi_orthogonal():
    site = first(wc.init_(tiny_vit(), "orthogonal"))
    for role in "qkv":
        assert_semi_orthogonal(site.slots[role].read())


def test_mimetic_products():
    # experiments.md 1.3, check values at D = 192, d = 64.
    model = timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=192, depth=1, num_heads=3)
    wc.init_(model, "mimetic", generator=generator())
    site = first(model)
    q, k = site.q.read().double(), site.k.read().double()
    assert wc.spectrum(q[0]).condition_number == pytest.approx(1.28, abs=0.03)
    assert wc.spectrum(q[0]).sigma_max == pytest.approx(1.35, abs=0.03)
    assert torch.einsum("hdc,hdc->h", q, k).div(192).tolist() == pytest.approx([0.40] * 3, abs=0.02)
    w_v = site.v.read().reshape(192, 192).T.double()
    w_o = model.blocks[0].attn.proj.weight.T.double()
    product = w_v @ w_o
    noise = product + 0.4 * torch.eye(192)
    # W_V W_O = 0.4 Z - 0.4 I with Z uniform within sqrt(3 / D): nothing may lie beyond.
    assert noise.abs().max().item() == pytest.approx(0.4 * (3 / 192) ** 0.5, rel=1e-3)
    assert noise.std().item() * 192**0.5 == pytest.approx(0.4, rel=0.02)


def test_mimetic_released_transposes_lose_the_product():
    model = timm.models.VisionTransformer(img_size=16, patch_size=4, embed_dim=192, depth=1, num_heads=3)
    wc.init_(model, "mimetic", transposes="released", generator=generator())
    w_v, w_o = first(model).v.read().reshape(192, 192).T, model.blocks[0].attn.proj.weight.T
    product = (w_v @ w_o).detach()
    off = product - product.diag().diag()
    assert product.diag().mean().item() == pytest.approx(-0.398, abs=0.02)
    assert off.std().item() * 192**0.5 == pytest.approx(0.278, abs=0.02)


def test_mimetic_signs_and_noise_options():
    model = tiny_vit()
    wc.init_(model, "mimetic", value_sign=1, qk_sign=-1, noise="normal", qk_noise=0.1, value_noise=0.1)
    site = first(model)
    assert torch.einsum("hdc,hdc->h", site.q.read(), site.k.read()).max() < 0
    assert (site.v.read().reshape(24, 24).T @ model.blocks[0].attn.proj.weight.T).diag().mean() > 0.3


def test_mimetic_position_embedding():
    model = tiny_vit()
    wc.init_(model, "mimetic", position="sincos2d")
    assert torch.equal(model.pos_embed[0, 0], torch.zeros(24))
    torch.testing.assert_close(model.pos_embed[0, 1:].double(), sincos_2d(4, 4, 24), rtol=0, atol=1e-6)
    # Patch (row 1, column 2): [sin x, cos x, sin y, cos y], omega_j = 1e4^(-j / (D/4 - 1)).
    omega = 1e4 ** (-torch.arange(6) / 5)
    expected = torch.cat([(2 * omega).sin(), (2 * omega).cos(), omega.sin(), omega.cos()])
    torch.testing.assert_close(model.pos_embed[0, 1 + 4 + 2].detach(), expected)

    gpt = GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=11, n_positions=16))
    wc.init_(gpt, "mimetic", position="sincos1d")
    assert gpt.wpe.weight[0].tolist() == [0.0] * 12 + [1.0] * 12
    with pytest.raises(wc.WeightError, match="position='sincos2d' needs"):
        wc.init_(gpt, "mimetic", position="sincos2d")


def test_mimetic_refuses_grouped_queries_and_changes_nothing():
    model = XTransformersAttention(heads=4, kv_heads=2)
    before = model.to_q.weight.clone()
    with pytest.raises(wc.UnsupportedLayoutError, match="4 query heads share 2"):
        wc.init_(model, "mimetic")
    assert torch.equal(model.to_q.weight, before)


@pytest.mark.parametrize("sizes", [(6, 3, [0, 2, 4]), (7, 3, [0, 3, 6]), (4, 4, [0, 1, 2, 3])])
def test_weight_selection_index_rule(sizes):
    teacher, student, expected = sizes
    assert select_indices(teacher, student).tolist() == expected


def test_weight_selection_blind_and_by_heads():
    teacher, student = tiny_vit(embed_dim=48, num_heads=6, depth=3), tiny_vit()
    head = student.head.weight.clone()
    wc.init_(student, "weight_selection", teacher=teacher)
    assert torch.equal(student.blocks[1].attn.qkv.weight, teacher.blocks[1].attn.qkv.weight[::2, ::2])
    assert torch.equal(student.pos_embed, teacher.pos_embed[:, :, ::2])
    assert torch.equal(student.head.weight, head)

    wc.init_(student, "weight_selection", teacher=teacher, layout="heads")
    big, small = first(teacher), first(student)
    for role in "qkv":
        assert torch.equal(small.slots[role].read(), big.slots[role].read()[[0, 2, 4]][:, :, ::2])
        assert torch.equal(small.slots[role].read_bias(), big.slots[role].read_bias()[[0, 2, 4]])
    assert torch.equal(small.o.read(), big.o.read()[[0, 2, 4]][:, ::2])
    assert torch.equal(student.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight[::2, ::2])


def test_weight_selection_by_heads_on_transposed_storage():
    config = {"n_layer": 1, "vocab_size": 11, "n_positions": 16}
    teacher, student = (
        GPT2Model(GPT2Config(n_embd=48, n_head=6, **config)),
        GPT2Model(GPT2Config(n_embd=24, n_head=3, **config)),
    )
    wc.init_(student, "weight_selection", teacher=teacher, layout="heads")
    for role in "qkv":
        assert torch.equal(first(student).slots[role].read(), first(teacher).slots[role].read()[[0, 2, 4]][:, :, ::2])


def test_weight_selection_refuses_a_smaller_teacher():
    with pytest.raises(wc.WeightError, match="at least as large on every axis"):
        wc.init_(tiny_vit(), "weight_selection", teacher=tiny_vit(embed_dim=12))
    with pytest.raises(ValueError, match="needs the option teacher="):
        wc.init_(tiny_vit(), "weight_selection")


def test_default_reruns_the_family():
    model = tiny_vit(embed_dim=96)
    wc.init_(model, "conditioned")
    torch.nn.init.ones_(model.blocks[0].attn.qkv.bias)
    head = model.head.weight.clone()
    wc.init_(model, "default", generator=generator())
    assert model.blocks[0].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(model.blocks[0].attn.qkv.bias, torch.zeros(288))
    assert torch.equal(model.head.weight, head)
    wc.init_(model, "default", rule="torch")
    assert model.blocks[0].attn.qkv.weight.abs().max().item() <= 96**-0.5
    assert model.blocks[0].attn.qkv.weight.std().item() == pytest.approx((3 * 96) ** -0.5, rel=0.05)


def test_default_on_hugging_face_and_torch():
    gpt = GPT2Model(GPT2Config(n_embd=96, n_head=3, n_layer=2, vocab_size=11, n_positions=16))
    wc.init_(gpt, "gaussian", std=1.0)
    wc.init_(gpt, "default", generator=generator())
    assert gpt.h[0].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
    mha = nn.MultiheadAttention(48, 3)
    wc.init_(mha, "conditioned")
    wc.init_(mha, "default")
    # Xavier uniform on the fused (3D, D) weight.
    assert mha.in_proj_weight.std().item() == pytest.approx((2 / (4 * 48)) ** 0.5, rel=0.05)


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_the_seed_decides_whatever_the_global_state(method):
    one, two = tiny_vit(), tiny_vit()
    two.load_state_dict(one.state_dict())
    wc.init_(one, method, generator=generator(3))
    torch.manual_seed(77)
    state = torch.get_rng_state()
    wc.init_(two, method, generator=generator(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    wc.init_(two, method, generator=generator(4))
    assert not torch.equal(one.blocks[0].attn.qkv.weight, two.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("method", ["conditioned", "orthogonal", "gaussian", "mimetic"])
def test_the_same_seed_gives_the_same_weights_whatever_the_storage(method):
    storages = [
        timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3, num_classes=0),
        NanoGPTAttention(24, 3),
        XTransformersAttention(24, heads=3, dim_head=8),
        nn.MultiheadAttention(24, 3),
        GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=11, n_positions=16)),
    ]
    sites = [first(wc.init_(model, method, generator=generator(5))) for model in storages]
    for site in sites[1:]:
        for role in "qkv":
            assert torch.equal(site.slots[role].read(), sites[0].slots[role].read())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_the_float32_result_cast(dtype):
    plain = first(wc.init_(tiny_vit(), "conditioned", generator=generator()))
    other = first(wc.init_(tiny_vit().to(dtype), "conditioned", generator=generator()))
    assert other.q.read().dtype == dtype
    assert torch.equal(other.q.read(), plain.q.read().to(dtype))


def test_grouped_queries_and_wide_heads():
    site = first(wc.init_(XTransformersAttention(12, heads=4, kv_heads=2, dim_head=5), "conditioned"))
    assert site.q.read().shape == (4, 5, 12) and site.k.read().shape == (2, 5, 12)
    assert_semi_orthogonal(site.k.read())
    # head_dim > in_features: orthonormal columns, and an identity that runs out of columns.
    wide = first(wc.init_(XTransformersAttention(4, heads=2, dim_head=6), "conditioned"))
    assert_semi_orthogonal(wide.q.read())
    assert torch.equal(wide.v.read()[0], torch.eye(6, 4))


def test_sites_restrict():
    model = stack(depth=2)
    before = model[0].attn.c_attn.weight.clone()
    wc.init_(model, "conditioned", sites=wc.find_attention(model)[1:])
    assert torch.equal(model[0].attn.c_attn.weight, before)
    with pytest.raises(ValueError, match="not a part of this model"):
        wc.init_(model, "conditioned", sites=wc.find_attention(stack()))
    with pytest.raises(ValueError, match="empty list"):
        wc.init_(model, "conditioned", sites=[])


def test_unknown_methods_and_options_list_the_choices():
    model = stack()
    with pytest.raises(
        wc.UnknownChoiceError, match=r"'balanced' is a correction.*: use wellcond.condition_\(model, \"balanced\"\)"
    ):
        wc.init_(nn.MultiheadAttention(8, 2), "balanced")
    with pytest.raises(wc.UnknownChoiceError, match="Did you mean 'conditioned'"):
        wc.init_(nn.MultiheadAttention(8, 2), "conditoned")
    with pytest.raises(wc.UnknownChoiceError, match="'conditioned', 'default', 'gaussian', 'mimetic'"):
        wc.init_(model, "condtioned")
    with pytest.raises(wc.UnknownChoiceError, match="expected one of 'orthogonal', 'heads', 'value'"):
        wc.init_(model, "conditioned", values="joint")
    with pytest.raises(wc.UnknownChoiceError, match="'per_head', 'joint', 'orthogonal'"):
        wc.init_(model, "conditioned", value="shared")
    with pytest.raises(ValueError, match="subset of 'qkv'"):
        wc.init_(model, "conditioned", projections="")
    with pytest.raises(wc.UnknownChoiceError, match="unknown projection"):
        wc.init_(model, "conditioned", projections="qo")


def test_meta_and_frozen_parameters_are_refused():
    with torch.device("meta"):
        on_meta = stack()
    with pytest.raises(wc.WeightError, match=r"after the model is materialised: model.to_empty"):
        wc.init_(on_meta, "conditioned")
    frozen = stack()
    frozen[1].attn.c_attn.weight.requires_grad_(False)
    before = frozen[0].attn.c_attn.weight.clone()
    with pytest.raises(wc.WeightError, match=r"1.attn \(q\) is frozen"):
        wc.init_(frozen, "conditioned")
    assert torch.equal(frozen[0].attn.c_attn.weight, before)


def test_tied_weights_are_refused_unless_every_holder_is_rewritten_alike():
    model = stack(XTransformersAttention, depth=2)
    model[1].attn.to_q.weight = model[0].attn.to_q.weight
    wc.init_(model, "conditioned")  # both holders are queries of the same shape
    assert_semi_orthogonal(first(model).q.read())
    with pytest.raises(wc.WeightError, match="is tied: the same parameter is used as 0.attn.to_q.weight, 1.attn"):
        wc.init_(model, "conditioned", sites=wc.find_attention(model)[:1])
    model[0].attn.to_k.weight = model[0].attn.to_q.weight
    with pytest.raises(wc.WeightError, match="tied"):
        wc.init_(model, "conditioned")


def test_a_failure_while_planning_leaves_the_model_as_it_was(monkeypatch):
    model = stack()
    before = [p.clone() for p in model.parameters()]
    original, calls = METHODS["gaussian"], []

    def breaks(context, **options):
        for write in original(context, **options):
            calls.append(write)
            if len(calls) == 4:
                raise RuntimeError("out of memory")
            yield write

    monkeypatch.setitem(METHODS, "gaussian", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        wc.init_(model, "gaussian")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    monkeypatch.setitem(METHODS, "gaussian", original)
    with pytest.raises(wc.WeightError, match="not finite"):
        wc.init_(model, "gaussian", std=float("inf"))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_davit_channel_attention_gets_its_identity_on_the_linear_path():
    model = timm.create_model("davit_tiny", embed_dims=(24, 48), depths=(1, 1), num_heads=(2, 4))
    by_role = [s for s in wc.find_attention(wc.init_(model, "conditioned")) if s.kind == "channel"]
    eye = torch.eye(12, 24).expand(2, 12, 24)
    assert torch.equal(by_role[0].q.read(), eye) and not torch.equal(by_role[0].v.read(), eye)
    wc.init_(model, "conditioned", roles="by_name")
    assert torch.equal(by_role[0].v.read(), eye) and not torch.equal(by_role[0].q.read(), eye)


def test_default_of_torch_resets_parts_before_wholes():
    mha = nn.MultiheadAttention(64, 2)
    wc.init_(mha, "default", generator=generator())
    assert torch.equal(mha.out_proj.bias, torch.zeros(64))
    wc.init_(mha, "default", rule="torch", generator=generator())
    assert mha.in_proj_weight.abs().max() <= 1 / 8 and mha.in_proj_weight.std().item() == pytest.approx(0.072, rel=0.05)
    gpt = GPT2Model(GPT2Config(n_embd=96, n_head=3, n_layer=1, vocab_size=11, n_positions=16))
    wc.init_(gpt, "default", rule="torch", generator=generator())
    assert gpt.h[0].attn.c_attn.weight.std().item() == pytest.approx((3 * 96) ** -0.5, rel=0.05)


def test_weight_selection_refuses_what_it_would_spoil():
    block = timm.models.vision_transformer.ParallelScalingBlock
    teacher, student = tiny_vit(embed_dim=48, num_heads=6, block_fn=block), tiny_vit(block_fn=block)
    with pytest.raises(wc.UnsupportedLayoutError, match="holds more than q, k and v"):
        wc.init_(student, "weight_selection", teacher=teacher, layout="heads")
    wc.init_(student, "weight_selection", teacher=teacher)
    conditioned = wc.condition_(tiny_vit(embed_dim=48, num_heads=6), "polar")
    with pytest.raises(wc.ConditioningError, match="the teacher is conditioned"):
        wc.init_(tiny_vit(), "weight_selection", teacher=conditioned)
    frozen = tiny_vit()
    frozen.norm.weight.requires_grad_(False)
    with pytest.raises(wc.WeightError, match="norm.weight is frozen"):
        wc.init_(frozen, "weight_selection", teacher=tiny_vit(embed_dim=48, num_heads=6))


def test_values_that_overflow_the_stored_dtype_are_refused():
    with pytest.raises(wc.WeightError, match="not finite"):
        wc.init_(tiny_vit().half(), "conditioned", value_scale=1e6)
