"""Cost of conditioning per training step and of the default callback, and speed of initialisation. Run: make bench.

Every ratio is measured within one run: the variants take turns, step by step, and each is compared with the plain step
of its own round; the median over rounds is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

import timm
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import wellcond as wc
from wellcond.attention.slot import corrections_of, remove_conditioning
from wellcond.conditioning.corrections import FollowingCorrection, straight_through
from wellcond.integrations.transformers import WellcondCallback

METHODS = {"plain": None, "identity": "identity", "polar": "polar", "balanced": "balanced"}
GOALS = {"identity": 1.01, "polar": 1.03, "balanced": 1.03}


def seconds(call: Callable[[], object]) -> float:
    """Time of one call: of the processor on one thread, which other processes disturb less; else of the clock."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    call()
    return clock() - start


def vit_step(model: nn.Module) -> Callable[[], None]:
    images, labels = torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))
    return training_step(model, lambda: nn.functional.cross_entropy(model(images), labels))


def gpt2_step(model: nn.Module) -> Callable[[], None]:
    tokens = torch.randint(50257, (4, 512))
    return training_step(model, lambda: model(tokens, labels=tokens).loss)


def training_step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step_ratios(build, make_step, rounds: int, console: Console) -> tuple[dict[str, float], float]:
    """Median over rounds of each variant's time over the plain one's in the same round, and the plain step's time.

    One model takes all parts, conditioned and set free in turn: two copies of a model differ by more than a correction
    costs, by where their weights lie in memory.
    """
    torch.manual_seed(0)
    model = build().train()
    step = make_step(model)
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for turn in track(range(rounds + 1), "training steps", console=console):
        names = list(METHODS)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with conditioned(model, METHODS[name]):
                times[name].append(seconds(step))
    warm = {name: values[1:] for name, values in times.items()}
    ratios = {name: statistics.median(map(operator.truediv, warm[name], warm["plain"])) for name in METHODS}
    return ratios, statistics.median(warm["plain"])


@contextlib.contextmanager
def conditioned(model: nn.Module, method: str | None) -> Iterator[None]:
    """The model with a correction, and without it afterwards."""
    if method is not None:
        wc.condition_(model, method)
    yield
    for module in model.modules():
        remove_conditioning(module)


def route_of_the_paper(model: nn.Module) -> float:
    """Seconds of paper S's theorem 3.5 as it is written: a singular value decomposition of every head in every step."""
    weights = [site.slots[role].read_raw().detach() for site in wc.find_attention(model) for role in "qkv"]

    def correct() -> None:
        for heads in weights:
            u, s, vh = torch.linalg.svd(heads, full_matrices=False)
            heads + s[:, :1, None] * (u @ vh)

    return min(seconds(correct) for _ in range(2))


def correction_alone(model: nn.Module, method: str) -> float:
    """Seconds of reading all weights as a forward pass does, without the step, whose noise is longer than that."""
    wc.condition_(model, method)
    found = [(module, name, c) for module in model.modules() for name, c in corrections_of(module).items()]
    weights = [module.get_parameter(name) for module, name, _ in found]

    def read() -> None:
        first = found[0][2]
        if isinstance(first, FollowingCorrection):
            values = first.values(weights)
        else:
            values = [
                c.value(weight, c.state_of(module)) for (module, _, c), weight in zip(found, weights, strict=True)
            ]
        for weight, value in zip(weights, values, strict=True):
            straight_through(weight, value)

    return min(seconds(read) for _ in range(5))


def loop_of_orthogonal(model: nn.Module, roles: str) -> None:
    """What one would write without wellcond: `orthogonal_` on each head's rows of the fused weight."""
    with torch.no_grad():
        for block in model.blocks:
            weight, heads = block.attn.qkv.weight, block.attn.num_heads
            d = weight.shape[1] // heads
            for role in range(3):
                for head in range(heads):
                    start = role * weight.shape[1] + head * d
                    if "qkv"[role] in roles:
                        torch.nn.init.orthogonal_(weight[start : start + d])
                    else:
                        weight[start : start + d].copy_(torch.eye(d, weight.shape[1]))


def init_ratios(rounds: int, console: Console) -> dict[str, float]:
    model = timm.create_model("vit_base_patch16_224")
    calls = {
        "init_(model, 'conditioned')": lambda: wc.init_(model, "conditioned"),
        "init_(model, 'conditioned', orthogonal='qr')": lambda: wc.init_(model, "conditioned", orthogonal="qr"),
        "loop of orthogonal_, Q and K per head, identity V": lambda: loop_of_orthogonal(model, "qk"),
        "loop of orthogonal_, Q, K and V per head": lambda: loop_of_orthogonal(model, "qkv"),
    }
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in track(range(rounds), "initialising ViT-B", console=console):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: min(values) for name, values in times.items()}


