"""Figures of the documentation, drawn when the site is built: from the records in results/, or computed on the spot.

`<!-- figure: NAME -->` on a line of a page is where one goes. They are SVG within the page: their text is text, and has
the colour of the page's. `python tools/site/figures.py FOLDER` writes them as files to look at.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axis import Axis
from svg import FIGURES, INK, figure, figure_as_svg
from torch import Tensor, nn

import wellcond as wc
from wellcond.lab.records import Comparison, load_comparisons
from wellcond.lab.report.analysis import HeadTable, read_heads
from wellcond.lab.report.tuning import find_tuning

ROOT = Path(__file__).resolve().parents[2]
COLOURS = {
    "default": "#4269d0",
    "scale-true default": "#4269d0",
    "gaussian": "#efb118",
    "conditioned": "#ff725c",
    "identity(lam=10)": "#a463f2",
    "calibrated": "#3ca951",
    "strong default": "#3ca951",
    "default, Muon": "#6cc5b0",
    "library default": "#9c6b4e",
    "polar": "#6cc5b0",
    "balanced": "#3ca951",
}


@cache
def comparison_of(path: str) -> Comparison:
    """The comparison in a folder of results/."""
    [comparison] = load_comparisons(ROOT / "results" / path)
    return comparison


@figure(
    "rates",
    alt="Score over the learning rate for five methods on three tasks, with the range of the tuning seeds",
    caption="Score over the learning rate: means of the tuning seeds, bands from the worst of them to the best. "
    "Every method is then tested at its own best rate, on other seeds and other data.",
)
def draw_rates() -> plt.Figure:
    """Learning-rate curves of three tasks."""
    tasks = {"digits": "ViT, digits", "vit": "ViT, CIFAR-10", "gpt2-wikitext2": "GPT-2, WikiText-2"}
    drawn, panels = plt.subplots(1, 3, figsize=(9.6, 2.9), layout="constrained")
    for panel, (task, title) in zip(panels, tasks.items(), strict=True):
        comparison = comparison_of(f"evidence/{task}")
        tuning = find_tuning(comparison)
        assert tuning is not None
        names = {
            "default": "scale-true default",
            "gaussian": "gaussian",
            "conditioned": "conditioned",
            "default+set(optimizer.name=muon)": "default, Muon",
            comparison.baseline: "strong default",
        }
        for method in tuning.methods:
            if method.label not in names:
                continue
            name = names[method.label]
            points = [point for point in method.profile("optimizer.lr") if point.scores]
            rates = [point.values["optimizer.lr"] for point in points]
            scores = [[tuning.metric.scale * score for score in point.scores.values()] for point in points]
            panel.plot(rates, [np.mean(s) for s in scores], "o-", ms=3, lw=1.4, color=COLOURS[name], label=name)
            lows, highs = [min(s) for s in scores], [max(s) for s in scores]
            panel.fill_between(rates, lows, highs, color=COLOURS[name], alpha=0.15, lw=0)
        panel.set(xscale="log", title=title, xlabel="learning rate", ylabel=tuning.metric.label)
        plain_ticks(panel.xaxis, (0.001, 0.003, 0.01, 0.03))
        if not tuning.metric.higher_is_better:
            panel.set_yscale("log")
            plain_ticks(panel.yaxis, (100, 150, 200, 300, 400, 600))
    legend(drawn, panels[0])
    return drawn


def plain_ticks(axis: Axis, ticks: Sequence[float]) -> None:
    """Plain numbers at some places of a logarithmic axis."""
    limits = axis.get_view_interval()
    axis.set_ticks([tick for tick in ticks if limits[0] <= tick <= limits[1]])
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def legend(drawn: plt.Figure, panel: plt.Axes) -> None:
    """One legend for all panels, below them."""
    handles, labels = panel.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=6)


def draw_seeds(comparison: Comparison, names: Mapping[str, str]) -> plt.Figure:
    """A dot for every seed of some methods, and a line at the mean."""
    shown = {label: names[label] for label in names if label in comparison.methods}
    drawn, axes = plt.subplots(figsize=(7.2, 0.27 * len(shown) + 0.7), layout="constrained")
    for row, (label, name) in enumerate(shown.items()):
        values = [comparison.result.scale * value for value in comparison.results(label).values()]
        colour = COLOURS.get(name, "#7f8fa6")
        axes.plot(values, [row] * len(values), "o", ms=4.5, alpha=0.55, mew=0, color=colour)
        axes.plot([np.mean(values)] * 2, [row - 0.35, row + 0.35], lw=2, color=colour)
    axes.set_yticks(range(len(shown)), list(shown.values()))
    axes.set(ylim=(len(shown) - 0.5, -0.5), xlabel=comparison.result.label)
    axes.grid(axis="x", color="#808080", alpha=0.25, lw=0.7)
    return drawn


@figure(
    "digits",
    alt="Test accuracy of every seed on digits, a row for each method, and the means",
    caption="Test accuracy on digits: a dot for each of ten seeds, a line at their mean, every method at its own "
    "tuned rate.",
)
def draw_digits() -> plt.Figure:
    """Every seed of the methods on digits."""
    comparison = comparison_of("evidence/digits")
    strong = comparison.baseline
    return draw_seeds(
        comparison,
        {
            strong: "strong default",
            f"{strong}+conditioned": "strong default + conditioned",
            "default+set(optimizer.name=muon)": "default, Muon",
            "conditioned": "conditioned",
            "gaussian": "gaussian",
            "balanced": "balanced",
            "default": "scale-true default",
            "default(library=true)": "library default",
            "identity(lam=10)": "identity(lam=10)",
        },
    )


@figure(
    "causal",
    alt="Test perplexity of a small GPT-2 for starts that differ in which of Q, K and V they set",
    caption="A small GPT-2: a dot for each seed, a line at the mean; lower is better. The starts differ in which "
    "of Q, K and V `conditioned` sets, and in the size of V.",
)
def draw_causal() -> plt.Figure:
    """Which projection hurts a causal model."""
    names = {
        "conditioned(projections=v)": "V alone",
        "conditioned": "conditioned: Q, K and V",
        "conditioned(keys=tied)": "Q, K and V, keys tied",
        "conditioned(value_scale=default)": "Q, K, and V at the default's norm",
        "conditioned(keys=tied, value_scale=default)": "the same, keys tied",
        "conditioned(projections=qk)": "Q and K alone",
        "default": "scale-true default",
        "default(library=true)": "library default",
    }
    return draw_seeds(comparison_of("evidence/causal"), names)


@cache
def measured_heads(folder: str, method: str) -> tuple[HeadTable, ...]:
    """What was measured of every finished run of a method."""
    runs = comparison_of(folder).finished(method).values()
    return tuple(table for table in map(read_heads, runs) if table is not None)


@figure(
    "kappa-ends",
    alt="Condition number of the head Jacobian at the start and at the end of training for three methods, by model",
    caption="κ(J) of the heads at the start (ring) and at the end of training (dot), one rate for all: geometric "
    "means over heads and seeds, over the non-zero spectrum.",
)
def draw_kappa_ends() -> plt.Figure:
    """Condition numbers of Jacobians at both ends, for the models in which they were measured."""
    folders = {"vit-patch8": "ViT, CIFAR-10", "xcit": "XCiT, CIFAR-10", "gpt2-tinystories": "GPT-2, TinyStories"}
    drawn, axes = plt.subplots(figsize=(7.6, 2.7), layout="constrained")
    for row, folder in enumerate(folders):
        for shift, method in zip((-0.24, 0.0, 0.24), ("default", "conditioned", "identity(lam=10)"), strict=True):
            tables = measured_heads(f"evidence/measured/{folder}", method)
            means = np.array([table.over_steps("pseudo_condition_number") for table in tables])
            start, end = np.exp(np.log(means[:, [0, -1]]).mean(axis=0))
            colour, place = COLOURS[method], row + shift
            axes.plot([start, end], [place] * 2, lw=1.6, color=colour)
            axes.plot(start, place, "o", ms=5.5, mfc="none", mew=1.4, color=colour)
            axes.plot(end, place, "o", ms=5.5, color=colour, label=method if row == 0 else None)
    axes.set(xscale="log", xlabel="κ(J)", ylim=(len(folders) - 0.5, -0.5))
    axes.set_yticks(range(len(folders)), list(folders.values()))
    axes.grid(axis="x", color="#808080", alpha=0.25, lw=0.7)
    legend(drawn, axes)
    return drawn


@cache
def digit_images() -> Tensor:
    """Eight digits of scikit-learn, zero mean and unit variance."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images[:8], dtype=torch.float32)[:, None]
    return (images - images.mean()) / images.std()


