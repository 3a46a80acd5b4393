import json

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import wellcond as wc
from training.test_monitor import IMAGES, loss_of, vit
from wellcond.errors import MonitorError, UnknownChoiceError
from wellcond.integrations.beside import name_numbers
from wellcond.training.turns import OneHeadAtATime

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")


@pytest.fixture(scope="module")
def monitor():
    torch.manual_seed(0)
    model = vit().train()
    monitor = wc.AttentionMonitor(model, every=1, weights_every=1)
    for _ in range(3):
        loss_of(model).backward()
        monitor.step()
    monitor.close()
    return monitor


def test_a_map_and_curves(monitor):
    ax = monitor.plot("entropy")
    table = np.asarray(ax.images[0].get_array())
    assert table.shape == (6, 3)
    np.testing.assert_array_equal(table, monitor.series.column("entropy").T)
    assert len(monitor.plot("max_logit", kind="curves").lines) == 2
    with pytest.raises(UnknownChoiceError, match="entropie"):
        monitor.plot("entropie")
    with pytest.raises(MonitorError, match="nothing to plot"):
        wc.AttentionMonitor(vit()).plot()


def test_panels_name_what_the_callbacks_log(monitor, tmp_path):
    logged = set(name_numbers(monitor.series, 0))
    monitor.write_layout(tmp_path / "panels.json")
    written = json.loads((tmp_path / "panels.json").read_text())
    assert {name for one in written["wandb"] for panel in one["panels"] for name in panel["y"]} <= logged
    with SummaryWriter(tmp_path / "board") as writer:
        writer.add_custom_scalars(written["tensorboard"])
    assert list((tmp_path / "board").iterdir())
    assert [section["name"] for section in written["wandb"]] == ["heads of blocks.0.attn", "heads of blocks.1.attn"]


def test_jacobians_in_turn_within_their_share():
    """One head at a time, only after the training has earned it, and the training is the same."""
    torch.manual_seed(0)
    model = vit(img_size=8).train()
    now = [0.0]
    turns = OneHeadAtATime(model, wc.find_attention(model), 0.5, clock=lambda: now[0])
    state, images = torch.get_rng_state(), IMAGES[:1, :, :8, :8]
    assert turns.measure(images) != {}, "the first measurement shows what one costs"
    turns.spent, turns.expected = 1.0, 1.0
    assert turns.measure(images) == {}
    now[0] = 100.0
    found = turns.measure(images)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert found["kappa_jacobian"].isfinite().tolist() == [False, True, *[False] * 4]
    assert found["kappa_x"].isfinite().tolist() == [True] * 3 + [False] * 3
    monitor = wc.AttentionMonitor(model, every=1, jacobian=1e9)
    model(images).sum().backward()
    monitor.step(images)
    frame = monitor.to_frame()
    assert frame["kappa_jacobian"].notna().sum() == 1 and frame["kappa_x"].notna().sum() == 3
