"""Adapters and searching a model: what a user's adapter declares is proven by the module's own forward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellcond as wc
from wellcond.attention import find
from wellcond.attention.layout import head_rows
from wellcond.attention.site import AttentionSite
from wellcond.attention.slot import Slot


class Mixed(nn.Module):
    """One projection for q, k, v, read in any of several ways."""

    def __init__(self, width=12, heads=4, kv_heads=None, reading="blocks", rotary=False):
        super().__init__()
        self.heads, self.kv_heads, self.reading, self.rotary = heads, kv_heads or heads, reading, rotary
        self.head_dim = width // heads if width % 2 else 2 * (width // (2 * heads)) or 2
        self.mix = nn.Linear(width, (heads + 2 * self.kv_heads) * self.head_dim)
        self.out = nn.Linear(heads * self.head_dim, width)

    def forward(self, x):
        b, n, _ = x.shape
        mixed, d, groups = self.mix(x), self.head_dim, self.heads // self.kv_heads
        if self.reading == "groups":
            mixed = mixed.view(b, n, self.kv_heads, groups + 2, d).transpose(1, 2)
            q, k, v = mixed.split([groups, 1, 1], dim=3)
            q = q.transpose(2, 3).reshape(b, self.heads, n, d)
            k, v = (t[:, :, :, 0] for t in (k, v))
        elif self.reading == "channels":  # heads change fastest, which no builder expresses
            q, k, v = (t.view(b, n, d, self.heads).permute(0, 3, 1, 2) for t in mixed.chunk(3, -1))
        else:
            sizes = {"q": self.heads * d, "k": self.kv_heads * d, "v": self.kv_heads * d}
            order = self.reading if self.reading != "blocks" else "qkv"
            parts = dict(zip(order, mixed.split([sizes[letter] for letter in order], -1), strict=True))
            q, k, v = (parts[letter].view(b, n, -1, d).transpose(1, 2) for letter in "qkv")
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


def rotate(x):
    angle = torch.arange(x.shape[-2])[:, None] * 0.3
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


class Separate(nn.Module):
    def __init__(self, width=12, heads=3):
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x):
        q, k, v = (t(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.a, self.b, self.c))
        p = (q @ k.mT * 0.25).softmax(-1)
        return self.out((p @ v).transpose(1, 2).flatten(2))


class OwnKernel(Mixed):
    """The softmax is hidden in a function that no recorder sees."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.mix(x).chunk(3, -1))
        weights = (q[..., :, None, :] * k[..., None, :, :]).sum(-1).exp()
        y = (weights[..., None] * v[..., None, :, :]).sum(-2) / weights.sum(-1, keepdim=True)
        return self.out(y.transpose(1, 2).flatten(2))


class NeedsMore(Mixed):
    def forward(self, x, table, position):
        return super().forward(x + table["shift"][position])


def declare(cls, example=None, letters="qkv", **declared):
    @wc.register_adapter(cls, example=example)
    def adapter(place):
        m = place.module
        options = {"num_heads": m.heads, "num_kv_heads": m.kv_heads, "output": m.out} | declared
        return wc.build_site(place, {letters: m.mix}, **options)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


