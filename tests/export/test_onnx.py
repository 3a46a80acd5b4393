"""ONNX export of a folded model, checked by onnx and run by ONNX Runtime."""

from collections import Counter

import pytest
import torch

import wellcond as wc
from export.small_models import CASES, never_conditioned, outputs, trained

MISSING = "onnx, onnxscript and onnxruntime are not installed; they are part of wellcond[dev]"
onnx, onnxruntime, _ = (pytest.importorskip(name, reason=MISSING) for name in ("onnx", "onnxruntime", "onnxscript"))

pytestmark = pytest.mark.filterwarnings(
    "ignore:# The axis name. batch will not be used:UserWarning",  # two inputs share it
)


def export(model, case, path):
    batch = case.batch(2)
    dynamic = {name: {0: torch.export.Dim("batch", min=1, max=64)} for name in batch}
    torch.onnx.export(model, (), path, kwargs=batch, dynamic_shapes=dynamic, dynamo=True, verbose=False)
    return path


def run(path, case, count):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in case.batch(count).items()})[0])


def contents(path):
    """Operators and stored tensors of a file."""
    model = onnx.load(path)
    assert not [f.name for f in model.functions] and {o.domain for o in model.opset_import} <= {""}
    initializers = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    return Counter(node.op_type for node in model.graph.node), initializers


# Every model once, every method at least once; the full table is that of torch.export, which this export starts from.
PAIRS = [
    pytest.param("timm_vit", "polar", marks=pytest.mark.slow),
    pytest.param("timm_swin", "balanced", marks=pytest.mark.slow),
    pytest.param("timm_xcit", "polar", marks=pytest.mark.slow),
    pytest.param("hf_bert", "balanced_frozen", marks=pytest.mark.slow),
    pytest.param("hf_gpt2", "identity", marks=pytest.mark.slow),
    ("torch_encoder", "balanced"),
]


@pytest.mark.parametrize("name, method", PAIRS)
def test_a_folded_model_runs_in_onnx_runtime_with_the_same_outputs(name, method, tmp_path):
    case = CASES[name]
    model = trained(case, method)
    conditioned = {count: outputs(model, case, count) for count in (1, 2, 5)}
    with wc.folded(model) as plain:
        path = export(plain, case, tmp_path / "folded.onnx")
    onnx.checker.check_model(path, full_check=True)
    for count, expected in conditioned.items():
        torch.testing.assert_close(run(path, case, count), expected, rtol=1e-4, atol=1e-4)
    # Zero cost: the file is that of a model that was never conditioned and has these weights.
    assert contents(path) == contents(export(never_conditioned(model, case), case, tmp_path / "plain.onnx"))


@pytest.mark.filterwarnings(
    "ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning",
    "ignore:The feature will be removed:DeprecationWarning",
    "ignore:`torch.jit.trace:FutureWarning",
    "ignore:`torch.jit.trace:DeprecationWarning",
)
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_model_that_is_not_folded_is_refused(dynamo, tmp_path):
    case, path = CASES["torch_encoder"], tmp_path / "model.onnx"
    model = trained(case, "polar")
    with pytest.raises(Exception, match=r"wellcond\.fold_\(model\) first"):
        torch.onnx.export(model, tuple(case.batch(2).values()), path, dynamo=dynamo, verbose=False)
    assert not path.exists()
