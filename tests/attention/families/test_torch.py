import pytest
import torch
from torch import nn

import wellcond as wc
from contracts.harness import randomise_


def reference(site, query, key, value, *, causal=False):
    """Attention of (B, N, D) tokens from what the site says, one head at a time."""
    module, outputs = site.module, 0
    for h in range(site.num_heads):
        q, k, v = (
            x @ slot.read()[h].T + (0 if slot.read_bias() is None else slot.read_bias()[h])
            for x, slot in ((query, site.q), (key, site.k), (value, site.v))
        )
        logits = site.scale * q @ k.mT
        if causal:
            logits = logits.masked_fill(torch.ones_like(logits[0]).triu(1).bool(), -torch.inf)
        outputs = outputs + logits.softmax(-1) @ v @ site.o.read()[h].T
    return outputs + (0 if module.out_proj.bias is None else module.out_proj.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}, {"kdim": 5}])
def test_heads_are_what_the_forward_computes(bias, batch_first, widths):
    module = randomise_(nn.MultiheadAttention(12, 3, bias=bias, batch_first=batch_first, **widths))
    site = wc.find_attention(module)[0]
    query = torch.randn(2, 4, 12, dtype=torch.float64)
    key = torch.randn(2, 6, widths.get("kdim", 12), dtype=torch.float64)
    value = torch.randn(2, 6, widths.get("vdim", 12), dtype=torch.float64)
    given = (query, key, value) if batch_first else tuple(x.transpose(0, 1) for x in (query, key, value))
    output = module(*given, need_weights=False)[0]
    output = output if batch_first else output.transpose(0, 1)
    torch.testing.assert_close(output, reference(site, query, key, value))
    assert site.causal is None and site.cross is bool(widths)


def test_encoder_and_decoder_layers():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    assert [s.name for s in wc.find_attention(encoder)] == ["layers.0.self_attn", "layers.1.self_attn"]
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1)
    sites = wc.find_attention(decoder)
    assert [(s.name, s.cross) for s in sites] == [("layers.0.self_attn", False), ("layers.0.multihead_attn", True)]
