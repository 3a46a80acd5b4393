"""The models of the papers at full size, on the meta device: parameters, and where their attention is."""

from collections import Counter

import pytest
import timm
import torch

from wellcond import find_attention

SIZES = {
    # name: (parameters in millions, {(kind, width, heads): number of attentions})
    "vit_tiny_patch16_224": (5.72, {("softmax", 192, 3): 12}),
    "vit_small_patch16_224": (22.05, {("softmax", 384, 6): 12}),
    "vit_base_patch16_224": (86.57, {("softmax", 768, 12): 12}),
    "vit_large_patch16_224": (304.33, {("softmax", 1024, 16): 24}),
    "vit_giant_patch14_224": (1012.61, {("softmax", 1408, 16): 40}),
    "deit_base_patch16_224": (86.57, {("softmax", 768, 12): 12}),
    "deit3_large_patch16_224": (304.37, {("softmax", 1024, 16): 24}),
    "xcit_medium_24_p16_224": (84.40, {("cross_covariance", 512, 8): 24, ("class", 512, 8): 2}),
    "xcit_large_24_p16_224": (189.10, {("cross_covariance", 768, 16): 24, ("class", 768, 16): 2}),
    "swin_base_patch4_window7_224": (
        87.77,
        {("softmax", 128, 4): 2, ("softmax", 256, 8): 2, ("softmax", 512, 16): 18, ("softmax", 1024, 32): 2},
    ),
    "swin_large_patch4_window7_224": (
        196.53,
        {("softmax", 192, 6): 2, ("softmax", 384, 12): 2, ("softmax", 768, 24): 18, ("softmax", 1536, 48): 2},
    ),
}
DAVIT = {
    # name: (parameters in millions, {(width, heads): pairs of window and channel attention})
    "davit_base": (87.95, {(128, 4): 1, (256, 8): 1, (512, 16): 9, (1024, 32): 1}),
    "davit_large": (196.81, {(192, 6): 1, (384, 12): 1, (768, 24): 9, (1536, 48): 1}),
    "davit_giant": (1406.47, {(384, 12): 1, (768, 24): 1, (1536, 48): 12, (3072, 96): 3}),
}
for davit, (parameters, pairs) in DAVIT.items():
    kinds = {(kind, *shape): number for shape, number in pairs.items() for kind in ("softmax", "channel")}
    SIZES[davit] = (parameters, kinds)


@pytest.mark.parametrize("name", list(SIZES))
def test_full_size_models_have_the_parameters_and_attentions_of_the_papers(name):
    millions, attentions = SIZES[name]
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
    found = find_attention(model)
    assert all(site.q.parameter.is_meta and site.evidence == "adapter" for site in found)
    kinds = [("class" if site.cross else site.kind, site.in_features, site.num_heads) for site in found]
    assert Counter(kinds) == attentions
    assert {site.head_dim for site in found} == {width // heads for _, width, heads in attentions}
    assert {site.num_heads * site.head_dim for site in found} == {width for _, width, _ in attentions}
