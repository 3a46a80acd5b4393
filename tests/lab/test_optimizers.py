import pytest
import torch
from pydantic import ValidationError
from torch import nn

from lab.helpers import tiny_bert, tiny_gpt2, tiny_vit
from wellcond import condition_
from wellcond.lab.optimizers import AdamW, Muon, Point, parameter_groups, set_point


def decayed_names(model, weight_decay=0.1):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(p)]
        for group in parameter_groups(model, weight_decay)
        if group["weight_decay"]
        for p in group["params"]
    }


def test_only_matrices_of_a_vit_decay():
    model = tiny_vit()
    expected = {name for name, p in model.named_parameters() if p.dim() > 1} - {"pos_embed", "cls_token"}
    assert decayed_names(model) == expected and "blocks.0.attn.qkv.weight" in expected


def test_positions_of_hugging_face_models_do_not_decay():
    gpt, bert = decayed_names(tiny_gpt2()), decayed_names(tiny_bert())
    assert "transformer.wte.weight" in gpt and "transformer.wpe.weight" not in gpt
    assert "bert.embeddings.word_embeddings.weight" in bert
    assert "bert.embeddings.position_embeddings.weight" not in bert
    assert not any("LayerNorm" in name or name.endswith("bias") for name in bert)


def test_what_a_model_itself_exempts_does_not_decay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

        def no_weight_decay(self):
            return {"table"}

    assert decayed_names(Model()) == {"other"}


@pytest.mark.parametrize("method", [None, "identity", "polar", "balanced"])
@pytest.mark.parametrize("make", [tiny_vit, tiny_gpt2])
def test_every_trainable_parameter_is_there_once(make, method):
    model = make() if method is None else condition_(make(), method, **({"lam": 1.0} if method == "identity" else {}))
    next(iter(model.parameters())).requires_grad_(False)
    listed = [id(p) for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert len(listed) == len(set(listed))
    assert set(listed) == {id(p) for p in model.parameters() if p.requires_grad}


def test_settings_reach_the_optimiser():
    adam = AdamW(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3).build(nn.Linear(2, 2))
    first, second = adam.param_groups
    assert (first["lr"], first["betas"], first["eps"], first["weight_decay"]) == (0.1, (0.8, 0.9), 1e-6, 0.3)
    assert second["weight_decay"] == 0.0


def test_a_point_sets_rate_and_momentum_of_every_group():
    adam, muon = AdamW(lr=1).build(nn.Linear(2, 2)), Muon(lr=1).build(tiny_vit())
    for optimizer in (adam, muon):
        assert set_point(optimizer, Point(0.5, 0.6), 0.1) == 0.05
    assert [(group["lr"], group["betas"]) for group in adam.param_groups] == [(0.05, (0.6, 0.999))] * 2
    assert [group["lr"] for group in muon.param_groups] == [0.05] * 3
    assert muon.param_groups[0]["momentum"] == 0.6 and muon.param_groups[1]["betas"] == (0.6, 0.999)
    set_point(adam, Point(1.0), 0.1)
    assert adam.param_groups[0]["betas"] == (0.6, 0.999)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (AdamW, {"lr": 0}),
        (Muon, {"lr": 1, "weight_decay": -1}),
    ],
)
def test_what_torch_would_refuse_is_refused_with_the_recipe(settings, fields):
    with pytest.raises(ValidationError):
        settings(**fields)
