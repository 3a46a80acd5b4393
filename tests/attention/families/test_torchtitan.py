"""torchtitan's row: its rows are those that the module's own output proves."""

from __future__ import annotations

import importlib

import pytest
import torch

import wellcond as wc
from attention.modern import HeldElsewhere
from wellcond.attention.readings import list_readings
from wellcond.attention.site import AttentionSite, ModuleContext
from wellcond.attention.structure import choose_reading


def assert_proven(site: AttentionSite) -> None:
    place = ModuleContext("", site.module, site.module)
    [proven] = choose_reading(place, list_readings(place))
    assert proven.evidence == "forward"
    for role, slot in site.slots.items():
        assert slot.owner is proven.slots[role].owner
        assert torch.equal(slot.rows, proven.slots[role].rows)


def test_a_module_written_like_it_has_the_rows_that_its_output_proves():
    class Renamed(HeldElsewhere):
        pass

    Renamed.__module__, Renamed.__qualname__ = "torchtitan.models.common.attention", "GQAttention"
    [site] = wc.find_attention(Renamed())
    assert (site.evidence, site.scale, site.rotary, site.qk_norm) == ("adapter", 8**-0.5, True, None)
    assert (site.num_heads, site.num_kv_heads) == (4, 2)
    assert_proven(site)


@pytest.mark.slow
@pytest.mark.parametrize("fuse_qkv", [True, False])
@pytest.mark.parametrize("kernel", ["flex", "varlen"])
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_llama3_and_qwen3(family: str, kernel: str, fuse_qkv: bool):
    """Of torchtitan 0.3.0, which needs an older version of datasets than wellcond's own tests."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed; put its wheel on PYTHONPATH")
    package = importlib.import_module(f"torchtitan.models.{family}")
    rope = package.__dict__["CosSinRoPE" if family == "qwen3" else "ComplexRoPE"]
    sizes = {"n_layers": 1, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 32}
    sizes |= {"head_dim": 16} if family == "qwen3" else {}
    build = getattr(package, f"_build_{family}_layers")
    layers = build(**sizes, fuse_qkv=fuse_qkv, attn_backend=kernel, rope=rope.Config(dim=16, max_seq_len=64))
    [site] = wc.find_attention(layers[0].attention.build())
    assert (site.num_heads, site.num_kv_heads, site.head_dim, site.scale) == (4, 2, 16, 0.25)
    assert site.rotary and site.qk_norm == ("rms" if family == "qwen3" else None)
    if kernel == "flex":  # the other kernel is for GPUs
        assert_proven(site)
