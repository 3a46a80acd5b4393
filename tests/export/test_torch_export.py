"""`torch.export` of a folded model: the same outputs after loading, and the graph of a plain model."""

import subprocess
import sys
from collections import Counter

import pytest
import torch

import wellcond as wc
from export.small_models import CASES, METHODS, built, first_tensor, outputs, trained


def export(model, case, count=2, **options):
    dynamic = {name: {0: torch.export.Dim.DYNAMIC} for name in case.batch(count)}
    return torch.export.export(model, (), kwargs=case.batch(count), dynamic_shapes=dynamic, **options)


def saved_and_loaded(program, path):
    torch.export.save(program, path)
    return torch.export.load(path)


def graph_of(program):
    """Operators in their order, and every stored tensor with its shape."""
    operators = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    tensors = {**program.state_dict, **program.constants}
    return operators, {name: tuple(value.shape) for name, value in tensors.items()}


# One model of each library by default, every pair in the slow suite.
DEFAULT = [("timm_vit", "polar"), ("hf_bert", "polar")]
PAIRS = [
    pytest.param(name, method, marks=() if (name, method) in DEFAULT else pytest.mark.slow)
    for name in CASES
    for method in METHODS
]


STRICT = [False, pytest.param(True, marks=pytest.mark.slow)]
ONE_BY_DEFAULT = [pytest.param(name, marks=() if name == "balanced" else pytest.mark.slow) for name in METHODS]


@pytest.mark.parametrize("name, method", PAIRS)
def test_a_folded_model_is_exported_saved_and_loaded_with_the_same_outputs(name, method, tmp_path):
    pytest.importorskip(name.partition("_")[0].replace("hf", "transformers"), reason="the library is not installed")
    case = CASES[name]
    model = trained(case, method)
    conditioned = {count: outputs(model, case, count) for count in (2, 3)}
    loaded = saved_and_loaded(export(wc.fold_(model), case), tmp_path / "model.pt2")
    for count, expected in conditioned.items():  # 3: another batch size than that of the export
        torch.testing.assert_close(outputs(loaded.module(), case, count), outputs(model, case, count), rtol=0, atol=0)
        torch.testing.assert_close(outputs(loaded.module(), case, count), expected, rtol=1e-5, atol=1e-5)
    # Zero cost: nothing of wellcond is in the program, which is that of a model that was never conditioned.
    assert graph_of(loaded) == graph_of(export(built(case), case))
    assert "wellcond" not in loaded.graph_module.code


@pytest.mark.parametrize("method", ONE_BY_DEFAULT)
def test_exporting_within_folded_leaves_the_model_as_it_was_and_outlives_it(method, tmp_path):
    case = CASES["torch_encoder"]
    model = trained(case, method)
    raw, expected = {key: value.clone() for key, value in model.state_dict().items()}, outputs(model, case)
    with wc.folded(model) as plain:
        program, state = export(plain, case), plain.state_dict()
    loaded, fresh = saved_and_loaded(program, tmp_path / "model.pt2"), built(case)
    assert graph_of(loaded) == graph_of(export(fresh, case))
    fresh.load_state_dict(state)
    for taken in (loaded.module(), fresh):
        torch.testing.assert_close(outputs(taken, case), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(value, raw[key]) for key, value in model.state_dict().items())
    assert wc.conditioning_of(model) is not None
    first_tensor(model.train()(**case.batch(2))).sum().backward()  # and it trains on


@pytest.mark.parametrize("method", ONE_BY_DEFAULT)
def test_a_model_may_be_converted_within_folded(method):
    case = CASES["torch_encoder"]
    model = trained(case, method)
    parameters, expected = dict(model.named_parameters()), outputs(model, case)
    with wc.folded(model) as plain:
        plain.double()
    assert all(value is parameters[name] and value.dtype == torch.float64 for name, value in model.named_parameters())
    doubled = first_tensor(model(case.batch(2)["src"].double()))
    torch.testing.assert_close(doubled.float(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_loaded_program_needs_no_wellcond(tmp_path):
    case = CASES["torch_encoder"]
    model = trained(case, "polar")
    expected = outputs(model, case)
    torch.export.save(export(wc.fold_(model), case), tmp_path / "model.pt2")
    torch.save({"batch": case.batch(2), "expected": expected}, tmp_path / "numbers.pt")
    code = (
        "import sys, torch\n"
        "program, numbers = torch.export.load('model.pt2'), torch.load('numbers.pt')\n"
        "torch.testing.assert_close(program.module()(**numbers['batch']), numbers['expected'], rtol=1e-5, atol=1e-5)\n"
        "assert 'wellcond' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("strict", STRICT, ids=["non_strict", "strict"])
@pytest.mark.parametrize("method", [pytest.param("polar", marks=pytest.mark.slow), "balanced"])
def test_a_model_whose_correction_follows_its_weights_must_be_folded_first(method, strict):
    case = CASES["torch_encoder"]
    model = trained(case, method)
    # A strict export raises torch's own error, which quotes ours.
    kind = torch._dynamo.exc.Unsupported if strict else wc.ConditioningError
    with pytest.raises(kind, match=r"wellcond\.fold_\(model\) first"):
        export(model, case, strict=strict)
    outputs(model, case)
    export(wc.fold_(model), case, strict=strict)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_tracing_without_folding_is_refused_too():
    case = CASES["torch_encoder"]
    with pytest.raises(wc.ConditioningError, match=r"wellcond\.fold_\(model\) first"):
        torch.jit.trace(trained(case, "balanced"), tuple(case.batch(2).values()))


@pytest.mark.parametrize("method", [pytest.param("identity", marks=pytest.mark.slow), "balanced_frozen"])
@pytest.mark.parametrize("strict", STRICT, ids=["non_strict", "strict"])
def test_a_fixed_correction_may_be_exported_and_costs_its_addition(method, strict, tmp_path):
    case = CASES["timm_vit"]
    model = trained(case, method)
    loaded = saved_and_loaded(export(model, case, strict=strict), tmp_path / "model.pt2")
    torch.testing.assert_close(outputs(loaded.module(), case, 3), outputs(model, case, 3), rtol=1e-5, atol=1e-5)
    assert "wellcond." not in " ".join(graph_of(loaded)[0])
    plain, added = (Counter(graph_of(program)[0]) for program in (export(built(case), case), loaded))
    assert sum((added - plain).values()) >= 2  # one per attention: what folding spares
