"""The cost model of docs/training/distributed.md against what torch counts."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import wellcond as wc
from conditioning.test_attach_step import images, vit
from wellcond.linalg.polar import mix_with_polar

SPEC = importlib.util.spec_from_file_location(
    "correction_cost", Path(__file__).parents[2] / "benchmarks" / "correction_cost.py"
)
module = sys.modules.setdefault("correction_cost", importlib.util.module_from_spec(SPEC))
SPEC.loader.exec_module(module)
correction_cost = module.correction_cost


@pytest.mark.parametrize("heads, rows, columns", [(1, 8, 16), (6, 16, 64), (36, 64, 384)])
def test_the_formula_is_what_torch_counts(heads, rows, columns):
    with FlopCounterMode(display=False) as counted:
        mix_with_polar(torch.randn(heads, rows, columns), keep=0.5, share=0.5)
    cost = correction_cost(heads, rows, columns)
    assert counted.get_total_flops() == cost.wide_flops + cost.narrow_flops


def test_a_model_adds_the_cost_of_its_heads_and_nothing_else():
    def flops(model):
        with FlopCounterMode(display=False) as counted:
            model(images()[0]).sum().backward()
        return counted.get_total_flops()

    cost = correction_cost(12 * 9, 16, 48)
    assert flops(wc.condition_(vit(), "balanced")) - flops(vit()) == cost.wide_flops + cost.narrow_flops
    assert flops(wc.condition_(vit(), "identity", lam=0.5)) == flops(vit())


def test_square_matrices_are_refused():
    with pytest.raises(ValueError, match=r"columns >= 2 rows, got \(8, 8\)"):
        correction_cost(1, 8, 8)
