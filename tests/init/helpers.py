"""Small models and checks that the tests of initialisations share."""

import timm
import torch

import wellcond as wc
from wellcond.linalg.spectrum import singular_values


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tiny_vit(**kwargs):
    arguments = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.models.VisionTransformer(**arguments | kwargs)


def first(model):
    return wc.find_attention(model)[0]


def assert_semi_orthogonal(heads, atol=5e-6):
    torch.testing.assert_close(
        singular_values(heads), torch.ones(len(heads), min(heads.shape[1:])).double(), rtol=0, atol=atol
    )