def digits_vit(method: str) -> nn.Module:
    """A small ViT for digits after a start of `init_`, or with a correction of `condition_`."""
    import timm

    torch.manual_seed(0)
    shape = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 4, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", **shape)
    if method == "calibrated":
        wc.init_(model, method, batch=digit_images())
    elif method in ("gaussian", "conditioned"):
        wc.init_(model, method, generator=torch.Generator().manual_seed(0))
    elif method == "identity(lam=10)":
        wc.condition_(model, "identity", lam=10.0)
    elif method in ("polar", "balanced"):
        wc.condition_(model, method)
    return model.eval()


@figure(
    "spectra",
    alt="Singular values of W_Q of one head under three starts and three corrections",
    caption="Singular values of W_Q in one head of a small ViT (width 64), as the forward pass uses it. Left: "
    "three starts. Right: the library's start and three corrections of it. κ(W) is the first value of a "
    "line over the last.",
)
def draw_spectra() -> plt.Figure:
    """Spectra before and after conditioning."""
    drawn, panels = plt.subplots(1, 2, figsize=(8.4, 3.0), sharey=True, layout="constrained")
    starts = ("library default", "gaussian", "conditioned")
    corrections = ("library default", "polar", "balanced", "identity(lam=10)")
    titles = ("init_: at step 0", "condition_: in every pass")
    for panel, title, methods in zip(panels, titles, (starts, corrections), strict=True):
        for method in methods:
            values = torch.linalg.svdvals(wc.find_attention(digits_vit(method))[0].q.read()[0]).detach().numpy()
            panel.plot(range(1, len(values) + 1), values, "o-", ms=3, lw=1.4, color=COLOURS[method], label=method)
        panel.set(yscale="log", title=title, xlabel="index of the singular value")
        panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(0.0, 0.6) if panel is panels[1] else (0.0, 0.72))
    panels[0].set_ylabel("singular value of W_Q")
    return drawn


