"""Run folders in the stored schema, with numbers that are known beforehand. No training."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from wellcond.lab.records import load_comparisons
from wellcond.lab.report.analysis import analyse
from wellcond.lab.report.page import gather, render_page
from wellcond.lab.report.tables import build_tables

ACCURACY = {"name": "accuracy", "higher_is_better": True, "percent": True}
PERPLEXITY = {"name": "perplexity", "higher_is_better": False, "percent": False}
STEPS_PER_EPOCH = 20


@dataclass
class FakeMethod:
    """What a method's runs contain; `finals` is the last metric by seed."""

    label: str
    finals: dict
    init: str = "default"
    condition: str | None = None
    init_options: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)
    set: dict = field(default_factory=dict)
    speed: float = 3.0
    kappa: float = 50.0
    jacobian: float = 2e3
    strict: str = "finite"
    entropy: float = 0.8
    dead: bool = False
    gradient: float = 0.1
    seconds_per_step: float = 0.02
    statuses: dict = field(default_factory=dict)
    curves: dict = field(default_factory=dict)
    slug: str = ""
    tested: dict = field(default_factory=dict)
    """Metric on the test split by seed, with the weights of the evaluation before the last."""


def write_with_samples(folder, methods, metric, samples_of, change=None):
    """A small comparison whose runs have the samples of their record; `change` edits a record after that."""
    write_comparison(folder, methods, metric=metric, points=2, layers=1, heads=1)
    change_records(folder, lambda record: {"samples": samples_of(record)})
    if change is not None:
        change_records(folder, change)
    return folder


def only_comparison(folder):
    (comparison,) = load_comparisons(folder)
    return comparison


def study(folder, methods=None, **options):
    """The analysis of a comparison of some methods, by default the usual ones."""
    return analyse(only_comparison(write_comparison(folder, methods or usual_methods(), **options)))


def table_of(analysis, name):
    return next(table for table in build_tables(analysis) if table.name == name)


def change_records(folder, edit):
    """Edit every run.json below a folder, or give every one some other values."""
    for path in sorted(Path(folder).rglob("run.json")):
        record = json.loads(path.read_text())
        record |= edit if isinstance(edit, dict) else edit(record) or {}
        path.write_text(json.dumps(record))


def points_of(figure, panel):
    """Points of a panel by series and seed."""
    return next(each.by_series() for each in figure.panels if each.name == panel)


def page_of(comparison):
    return render_page(gather(analyse(comparison)))


def slug_of(label):
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in label.lower())
    return "-".join(filter(None, kept.split("-"))) or "method"


def dump(value):
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: dump(inner) for key, inner in value.items()}
    return [dump(inner) for inner in value] if isinstance(value, list) else value


def write_lines(path, rows):
    path.write_text("".join(json.dumps(dump(row)) + "\n" for row in rows))


def wobble(*numbers):
    """A number in [-1, 1) that looks random and is always the same."""
    return math.sin(12.9898 * sum((at + 1.7) * n for at, n in enumerate(numbers, 1)) + 0.5)


def metric_curve(method, seed, epochs, metric):
    if seed in method.curves:
        return list(method.curves[seed])
    start, end = (0.1, method.finals[seed]) if metric["higher_is_better"] else (90.0, method.finals[seed])
    shape = [(1 - math.exp(-method.speed * e / epochs)) / (1 - math.exp(-method.speed)) for e in range(epochs + 1)]
    noise = 0.008 * abs(end - start)
    return [start + (end - start) * s + (noise * wobble(seed, e) if 0 < e < epochs else 0) for e, s in enumerate(shape)]


