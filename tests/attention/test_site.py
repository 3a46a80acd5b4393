"""Attention layers by number and by name, and in a copy of their module."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import wellcond as wc


@pytest.fixture(scope="module")
def sites():
    return wc.find_attention(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 12))


def test_a_path_or_a_part_that_one_attention_has_finds_it(sites):
    assert sites["layers.1.self_attn"] is sites[2]
    assert sites["11.multihead_attn"] is sites[-1]
    encoder = wc.find_attention(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 12))
    assert encoder["layers.1"] is encoder[1] and encoder["layers.1"].q.read().shape == (2, 4, 8)  # not layers.10
    assert wc.find_attention(nn.MultiheadAttention(8, 2))[""].num_heads == 2


def test_they_are_still_a_list(sites):
    assert isinstance(sites, list) and len(sites) == 24
    assert sites[2:4]["multihead_attn"] is sites[3]
    with pytest.raises(IndexError):
        sites[24]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "layers.3",
            "'layers.3' is part of 2 attention layers: expected the path of one, such as 'layers.3.self_attn'",
        ),
        ("layer.0", "no attention 'layer.0'; did you mean 'layers.0.self_attn'"),
        ("encoder", "no attention 'encoder'. The model has 'layers.0.self_attn', 'layers.0.multihead_attn'"),
    ],
)
def test_other_paths_are_answered_with_those_there_are(path, message, sites):
    with pytest.raises(KeyError) as told:
        sites[path]
    assert str(told.value).startswith(message) and isinstance(told.value, wc.SiteNotFoundError)


def test_a_site_of_a_copy():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    [site] = wc.find_attention(layer)
    copied = copy.deepcopy(site.module)
    moved = site.on(copied)
    assert moved.module is copied and moved.o.owner is copied.out_proj and moved.q.bias_name == site.q.bias_name
    moved.q.write_(torch.zeros(2, 4, 8))
    assert bool((site.q.read() != 0).any())
    elsewhere = dataclasses.replace(site, q=dataclasses.replace(site.q, owner=nn.Linear(8, 8)))
    with pytest.raises(wc.UnsupportedLayoutError, match="its Linear is no part of the module"):
        elsewhere.on(copied)
