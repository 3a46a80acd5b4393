"""Heads whose queries and keys pass a map, against automatic differentiation; `check_form` serves all forms."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from wellcond.errors import UnknownChoiceError, WeightError
from wellcond.jacobian.diagnosis import diagnose_head
from wellcond.jacobian.head import Head
from wellcond.jacobian.maps import TokenMap, chain, identity_map, l2_norm, layer_norm, rms_norm, rotary
from wellcond.jacobian.normalised import NormalisedHead, Softmax, cosine_head, mapped_head, softmax_weights
from wellcond.jacobian.plain import dense_jacobian
from wellcond.jacobian.spectrum import form_spectrum

F64 = torch.float64


def tensor(rows):
    return torch.tensor(rows, dtype=F64)


def causal(n):
    return torch.zeros(n, n, dtype=F64).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)


def normals(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)


def numerical_rank(sigma, rtol=1e-11):
    return int((sigma > rtol * sigma[0]).sum())


def dense_of(function, parameters):
    """The whole Jacobian of a function of several tensors."""
    parts = torch.func.jacrev(function, argnums=tuple(range(len(parameters))))(*parameters)
    rows = function(*parameters).numel()
    return torch.cat([part.reshape(rows, -1) for part in parts], dim=1)


def check_form(form, function, parameters, rtol=1e-11):
    """Everything that a form says, against automatic differentiation of `function`; returns the singular values."""
    torch.testing.assert_close(form.output(), function(*parameters), rtol=0, atol=1e-12)
    dense = dense_of(function, parameters)
    sigma, explicit = torch.linalg.svdvals(dense), torch.linalg.svdvals(form.explicit_jacobian())
    k, largest = min(len(sigma), len(explicit)), float(sigma[0])
    torch.testing.assert_close(explicit[:k], sigma[:k], rtol=0, atol=rtol * largest)
    assert (sigma[k:] <= rtol * largest).all()
    gram = form.output_gram()
    squares = {"rtol": 0, "atol": rtol * largest**2}
    torch.testing.assert_close(gram, dense @ dense.T, **squares)
    torch.testing.assert_close(form.explicit_jacobian() @ form.explicit_jacobian().T, gram, **squares)
    products = torch.stack([form.product(e) for e in torch.eye(form.num_outputs, dtype=F64)], dim=1)
    torch.testing.assert_close(products, gram, **squares)
    check_side(form.output_side(), form.num_outputs, gram, largest)
    assert form.certified()[0] <= (1 + rtol) * float(sigma[-1]) or form.num_outputs > dense.shape[1]
    structure = form.structure()
    assert (structure.num_outputs, structure.num_parameters) == tuple(dense.shape)
    assert numerical_rank(sigma) <= structure.max_rank <= structure.smaller_side
    return sigma


def check_side(side, n, gram, largest):
    """What iterations use of J J^T: triangles, products, lengths."""
    if side is None:
        return
    assert (side.side, side.num_null) == (n, 0)
    rows, scale = normals(8)(3, n), max(largest, 1e-300)
    squares = {"rtol": 0, "atol": 1e-11 * largest**2}
    torch.testing.assert_close(side.square(rows), rows @ gram, rtol=1e-11, atol=1e-11 * n * largest**2)
    torch.testing.assert_close(side.shifted(scale, 0.5).tril(), gram.tril() - 0.5 * torch.eye(n, dtype=F64), **squares)
    assert abs(side.length(rows[0]) * rows[0].norm() - (rows[0] @ gram @ rows[0]).clamp_min(0).sqrt()) <= 1e-6 * largest
    if largest > 0:
        lower = side.lower_float32(largest).tril().double()
        torch.testing.assert_close(lower, gram.tril() / largest**2, rtol=0, atol=1e-5)


def head_function(head, query=lambda q: q, key=lambda k: k, biases=False):
    """A naive head and its parameters: weights, then the biases that exist if they count."""
    present = [name for name in ("b_q", "b_k", "b_v") if biases and getattr(head, name) is not None]

    def function(w_q, w_k, w_v, *given):
        bias = {name: getattr(head, name) for name in ("b_q", "b_k", "b_v")} | dict(zip(present, given, strict=True))
        bias = {name: torch.zeros(1, dtype=F64) if b is None else b for name, b in bias.items()}
        outputs = []
        for h in range(len(w_q)):
            q = head.x @ w_q[h].T + (bias["b_q"][h] if bias["b_q"].dim() == 2 else bias["b_q"])
            k, v = head.memory @ w_k.T + bias["b_k"], head.memory @ w_v.T + bias["b_v"]
            logits = head.scale * query(q) @ key(k).T
            if head.mask is not None:
                logits = logits + (head.mask if head.mask.dim() == 2 else head.mask[h])
            outputs.append(torch.softmax(logits, -1) @ v)
        return torch.stack(outputs)

    return function, (head.query_weights, head.w_k, head.w_v, *[getattr(head, name) for name in present])


@st.composite
def random_heads(draw, min_width=1, even=False):
    """Self or cross attention; N > D, N < D, N = 1; grouped queries; masks; biases."""
    n, m = draw(st.integers(1, 7)), draw(st.sampled_from([None, None, 1, 5]))
    D, E = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    d, dv, g = draw(st.integers(min_width, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    d, E = 2 * ((d + 1) // 2) if even else d, D if m is None else E
    normal, biased = normals(draw(st.integers(0, 10_000))), draw(st.booleans())
    masked = draw(st.booleans())
    mask = None if not masked else causal(n) if m is None else normal(n, m)
    return Head(
        normal(n, D), normal(g, d, D), normal(d, E), normal(dv, E), 0.7, y=None if m is None else normal(m, E),
        b_q=normal(g, d) if biased else None, b_k=normal(d) if biased else None, b_v=normal(dv) if biased else None,
        mask=mask,
    )  # fmt: skip


def rope(x, cos, sin, layout):
    """Rotary embedding as models write it."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    if layout == "half":
        first, second = part.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    return torch.cat([part * cos + turned * sin, rest], -1)