def conditioning_rows(method, seed, epochs, points, layers, heads):
    rows = []
    for point in range(points):
        share = point / max(points - 1, 1)
        step = round(share * epochs * STEPS_PER_EPOCH)
        for layer in range(layers):
            for head in range(heads):
                factor = 10 ** (0.25 * wobble(seed, layer, head) + 0.4 * share + 0.05 * layer)
                row = {"step": step, "epoch": step / STEPS_PER_EPOCH, "layer": f"blocks.{layer}.attn", "head": head}
                for role in "qkv":
                    kappa = max(1.0, method.kappa * factor)
                    correction = 2.0 if method.condition else 1.0
                    row |= {f"kappa_{role}": kappa, f"sigma_max_{role}": 1.5, f"sigma_min_{role}": 1.5 / kappa}
                    row |= {
                        f"raw_kappa_{role}": kappa * correction,
                        f"raw_sigma_max_{role}": 1.5,
                        f"raw_sigma_min_{role}": 1.5 / kappa / correction,
                    }
                jacobian = method.jacobian * factor
                strict = jacobian if method.strict == "finite" or head else float(method.strict)
                row |= {
                    "condition_number": strict, "pseudo_condition_number": jacobian, "sigma_max": 3.0,
                    "sigma_rank": 3.0 / jacobian, "rank": 40, "nullity": 0, "status": "exact", "norm_q": 0.5,
                    "norm_k": 0.5, "norm_v": 2.0, "papers_bound_log10": math.log10(jacobian) - 0.3,
                    "bound_log10": math.log10(jacobian) + 4,
                    "entropy": method.entropy * 2.0, "normalised_entropy": min(1.0, method.entropy + 0.02 * head),
                    "diagonal_mass": 0.99 if method.dead else 0.1 + 0.02 * layer, "max_probability": 0.5,
                    "dead": method.dead, "seconds": 0.01,
                }  # fmt: skip
                rows.append(row)
    return rows


