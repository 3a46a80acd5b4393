"""Quantised layers and adapters of PEFT: the error names the layer, its class and what to do."""

import pytest
import timm
import torch
from torch import Tensor, nn

import wellcond as wc
from models import NanoGPTAttention

X = torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class EightBit(Tensor):
    """A weight as torchao stores it: integers and a scale behind a tensor that says it is float32."""

    @staticmethod
    def __new__(cls, integers, scale):
        return Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32)

    def __init__(self, integers, scale):
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self):
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, _, size, stride):
        return EightBit(inner["integers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scale)
        if func.overloadpacket in (torch.ops.aten.t, torch.ops.aten.mm, torch.ops.aten.addmm):
            whole = [a.integers * a.scale if isinstance(a, cls) else a for a in args]
            return func(*whole, **(kwargs or {}))
        raise NotImplementedError(f"EightBit: {func}")


def eight_bit(linear):
    scale = linear.weight.detach().abs().max() / 127
    integers = (linear.weight.detach() / scale).round().to(torch.int8)
    linear.weight = nn.Parameter(EightBit(integers, scale), requires_grad=False)


class Packed(nn.Linear):
    """As torch.ao.nn.quantized: weight is a method, and no tensor is stored under that name."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        stored = self._parameters.pop("weight").detach()
        self.weight = lambda: stored


def vit():
    torch.manual_seed(0)
    return timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=24, depth=2, num_heads=3)


READERS = {"measure": lambda m: wc.measure(m, IMAGES), "diagnose": lambda m: wc.diagnose(m, IMAGES)}
WRITERS = {"init_": lambda m: wc.init_(m, "gaussian"), "condition_": lambda m: wc.condition_(m, "balanced")}


@pytest.mark.parametrize("verb", [*READERS, *WRITERS])
def test_a_tensor_as_torchao_makes_it(verb):
    model = vit()
    eight_bit(model.blocks[1].attn.qkv)
    model(IMAGES)  # the model itself runs
    said = r"^blocks\.1\.attn \(q.*Linear.*EightBit.*quantised.*(before|Use the model)"
    with pytest.raises(wc.WeightError, match=said):
        (READERS | WRITERS)[verb](model)


@pytest.mark.parametrize("verb", [*READERS, *WRITERS])
def test_modules_that_hold_no_weight_tensor(verb):
    model = vit()
    model.blocks[1].attn.qkv = Packed(24, 72)
    with pytest.raises(wc.WeightError, match=r"^blocks\.1\.attn \(Attention\): a .*Packed holds no weight"):
        (READERS | WRITERS)[verb](model)


@pytest.mark.parametrize("verb", [*READERS, *WRITERS])
def test_packed_integers(verb):
    """As bitsandbytes stores four bits: two to a byte, in one column."""
    model = vit()
    model.blocks[0].attn.qkv.weight = nn.Parameter(torch.zeros(864, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(wc.WeightError, match=r"^blocks\.0\.attn .*Linear stores its weight as torch.uint8"):
        (READERS | WRITERS)[verb](model)


@pytest.mark.parametrize(
    ("target", "verb"), [*(("qkv", v) for v in [*READERS, *WRITERS]), *(("proj", v) for v in READERS)]
)
def test_adapters_of_peft(target, verb):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(vit(), peft.LoraConfig(r=2, target_modules=[target]))
    readers = {"measure": lambda m: wc.measure(m.base_model.model, IMAGES), "diagnose": READERS["diagnose"]}
    with pytest.raises(wc.WeightError, match=r"blocks\.0\.attn .*carries an adapter of PEFT.*merge the adapter first"):
        (readers | WRITERS)[verb](model)


def test_a_class_that_nobody_named():
    model = NanoGPTAttention()
    eight_bit(model.c_attn)
    with pytest.raises(wc.WellcondError, match="EightBit"):
        wc.measure(model, X)