def angles(n, width, layout, start=0.0):
    theta = torch.outer(torch.arange(n, dtype=F64) + start, 10.0 ** -torch.arange(width // 2, dtype=F64))
    theta = torch.cat([theta, theta], -1) if layout == "half" else theta.repeat_interleave(2, -1)
    return theta.cos(), theta.sin()


NORMS = {
    "layer": (layer_norm, lambda t: F.layer_norm(t, t.shape[-1:])),
    "layer, eps .1": (lambda t: layer_norm(t, eps=0.1), lambda t: F.layer_norm(t, t.shape[-1:], eps=0.1)),
    "rms": (rms_norm, lambda t: F.rms_norm(t, t.shape[-1:], eps=1e-6)),
    "rms, eps .1": (lambda t: rms_norm(t, eps=0.1), lambda t: F.rms_norm(t, t.shape[-1:], eps=0.1)),
    "l2": (l2_norm, lambda t: F.normalize(t, dim=-1)),
    "identity": (identity_map, lambda t: t),
}


@pytest.mark.parametrize("name", NORMS)
def test_maps_and_their_jacobians(name):
    ours, theirs = NORMS[name]
    rows = normals(0)(2, 5, 4)
    rows[0, 0] = 1e-14  # within the eps of the l2 norm
    mapped = ours(rows)
    torch.testing.assert_close(mapped.value, theirs(rows))
    expected = torch.stack([torch.func.jacrev(theirs)(row) for row in rows.flatten(0, 1)]).view(2, 5, 4, 4)
    torch.testing.assert_close(mapped.jacobian, expected)


def test_affine_norms():
    normal = normals(1)
    rows, weight, bias = normal(5, 4), normal(4), normal(4)
    for mapped, theirs in [
        (layer_norm(rows, weight=weight, bias=bias), lambda t: F.layer_norm(t, (4,), weight, bias)),
        (rms_norm(rows, weight=weight), lambda t: F.rms_norm(t, (4,), weight, eps=1e-6)),
    ]:
        torch.testing.assert_close(mapped.value, theirs(rows))
        torch.testing.assert_close(mapped.jacobian, torch.func.vmap(torch.func.jacrev(theirs))(rows))
        assert mapped.symmetry == "none"


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [4, 6])
def test_rotary_is_the_rotation_that_models_apply(layout, width):
    rows, (cos, sin) = normals(2)(3, 5, 6), angles(5, width, layout)
    mapped = rotary(rows, cos, sin, layout=layout)
    torch.testing.assert_close(mapped.value, rope(rows, cos, sin, layout))
    torch.testing.assert_close(mapped.jacobian @ mapped.jacobian.mT, torch.eye(6, dtype=F64).expand(3, 5, 6, 6))
    torch.testing.assert_close((mapped.jacobian @ rows[..., None])[..., 0], mapped.value)


def test_rotary_as_transformers_and_timm_write_it():
    rows = normals(3)(1, 1, 5, 6)
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cos, sin = angles(5, 6, "half")
    expected, _ = llama.apply_rotary_pos_emb(rows, rows, cos[None], sin[None])
    torch.testing.assert_close(rotary(rows, cos, sin, layout="half").value, expected)
    timm = pytest.importorskip("timm.layers")
    cos, sin = angles(5, 6, "interleaved")
    expected = timm.apply_rot_embed_cat(rows, torch.cat([sin, cos], -1))
    torch.testing.assert_close(rotary(rows, cos, sin, layout="interleaved").value, expected)


@settings(max_examples=60, deadline=None)
@given(random_heads(), st.sampled_from(sorted(NORMS)), st.sampled_from(sorted(NORMS)), st.booleans())
def test_normalised_heads(head, of_query, of_key, biases):
    (query, q), (key, k) = NORMS[of_query], NORMS[of_key]
    check_form(mapped_head(head, query, key, biases=biases), *head_function(head, q, k, biases))


@settings(max_examples=30, deadline=None)
@given(random_heads(even=True), st.sampled_from(["half", "interleaved"]), st.booleans(), st.booleans())
def test_rotary_heads_with_and_without_norm(head, layout, normed, biases):
    weight = torch.linspace(0.5, 2, head.head_dim, dtype=F64)
    tables = angles(head.num_tokens, head.head_dim, layout), angles(len(head.memory), head.head_dim, layout, 0.5)

    def ours(table):
        turn = lambda rows: rotary(rows, *table, layout=layout)  # noqa: E731
        return chain(lambda rows: rms_norm(rows, weight=weight), turn) if normed else turn

    def theirs(table):
        norm = (lambda t: F.rms_norm(t, t.shape[-1:], weight, eps=1e-6)) if normed else (lambda t: t)
        return lambda t: rope(norm(t), *table, layout)

    form = mapped_head(head, ours(tables[0]), ours(tables[1]), biases=biases)
    check_form(form, *head_function(head, theirs(tables[0]), theirs(tables[1]), biases))


@settings(max_examples=20, deadline=None)
@given(random_heads(), st.booleans())
def test_identity_maps_give_the_plain_head(head, biases):
    form = mapped_head(head, identity_map, biases=biases)
    plain = torch.cat(list(dense_jacobian(head, biases=biases).values()), 1)
    torch.testing.assert_close(form.output_gram(), plain @ plain.T)


@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize(("n", "d"), [(40, 3), (60, 5), (30, 4)])
@pytest.mark.parametrize(
    ("mapped", "loss"),
    [
        (lambda t: l2_norm(t), lambda d, r, g: g + 1 + d * (d - 1) // 2),
        (lambda t: rms_norm(t, eps=0.1), lambda d, r, g: d * (d - 1) // 2),
        (lambda t: layer_norm(t, eps=0.0), lambda d, r, g: (g + 1) * (r + 1) + (d - 1) * (d - 2) // 2),
        (lambda t: layer_norm(t, eps=0.1), lambda d, r, g: (g + 1) * r + (d - 1) * (d - 2) // 2),
    ],
    ids=["l2", "rms", "layer, no eps", "layer"],
)
def test_rank_of_generic_norm_heads(g, n, d, mapped, loss):
    """Tokens of rank r: d r (g + 1) + dv r numbers are seen, less what the norm hides and the rotations it allows."""
    normal, D = normals(4), 4
    head = Head(normal(n, D), normal(g, d, D), normal(d, D), normal(2, D), 1.0)
    form = mapped_head(head, mapped)
    expected = d * D * (g + 1) + 2 * D - loss(d, D, g)
    assert form.structure().max_rank == min(expected, form.num_outputs)
    assert numerical_rank(torch.linalg.svdvals(form.explicit_jacobian())) == form.structure().max_rank


def test_rank_of_a_norm_head_that_is_wider_than_its_tokens():
    """Queries and keys span 2 r = 4 of d = 7 dimensions: 3 of the 21 rotations move neither: no null directions."""
    normal = normals(12)
    head = Head(normal(40, 2), normal(7, 2), normal(7, 2), normal(2, 2), 0.3)
    form = mapped_head(head, lambda rows: rms_norm(rows, eps=0.1))
    assert form.structure().max_rank == 2 * 7 * 2 + 2 * 2 - (21 - 3)
    assert numerical_rank(torch.linalg.svdvals(form.explicit_jacobian())) == form.structure().max_rank


def test_rank_of_a_generic_rotary_head():
    normal, d, D = normals(5), 4, 4
    head = Head(normal(40, D), normal(d, D), normal(d, D), normal(2, D), 1.0)
    form = mapped_head(head, lambda rows: rotary(rows, *angles(40, d, "half"), layout="half"))
    assert form.structure().max_rank == 2 * d * D + 2 * D - d
    assert numerical_rank(torch.linalg.svdvals(form.explicit_jacobian())) == form.structure().max_rank


def test_cosine_attention_does_not_see_the_scale_of_its_weights():
    normal = normals(6)
    x, w_q, w_k, w_v = normal(5, 6), normal(3, 6), normal(3, 6), normal(3, 6)
    form = cosine_head(Head(x, w_q, w_k, w_v, 10.0))
    scaled = cosine_head(Head(x, 7 * w_q, w_k / 3, w_v, 10.0))
    torch.testing.assert_close(form.output(), scaled.output())
    for name, factor in (("q", 1 / 7), ("k", 3.0), ("v", 1.0)):
        torch.testing.assert_close(scaled.parameter_blocks()[name], factor * form.parameter_blocks()[name])


def test_swin_v2_cosine_attention_against_timm():
    timm = pytest.importorskip("timm.models.swin_transformer_v2")
    torch.manual_seed(0)
    attention = timm.WindowAttention(6, window_size=(2, 2), num_heads=2).double().eval()
    x = normals(7)(4, 6)
    scale = attention.logit_scale.clamp(max=math.log(1 / 0.01)).exp().flatten().tolist()
    table = attention.cpb_mlp(attention.relative_coords_table).view(-1, 2)
    bias = 16 * torch.sigmoid(table[attention.relative_position_index.view(-1)].view(4, 4, 2).permute(2, 0, 1))
    w_q, w_k, w_v = attention.qkv.weight.view(3, 2, 3, 6)
    (b_q, b_v) = (b.view(2, 3) for b in (attention.q_bias, attention.v_bias))
    outputs = [
        cosine_head(Head(x, w_q[h], w_k[h], w_v[h], scale[h], b_q=b_q[h], b_v=b_v[h],
                                mask=bias[h])).output()[0]
        for h in range(2)
    ]  # fmt: skip
    ours = attention.proj(torch.cat(outputs, -1))
    torch.testing.assert_close(ours, attention(x[None])[0])


def test_key_bias_counts_under_a_norm_and_only_there():
    normal = normals(8)
    head = Head(normal(5, 6), normal(3, 6), normal(3, 6), normal(2, 6), 0.7, b_k=normal(3))
    without, plain = Head(head.x, head.w_q, head.w_k, head.w_v, 0.7), identity_map
    bias_only = NormalisedHead(head, l2_norm(head.queries()), l2_norm(head.keys()), True).output_gram()
    bias_only -= NormalisedHead(head, l2_norm(head.queries()), l2_norm(head.keys()), False).output_gram()
    assert float(bias_only.norm()) > 0.1
    counted, ignored = mapped_head(head, plain, biases=True), mapped_head(without, plain)
    torch.testing.assert_close(counted.output_gram(), ignored.output_gram())


def test_weights_keep_relative_accuracy_when_attention_is_one_hot():
    """T13: V^T Lambda of a row with p = (1, e, e, ...) is of order e, far below rounding of V."""
    v, small = normals(9)(4, 3), 1e-30
    p = tensor([[1.0, small, 2 * small, 0.0]])
    expected = torch.stack([-(v[1] - v[0]) - 2 * (v[2] - v[0]), v[1] - v[0], 2 * (v[2] - v[0]), 0 * v[0]], -1) * small
    torch.testing.assert_close(softmax_weights(p, v)[0], expected, rtol=1e-12, atol=0)


def test_form_spectrum_takes_the_form():
    normal = normals(10)
    form = cosine_head(Head(normal(5, 8), normal(3, 8), normal(3, 8), normal(3, 8), 4.0))
    expected = torch.linalg.svdvals(form.explicit_jacobian())
    for method in ("gram", "dense", "cholesky", "implicit"):
        got = form_spectrum(form, method=method)
        assert got.sigma_max == pytest.approx(float(expected[0]), rel=1e-9)
        assert got.sigma_min == pytest.approx(float(expected[-1]), rel=1e-6)


def test_refusals():
    normal = normals(11)
    head = Head(normal(3, 4), normal(2, 4), normal(2, 4), normal(2, 4), 1.0)
    with pytest.raises(ValueError, match="query map: expected 3 rows"):
        NormalisedHead(head, l2_norm(normal(4, 2)), l2_norm(head.keys()))
    with pytest.raises(WeightError, match="key map has NaN"):
        NormalisedHead(head, l2_norm(head.queries()), TokenMap(normal(3, 2) / 0.0, normal(3, 2, 2)))
    with pytest.raises(UnknownChoiceError, match="rotary layout"):
        rotary(normal(3, 2), normal(3, 2), normal(3, 2), layout="other")
    with pytest.raises(ValueError, match="even width"):
        rotary(normal(3, 3), normal(3, 3), normal(3, 3), layout="half")


@pytest.mark.parametrize("g", [1, 2])
@pytest.mark.parametrize("mapped", ["rotary", "values"])
def test_a_mapped_head_is_diagnosed_as_a_plain_one_is(g, mapped):
    draw, n = normals(3), 7
    head = Head(draw(n, 6), draw(g, 4, 6), draw(4, 6), draw(4, 6), scale=0.5, mask=causal(n))
    angles = draw(n, 4)
    form = mapped_head(head, lambda rows: rotary(rows, angles.cos(), angles.sin(), layout="half"))
    if mapped == "values":  # and a sink: a key without a value
        p = torch.cat([0.75 * form.p, torch.full((len(form.p), 1), 0.25, dtype=F64)], dim=1)
        turned = TokenMap(head.values() @ draw(4, 4), draw(4, 4).expand(n, 4, 4))
        slope = torch.full_like(form.p, 0.5)
        form = dataclasses.replace(form, softmax=Softmax(p, slope, turned))
    found, blocks = form.diagnose(), form.parameter_blocks()
    norms = [float(torch.linalg.matrix_norm(blocks[name], 2)) for name in "qkv"]
    assert [found.norm_q, found.norm_k, found.norm_v] == pytest.approx(norms, rel=1e-8)
    entropy = -torch.special.xlogy(form.all_probabilities, form.all_probabilities).sum(-1)
    assert found.attention.entropy == pytest.approx(float(entropy.mean()))
    own = form.p.view(g, n, n).diagonal(dim1=-2, dim2=-1)
    assert found.attention.diagonal_mass == pytest.approx(float(own.mean()))
    assert 0 < found.attention.normalised_entropy < 1 and not found.dead
    assert found.kappa_x == pytest.approx(float(torch.linalg.cond(head.x)))


def test_identity_maps_are_diagnosed_as_the_plain_head():
    draw = normals(4)
    head = Head(draw(6, 5), draw(3, 5), draw(3, 5), draw(3, 5), scale=0.5, mask=causal(6))
    mine, plain = mapped_head(head, identity_map).diagnose(), diagnose_head(head)
    numbers = {key: value for key, value in mine.to_dict().items() if isinstance(value, float)}
    assert numbers == pytest.approx({key: plain.to_dict()[key] for key in numbers}, rel=1e-9)
    assert dataclasses.asdict(mine.attention) == pytest.approx(dataclasses.asdict(plain.attention))
    assert mine.verdict == plain.verdict and mine.explanation[:20] == plain.explanation[:20]


def test_a_collapsed_rotary_head_is_dead():
    draw = normals(5)
    w = draw(4, 4)
    head = Head(50 * torch.eye(4, dtype=F64), w, w, draw(4, 4), scale=0.5)
    found = mapped_head(head, identity_map).diagnose()
    assert found.dead and found.verdict == "dead head" and "collapsed" in found.explanation
