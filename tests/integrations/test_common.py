"""What the callbacks of every training loop share."""

import math
import random
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from wellcond.integrations import lightning, transformers
from wellcond.integrations.common import first_samples, on_device

WORDS = {**{f"w{i}": i for i in range(30)}, "[MASK]": 30, "[PAD]": 31}


class Drawing:
    """A collator with generators of its own, one of which is made when it is first needed."""

    def __init__(self):
        self.torch, self.numpy, self.python = torch.Generator().manual_seed(1), np.random.default_rng(1), None
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        if self.python is None:
            self.python = random.Random(1)
        return [int(torch.randint(1000, (), generator=self.torch)), self.numpy.random(), self.python.random()]


class Wrapper:
    """As Trainer wraps a collator to remove columns."""

    def __init__(self, data_collator):
        self.data_collator = data_collator

    def __call__(self, samples):
        return self.data_collator(samples)


def masking():
    words = Tokenizer(models.WordLevel(WORDS, "w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]", pad_token="[PAD]")
    return DataCollatorForLanguageModeling(tokenizer, seed=3)


@pytest.mark.parametrize("wrap", [lambda collate: collate, Wrapper], ids=["bare", "wrapped"])
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("make", [Drawing, masking])
def test_a_probe_uses_up_no_number_of_a_collators_own_generators(make, used_before, wrap):
    batches, rows = [], [{"input_ids": list(range(30))}] * 4
    for probed in (False, True):
        collate = make()
        if used_before:
            collate(rows)
        if probed:
            first_samples(SimpleNamespace(dataset=rows, collate_fn=wrap(collate)), 2)
        batches.append(collate(rows))
    assert str(batches[0]) == str(batches[1])


def test_a_probe_leaves_the_collator_as_it_was():
    collate = Drawing()
    first_samples(SimpleNamespace(dataset=[1, 2], collate_fn=collate), 1)
    assert collate.calls == 0 and collate.python is None


def test_a_probe_does_not_touch_gpus_that_are_not_in_use(monkeypatch):
    asked = []
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices=None: asked.append(devices) or fork(devices=devices))
    first_samples(SimpleNamespace(dataset=[1, 2], collate_fn=Drawing()), 1)
    assert asked == [[]]


def test_a_batch_keeps_its_form_on_its_way_to_a_device():
    pair = namedtuple("Pair", "first second")(torch.ones(1), "text")
    batch = {"pair": pair, "states": (torch.ones(2),), "flag": True, "none": None}
    moved = on_device(batch, torch.device("meta"))
    assert type(moved["pair"]) is type(pair) and moved["pair"].second == "text"
    assert moved["pair"].first.device.type == moved["states"][0].device.type == "meta"
    assert type(moved["states"]) is tuple and moved["flag"] is True and moved["none"] is None


@pytest.mark.parametrize("make", [lightning.WellcondCallback, transformers.WellcondCallback])
def test_bad_options_are_found_when_a_callback_is_made(make):
    for options in (
        {"samples": 0},
        {"every": -1},
        {"every": [-1]},
        {"weights_every": True},
        {"budget": math.nan},
        {"budget": -0.5},
        {"heads": 0},
        {"batch": 3},
        {"batch": {"labels": 3}},
        {"per_layer": 1},
        {"export": 3},
        {"measure": 0},
    ):
        with pytest.raises(ValueError, match=rf"^{next(iter(options))}: expected"):
            make(**options)