def small_llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def small_gpt2() -> nn.Module:
    sizes = {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes))


CALLBACK_CASES = {
    "Llama, width 64, 2 layers, 64 tokens": (small_llama, 64, 40),
    "GPT-2, width 384, 6 layers, 256 tokens": (small_gpt2, 256, 40),
}


def trainer_seconds(build: Callable[[], nn.Module], tokens: int, steps: int, tracked: bool) -> tuple[float, str]:
    """Time of `Trainer.train`, and what the default callback says of its own share of it."""
    torch.manual_seed(0)
    rows = torch.randint(64, (steps, tokens))
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=1, save_strategy="no", report_to=[], use_cpu=True,
            dataloader_pin_memory=False, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(build(), arguments, train_dataset=data)
        callback = WellcondCallback().add_to(trainer) if tracked else None
        took = seconds(trainer.train)
    if callback is None or callback.tracker is None:
        return took, ""
    tracker = callback.tracker
    jacobians = sum(point.condition_number is not None for point in tracker.points)
    steps_measured = len({point.step for point in tracker.points})
    return took, f"{tracker.overhead:.1%}, {steps_measured} steps, {jacobians} times kappa(J)"


def print_callback(out: Console) -> None:
    """Trainer with and without the default callback, in turn; the first round warms up."""
    table = Table("Trainer.train", "without, s", "with WellcondCallback(), s", "ratio", "the callback's own account")
    for name, (build, tokens, steps) in CALLBACK_CASES.items():
        trainer_seconds(build, tokens, 2, True)
        plain, _ = trainer_seconds(build, tokens, steps, False)
        tracked, account = trainer_seconds(build, tokens, steps, True)
        table.add_row(name, f"{plain:.2f}", f"{tracked:.2f}", f"{tracked / plain:.2f}", account)
    out.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--skip-steps", action="store_true", help="not the cost of corrections")
    parser.add_argument("--only-callback", action="store_true", help="only the cost of the default callback")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore", wc.NumericalWarning)
    console, out = Console(stderr=True), Console(width=140)
    out.print(f"torch {torch.__version__}, {options.threads} thread(s), {options.rounds} rounds, float32, CPU")

    print_callback(out)
    if options.only_callback:
        return
    if not options.skip_steps:
        ratios_of = (f"{name} / plain" for name in GOALS)
        table = Table(
            "training step",
            "plain step, s",
            *ratios_of,
            *(f"{name} alone, ms: 1 + alone / plain" for name in GOALS),
            "the paper's SVDs / plain",
        )
        cases = {
            "ViT-S, 32 images of 224 px": (lambda: timm.create_model("vit_small_patch16_224"), vit_step),
            "GPT-2 small, 4 x 512 tokens": (lambda: GPT2LMHeadModel(GPT2Config()), gpt2_step),
        }
        for name, (build, make_step) in cases.items():
            ratios, plain = step_ratios(build, make_step, options.rounds, console)
            alone = {method: correction_alone(build(), method) for method in GOALS}
            paper = f"{1 + route_of_the_paper(build()) / plain:.3f}"
            table.add_row(
                name,
                f"{plain:.2f}",
                *(f"{ratios[method]:.3f}" for method in GOALS),
                *(f"{1e3 * alone[method]:.0f}: {1 + alone[method] / plain:.3f}" for method in GOALS),
                paper,
            )
        goals = [f"<= {goal:.2f}" for goal in GOALS.values()]
        table.add_row("goal", "", *goals, *goals, "")
        out.print(table)

    times = init_ratios(3 * options.rounds, console)
    ours = times["init_(model, 'conditioned')"]
    table = Table("initialising ViT-B (144 heads x 3)", "ms", "/ init_ conditioned")
    for name, value in times.items():
        table.add_row(name, f"{1e3 * value:.0f}", f"{value / ours:.2f}")
    out.print(table)

    build = seconds(lambda: timm.create_model("vit_giant_patch14_224"))
    giant = timm.create_model("vit_giant_patch14_224")
    init = seconds(lambda: wc.init_(giant, "conditioned"))
    out.print(f"ViT-Giant: timm builds it in {build:.1f} s, init_ conditioned takes {init:.1f} s ({init / build:.2f})")


if __name__ == "__main__":
    main()
