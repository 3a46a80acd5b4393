"""Attentions by number and by name."""

import pytest
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
        ("layers.3", "'layers.3' is part of 2 attentions: expected the path of one, such as 'layers.3.self_attn', "),
        ("layer.0", "no attention 'layer.0'; did you mean 'layers.0.self_attn'"),
        ("encoder", "no attention 'encoder'. The model has 'layers.0.self_attn', 'layers.0.multihead_attn'"),
    ],
)
def test_other_paths_are_answered_with_those_there_are(path, message, sites):
    with pytest.raises(KeyError) as told:
        sites[path]
    assert str(told.value).startswith(message) and isinstance(told.value, wc.SiteNotFoundError)
