"""Weight selection: which weights of a larger model are taken."""

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

import wellcond as wc
from attention.modern import PerHead, Stack
from init.helpers import first, tiny_vit


def test_weight_selection_blind_and_by_heads():
    teacher, student = tiny_vit(embed_dim=48, num_heads=6, depth=3), tiny_vit()
    head = student.head.weight.clone()
    wc.init_(student, "weight_selection", teacher=teacher)
    assert torch.equal(student.blocks[1].attn.qkv.weight, teacher.blocks[1].attn.qkv.weight[::2, ::2])
    assert torch.equal(student.pos_embed, teacher.pos_embed[:, :, ::2])
    assert torch.equal(student.head.weight, head)

    wc.init_(student, "weight_selection", teacher=teacher, layout="heads")
    big, small = first(teacher), first(student)
    for role in "qkv":
        assert torch.equal(small.slots[role].read(), big.slots[role].read()[[0, 2, 4]][:, :, ::2])
        assert torch.equal(small.slots[role].read_bias(), big.slots[role].read_bias()[[0, 2, 4]])
    assert torch.equal(small.o.read(), big.o.read()[[0, 2, 4]][:, ::2])
    assert torch.equal(student.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight[::2, ::2])


def test_weight_selection_by_heads_on_transposed_storage():
    sizes = {"n_layer": 1, "vocab_size": 11, "n_positions": 16}
    teacher, student = (GPT2Model(GPT2Config(n_embd=8 * heads, n_head=heads, **sizes)) for heads in (6, 3))
    wc.init_(student, "weight_selection", teacher=teacher, layout="heads")
    for role in "qkv":
        assert torch.equal(first(student).slots[role].read(), first(teacher).slots[role].read()[[0, 2, 4]][:, :, ::2])


def test_weight_selection_refuses_a_smaller_teacher():
    with pytest.raises(wc.WeightError, match="at least as large on every axis"):
        wc.init_(tiny_vit(), "weight_selection", teacher=tiny_vit(embed_dim=12))
    with pytest.raises(ValueError, match="needs the option teacher="):
        wc.init_(tiny_vit(), "weight_selection")


def test_weight_selection_refuses_what_it_would_spoil():
    block = timm.models.vision_transformer.ParallelScalingBlock
    teacher, student = tiny_vit(embed_dim=48, num_heads=6, block_fn=block), tiny_vit(block_fn=block)
    with pytest.raises(wc.UnsupportedLayoutError, match="holds more than q, k and v"):
        wc.init_(student, "weight_selection", teacher=teacher, layout="heads")
    wc.init_(student, "weight_selection", teacher=teacher)
    conditioned = wc.condition_(tiny_vit(embed_dim=48, num_heads=6), "polar")
    with pytest.raises(wc.ConditioningError, match="the teacher is conditioned"):
        wc.init_(tiny_vit(), "weight_selection", teacher=conditioned)
    frozen = tiny_vit()
    frozen.norm.weight.requires_grad_(False)
    with pytest.raises(wc.WeightError, match="norm.weight is frozen"):
        wc.init_(frozen, "weight_selection", teacher=tiny_vit(embed_dim=48, num_heads=6))


def decoder(width, heads):
    layer = nn.TransformerDecoderLayer(width, heads, 2 * width, batch_first=True)
    return nn.ModuleDict({"decoder": nn.TransformerDecoder(layer, 2), "head": nn.Linear(width, 5)})


def test_weight_selection_takes_the_cross_attention_of_a_decoder():
    teacher, student = decoder(16, 4), decoder(8, 2)
    classifier = student["head"].weight.clone()
    wc.init_(student, "weight_selection", teacher=teacher)
    expected = teacher.state_dict()
    for name, found in student.state_dict().items():
        if name.startswith("head."):
            continue
        picked = expected[name][
            tuple(slice(None, None, t // s) for t, s in zip(expected[name].shape, found.shape, strict=True))
        ]
        assert torch.equal(found, picked), name
    assert torch.equal(student["head"].weight, classifier)


@pytest.mark.parametrize("build", [Stack, PerHead])
def test_heads_are_picked_from_stacks_of_matrices(build):
    teacher, student = (nn.Sequential(build()) for _ in range(2))
    for parameter in teacher.parameters():
        nn.init.normal_(parameter)
    wc.init_(student, "weight_selection", teacher=teacher, layout="heads")
    assert all(torch.equal(value, teacher.state_dict()[name]) for name, value in student.state_dict().items())