WRONG = {
    "arrangement": (
        dict(reading="groups"),
        dict(arrangement="blocks"),
        '{"qkv": m.mix}, num_heads=4, arrangement="groups"',
    ),
    "interleaving": (
        dict(reading="blocks"),
        dict(arrangement="groups"),
        '{"qkv": m.mix}, num_heads=4, arrangement="blocks"',
    ),
    "order": (dict(reading="vkq"), dict(), '{"vkq": m.mix}, num_heads=4, arrangement="blocks"'),
    "queries and keys": (dict(reading="kqv"), dict(), '{"kqv": m.mix}, num_heads=4, arrangement="blocks"'),
    "too few heads": (dict(), dict(num_heads=2, num_kv_heads=2), 'num_heads=4, arrangement="blocks"'),
    "too many heads": (dict(width=16), dict(num_heads=8, num_kv_heads=8), 'num_heads=4, arrangement="blocks"'),
    "grouped arrangement": (
        dict(heads=4, kv_heads=2, reading="groups"),
        dict(arrangement="blocks"),
        'num_heads=4, num_kv_heads=2, arrangement="groups"',
    ),
    "rotary": (
        dict(reading="groups", rotary=True),
        dict(arrangement="blocks"),
        '{"qkv": m.mix}, num_heads=4, arrangement="groups"',
    ),
    "channels": (dict(reading="channels"), dict(), "contradicts what the adapter declares"),
    "scale": (dict(), dict(scale=0.3), "scale is declared as 0.3, and its logits are 0.7071068 q.k"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_declaration_is_an_error_that_says_what_the_forward_pass_reads(case):
    built, declared, said = WRONG[case]
    model = Mixed(**built)
    declare(Mixed, **declared)
    before = state(model)
    x = torch.randn(2, 5, model.mix.in_features)
    verbs = {"find": wc.find_attention, "measure": lambda m: wc.measure(m, x), "diagnose": lambda m: wc.diagnose(m, x)}
    for verb in [*verbs.values(), lambda m: wc.init_(m, "conditioned"), lambda m: wc.condition_(m, "balanced")]:
        with pytest.raises(wc.UnsupportedLayoutError, match="Correct what the adapter of Mixed declares") as error:
            verb(model)
        assert said in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())


RIGHT = {
    "blocks": (dict(), dict(scale=2**-0.5)),
    "groups": (dict(reading="groups"), dict(arrangement="groups")),
    "order": (dict(reading="vkq"), dict(letters="vkq")),
    "grouped queries": (dict(heads=4, kv_heads=2, reading="groups"), dict(arrangement="groups")),
    "rotary": (dict(rotary=True), dict(rotary=True)),
    "one head": (dict(heads=1), dict(arrangement="groups")),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_declaration_is_proven_with_its_facts(case):
    built, declared = RIGHT[case]
    model = nn.Sequential(Mixed(**built), Mixed(**built))
    declare(Mixed, **declared)
    sites = wc.find_attention(model)
    d = model[0].head_dim
    assert [site.evidence for site in sites] == ["forward"] * 2
    assert sites[0].scale == pytest.approx(d**-0.5) and sites[0].rotary == (case == "rotary")


def test_the_proof_runs_once_per_class_and_configuration():
    class Counted(Mixed):
        runs = 0

        def forward(self, x):
            type(self).runs += 1
            return super().forward(x)

    declare(Counted)
    model = nn.Sequential(*(Counted() for _ in range(4)))
    wc.find_attention(model)
    runs = Counted.runs
    wc.find_attention(model)
    assert Counted.runs == runs > 0
    model.append(Counted(heads=2))
    wc.find_attention(model)
    assert Counted.runs > runs
    model[1].reading = "groups"
    with pytest.raises(wc.UnsupportedLayoutError, match=r"^1 \(Counted\)"):
        wc.find_attention(model)
    assert [site.name for site in wc.find_attention(model, strict=False)] == ["0", "2", "3", "4"]


def test_swapped_projections_are_named():
    @wc.register_adapter(Separate)
    def adapter(place):
        m = place.module
        return wc.build_site(place, {"q": m.b, "k": m.a, "v": m.c}, num_heads=m.heads)

    with pytest.raises(
        wc.UnsupportedLayoutError, match=r"build_site\(place, {\"q\": m.a, \"k\": m.b, \"v\": m.c}, num_heads=3\)"
    ):
        wc.find_attention(Separate())


@pytest.mark.parametrize("part", ["output", "query"])
def test_a_transposed_weight_is_refused(part):
    @wc.register_adapter(Separate)
    def adapter(place):
        m, rows = place.module, head_rows(3, 4)
        q = Slot(m.a, "weight", rows, transposed=part == "query")
        o = Slot(m.out, "weight", rows, transposed=part == "output", heads_on_input=True)
        k, v = Slot(m.b, "weight", rows), Slot(m.c, "weight", rows)
        return AttentionSite(place.name, m, q, k, v, o)

    with pytest.raises(wc.UnsupportedLayoutError, match="confirms transposed=False for"):
        wc.find_attention(Separate())


def test_a_kernel_that_shows_no_softmax_is_proven_by_its_output():
    declare(OwnKernel)
    [site] = wc.find_attention(OwnKernel())
    assert site.evidence == "forward" and site.scale is None
    declare(OwnKernel, arrangement="groups")
    with pytest.raises(wc.UnsupportedLayoutError, match='arrangement="blocks"'):
        wc.find_attention(OwnKernel())


def test_what_cannot_be_proven_is_said():
    declare(NeedsMore)
    with pytest.warns(wc.LayoutWarning, match=r"not proven: .*example="):
        [site] = wc.find_attention(NeedsMore())
    assert site.evidence == "declared"


def test_arguments_of_the_forward_pass_can_be_given():
    model = NeedsMore()
    declare(NeedsMore)
    with pytest.warns(wc.LayoutWarning, match="could not be tried"):
        wc.find_attention(model)
    shift = {"shift": torch.randn(3, 12)}
    declare(NeedsMore, example=lambda m: (torch.randn(1, 4, 12), shift, 2))
    assert wc.find_attention(model)[0].evidence == "forward"
    declare(NeedsMore, example=lambda m: (torch.randn(1, 4, 12), shift, 2), arrangement="groups")
    with pytest.raises(wc.UnsupportedLayoutError, match='arrangement="blocks"'):
        wc.find_attention(model)


def test_measuring_compares_a_layout_that_was_not_proven_with_the_batch():
    batch = (torch.randn(2, 5, 12), {"shift": torch.randn(3, 12)}, 1)
    model = NeedsMore()
    declare(NeedsMore, arrangement="groups", scale=2**-0.5)
    with pytest.warns(wc.LayoutWarning), pytest.raises(wc.UnsupportedLayoutError, match="multiplies something else"):
        wc.measure(model, batch)
    declare(NeedsMore, arrangement="groups")  # without a scale it is not declared plain: derivatives of the module
    with pytest.warns(wc.LayoutWarning):
        report = wc.measure(model, batch, layers=[0], heads=[0])
    assert report.layers[0].heads[0].how.startswith("generic derivatives")
    declare(NeedsMore, scale=2**-0.5)
    with pytest.warns(wc.LayoutWarning):
        report = wc.measure(model, batch)
    assert [head.how for head in report.layers[0].heads] == ["structured: plain softmax"] * 4


@pytest.mark.parametrize("wrong", [3, None, torch.nn.Linear(2, 2)])
def test_targets_and_functions_that_cannot_be(wrong):
    with pytest.raises(TypeError, match="expected a class or its dotted name"):
        wc.register_adapter(wrong)
    with pytest.raises(TypeError, match="expected a function from a place"):
        wc.register_adapter("no.such.Class")("a string")
    with pytest.raises(TypeError, match="example: expected a function"):
        wc.register_adapter("no.such.Class", example=3)


def test_a_model_is_searched_once_for_all_who_ask(monkeypatch):
    from wellcond.attention import checks

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    scan = find.scan_attention(model)
    monkeypatch.setattr(checks, "scan_attention", None)
    assert [site.name for site in checks.choose_sites(model, "layers.1", scan=scan)] == ["layers.1.self_attn"]
    assert checks.choose_sites(model, None, scan=scan) == scan.found() == scan.sites


def test_modules_without_projections_are_not_read(monkeypatch):
    """Of a model of a known family, and of blocks around an attention, no reading is listed."""
    from wellcond.attention import readings

    seen = []
    original = readings._module_readings
    monkeypatch.setattr(readings, "_module_readings", lambda place: seen.append(place.name) or original(place))
    wc.find_attention(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    assert not seen
    declare(Mixed)
    wc.find_attention(nn.Sequential(nn.LayerNorm(12), Mixed(), nn.Sequential(nn.Linear(12, 12), nn.GELU())))
    assert not seen