@figure(
    "attention-maps",
    alt="Attention maps of the first head at the start of training under five methods",
    caption="Attention of the first head at step 0, before any training: rows are the tokens of a digit (a class "
    "token and 16 patches), columns what they attend to. Colours run from 0 to the largest probability, "
    "which is above each map.",
)
def draw_attention_maps() -> plt.Figure:
    """Attention at the start under each method."""
    methods = ("library default", "gaussian", "conditioned", "calibrated", "identity(lam=10)")
    drawn, panels = plt.subplots(1, len(methods), figsize=(9.6, 2.4), layout="constrained")
    for panel, method in zip(panels, methods, strict=True):
        attention = first_map(digits_vit(method))
        panel.imshow(attention, cmap="viridis", vmin=0.0, interpolation="none")
        panel.set_title(f"{method}\nlargest {attention.max():.2f}", fontsize=8.5)
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(False)
    return drawn


@torch.no_grad()
def first_map(model: nn.Module) -> np.ndarray:
    """Attention of the first head of the first layer on the first image."""
    seen: list[Tensor] = []
    handle = model.get_submodule("blocks.0.attn").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(digit_images())
    handle.remove()
    site = wc.find_attention(model)[0]
    queries, keys = (seen[0][0] @ slot.read()[0].T for slot in (site.q, site.k))
    return torch.softmax(queries @ keys.T * site.head_dim**-0.5, dim=-1).numpy()


@figure(
    "cost",
    alt="Time of a training step with a correction over one without, for two models",
    caption="Time of a training step with a correction over one without, from the table in Speed; noise is about "
    "±5 %. A start costs nothing per step, and a folded correction costs nothing either.",
)
def draw_cost() -> plt.Figure:
    """Cost of a step, from the table of docs/speed.md."""
    lines = (ROOT / "docs" / "speed.md").read_text("utf-8").splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("|") and {"identity", "balanced"} <= set(cells(line))]
    if not heads:
        sys.exit(
            "docs/speed.md has no table with columns `identity` and `balanced`, from which the figure `cost` is drawn."
        )
    names = cells(lines[heads[0]])[1:]
    rows = [cells(line) for line in lines[heads[0] + 2 : heads[0] + 4]]
    drawn, axes = plt.subplots(figsize=(6.6, 2.2), layout="constrained")
    for shift, colour, row in zip((-0.17, 0.17), ("#4269d0", "#efb118"), rows, strict=True):
        ratios = [float(cell) for cell in row[1:]]
        places = [place + shift for place in range(len(names))]
        axes.barh(places, [ratio - 1 for ratio in ratios], height=0.3, left=1.0, color=colour, label=row[0])
    axes.axvline(1.0, color=INK, lw=0.8)
    axes.set_yticks(range(len(names)), [name.replace("a singular value decomposition", "one SVD") for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0.95, 1.15), xlabel="time of a step, relative")
    legend(drawn, axes)
    return drawn


def cells(line: str) -> list[str]:
    """Cells of a row of a markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


if __name__ == "__main__":
    for one in FIGURES:
        (Path(sys.argv[1]) / f"{one}.svg").write_text(figure_as_svg(one), encoding="utf-8")
