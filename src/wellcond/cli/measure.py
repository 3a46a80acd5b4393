"""`wellcond measure`: weights, Jacobians and attention of a model on an input."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from wellcond.cli import app as cli
from wellcond.errors import AttentionNotFoundError, WellcondError, check_choice

if TYPE_CHECKING:
    from torch import nn

    from wellcond.measurement import HeadReport, MeasurementReport

CONVENTIONS = ("wide", "stack")
KAPPAS = ("strict", "pseudo")
COMBINES = ("mean", "stack")
METHODS = ("auto", "dense", "gram", "cholesky", "implicit")


@cli.app.command("measure", rich_help_panel=cli.MODELS)
def measure(
    model: cli.Model,
    input: cli.Input = "random",
    layers: Annotated[
        str, typer.Option(metavar="LIST", help="all, or numbers such as 0,5,11, as inspect lists them.")
    ] = "all",
    heads: Annotated[str, typer.Option(metavar="LIST", help="all, or numbers of key/value heads such as 0,1.")] = "all",
    convention: Annotated[
        str, typer.Option(metavar="NAME", help="wide (the Jacobian) or stack (the papers' matrix).")
    ] = "wide",
    kappa: Annotated[
        str, typer.Option(metavar="NAME", help="strict, or pseudo (over non-zero singular values).")
    ] = "strict",
    samples: Annotated[int, typer.Option(metavar="N", help="Samples (or windows) to measure.")] = 1,
    combine: Annotated[
        str, typer.Option(metavar="NAME", help="mean (one by one) or stack (one Jacobian of all samples).")
    ] = "mean",
    method: Annotated[str, typer.Option(metavar="NAME", help="auto, dense, gram, cholesky or implicit.")] = "auto",
    biases: Annotated[bool, typer.Option("--biases", help="Count biases as parameters.")] = False,
    tokens: cli.Tokens = 32,
    weights: cli.Weights = None,
    model_arg: cli.ModelArguments = None,
    seed: cli.Seed = 0,
    output: cli.JsonFile = None,
    html: cli.HtmlFile = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="File in which every measured head is recorded; the same command resumes from it."),
    ] = None,
    force: cli.Force = False,
) -> None:
    """Measure every head on an input: condition numbers of weights and Jacobian, attention entropy, a verdict."""
    check_choice("convention", convention, CONVENTIONS)
    check_choice("kappa", kappa, KAPPAS)
    check_choice("combine", combine, COMBINES)
    check_choice("Jacobian method", method, METHODS)
    if samples < 1:
        raise cli.OptionError(f"--samples: expected at least 1, found {samples}")
    if convention == "stack" and biases:
        raise cli.OptionError(
            "--convention stack is defined without biases. Leave out --biases, or use --convention wide"
        )
    numbers = {"layers": read_numbers(layers, "--layers"), "heads": read_numbers(heads, "--heads")}
    cli.check_input(input, tokens=tokens)
    cli.check_outputs([path for path in (output, html) if path is not None], force=force)
    arguments = cli.read_model(model, model_arg, weights)
    from wellcond.cli.checkpoints import build_loaded
    from wellcond.cli.console import make_console
    from wellcond.lab.report.measurement_page import render_measurement

    built = build_loaded(model, arguments, weights, seed)
    options = {"convention": convention, "kappa": kappa, "samples": samples, "combine": combine, "method": method,
               "biases": biases, "resume": resume}  # fmt: skip
    spec = cli.describe_spec(model, model_arg, weights, seed)
    report = _measure_and_print(built, spec, input, numbers | options, tokens=tokens, seed=seed)
    for path, make in ((output, lambda: report.to_json() + "\n"), (html, lambda: render_measurement(report.to_dict()))):
        if path is not None:
            cli.write_output(path, make(), force=force)
            make_console().print(f"wrote {path}", markup=False, soft_wrap=True)


def read_numbers(text: str, option: str) -> list[int] | None:
    """Numbers such as ``0,5,11``; None for ``all``.

    Raises: OptionError for anything else, and for numbers that are given twice.

    Example:
        >>> read_numbers("0, 5", "--layers"), read_numbers("all", "--layers")
        ([0, 5], None)
    """
    if text.strip() == "all":
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise cli.OptionError(f"{option}: expected 'all' or numbers such as 0,5,11, found {text!r}") from error
    if len(set(numbers)) < len(numbers):
        raise cli.OptionError(f"{option}: expected every number once, found {text!r}")
    return numbers


def _measure_and_print(
    model: nn.Module, spec: str, source: str, options: dict[str, Any], *, tokens: int, seed: int
) -> MeasurementReport:
    """Measure a model, called `spec` in the report, on ``--input`` and print the table; `options` are of `measure`."""
    from rich.markup import escape

    from wellcond.attention.find import scan_attention
    from wellcond.cli.console import make_console
    from wellcond.cli.inputs import make_batch

    scan = scan_attention(model)
    if not scan.sites:
        raise AttentionNotFoundError(
            (type(module).__name__ for module in model.modules()), [str(refusal) for refusal in scan.refusals]
        )
    layers = options["layers"]
    _check_numbers(layers, "--layers", len(scan.sites), "attentions; `wellcond inspect` lists them in order")
    chosen = scan.sites if layers is None else [scan.sites[layer] for layer in layers]
    most = max(site.num_kv_heads for site in chosen)
    _check_numbers(options["heads"], "--heads", most, "key/value heads in the widest attention chosen")
    batch, described = make_batch(model, source, samples=options["samples"], tokens=tokens, seed=seed)
    try:
        found = _measure_with_bar(model, batch, [site.name or "(model)" for site in chosen], options)
    except WellcondError:
        raise
    except ValueError as error:
        raise cli.OptionError(str(error)) from error
    facts = {"model": f"{spec}: {found.run['model']}", "input": f"{described}: {found.run['input']}"}
    report = dataclasses.replace(found, run=found.run | facts)
    _print_report(report)
    for refusal in scan.refusals:
        make_console().print(f"[yellow]not understood:[/] {escape(str(refusal))}")
    return report


def _check_numbers(numbers: Sequence[int] | None, option: str, count: int, what: str) -> None:
    """Raise OptionError for numbers that do not exist."""
    outside = [number for number in numbers or () if not 0 <= number < count]
    if outside:
        raise cli.OptionError(f"{option}: expected numbers from 0 to {count - 1} ({count} {what}), found {outside[0]}")


def _measure_with_bar(model: nn.Module, batch: Any, names: Sequence[str], options: dict[str, Any]) -> MeasurementReport:
    from rich import progress
    from rich.console import Console

    from wellcond.measurement import measure

    columns = progress.TextColumn("{task.description}", markup=False), progress.BarColumn()
    times = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    with progress.Progress(*columns, *times, console=Console(stderr=True)) as bar:
        task = bar.add_task("forward pass", total=None)

        def show(plan: Sequence[Any]) -> Iterator[Any]:
            bar.update(task, total=len(plan))
            for layer, head in plan:
                bar.update(task, description=f"{names[layer]} head {head}")
                yield layer, head
                bar.advance(task)
            bar.update(task, description="measured")

        return measure(model, batch, progress=show, **cast(Any, options))


def _print_report(report: MeasurementReport) -> None:
    """Table of heads, problems and a summary, on standard output."""
    from rich.markup import escape

    from wellcond.cli.console import make_console, print_table
    from wellcond.lab.report.table import Table

    out = make_console()
    header = ("layer", "head", "κ(J)", "pseudo κ", "status", "verdict", "|J_Q|", "|J_K|", "|J_V|", "entropy",
              "diagonal", "κ(W_Q)", "κ(W_K)", "κ(W_V)", "why not finite")  # fmt: skip
    rows = tuple((layer.name or "(model)", *_cells(head)) for layer in report.layers for head in layer.heads)
    print_table(out, "", Table("heads", "", header, rows, (), frozenset({0, 4, 5, 14})))
    for layer in report.layers:
        if layer.problem:
            out.print(f"[yellow]not measured:[/] {escape(layer.name or '(model)')}: {escape(layer.problem)}")
    out.print(summarise(report), markup=False)


def _cells(head: HeadReport) -> list[str]:
    from wellcond.cli.console import show_weight

    d = head.diagnosis
    norms = [f"{x:.3g}" for x in (d.norm_q, d.norm_k, d.norm_v)] if d else ["-"] * 3
    maps = [d.attention.entropy, d.attention.diagonal_mass] if d else [math.nan, math.nan]
    shown = ["-" if math.isnan(x) else f"{x:.4f}" for x in maps]
    spectra = [head.weights[role] for role in "qkv"]
    weights = [show_weight(s.condition_number, s.pseudo_condition_number, s.why_not_finite) for s in spectra]
    kappas = [f"{head.mean_kappa():.4g}", head.show_pseudo() if head.why_not_finite else ""]
    return [str(head.index), *kappas, head.status, head.verdict, *norms, *shown, *weights, head.why_not_finite]


def summarise(report: MeasurementReport) -> str:
    """What to take home: how many heads, the worst, those that are infinite, inexact or dead."""
    rows = [(layer.name or "(model)", head) for layer in report.layers for head in layer.heads]
    dead = [f"{name} head {head.index}" for name, head in rows if head.dead]
    alive = [head.mean_kappa() for _, head in rows if not head.dead]
    finite = [k for k in alive if math.isfinite(k)]
    text = "".join(f"{name}: {report.run[name]}\n" for name in ("model", "input") if name in report.run)
    text += f"{len(rows)} heads of {len(report.layers)} attentions; {report.convention} Jacobian, {report.kappa} κ"
    if report.conditioning is not None:
        text += f", conditioned by {report.conditioning.get('method')!r} (effective weights)"
    if finite:
        mean = math.exp(sum(map(math.log, finite)) / len(finite))
        text += f".\nκ(J) of live heads: geometric mean {mean:.4g}, worst {max(finite):.4g}"
    others = [head.mean_kappa("pseudo") for _, head in rows if not head.dead and not math.isfinite(head.mean_kappa())]
    known = [k for k in others if math.isfinite(k)]
    infinite, inexact = len(others), sum(head.status != "exact" for _, head in rows)
    text += f"; {infinite} not finite" * bool(infinite)
    if known:
        mean = math.exp(sum(map(math.log, known)) / len(known))
        text += f" (over the non-zero spectrum: geometric mean {mean:.4g}, worst {max(known):.4g})"
    text += f"; {inexact} not exact" * bool(inexact)
    listed = ", ".join(dead[:12]) + (f" and {len(dead) - 12} more" if len(dead) > 12 else "")
    said = f"{len(dead)} ({listed}); their κ(J) says nothing good" if dead else "none"
    unknown = sum(head.diagnosis is None for _, head in rows)
    if unknown:
        said += f"; {unknown} heads are not plain softmax attention and could not be diagnosed"
    return f"{text}.\ndead heads: {said}"
