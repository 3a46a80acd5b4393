import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lab.helpers import same_state, tiny_vit
from wellcond.attention.find import find_attention
from wellcond.conditioning.attach import corrections_of
from wellcond.errors import RecipeError
from wellcond.lab.methods import MethodSettings, check_distinct, parse_methods, split_methods


def parse(text):
    return MethodSettings.model_validate(text)


def slug(label):
    return MethodSettings(label=label).slug


def problem(spec):
    with pytest.raises(ValidationError) as caught:
        MethodSettings.model_validate(spec)
    return caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
("default", ("default", {}, None, {}, "qkv")),
("identity(lam=10)", ("default", {}, "identity", {"lam": 10}, "qkv")),
(" identity( lam = 1e-3 , layout=joint ) ",
         ("default", {}, "identity", {"lam": 0.001, "layout": "joint"}, "qkv")),
("identity(lam={q: 1, v: 2.5})", ("default", {}, "identity", {"lam": {"q": 1, "v": 2.5}}, "qkv")),
("conditioned + balanced(target=1.5, frozen=true)",
         ("conditioned", {}, "balanced", {"target": 1.5, "frozen": True}, "qkv")),
("balanced+conditioned(output=orthogonal)", ("conditioned", {"output": "orthogonal"}, "balanced", {}, "qkv")),
],
)  # fmt: skip
def test_text_gives_the_method(text, expected):
    method = parse(text)
    assert (
        method.init,
        method.init_options,
        method.condition,
        method.condition_options,
        method.projections,
    ) == expected
    assert method.label == text.strip()


FIELDS = [
    {},
    {"init": "gaussian", "sites": "blocks.*"},
    {"init": "conditioned", "init_options": {"orthogonal": "qr", "value_scale": 1.1754943508222875e-38}},
    {"init": "conditioned", "init_options": {"output": "identity", "tokens": 10**6}, "sites": "[ab], c=d"},
    {"init": "weight_selection", "init_options": {"teacher": "it's, large", "exclude": ["head", "blocks.0"]}},
    {"init": "weight_selection", "init_options": {"teacher": "a", "exclude": []}, "sites": 'a "quoted" name'},
    {"condition": "identity", "condition_options": {"lam": {"q": 1, "v": 2.5}, "layout": "per_head"}},
    {"condition": "identity", "condition_options": {"lam": -1e9}, "projections": "kv", "tokens": {"positions": 25}},
    {"init": "conditioned", "condition": "balanced", "condition_options": {"target": 1.5, "frozen": False}},
    {"tokens": {"embeddings": 1e-3, "positions": 1e6}},
    {"tokens": {"embeddings": 3}, "sites": "blocks.*", "condition": "balanced"},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_canonical_text_gives_the_same_method(fields):
    method = MethodSettings(**fields)
    again = parse(method.canonical())
    assert again.model_dump(mode="json") == method.model_dump(mode="json")
    assert again.canonical() == method.canonical() == method.label


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("conditoned", r"unknown method: got 'conditoned', .*'mimetic'.*'balanced'.* Did you mean 'conditioned'\?"),
        ("identity(lamda=1)", r"unknown option of 'identity': got 'lamda', expected one of 'lam', 'layout'"),
        ("weight_selection", r"'weight_selection' needs the option teacher="),
        ("gaussian(std=abc)", r"std of 'gaussian': expected a finite number above 0 or None, got 'abc'"),
        ("conditioned(projections=qx)+polar", r"unknown projection: got 'x'"),
        ("polar+balanced", r"names two methods of the same kind: polar and balanced"),
        ("identity(10)", r"expected options such as lam=10 in 'identity\(10\)', found '10'"),
        ("identity(lam=1, lam=2)", r"the option 'lam' appears twice"),
        ('conditioned(sites="a.*")+polar(sites="b.*")', r"names two patterns of sites"),
        ("identity(lam=[)", r"expected brackets in pairs, found 'identity\(lam=\[\)'"),
        ("identity(lam={q: 1, q: 2})", r"lam in .* is not YAML.*'q' appears twice"),
        ("identity(lam=(1, 2))", r"expected options such as lam=10 in .*, found 'lam=\(1, 2\)'"),
        ("(conditioned)", r"expected a method such as conditioned.*found '\(conditioned\)'"),
        ("identity(lam.q=1)", r"expected options such as lam=10 in"),
        ("conditioned" + "+polar" * 5000, r"at most 20000 characters, found 30011"),
        ("[" * 19000, r"expected brackets in pairs"),
        ("", r"expected a method such as conditioned"),
        ({"condition_options": {"lam": 1}}, r"belong to a condition, which is missing"),
        ({"innit": "default"}, r"unknown field: got 'innit', .*Did you mean 'init'"),
    ],
)
def test_errors_say_what_is_wrong_and_what_is_allowed(spec, message):
    assert re.search(message, problem(spec), flags=re.DOTALL)


