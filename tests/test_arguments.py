"""Malformed calls of the public names: an error that says what was expected and found, before anything happens."""

import copy
import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import wellcond as wc
from wellcond.arguments import check_values
from wellcond.attention.site import ModuleContext
from wellcond.init.apply import METHODS, check_options

NAN, INF = float("nan"), float("inf")
X = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))


def model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def head(**changes):
    generator = torch.Generator().manual_seed(0)
    tensors = {"x": (4, 6), "w_q": (3, 6), "w_k": (3, 6), "w_v": (3, 6)}
    given = {name: torch.randn(*shape, generator=generator) for name, shape in tensors.items()} | changes
    positional = [given.pop(name) for name in tensors]
    return wc.jacobian_spectrum(*positional, **given)


NOT_TENSORS = {
    "complex": (torch.ones(4, 6, dtype=torch.complex64), "expected real numbers, got a tensor of shape (4, 6)"),
    "empty": (torch.ones(0, 6), "expected at least one entry, got a tensor of shape (0, 6)"),
    "numpy": (np.ones((4, 6)), "expected a tensor, got ndarray"),
    "None": (None, "expected a tensor, got NoneType None"),
    "text": ("x", "expected a tensor, got str 'x'"),
    "number": (2.0, "expected a tensor, got float 2.0"),
    "vector": (torch.ones(6), "a matrix"),
    "meta": (torch.ones(4, 6, device="meta"), "on the meta device"),
    "sparse": (torch.ones(4, 6).to_sparse(), "expected a dense tensor"),
}


@pytest.mark.parametrize("name", ["x", "w_q", "w_k", "w_v", "matrix"])
@pytest.mark.parametrize("case", NOT_TENSORS)
def test_what_is_no_tensor_of_a_head_and_no_matrix_of_a_spectrum(name, case):
    value, said = NOT_TENSORS[case]
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{re.escape(said)}"):
        wc.spectrum(value) if name == "matrix" else head(**{name: value})


OPTIONS = {
    "scale": {NAN: "finite", INF: "finite", "1": "a number", True: "a number", 1j: "a number", 10**400: "float64"},
    "rtol": {NAN: "finite", -1.0: "at least 0 and below 1", 1.0: "at least 0 and below 1", "a": "a number"},
    "memory_limit": {0: "at least 1", -5: "at least 1", 1e9: "a whole number", "1": "a whole number"},
    "biases": {3: "a tuple of three", (None, None): "a tuple of three", (1.0, None, None): "expected a tensor"},
    "mask": {0.5: "expected a tensor", "causal": "expected a tensor"},
    "kv_tokens": {0.5: "expected a tensor"},
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OPTIONS.items() for value in values])
def test_options_of_a_head(name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}.*{OPTIONS[name][value]}"):
        head(**{name: value})


@pytest.mark.parametrize("role", [0, 1, 2])
def test_a_bias_of_another_length(role):
    biases = [None, None, None]
    biases[role] = torch.ones(4)
    with pytest.raises(ValueError, match=rf"b_{'qkv'[role]}: expected the shape \(3,\).*got \(4,\)"):
        head(biases=tuple(biases))


def test_numbers_that_leave_float64():
    with pytest.raises(wc.WeightError, match="too large"):
        head(x=torch.full((4, 6), 1e300, dtype=torch.float64))


def test_numpy_scalars_are_numbers():
    assert head(scale=np.float32(0.5)).condition_number == head(scale=0.5).condition_number
    report = wc.measure(model(), X, samples=np.int64(1), heads=np.arange(1), jacobian=np.bool_(False))
    assert [len(layer.heads) for layer in report.layers] == [1, 1]


