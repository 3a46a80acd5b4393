"""What timm asks of every model in its own tests, asked of conditioned and of folded models: one small model a family.

timm's tests are not in its wheel; these ask the same (forward, backward, features, intermediate outputs, and the first
two through torch.fx) of the smallest model of each architecture file in which attention is found. Where the plain model
fails as well, the question is timm's own and the test is skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models import get_notrace_functions, get_notrace_modules
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import wellcond as wc

DEEP = """
    beit_base_patch16_224 cait_xxs24_224 deepseek_vit_412m deit_tiny_patch16_224 vit_tiny_patch16_dinov3_qkvb
    eva02_tiny_patch14_224 naflexvit_base_patch16_parfac_gap qwen3_vit_88m tnt_s_legacy_patch16_224
    vit_tiny_r_s16_p8_224 samvit_base_patch16_224 xcit_nano_12_p8_224
""".split()
MODELS = """
    halonet_h1 convit_tiny cpubone_nano crossvit_tiny_240 csatv2 davit_tiny edgenext_xx_small efficientformer_l1
    fastvit_mci0 gcvit_xxtiny hiera_tiny_224 sam2_hiera_tiny lowformer_b0 test_coatnet caformer_s18 mobilenetv5_base
    mobilevit_xxs nest_tiny nextvit_small pit_ti_224 pvt_v2_b0 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    swinv2_cr_tiny_224 tiny_vit_5m_224 twins_svt_small visformer_tiny test_vit test_vit_relpos vitamin_small_224
    volo_d1_224
""".split()
"""The smallest of every architecture file; those in `DEEP` are large, so that two blocks of them are built."""
SMALL_IMAGE = 128
TRACER = {
    "leaf_modules": get_notrace_modules(),
    "autowrap_functions": get_notrace_functions(),
    "param_shapes_constant": True,
}


def plain(model: nn.Module) -> nn.Module:
    return model


def conditioned(model: nn.Module) -> nn.Module:
    return wc.condition_(model, "balanced", sites=wc.find_attention(model, strict=False))


def folded(model: nn.Module) -> nn.Module:
    return wc.fold_(conditioned(model))


Prepare = Callable[[nn.Module], nn.Module]


def create(name: str, prepare: Prepare, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"depth": 2} if name in DEEP else {}
    return prepare(timm.create_model(name, **sizes, **arguments))


def images(model: nn.Module, count: int = 1) -> Tensor:
    """As small as the model says that its images may be."""
    config: Any = model.default_cfg
    channels, *size = config["input_size"]
    if not config.get("fixed_input_size") and max(size) > SMALL_IMAGE:
        size = (config.get("min_input_size") or (channels, SMALL_IMAGE, SMALL_IMAGE))[1:]
    return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(1))


def together(outputs: Any) -> Tensor:
    return torch.cat(outputs) if isinstance(outputs, (tuple, list)) else outputs


def assert_all_have_gradients(model: nn.Module, names: set[str]) -> None:
    missing = sorted(names - {name for name, parameter in model.named_parameters() if parameter.grad is not None})
    assert not missing, f"{len(missing)} parameters without gradient: {missing[:4]}"


def forward(name: str, prepare: Prepare) -> None:
    model = create(name, prepare).eval()
    x = images(model)
    output = together(model(x))
    assert len(output) == 1 and not output.isnan().any()
    try:
        model.set_grad_checkpointing()  # type: ignore[operator]
    except Exception:  # not every family has it
        return
    torch.testing.assert_close(together(model(x)), output, rtol=1e-4, atol=1e-5)


def backward(name: str, prepare: Prepare) -> None:
    model = create(name, prepare, num_classes=42).train()
    output = together(model(images(model, 2)))
    output.mean().backward()
    assert_all_have_gradients(model, {name for name, _ in model.named_parameters()})
    assert output.shape[-1] == 42 and not output.isnan().any()


def features(name: str, prepare: Prepare) -> None:
    layers = {"out_indices": (0, 1)} if name in DEEP else {}
    model = create(name, prepare, features_only=True, **layers).eval()
    channels = model.feature_info.channels()  # type: ignore[operator, union-attr]
    axis = -1 if getattr(model, "output_fmt", "NCHW") == "NHWC" else 1
    outputs = model(images(model))
    assert [output.shape[axis] for output in outputs] == channels
    assert not any(output.isnan().any() for output in outputs)


def intermediates(name: str, prepare: Prepare) -> None:
    model = create(name, prepare).eval()
    x = images(model)
    output, parts = model.forward_intermediates(x, output_fmt="NCHW")  # type: ignore[operator]
    expected = model.forward_features(x)  # type: ignore[operator]
    assert [part.shape[1] for part in parts] == [info["num_chs"] for info in model.feature_info]  # type: ignore[union-attr]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def traced(model: nn.Module) -> nn.Module:
    """The model as a graph of torch.fx, with all of its outputs."""
    training, evaluation = get_graph_node_names(model, tracer_kwargs=TRACER)
    return create_feature_extractor(
        model, train_return_nodes=training[-1:], eval_return_nodes=evaluation[-1:], tracer_kwargs=TRACER
    )


def forward_fx(name: str, prepare: Prepare) -> None:
    model = create(name, prepare).eval()
    x = images(model)
    with torch.inference_mode():
        expected = together(model(x))
        output = together(list(traced(model)(x).values()))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


def backward_fx(name: str, prepare: Prepare) -> None:
    model = create(name, prepare, num_classes=42).train()
    names = {name for name, _ in model.named_parameters()}
    x = images(model, 2)
    graph = traced(model)
    together(list(graph(x).values())).mean().backward()
    assert_all_have_gradients(graph, names)


QUESTIONS = (forward, backward, features, intermediates, forward_fx, backward_fx)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.__name__)
@pytest.mark.parametrize("prepare", [conditioned, folded], ids=lambda prepare: prepare.__name__)
@pytest.mark.parametrize("name", [*DEEP, *MODELS])
def test_timm_s_own_questions(name: str, prepare: Prepare, question: Callable[[str, Prepare], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            question(name, prepare)
        except Exception as ours:
            try:
                question(name, plain)
            except Exception as timms:
                pytest.skip(f"the plain model fails too: {type(timms).__name__}: {str(timms).splitlines()[0][:120]}")
            raise ours