LABELS = st.one_of(
    st.text(min_size=1, max_size=20),
    st.from_regex(r"[ab](\+[ab])?(\([ab]=[ab](, ?[ab]=[ab])?\))?(\+[ab])?", fullmatch=True),
    st.text("ab-+=(), ._A", min_size=1, max_size=7),
)


@given(LABELS, LABELS)
def test_different_labels_have_different_folders(a, b):
    assert (slug(a) == slug(b)) == (a == b)


def test_a_list_of_methods_is_split_outside_brackets():
    found = parse_methods("default, identity(lam=2, layout=joint),conditioned+polar")
    assert [method.label for method in found] == ["default", "identity(lam=2, layout=joint)", "conditioned+polar"]
    assert split_methods("a(b='x,y'),c(d=\"e\\\",f\"),it's,g") == ["a(b='x,y')", 'c(d="e\\",f")', "it's", "g"]
    with pytest.raises(RecipeError, match="--methods: .*'xx'"):
        parse_methods("default,xx")


def test_methods_must_differ():
    with pytest.raises(RecipeError, match="'polar' and 'polar' are the same"):
        parse_methods("polar, polar")
    with pytest.raises(RecipeError, match="'identity.lam=1.' and 'b' are the same"):
        check_distinct(
            [*parse_methods("identity(lam=1)"), parse("identity(lam=1.0)").model_copy(update={"label": "b"})]
        )
    check_distinct(parse_methods("identity(lam=1), identity(lam=2), identity"))


def test_default_leaves_every_bit():
    model = tiny_vit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert parse("default").apply_(model, seed=1) is model
    assert same_state(model.state_dict(), before) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("text", ["gaussian", "conditioned", "mimetic", "orthogonal", "default(rule=torch)"])
def test_a_seed_fixes_the_weights(text):
    def made(seed):
        torch.manual_seed(0)
        return parse(text).apply_(tiny_vit(), seed=seed).state_dict()

    first, again, other = made(1), made(1), made(2)
    assert same_state(first, again) and not same_state(first, other)


def test_a_condition_acts_on_the_chosen_projections():
    torch.manual_seed(0)
    plain = find_attention(tiny_vit())[0]
    torch.manual_seed(0)
    model = parse("identity(lam=10, projections=v)").apply_(tiny_vit(), seed=0)
    site = find_attention(model)[0]
    assert corrections_of(model.blocks[0].attn.qkv)
    assert torch.equal(site.q.read(), plain.q.read()) and not torch.equal(site.v.read(), plain.v.read())


@pytest.mark.parametrize("text", ['conditioned(sites="blocks.1.*")', 'polar(sites="*.1.attn")', "gaussian+balanced"])
def test_a_method_acts_on_the_chosen_attentions(text):
    torch.manual_seed(0)
    plain = find_attention(tiny_vit())
    torch.manual_seed(0)
    sites = find_attention(parse(text).apply_(tiny_vit(), seed=0))
    changed = [not torch.equal(ours.q.read(), theirs.q.read()) for ours, theirs in zip(sites, plain, strict=True)]
    assert changed == [parse(text).sites == "*", True]


def test_a_pattern_that_fits_nothing_names_what_there_is():
    with pytest.raises(RecipeError, match=r"blocks.0.attn, .*'layers.\*'"):
        parse('conditioned(sites="layers.*")').apply_(tiny_vit(), seed=0)
