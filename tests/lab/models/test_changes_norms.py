import pytest
import timm
import torch
import transformers
from torch import nn

from lab.helpers import bundle, byte_images, make_recipe, tiny_bert, tiny_gpt2, tiny_vit
from wellcond import find_attention
from wellcond.errors import RecipeError, WellcondError
from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.changes import remove_norms_
from wellcond.lab.tasks.base import TaskContext
from wellcond.lab.tasks.image_classification import ImageClassification, ImageClassificationSettings
from wellcond.lab.train.prepare import prepare_model


def nystromformer():
    config = transformers.NystromformerConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, num_landmarks=4,
        segment_means_seq_len=16, max_position_embeddings=32, conv_kernel_size=3,
    )  # fmt: skip
    return transformers.NystromformerForSequenceClassification(config)


def image_model(name, **arguments):
    return timm.create_model(name, num_classes=3, **arguments)


SWIN = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2)}
DAVIT = {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (1, 2), "window_size": 4}
XCIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "cls_attn_layers": 1}
TOKENS = torch.arange(16).view(1, 16)
FAMILIES = {
    "vit": (lambda: tiny_vit(qk_norm=True), torch.rand(1, 1, 8, 8)),
    "deit": (lambda: image_model("deit_tiny_patch16_224", img_size=32, embed_dim=8, depth=2, num_heads=2), None),
    "swin": (lambda: image_model("swin_tiny_patch4_window7_224", **SWIN), None),
    "xcit": (lambda: image_model("xcit_tiny_12_p16_224", **XCIT), None),
    "davit": (lambda: image_model("davit_tiny", **DAVIT), None),
    "gpt2": (lambda: tiny_gpt2(20, 16), TOKENS),
    "bert": (lambda: tiny_bert(20), TOKENS),
    "nystromformer": (nystromformer, TOKENS),
}
# Norms of the first block, that in front of its attention (None: there is none), and of the second kind of block.
BLOCKS = {
    "vit": ("blocks.0.", ["norm1", "norm2"], "norm1"),
    "deit": ("blocks.1.", ["norm1", "norm2"], "norm1"),
    "swin": ("layers.1.blocks.0.", ["norm1", "norm2"], "norm1"),
    "xcit": ("blocks.0.", ["norm1", "norm3", "norm2"], "norm1"),
    "davit": ("stages.1.blocks.0.1.", ["norm1", "norm2"], "norm1"),
    "gpt2": ("transformer.h.0.", ["ln_1", "ln_2"], "ln_1"),
    "bert": ("bert.encoder.layer.0.", ["attention.output.LayerNorm", "output.LayerNorm"], None),
    "nystromformer": ("nystromformer.encoder.layer.1.", ["attention.output.LayerNorm", "output.LayerNorm"], None),
}
KEPT = {
    "vit": ["norm", "blocks.0.attn.q_norm"], "deit": ["norm"], "swin": ["norm", "layers.1.downsample.norm"],
    "xcit": ["norm", "blocks.0.local_mp.bn"], "davit": ["stages.1.downsample.norm"], "gpt2": ["transformer.ln_f"],
    "bert": ["bert.embeddings.LayerNorm"], "nystromformer": ["nystromformer.embeddings.LayerNorm"],
}  # fmt: skip


def made(family):
    build, sample = FAMILIES[family]
    torch.manual_seed(0)
    return build().eval(), torch.rand(1, 3, 32, 32) if sample is None else sample


def output(model, sample):
    with torch.no_grad():
        found = model(sample)
    return found if isinstance(found, torch.Tensor) else found.logits


@pytest.mark.parametrize("norms", ["without_block_norms", "without_attention_norm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_taken_out_and_nothing_else_changes(family, norms):
    model, sample = made(family)
    kinds = {name: type(module) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    prefix, of_block, front = BLOCKS[family]
    if norms == "without_attention_norm" and front is None:
        with pytest.raises(RecipeError, match="attention.self"):
            remove_norms_(model, norms, lambda: output(model, sample))
        assert kinds == {name: type(module) for name, module in model.named_modules()}
        return
    before = output(model, sample)
    replaced = remove_norms_(model, norms, lambda: output(model, sample))
    expected = of_block if norms == "without_block_norms" else [front]
    assert [name.removeprefix(prefix) for name in replaced if name.startswith(prefix)] == expected
    blocks = {name.partition(".norm")[0] for name in replaced}
    assert norms == "without_block_norms" or len(replaced) == len(find_attention(model)) == len(blocks)
    after = {name: type(module) for name, module in model.named_modules()}
    assert {name for name in kinds if after[name] is not kinds[name]} == set(replaced)
    assert all(after[name] is nn.Identity for name in replaced) and not set(KEPT[family]) & set(replaced)
    assert all(name in after for name in KEPT[family])
    left = model.state_dict()
    assert all(torch.equal(left[name], state[name]) for name in left)
    assert {name.rpartition(".")[0] for name in set(state) - set(left)} <= set(replaced)
    changed = output(model, sample)
    assert changed.isfinite().all() and not torch.allclose(changed, before)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Lonely(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), nn.MultiheadAttention(8, 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "[Nn]o attention"),
        (Lonely, "stands in no list of blocks"),
        (
            lambda: nn.Sequential(nn.Sequential(nn.MultiheadAttention(8, 2))),
            "of Sequential is unknown",
        ),
        (
            lambda: transformers.T5EncoderModel(
                transformers.T5Config(d_model=8, d_kv=4, num_heads=2, d_ff=8, num_layers=1, vocab_size=8)
            ),
            "layer.0 of T5EncoderModel is unknown",
        ),
    ],
)
def test_blocks_of_another_form_are_refused(model, message):
    model = model()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(WellcondError, match=message):
        remove_norms_(model, "without_block_norms", lambda: None)
    assert kinds == [type(module) for module in model.modules()]


def test_the_other_weights_are_those_of_the_model_with_norms():
    task = ImageClassification(ImageClassificationSettings(), TaskContext(bundle("image", byte_images(4, 1)), 0))
    recipes = [make_recipe(), make_recipe(model=make_recipe().model.model_dump() | {"norms": "without_block_norms"})]
    whole, without = (
        prepare_model(recipe, MethodSettings.model_validate("conditioned"), task, seed=3, base=None).state_dict()
        for recipe in recipes
    )
    assert set(whole) > set(without) and "norm.weight" in without and "blocks.0.norm1.weight" not in without
    assert all(torch.equal(whole[name], without[name]) for name in without)