VERBS = {
    "find_attention": wc.find_attention,
    "init_": wc.init_,
    "condition_": lambda m: wc.condition_(m, "balanced"),
    "recondition_": lambda m: wc.recondition_(m, {"method": "balanced", "projections": "qkv", "sites": []}),
    "fold_": wc.fold_,
    "folded": lambda m: wc.folded(m).__enter__(),
    "conditioning_of": wc.conditioning_of,
    "measure": lambda m: wc.measure(m, X),
    "measure of sites": lambda m: wc.measure(m, X, sites="layers.*"),
    "diagnose": lambda m: wc.diagnose(m, X),
}
NO_MODELS = {
    "None": (None, "got NoneType None"),
    "text": ("vit_tiny", "got str 'vit_tiny'; build the model first"),
    "class": (nn.Linear, "give an instance of the class"),
    "list": ([1], r"got list \[1\]"),
    "state": ({"weight": X}, "call load_state_dict"),
    "function": (len, "got builtin_function_or_method"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model(verb, case):
    value, said = NO_MODELS[case]
    with pytest.raises(TypeError, match=f"^model: expected a torch.nn.Module, .*{said}"):
        VERBS[verb](value)


BY_SITES = {
    "init_": lambda m, sites: wc.init_(m, "gaussian", sites=sites),
    "condition_": lambda m, sites: wc.condition_(m, "balanced", sites=sites),
    "measure": lambda m, sites: wc.measure(m, X, sites=sites, jacobian=False),
    "diagnose": lambda m, sites: wc.diagnose(m, X, sites=sites),
    "ConditionTracker": lambda m, sites: wc.ConditionTracker(m, X, sites=sites, every={9}, weights_every={0}),
}


def changed(before, after):
    """Layers whose weights, or the weights that they use, are others."""
    pairs = zip(wc.find_attention(before), wc.find_attention(after), strict=True)
    return [one.name for one, other in pairs if not torch.equal(one.q.read(), other.q.read())]


def names_of(result):
    if isinstance(result, wc.ConditionTracker):
        return sorted({point.layer for point in result.points})
    return [layer.name for layer in result.layers]


CHOSEN = {
    "all by a pattern": (lambda sites: "layers.*", 2),
    "a path": (lambda sites: "layers.1", 1),
    "a set of signs": (lambda sites: "*.[1]*", 1),
    "a part of paths": (lambda sites: "self_attn", 2),
    "several patterns": (lambda sites: ("layers.1", "layers.0*"), 2),
    "a site": (lambda sites: sites[1], 1),
    "a site beside a pattern": (lambda sites: [sites[1], "layers.0"], 2),
}


@pytest.mark.parametrize("verb", BY_SITES)
@pytest.mark.parametrize("case", CHOSEN)
def test_sites_and_patterns_of_paths(verb, case):
    given, (choose, count) = model(), CHOSEN[case]
    before = copy.deepcopy(given)
    result = BY_SITES[verb](given, choose(wc.find_attention(given)))
    found = changed(before, given) if result is given else names_of(result)
    assert found == ["layers.0.self_attn", "layers.1.self_attn"][-count:]


@pytest.mark.parametrize("verb", BY_SITES)
def test_a_pattern_that_matches_nothing_names_close_ones_and_changes_nothing(verb):
    given = model()
    before = copy.deepcopy(given)
    with pytest.raises(wc.SiteNotFoundError, match=r"no attention 'layer\.1'; did you mean .*'layers.1.self_attn'"):
        BY_SITES[verb](given, "layer.1")
    with pytest.raises(wc.SiteNotFoundError, match=r"no attention 'blocks\.\*'.* The model has 'layers.0.self_attn'"):
        BY_SITES[verb](given, "blocks.*")
    for wrong in (3, 0.5, [None], [4], torch.ones(2), given):
        with pytest.raises(TypeError, match="^sites: expected sites"):
            BY_SITES[verb](given, wrong)
    with pytest.raises(ValueError, match="at least one attention site"):
        BY_SITES[verb](given, [])
    assert not changed(before, given)


def place():
    module = nn.Module()
    module.q, module.k, module.v = (nn.Linear(8, 8) for _ in range(3))
    module.qkv = nn.Linear(8, 24)
    return ModuleContext("", module, module)


BUILDERS = {
    "separate": lambda p, **o: wc.build_site(p, {"q": p.module.q, "k": p.module.k, "v": p.module.v}, **o),
    "fused": lambda p, **o: wc.build_site(p, {"qkv": p.module.qkv}, **o),
}
DECLARED = {
    "num_heads": [2.0, 0, -2, True, "2", None, NAN, torch.tensor([2, 2])],
    "num_kv_heads": [2.0, 0, -1, True, "2"],
    "head_dim": [4.0, 0, "4"],
    "output": [3, "out"],
    "scale": [NAN, INF, "0.5", True],
    "causal": [1, "yes"],
    "rotary": [None, 1],
    "kind": ["hard", 3],
    "qk_norm": ["l3"],
    "modifiers": ["gated", [1], None],
    "roles": [{}, 3],
    "windowed": [True],
}


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("name", DECLARED)
def test_what_an_adapter_may_not_declare(builder, name):
    for value in DECLARED[name]:
        with pytest.raises((TypeError, ValueError), match="expected") as error:
            BUILDERS[builder](place(), **({"num_heads": 2} | {name: value}))
        assert "unsupported operand" not in str(error.value)


def test_what_only_a_fused_projection_declares():
    fused = nn.Linear(8, 24)
    for wrong in ({"shards": 0}, {"shards": 1.0}, {"value_head_dim": 4.0}):
        with pytest.raises((TypeError, ValueError), match="expected"):
            wc.build_site(place(), {"qkv": fused}, num_heads=2, **wrong)
    for projections in ({"qkq": fused}, {"qk": fused}, {3: fused}, fused, {"qkv": fused, "q": fused}):
        with pytest.raises((TypeError, ValueError), match="^projections: expected"):
            wc.build_site(place(), projections, num_heads=2)
    with pytest.raises(TypeError, match="expected a projection such as nn.Linear, got float 2.0"):
        wc.build_site(place(), {"qkv": 2.0}, num_heads=2)
    with pytest.raises(TypeError, match="^place: expected"):
        wc.build_site("blocks.0", {"qkv": fused}, num_heads=2)


MEASURED = {
    "layers": [3, "0", [0.0], [True], [None]],
    "heads": [0, "all", ["0"], [1.0]],
    "settings": [{}, 3, "wide"],
    "resume": [3, [], True],
    "progress": [3, None],
    "samples": [0, -1, 1.0, True, None, NAN, "1"],
    "jacobian": [None, 1, "no"],
    "biases": [None, 0],
    "output": [None, "yes"],
    "memory_limit": [0, 1e9, "1 GB"],
}


@pytest.mark.parametrize("name", MEASURED)
def test_options_of_a_measurement(name):
    for value in MEASURED[name]:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            wc.measure(model(), X, **{name: value})


@pytest.mark.parametrize("batch", [None, 3, NAN, "text", b"", 1j, True])
@pytest.mark.parametrize("verb", [wc.measure, wc.diagnose])
def test_what_is_no_batch(verb, batch):
    if batch is None and verb is wc.diagnose:
        return  # a diagnosis of the weights alone
    with pytest.raises(TypeError, match="^batch: expected what the model is called with"):
        verb(model(), batch)


def test_a_batch_without_samples():
    for verb in (wc.measure, wc.diagnose):
        with pytest.raises(
            ValueError, match=r"^batch: expected at least one sample, got a tensor of shape \(0, 5, 8\)"
        ):
            verb(model(), torch.ones(0, 5, 8))


def test_other_arguments():
    with pytest.raises(wc.WellcondError, match="not a report"):
        wc.MeasurementReport.from_json(3)
    with pytest.raises(TypeError, match="^generator: expected"):
        wc.init_(model(), "gaussian", generator=0)
    with pytest.raises(TypeError, match="^settings: expected a mapping"):
        wc.recondition_(model(), "balanced")
    with pytest.raises(ValueError, match="^settings: expected what conditioning_of"):
        wc.recondition_(model(), {"method": "balanced"})
    with pytest.raises(TypeError, match="a number, a slice or a module path"):
        wc.find_attention(model())[1.5]
    with pytest.raises(TypeError, match="^strict: expected True or False"):
        wc.find_attention(model(), strict=None)
    slot = wc.find_attention(model())[0].q
    with pytest.raises(TypeError, match="^heads: expected a tensor"):
        slot.write_(3.0)
    with pytest.raises(ValueError, match=r"expected a bias of shape \(2, 4\), got \(8,\)"):
        slot.write_bias_(torch.ones(8))
    for name in ("trained", "jacobian"):
        with pytest.raises(TypeError, match=f"^{name}: expected True or False"):
            wc.diagnose(model(), X, **{name: torch.ones(2)})


# Methods by name, and which values their options may have


WRONG = [
    ("gaussian", "std", ["abc", NAN, INF, -0.02, 0, True, [1.0]], "a finite number above 0 or None"),
    ("gaussian", "tokens", [1.5], "a whole number"),
    ("gaussian", "value", ["shared"], ("gaussian", "per_head", "joint")),
    ("gaussian", "projections", [3], "text"),
    ("conditioned", "value_scale", ["big"], "a finite number or one of 'default'"),
    ("conditioned", "match_norm", ["yes"], "True or False"),
    ("conditioned", "output", ["joint"], "True or False or one of 'identity', 'orthogonal'"),
    ("mimetic", "qk_sign", [2], (1, -1)),
    ("default", "rule", [None], "one of 'family', 'torch'"),
    ("weight_selection", "exclude", ["head"], "a list of text"),
    ("weight_selection", "teacher", ["big"], "a Module"),
]


@pytest.mark.parametrize(("method", "option", "values", "expected"), WRONG)
def test_a_wrong_value_is_refused_before_the_model_is_looked_at(method, option, values, expected):
    needed = {"teacher": nn.Linear(2, 2)} if method == "weight_selection" else {}
    for value in values:
        options = needed | {option: value}
        for ask in (lambda: check_options(method, options), lambda: wc.init_(None, method, **options)):  # noqa: B023
            with pytest.raises(wc.OptionError, match=option) as caught:
                ask()
            assert caught.value.expected == expected and caught.value.found is value


def test_options_that_exclude_each_other_are_refused_without_a_model():
    with pytest.raises(wc.OptionError, match="sets q and k together"):
        check_options("gaussian", {"keys": "tied", "projections": "qv"})
    with pytest.raises(wc.OptionError, match="an own_token between"):
        check_options("conditioned", {"keys": "tied", "own_token": 1.5})


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_default_is_a_value_that_is_allowed(method):
    parameters = inspect.signature(METHODS[method]).parameters.values()
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    check_options(method, options | ({"teacher": nn.Linear(2, 2)} if method == "weight_selection" else {}))


def test_a_name_of_ours_is_taken_and_a_users_may_be_replaced():
    for verb, name in ((wc.register_init, "gaussian"), (wc.register_init, "polar"), (wc.register_condition, "polar")):
        with pytest.raises(wc.OptionError, match=rf"'{name}' is .*, already; choose another name"):
            verb(name)(lambda context: [])
    with pytest.raises(wc.OptionError, match="expected a word such as 'my_method', got 'two words'"):
        wc.register_init("two words")(lambda context: [])
    for factor in (1.0, 2.0):
        wc.register_init("again")(
            lambda context, factor=factor: [(context.sites[0].q, context.sites[0].q.read() * factor)]
        )
    model = nn.MultiheadAttention(8, 2)
    before = model.in_proj_weight[:8].clone()
    assert torch.equal(wc.init_(model, "again").in_proj_weight[:8], 2 * before)
    del METHODS["again"]


def annotated(*, names: list[str] = [], where: "Path | None" = None, call: Callable[[int], int] | None = None):  # noqa: B006, F821
    pass


def test_annotations_that_mean_nothing_here_are_passed_over():
    check_values(annotated, "annotated", {"names": "no list", "where": 1, "call": 2})  # Path is not imported
    annotated.__annotations__.pop("where")
    check_values(annotated, "annotated", {"call": 2, "names": ["a"], "other": 1})
    with pytest.raises(wc.OptionError, match="expected a list of text, got 'no list'") as caught:
        check_values(annotated, "annotated", {"names": "no list"})
    assert caught.value.expected == "a list of text" and caught.value.found == "no list"
