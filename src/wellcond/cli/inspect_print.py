"""What `wellcond inspect` prints of a model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from wellcond.attention.effective import conditioning_of
from wellcond.attention.find import scan_attention
from wellcond.attention.site import FLAGS, AttentionSite
from wellcond.cli.console import make_console, print_table, show_weight
from wellcond.cli.fold import build_loaded
from wellcond.errors import AttentionNotFoundError
from wellcond.files import to_json
from wellcond.lab.report.table import Table
from wellcond.linalg.spectrum import spectra
from wellcond.models import ModelSpecError, build_model, is_local_code
from wellcond.records import Spectrum
from wellcond.run_facts import describe_model
from wellcond.version import __version__

MOST_RANDOM = 500_000_000
"""Parameters of a model that is built with random weights if it is only named: 2 GB, and seconds to draw."""


def describe(site: AttentionSite) -> dict[str, Any]:
    """One row: where, what, and the worst condition number over heads of each projection (effective weights)."""
    row: dict[str, Any] = {
        "layer": site.name or "(model)",
        "class": type(site.module).__name__.removeprefix("Conditioned"),
        "kind": site.kind,
        "num_heads": site.num_heads,
        "num_kv_heads": site.num_kv_heads,
        "head_dim": site.head_dim,
        "in_features": site.in_features,
        "arrangement": site.arrangement,
        "scale": site.scale,
        "qk_norm": site.qk_norm,
        "flags": [flag for flag in FLAGS if getattr(site, flag)],
        "evidence": site.evidence,
    }
    for role in "qkv":
        worst = worst_head(site, role)
        row[f"kappa_{role}"] = None if worst is None else worst.condition_number
        row[f"pseudo_kappa_{role}"] = None if worst is None else worst.pseudo_condition_number
        row[f"why_not_finite_{role}"] = "" if worst is None else worst.why_not_finite
    return row


def worst_head(site: AttentionSite, role: str) -> Spectrum | None:
    """Spectrum of the worst conditioned head, a zero one being worse than all; None without weights."""
    heads = site.slots[role].read().detach()
    found = [] if heads.is_meta else spectra(heads)
    return max(found, key=lambda s: (s.rank == 0, s.condition_number, s.pseudo_condition_number), default=None)


def build_to_inspect(spec: str, arguments: dict[str, Any], weights: Path | None, seed: int) -> nn.Module:
    """The model of a command; a large one that is only named is built on the meta device.

    Its weights would be random, and take memory and minutes, so that it has no condition numbers.
    """
    has_weights = weights is not None or is_local_code(spec) or Path(spec.partition(":")[2]).is_dir()
    large = None if has_weights else _large_on_meta(spec, arguments)
    return build_loaded(spec, arguments, weights, seed) if large is None else large


def _large_on_meta(spec: str, arguments: dict[str, Any]) -> nn.Module | None:
    """The model on the meta device, if it is larger than what is built with random weights."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constructors warn of copies to the meta device
        try:
            model = build_model(spec, arguments, on_meta=True)
        except ModelSpecError:  # a mistake, or a constructor that needs values: building it for real tells
            return None
    return model if count_parameters(model) > MOST_RANDOM else None


def count_parameters(model: nn.Module) -> int:
    """Numbers in the parameters of a model; those that are tied count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def print_model(model: nn.Module, *, as_json: bool = False, title: str = "") -> None:
    """Print every attention of a model; modules that were refused are listed with the reason."""
    console = Console(stderr=True)
    scan = scan_attention(model)
    if not scan.sites and not scan.refusals:
        raise AttentionNotFoundError((type(m).__name__ for m in model.modules()), [])
    with torch.no_grad():
        rows = [
            describe(site)
            for site in track(scan.sites, "condition numbers", console=console, transient=True, disable=as_json)
        ]
    note, parameters = "", count_parameters(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        note = (
            "Built without weights: a model of this size is not filled with random ones, whose κ would say nothing. "
            f"Give real ones with --weights FILE or as a folder hf:PATH; they take {num_bytes / 2**30:,.1f} GiB."
        )
    conditioning = conditioning_of(model)
    if as_json:
        content = {
            "model": f"{title}: {describe_model(model)}" if title else describe_model(model),
            "version": __version__,
            "conditioning": conditioning,
            "parameters": parameters,
            "sites": rows,
            "refused": [str(refusal) for refusal in scan.refusals],
        }
        print(to_json(content | ({"note": note} if note else {}), indent=2))
        return
    out = make_console()
    print_table(out, "", _model_table(rows))
    stored = "W" if conditioning is None else f"W + C ({conditioning['method']})"
    told = note or f"κ: worst over heads of σ_max/σ_min of each head's {stored}."
    of = f" in {title}" if title else ""
    out.print(f"{told} {len(rows)} attentions, {parameters:,} parameters{of}.", markup=False, soft_wrap=bool(note))
    for refusal in scan.refusals:
        out.print(f"[yellow]not understood:[/] {refusal}")


def _model_table(rows: list[dict[str, Any]]) -> Table:
    shown = []
    for row in rows:
        grouped = row["num_kv_heads"] != row["num_heads"]
        heads = f"{row['num_heads']}/{row['num_kv_heads']}" if grouped else str(row["num_heads"])
        remarks = [flag.replace("_", " ") for flag in row["flags"]]
        remarks += [f"{row['qk_norm']} qk-norm"] if row["qk_norm"] else []
        remarks += ["by structure only"] if row["evidence"] == "structure" else []
        names = ("kappa", "pseudo_kappa", "why_not_finite")
        kappas = [show_weight(*(row[f"{name}_{role}"] for name in names)) for role in "qkv"]
        dims = f"{row['head_dim']} x {row['in_features']}"
        shown.append((row["layer"], row["kind"], heads, dims, row["arrangement"], *kappas, ", ".join(remarks)))
    header = ("layer", "kind", "heads", "dims", "arrangement", *(f"κ(W_{role})" for role in "QKV"), "remarks")
    return Table("attention", "", header, tuple(shown), (), frozenset({0, 1, 2, 3, 4, 8}))
