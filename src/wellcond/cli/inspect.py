"""`wellcond inspect`, `init` and `fold`: the weights of attention, as they are found and as a plain checkpoint."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import track
from typer import Argument, Option

from wellcond.arguments import check_choice
from wellcond.cli import app as cli
from wellcond.cli.console import echo, echo_json, make_console, print_table
from wellcond.errors import AttentionNotFoundError, ModelSpecError, WeightError
from wellcond.files import to_json
from wellcond.init import recommended
from wellcond.lab.models.build import build_model, check_model, is_local_code, parse_values
from wellcond.lab.report.table import Cell, Table
from wellcond.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from wellcond.attention.site import AttentionSite

FIELDS = ("kind", "num_heads", "num_kv_heads", "head_dim", "in_features", "scale", "qk_norm", "evidence")
MOST_RANDOM = 500_000_000
"""Parameters of a model that is built with random weights if it is only named: 2 GB, and seconds to draw."""
CALIBRATED = "calibrated"
METHOD_HELP = (
    f"{recommended.METHOD}, with --data, is recommended; {recommended.WITHOUT_TOKENS} for image models without "
    "learned positions (Swin, XCiT); others are default, conditioned, ...: a wrong name lists all."
)
NO_WEIGHTS = "Built without weights, since random ones of this size say nothing; give real ones: --weights, hf:PATH."


@cli.app.command("inspect", rich_help_panel=cli.MODELS)
def inspect(
    model: Annotated[str | None, Argument(metavar="MODEL", help=cli.MODEL_HELP)] = None,
    weights: cli.Weights = None,
    model_arg: cli.ModelArguments = None,
    seed: cli.Seed = 0,
    json: Annotated[bool, Option("--json", help="Print JSON instead of a table.")] = False,
    zoo: Annotated[str | None, Option(metavar="NAME", help="List all models of a library instead: timm or hf.")] = None,
) -> None:
    """List every attention layer of MODEL: kind, heads, widths, layout, condition numbers of W_Q, W_K, W_V."""
    if (model is None) == (zoo is None):
        raise typer.BadParameter("give either a MODEL or --zoo timm|hf")
    if model is None:
        check_choice("zoo", zoo, ("timm", "hf"))
        print_zoo(str(zoo), as_json=json)
        return
    built = _build(model, model_arg, weights, seed)
    import torch

    from wellcond.attention.evaluation import describe_model
    from wellcond.attention.find import scan_attention
    from wellcond.attention.slot import conditioning_of

    scan = scan_attention(built)
    if not scan.sites and not scan.refusals:
        raise AttentionNotFoundError((type(m).__name__ for m in built.modules()), [])
    sites = track(scan.sites, "condition numbers", console=make_console(stderr=True), transient=True, disable=json)
    with torch.no_grad():
        rows = [_describe(site) for site in sites]
    title = cli.describe_spec(model, model_arg, weights, seed)
    parameters = sum(parameter.numel() for parameter in built.parameters())
    note = NO_WEIGHTS if any(parameter.is_meta for parameter in built.parameters()) else ""
    conditioning = conditioning_of(built)
    if json:
        content = {
            "model": f"{title}: {describe_model(built)}", "version": __version__, "conditioning": conditioning,
            "parameters": parameters, "sites": rows, "refused": [str(refusal) for refusal in scan.refusals],
        }  # fmt: skip
        echo_json(to_json(content | ({"note": note} if note else {}), indent=2))
        return
    out = make_console()
    print_table(out, Table.of("attention", "", list(map(_show, rows)), words=(0, 1, 2, 3, 4, 8)))
    stored = "W" if conditioning is None else f"W + C ({conditioning['method']})"
    summary = note or f"κ: worst over heads of σ_max/σ_min of each head's {stored}."
    summary += f" {len(rows)} attention layers, {parameters:,} parameters in {title}."
    out.print(summary, markup=False, soft_wrap=bool(note))
    for refusal in scan.refusals:
        out.print(f"[yellow]not understood:[/] {escape(str(refusal))}")


def _build(spec: str, model_arg: list[str] | None, weights: Path | None, seed: int) -> nn.Module:
    """The model; a large one that is only named has no weights: random ones would take memory and minutes."""
    arguments = parse_values(model_arg or [])
    check_model(spec, arguments)
    import torch

    if weights is None and not is_local_code(spec) and not Path(spec.partition(":")[2]).is_dir():
        # A mistake, or a constructor that needs values, is reported when the model is built for real.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), contextlib.suppress(ModelSpecError):
            warnings.simplefilter("ignore")  # constructors warn of copies to the meta device
            model = build_model(spec, arguments, on_meta=True)
            if sum(parameter.numel() for parameter in model.parameters()) > MOST_RANDOM:
                return model
    return cli.build_loaded(spec, model_arg, weights, seed)


def _describe(site: AttentionSite) -> dict[str, Any]:
    """One row: where, what, and the worst condition number over heads of each projection (effective weights)."""
    from wellcond.attention.site import FLAGS
    from wellcond.linalg.spectrum import spectra

    row: dict[str, Any] = {
        "layer": site.name or "(model)", "class": type(site.module).__name__.removeprefix("Conditioned"),
        "flags": [flag for flag in FLAGS if getattr(site, flag)],
    }  # fmt: skip
    row |= {name: getattr(site, name) for name in FIELDS}
    row["weights"] = _storage(site)
    for role in "qkv":
        heads = site.slots[role].read().detach()
        found = [] if heads.is_meta else spectra(heads)
        # A head that is zero is worse than all.
        worst = max(found, key=lambda s: (s.rank == 0, s.condition_number, s.pseudo_condition_number), default=None)
        row[f"kappa_{role}"] = None if worst is None else worst.condition_number
        row[f"pseudo_kappa_{role}"] = None if worst is None else worst.pseudo_condition_number
        row[f"why_not_finite_{role}"] = "" if worst is None else worst.why_not_finite
    return row


def _storage(site: AttentionSite) -> str:
    """Which of Q, K and V share a stored weight."""
    if site.q.parameter is site.k.parameter is site.v.parameter:
        return "fused"
    if site.k.parameter is site.v.parameter:
        return "q + fused kv"
    return "fused qk + v" if site.q.parameter is site.k.parameter else "separate"


def _show(row: dict[str, Any]) -> dict[str, Cell]:
    """A row of `_describe` as the table has it; where a condition number is not finite, why, and the pseudo one."""
    heads, groups = row["num_heads"], row["num_kv_heads"]
    shown: dict[str, Cell] = {
        "layer": row["layer"], "kind": row["kind"], "heads": str(heads) if heads == groups else f"{heads}/{groups}",
        "dims": f"{row['head_dim']} x {row['in_features']}", "weights": row["weights"],
    }  # fmt: skip
    for role in "qkv":
        kappa, pseudo, why = (row[f"{name}_{role}"] for name in ("kappa", "pseudo_kappa", "why_not_finite"))
        known = pseudo if why else kappa
        text = "-" if known is None else f"{known:.3f}" if known < 1000 else f"{known:.2e}"
        shown[f"κ(W_{role.upper()})"] = f"{kappa} ({why}{f', pseudo {text}' * math.isfinite(pseudo)})" if why else text
    remarks = [flag.replace("_", " ") for flag in row["flags"]]
    remarks += [f"{row['qk_norm']} qk-norm"] if row["qk_norm"] else []
    remarks += ["by structure only"] if row["evidence"] == "structure" else []
    return shown | {"remarks": ", ".join(remarks)}


def print_zoo(library: str, *, as_json: bool = False) -> None:
    """Walk every architecture of timm or hf, as installed, and print how much of it is understood."""
    from wellcond.cli.zoo.forms import is_structured
    from wellcond.cli.zoo.walk import walk_hf, walk_timm

    console, walk = make_console(stderr=True), walk_timm if library == "timm" else walk_hf
    rows = walk(progress=lambda names: track(names, f"walking {library}", console=console, disable=as_json))
    if as_json:
        package = "transformers" if library == "hf" else library
        facts = {"version": __version__, "library": f"{library} {metadata.version(package)}"}
        echo_json(to_json([asdict(row) | facts for row in rows], indent=2))
        return
    header = ("family", "model", "status", "sites", "kinds", "remark", "form of the Jacobian")
    shown = tuple(tuple(map(str, asdict(row).values())) for row in rows)
    out = make_console()
    print_table(out, Table("zoo", "", header, shown, text_columns=frozenset({0, 1, 2, 4, 5, 6})))
    counts = [f"{status}: {count}" for status, count in Counter(row.status for row in rows).most_common()]
    structured = sum(is_structured(row.forms) for row in rows if row.status == "found")
    out.print(f"{', '.join(counts)}; structured Jacobians: {structured} of the found")


@cli.app.command("init", rich_help_panel=cli.MODELS)
def init(
    model: cli.Model,
    output: cli.Output,
    method: Annotated[str, Option(metavar="NAME", help=METHOD_HELP)] = recommended.METHOD,
    weights: cli.Weights = None,
    option: Annotated[list[str] | None, Option(metavar="KEY=VALUE", help="Option of the method; repeatable.")] = None,
    data: Annotated[str | None, Option(metavar="DATA", help=f"Batch for {CALIBRATED}: {cli.BATCH_HELP}")] = None,
    model_arg: cli.ModelArguments = None,
    seed: cli.Seed = 0,
    force: cli.Force = False,
) -> None:
    """Initialise the attention of MODEL, which is to be trained from scratch, and write a plain checkpoint."""
    options = parse_values(option or [])
    cli.check_outputs(output, force=force, suffix=".safetensors")
    if method == CALIBRATED and data is None:
        raise typer.BadParameter(
            f"--method {method}, the recommended one, sets tokens and weights on a batch: expected --data (yours: "
            f"{cli.BATCH_HELP}), found none. Without data: --method {recommended.WITHOUT_TOKENS}"
        )
    if method != CALIBRATED and data is not None:
        raise typer.BadParameter(f"expected no --data with --method {method}: only {CALIBRATED} reads data")
    if data is not None:
        cli.check_batch_data(data)
    built = cli.build_loaded(model, model_arg, weights, seed)
    import torch

    from wellcond.attention.find import find_attention
    from wellcond.cli.inputs import folder_of, make_batch
    from wellcond.conditioning.checkpoint import save_weights
    from wellcond.init.apply import init_

    batch = (
        {} if data is None else {"batch": make_batch(built, data, samples=32, seed=seed, folder=folder_of(model))[0]}
    )
    try:
        init_(built, method, generator=torch.Generator().manual_seed(seed), **options, **batch)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        said = f" with {', '.join(option)}" if option else ""
        raise cli.OptionError(f"--method {method}{said}: {error}") from error
    save_weights(built, output, overwrite=force)
    echo(f"wrote {output}: {len(find_attention(built))} attention layers initialised as {method!r}")


@cli.app.command("fold", rich_help_panel=cli.MODELS)
def fold(
    model: cli.Model,
    output: cli.Output,
    weights: Annotated[Path, cli.checkpoint_option(help="Checkpoint of a conditioned model.")],
    ema: Annotated[bool, Option("--ema", help="Take the EMA weights of a checkpoint of timm's train script.")] = False,
    model_arg: cli.ModelArguments = None,
    force: cli.Force = False,
) -> None:
    """Fold the correction of a conditioned checkpoint into its weights, and write a plain checkpoint."""
    cli.check_outputs(output, force=force, suffix=".safetensors")
    built = cli.build_loaded(model, model_arg, weights, 0, averaged=ema)
    from wellcond.attention.slot import conditioning_of
    from wellcond.conditioning.apply import fold_
    from wellcond.conditioning.checkpoint import save_weights

    settings = conditioning_of(built)
    if settings is None:
        raise WeightError(f"{weights} is a plain checkpoint already: it names no correction to fold")
    fold_(built)
    save_weights(built, output, overwrite=force)
    echo(f"wrote {output}: folded {settings['method']!r} into {len(settings['sites'])} attention layers")
