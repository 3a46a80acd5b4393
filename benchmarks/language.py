"""Tokens per second through the engine against the same model, data and optimiser in a hand-written PyTorch loop.

GPT-2 on byte pairs, and Crammed BERT with masked tokens. Rounds alternate and count processor time on one thread, which
other processes disturb least. The goal is a ratio of at least 0.97 at the larger width.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from wellcond.lab.methods import MethodSettings
from wellcond.lab.models.build import build_model
from wellcond.lab.recipe import Recipe
from wellcond.lab.train.prepare import prepare_task
from wellcond.lab.train.run import Job, run_job

BATCH, LENGTH, VOCABULARY, MASKED = 16, 128, 2048, 0.25
LR, BETAS, DECAY, CLIP, LOG_EVERY = 1e-3, (0.9, 0.98), 0.01, 1.0, 10
HIDDEN, RANDOM = 0.8, 0.9


def write_text(path: Path) -> None:
    """Words of three syllables, common and rare ones, some 300,000 of them."""
    random = np.random.default_rng(0)
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in "aeiou"]
    words = ["".join(random.choice(syllables, 3)) for _ in range(8000)]
    ranks = 1 / np.arange(1, len(words) + 1)
    chosen = random.choice(len(words), (3000, 100), p=ranks / ranks.sum())
    path.write_text("\n".join(" ".join(words[word] for word in line) for line in chosen))


def recipe_of(kind: str, width: int, steps: int, text: Path) -> Recipe:
    """The same for both loops; nothing is measured or evaluated between the first step and the last."""
    if kind == "gpt2":
        task = {
            "name": "language_modelling",
            "context": LENGTH,
            "tokenizer": {"train": "bpe", "vocabulary": VOCABULARY},
        }
        sizes = {"n_embd": width, "n_layer": 2, "n_head": 4}
        arguments = sizes | dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
        model = {"name": "hf:gpt2", "arguments": arguments}
    else:
        tokenizer = {"train": "wordpiece", "vocabulary": VOCABULARY}
        task = {
            "name": "masked_language_modelling",
            "length": LENGTH,
            "tokenizer": tokenizer,
        }
        arguments = {"width": width, "layers": 2, "heads": 4, "feed_forward": 4 * width}
        model = {"name": "wellcond:crammed_bert", "arguments": arguments}
    fields = {
        "name": "language-benchmark",
        "scale": "tiny",
        "task": task,
        "data": {"source": "files", "train": str(text), "evaluation_fraction": 0.02},
        "model": model,
        "optimizer": {"name": "adamw", "lr": LR, "betas": BETAS, "weight_decay": DECAY},
        "schedule": {"name": "cosine", "warmup": {"steps": 5}},
        "training": {
            "length": {"steps": steps},
            "batch_size": BATCH,
            "clip_norm": CLIP,
            "threads": 1,
            "log_every": LOG_EVERY,
        },
        "evaluation": {"every": {"steps": steps}, "batch_size": 64, "samples": 1},
        "checkpoint": {"every": {"steps": steps}},
        "tracking": {"weights_every": None, "jacobian_points": 0},
    }
    return Recipe.model_validate(fields)


def through_engine(recipe: Recipe, steps: int) -> float:
    """Tokens per second of processor time, with everything the engine does between evaluations."""
    marks = []

    def observe(event: dict[str, Any]) -> None:
        # Training lies between the end of the first evaluation and the beginning of the last.
        if event["event"] == "evaluation" or event.get("phase") == "evaluating":
            marks.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        run_job(Job(recipe, MethodSettings(init="default"), 0, Path(folder) / "run", cpu=True), observe)
    return steps * BATCH * LENGTH / (marks[2] - marks[1])


def next_tokens(stream: Tensor, model: Any) -> Iterator[Callable[[], Tensor]]:
    """Losses of GPT-2 on blocks in random order."""
    blocks = (len(stream) - 1) // LENGTH
    while True:
        for rows in torch.randperm(blocks)[: blocks // BATCH * BATCH].split(BATCH):

            def loss(rows: Tensor = rows) -> Tensor:
                tokens = stream[rows[:, None] * LENGTH + torch.arange(LENGTH + 1)]
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
                return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

            yield loss


def hidden_tokens(stream: Tensor, model: Any, special: tuple[int, ...], mask: int) -> Iterator[Callable[[], Tensor]]:
    """Losses of Crammed BERT on a quarter of the tokens, of which 80 % are hidden and 10 % are random."""
    blocks, number = len(stream) // LENGTH, round(MASKED * LENGTH)
    forbidden = torch.tensor(special)
    while True:
        for rows in torch.randperm(blocks)[: blocks // BATCH * BATCH].split(BATCH):

            def loss(rows: Tensor = rows) -> Tensor:
                tokens = stream[rows[:, None] * LENGTH + torch.arange(LENGTH)]
                order = torch.rand(tokens.shape).masked_fill(torch.isin(tokens, forbidden), 2.0)
                places = order.topk(number, largest=False, sorted=False).indices
                labels = tokens.gather(1, places)
                kind = torch.rand(labels.shape)
                seen = labels.where(kind >= RANDOM, torch.randint_like(labels, VOCABULARY))
                seen = torch.where(kind < HIDDEN, mask, seen)
                inputs = tokens.scatter(1, places, seen)
                flat = (places + LENGTH * torch.arange(len(rows))[:, None]).flatten()
                return cross_entropy(model(input_ids=inputs, positions=flat), labels.flatten())

            yield loss


def by_hand(kind: str, recipe: Recipe, steps: int) -> float:
    """Tokens per second of the loop one would write without a library, with the tokens in memory."""
    torch.manual_seed(0)
    task = prepare_task(recipe, seed=0, base=None)
    arguments = task.model_arguments(recipe.model.name.partition(":")[0]) | recipe.model.arguments
    model = build_model(recipe.model.name, arguments, auto_class=task.auto_class, local_code=False).train()
    stream = torch.from_numpy(np.asarray(task.train.stream.tokens).astype(np.int64))
    assert task.tokenizer is not None
    special = task.tokenizer.special
    losses = (
        next_tokens(stream, model)
        if kind == "gpt2"
        else hidden_tokens(stream, model, tuple(special.values()), special["mask"])
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps + 1, pct_start=0.1)
    start = time.process_time()
    for step in range(1, steps + 1):
        loss = next(losses)()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % LOG_EVERY == 0:
            assert np.isfinite(float(loss)) and np.isfinite(float(norm))
    return steps * BATCH * LENGTH / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = f"load of the machine {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    print(f"{BATCH} x {LENGTH} tokens a step, one thread, {arguments.rounds} rounds of {arguments.steps} steps; {load}")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("WELLCOND_CACHE", str(Path(folder) / "cache"))
        os.environ.setdefault("HF_DATASETS_CACHE", str(Path(folder) / "datasets"))
        text = Path(folder) / "text.txt"
        write_text(text)
        for kind in ("gpt2", "crammed_bert"):
            for width in arguments.widths:
                recipe = recipe_of(kind, width, arguments.steps, text)
                hand, engine = [], []
                for _ in range(arguments.rounds + 1):
                    hand.append(by_hand(kind, recipe, arguments.steps))
                    engine.append(through_engine(recipe, arguments.steps))
                hand, engine = hand[1:], engine[1:]  # the first round warms up
                ratios = [e / h for e, h in zip(engine, hand, strict=True)]
                print(
                    f"{kind}, width {width}: by hand {max(hand):,.0f}, engine {max(engine):,.0f} tokens per second; "
                    f"ratio of the fastest {max(engine) / max(hand):.3f}, median of paired ratios "
                    f"{statistics.median(ratios):.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