def write_run(folder, method, seed, *, metric=ACCURACY, epochs=12, points=5, layers=3, heads=4, conditioning=True):
    """One run; a run that did not finish has half of its evaluations, and a killed one half a last line."""
    status = method.statuses.get(seed, "finished")
    path = Path(folder) / (method.slug or slug_of(method.label)) / f"seed{seed}"
    path.mkdir(parents=True, exist_ok=True)
    curve = metric_curve(method, seed, epochs, metric)
    if status != "finished":
        curve = curve[: max(len(curve) // 2, 1)]
    evaluations = [
        {
            "step": e * STEPS_PER_EPOCH, "epoch": float(e), "loss": 2.3 * math.exp(-0.2 * e) + 0.01 * seed,
            metric["name"]: value, "train_loss": None if e == 0 else 2.0 * math.exp(-0.25 * e),
            "seconds": e * STEPS_PER_EPOCH * method.seconds_per_step,
        }
        for e, value in enumerate(curve)
    ]  # fmt: skip
    done = (len(curve) - 1) * STEPS_PER_EPOCH
    steps = [
        {
            "step": s, "epoch": s / STEPS_PER_EPOCH, "loss": 2.3 * math.exp(-0.01 * s) + 0.02 * wobble(seed, s),
            "lr": 1e-3, "grad_norm": 1.0, "grad_norm_q": method.gradient, "grad_norm_k": method.gradient,
            "grad_norm_v": 0.2,
        }
        for s in range(10, done + 1, 10)
    ]  # fmt: skip
    last = {key: value for key, value in evaluations[-1].items() if key not in ("train_loss", "seconds")}
    record = {
        "schema": 1, "kind": "wellcond-run", "recipe": "digits", "scale": "tiny", "method": method.label,
        "slug": path.parent.name, "seed": seed,
        "method_spec": {
            "init": method.init, "init_options": method.init_options,
            "condition": method.condition, "condition_options": {},
            "tokens": method.tokens, "set": method.set,
        },
        "config": {"optimiser": {"lr": 1e-3, "weight_decay": 0.05}, "method": method.label, "seed": seed, "batch": 64},
        "config_hash": "0123456789abcdef", "status": status,
        "reason": "loss became nan at step 130" if status == "diverged" else "", "metric": metric,
        "final": last, "best": last,
        "data": {"name": "digits", "train": 1297, "evaluation": 500, "description": "8 x 8 grey images"},
        "model": {"name": "timm:vit_tiny", "parameters": 137000, "attentions": layers},
        "progress": {
            "step": done, "num_steps": epochs * STEPS_PER_EPOCH, "epoch": float(len(curve) - 1),
            "num_epochs": float(epochs), "steps_per_epoch": STEPS_PER_EPOCH,
        },
        "seconds": {
            "training": done * method.seconds_per_step, "evaluation": 0.4, "measuring": 2.2, "checkpointing": 0.1,
            "setup": 0.9,
        },
        "samples_per_second": 64 / method.seconds_per_step, "seconds_per_step": method.seconds_per_step,
        "peak_memory_bytes": 812000000 + 1000000 * seed,
        "sessions": [
            {
                "started": "2026-11-15T23:59:00+00:00", "wellcond": "0.1.0", "python": "3.11.2", "torch": "2.15.0",
                "packages": {"timm": "1.0.30"}, "commit": "abc123", "dirty": False, "device": "cpu",
                "device_name": "x86_64", "processes": 1, "threads": 1, "precision": "float32", "resumed_at_step": 0,
                "alone": True,
            }
        ],
    }  # fmt: skip
    if status == "finished" and seed in method.tested:
        at = evaluations[-2]
        record["test"] = {"step": at["step"], "epoch": at["epoch"], "weights": "best", "loss": 0.5}
        record["test"][metric["name"]] = method.tested[seed]
    (path / "run.json").write_text(json.dumps(dump(record)))
    write_lines(path / "steps.jsonl", steps)
    write_lines(path / "evaluations.jsonl", evaluations)
    if conditioning:
        write_lines(path / "conditioning.jsonl", conditioning_rows(method, seed, epochs, points, layers, heads))
    if status == "running":
        with open(path / "steps.jsonl", "a") as file:
            file.write('{"step": 9999, "lo')
    return path


def write_comparison(folder, methods, *, baseline=None, title="ViT on scikit-learn digits", **options):
    """A comparison folder; seeds are those that each method has a final value for."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for method in methods:
        for seed in method.finals:
            write_run(folder, method, seed, **options)
    seeds = sorted({seed for method in methods for seed in method.finals})
    record = {
        "schema": 1, "kind": "wellcond-comparison", "name": "digits", "title": title, "recipe": "digits",
        "scale": "tiny", "methods": [{"label": m.label, "slug": m.slug or slug_of(m.label)} for m in methods],
        "baseline": baseline or methods[0].label, "seeds": seeds, "notes": "",
    }  # fmt: skip
    (folder / "comparison.json").write_text(json.dumps(record))
    return folder


def usual_methods():
    """Five methods with three seeds: one better, one control, one saturated, one with a diverged and a killed run."""
    return [
        FakeMethod("default", {0: 0.90, 1: 0.91, 2: 0.92}),
        FakeMethod("conditioned", {0: 0.93, 1: 0.945, 2: 0.95}, init="conditioned", speed=6.0, kappa=1.2, jacobian=80),
        FakeMethod("gaussian", {0: 0.925, 1: 0.95, 2: 0.94}, init="gaussian", speed=5.0, kappa=3.0, jacobian=120,
                   strict="inf"),
        FakeMethod("identity(lam=10)", {0: 0.50, 1: 0.52, 2: 0.51}, condition="identity", speed=2.0, kappa=1.1,
                   jacobian=9, entropy=0.0, dead=True, gradient=1e-6, seconds_per_step=0.022),
        FakeMethod("polar", {0: 0.915, 1: 0.91, 2: 0.93}, condition="polar", kappa=1.9, jacobian=300,
                   seconds_per_step=0.031, statuses={1: "diverged", 2: "running"}),
    ]  # fmt: skip
