"""Models driven into each condition for real: the alarm comes, in words, before the loss shows it."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wellcond as wc
from wellcond.errors import MonitorError, UnknownChoiceError
from wellcond.training.alarm_rules import RULES
from wellcond.training.series import Series


class Block(nn.Module):
    def __init__(self, norm, skip):
        super().__init__()
        self.norm = nn.LayerNorm(32) if norm else nn.Identity()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.skip = skip

    def forward(self, x):
        y = self.norm(x)
        added = self.attention(y, y, y, need_weights=False)[0]
        x = x + added if self.skip else added
        return x + self.mlp(x) if self.skip else x


class Words(nn.Module):
    """A small model of sequences, with or without norms and skips."""

    def __init__(self, norm=True, skip=True, depth=3):
        super().__init__()
        self.words, self.places = nn.Embedding(16, 32), nn.Parameter(0.3 * torch.randn(24, 32))
        self.blocks = nn.ModuleList(Block(norm, skip) for _ in range(depth))
        self.head = nn.Linear(32, 16)

    def forward(self, words):
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model, steps, rate, *, alarms=None, every=1, file=None, optimizer=torch.optim.Adam):
    generator = torch.Generator().manual_seed(1)
    optimizer = optimizer(model.parameters(), lr=rate)
    alarms = wc.Alarms(to=[]) if alarms is None else alarms
    losses = []
    with wc.AttentionMonitor(model.train(), every=every, weights_every=every, alarms=alarms, file=file) as monitor:
        for _ in range(steps):
            words = torch.randint(16, (8, 24), generator=generator)
            target = words.roll(1, 1).cumsum(1) % 16  # what stood before matters
            loss = F.cross_entropy(model(words).flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            monitor.step()
    return losses, monitor


def test_a_rate_too_high_is_seen_before_the_loss_diverges(tmp_path):
    torch.manual_seed(0)
    seen = []
    losses, monitor = train(
        Words(norm=False), 60, 0.05, alarms=wc.Alarms(to=[seen.append]), file=tmp_path / "monitor.jsonl"
    )
    alarm = next(one for one in seen if one.kind == "logits")
    diverged = next((step for step, loss in enumerate(losses, 1) if not loss < 5 * losses[0]), math.inf)
    assert alarm.step < diverged < math.inf and alarm.began <= alarm.step and alarm.value > 100
    assert "QKClip" in alarm.remedy and "2507.20534" in alarm.evidence and alarm.site in alarm.verdict
    assert f"head {alarm.head}" in alarm.verdict and f"since step {alarm.began}" in alarm.verdict
    # The file replays to the same alarms.
    series = Series.read(tmp_path / "monitor.jsonl")
    assert np.array_equal(series.values, monitor.series.values, equal_nan=True)
    assert wc.Alarms.replay(series) == seen


def test_rank_collapse_without_skips():
    torch.manual_seed(0)
    losses, monitor = train(Words(norm=True, skip=False, depth=8), 5, 1e-3)
    found = [one for one in monitor.alarms.raised if one.kind == "rank-collapse"]
    assert found and min(one.step for one in found) <= 3 and all(math.isfinite(loss) for loss in losses)
    assert {one.site for one in found} >= {"blocks.7.attention"}


def test_a_saturating_lambda():
    torch.manual_seed(0)
    model = Words()
    model.places.data *= 5  # tokens differ
    with pytest.warns(wc.NumericalWarning, match="saturates"):
        wc.condition_(model, "identity", lam=8.0)
    _, monitor = train(model, 5, 1e-3)
    assert "own-token" in {one.kind for one in monitor.alarms.raised}


def test_a_frozen_and_a_duplicated_head():
    torch.manual_seed(0)
    model = Words()
    for parameter in model.blocks[1].attention.parameters():
        parameter.requires_grad_(False)
    site = wc.find_attention(model)["blocks.2.attention"]
    for slot in (site.q, site.k, site.v):
        heads = slot.read().clone()
        heads[3] = heads[0]
        slot.write_(heads)
    _, monitor = train(model, 4, 1e-3)
    found = {(one.kind, one.site) for one in monitor.alarms.raised}
    assert ("frozen", "blocks.1.attention") in found and ("duplicate", "blocks.2.attention") in found


def series_of(columns, **numbers):
    length = len(next(iter(numbers.values())))
    series = Series([("attn", 1)], columns)
    for step in range(length):
        series.add(step + 1, np.array([[numbers[name][step] for name in columns]]))
    return series


CASES = {
    "not-finite": {"max_logit": [3.0, 9.0, math.inf]},
    "bfloat16": {"max_logit_low": [90.0, 140.0, 150.0]},
    "malignant-entropy": {"entropy": [3.0, 1.0, 0.9, 0.8], "sec_qk": [0.2, 0.3, 0.5, 0.6]},
    "benign-entropy": {"entropy": [3.0, 1.0, 0.9, 0.8], "self_share": [0.1, 0.5, 0.6, 0.7]},
    "sink": {"first_share": [0.5, 0.96, 0.97, 0.98]},
    "one-key": {"entropy": [1.0, 0.001, 0.001, 0.001]},
    "tokens": {"kappa_x": [1e2, 1e3, 1e5]},
    "drowning": {"attention_share": [1.0, 5.0, 6.0]},
}


@pytest.mark.parametrize("kind", CASES)
def test_rules_hold_for_the_series_they_describe(kind):
    numbers = CASES[kind]
    alarms = wc.Alarms.replay(series_of(list(numbers), **numbers))
    assert [one.kind for one in alarms] == [kind]
    quiet = {name: values[:1] * len(values) for name, values in numbers.items()}
    assert wc.Alarms.replay(series_of(list(quiet), **quiet)) == []


def test_an_alarm_is_raised_once_until_it_was_gone():
    values = [10.0, 120.0, 150.0, 200.0, 300.0, *[10.0] * 12, 150.0]
    alarms = wc.Alarms.replay(series_of(["max_logit"], max_logit=values), only=["logits"])
    assert [one.step for one in alarms] == [2, 18]


def test_every_rule_has_a_source():
    assert all(rule.evidence and rule.remedy for rule in RULES.values())


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UnknownChoiceError, match="sink"):
        wc.Alarms(to="mail")
    with pytest.raises(UnknownChoiceError, match="explosions"):
        wc.Alarms(only=["explosions"])
    (tmp_path / "other.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(MonitorError, match="is not what a monitor"):
        Series.read(tmp_path / "other.jsonl")


@pytest.mark.slow
def test_a_callable_may_act():
    """The rate falls when the alarm comes, and the run that diverges without it stays finite."""
    torch.manual_seed(0)
    model = Words(norm=False)
    optimizers = []

    def slow_down(alarm):
        for group in optimizers[0].param_groups:
            group["lr"] *= 0.01

    def build(parameters, lr):
        optimizers.append(torch.optim.Adam(parameters, lr=lr))
        return optimizers[0]

    alarms = wc.Alarms(to=[slow_down], only=["logits"])
    losses, _ = train(model, 60, 0.05, alarms=alarms, optimizer=build)
    assert alarms.raised and max(losses[alarms.raised[0].step + 5 :]) < max(losses)


@pytest.mark.slow
def test_a_healthy_run_raises_none():
    torch.manual_seed(0)
    losses, monitor = train(Words(), 2000, 1e-3, every=10)
    assert losses[-1] < losses[0] and monitor.alarms.raised == []
