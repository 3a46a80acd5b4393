"""`wellcond inspect --zoo`: which attention of a library is described; timm by one small model of each file."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from wellcond.attention.find import Scan, find_attention, scan_attention
from wellcond.cli.console import make_console, print_table
from wellcond.cli.zoo_forms import DESCRIBED, captured_forms, forms_of, is_structured, one_of_each_kind
from wellcond.errors import MissingExtraError
from wellcond.files import to_json
from wellcond.jacobian.capture import capture_sites
from wellcond.lab.report.table import Table
from wellcond.version import __version__

# From the smallest up: the first word that a model's name contains decides; names with none of them come last.
SMALL_WORDS = (
    "test", "zepto", "atto", "femto", "pico", "nano", "xxs", "xs", "tiny", "t0", "mini", "s0", "b0", "m0",
    "small", "s1", "m1", "d1", "18", "s12", "050", "26", "medium", "base",
)  # fmt: skip
ATTENTION_NAME = re.compile(r"attention|attn", re.IGNORECASE)
# A module that holds one of these projects queries, keys or values; a squeeze-excite gate holds none.
PROJECTION_NAME = re.compile(r"^(to_|c_|in_proj_)?(q|k|v|qk|kv|qkv|qkvs|query|key|value)(_proj|_lin|_gate)?$")


@dataclass(frozen=True)
class ZooRow:
    """What a walk found in one model.

    `status` is ``found`` (every attention described), ``partly``, ``refused``, ``no attention`` or ``not built``.
    """

    family: str
    model: str
    status: str
    num_sites: int
    kinds: str
    detail: str
    forms: str = ""
    """Which forms of the Jacobian measure what was found; empty where nothing was found or it was not asked for."""


Progress = Callable[[Sequence[str]], Iterable[str]]


def walk_timm(progress: Progress = iter) -> list[ZooRow]:
    """Build a small model of every architecture file of timm, without weights, and look for its attention.

    The smallest model that has any attention stands for its file (FastViT's smallest are convolutional); "no
    attention" means that no model of the file has any.

    Args:
        progress: wraps the sequence of names that is walked, to show how far it is.

    Returns: one row per architecture file, in timm's order.

    Raises:
        MissingExtraError: timm is not installed.
    """
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm", "vision") from error

    return [
        _first_with_attention(family, timm.list_models(module=family), timm.create_model)
        for family in progress(timm.list_modules())
    ]


def _first_with_attention(family: str, names: Iterable[str], create: Callable[[str], nn.Module]) -> ZooRow:
    rows = []
    for name in smallest_first(names):
        row = inspect_model(family, name, partial(create, name), forms=True)
        if row.status in ("found", "partly") and not (is_structured(row.forms) and DESCRIBED not in row.forms):
            # Windows and maps do not fit into a trial of the attention alone: ask the whole model.
            return replace(row, forms=forms_in_use(create(name)) or row.forms)
        if row.status in ("found", "partly", "refused"):
            return row
        rows.append(row)
    return rows[0]


def forms_in_use(model: nn.Module) -> str:
    """Which forms of the Jacobian measure the attention of a model of timm, on an image of noise; empty if it fails."""
    config: Any = getattr(model, "default_cfg", {})
    size = config.get("input_size", (3, 224, 224))
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # One of each kind: the maps of all layers of a model of 1,024 pixels have many GB.
            chosen = one_of_each_kind(find_attention(model, strict=False))
            return captured_forms(capture_sites(model, image, chosen, max_samples=1, required=False))
        except Exception:  # a model that takes no image
            return ""


def smallest_first(names: Iterable[str]) -> list[str]:
    """The names in the order of how small they sound; among equals the shortest first.

    Example:
        >>> smallest_first(["vit_base", "vit_tiny_384", "vit_tiny"])
        ['vit_tiny', 'vit_tiny_384', 'vit_base']
    """

    def rank(name: str) -> tuple[int, int, str]:
        words = re.split(r"[^a-z0-9]+", name)
        first = next((n for n, word in enumerate(SMALL_WORDS) if word in words), len(SMALL_WORDS))
        return first, len(name), name

    return sorted(names, key=rank)


def inspect_model(family: str, name: str, build: Callable[[], nn.Module], *, forms: bool = False) -> ZooRow:
    """Build a model on the meta device (on the CPU where that fails) and describe what is found in it.

    With `forms`, also which form of the Jacobian measures each kind of attention, as far as a trial of it tells.
    """
    try:
        model = build_without_weights(build)
    except Exception as error:  # a model that cannot be built is a row of the table, whatever it raised
        return not_built(family, name, error)
    scan = scan_attention(model)
    row = summarise(family, name, scan, unrecognised_attention(model, scan))
    return replace(row, forms=forms_of(scan.sites)) if forms else row


def not_built(family: str, name: str, error: Exception) -> ZooRow:
    """The row of a model whose constructor failed."""
    return ZooRow(family, name, "not built", 0, "", f"{type(error).__name__}: {first_line(error)}")


def build_without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """Call `build` on the meta device; on the CPU if the constructor needs values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constructors warn of their own affairs (deprecated names, meta copies)
        try:
            with torch.device("meta"):
                return build()
        except Exception:  # data-dependent constructors raise many kinds of errors on meta tensors
            return build()


def summarise(family: str, name: str, scan: Scan, missed: Sequence[str]) -> ZooRow:
    """The row of one scanned model; `missed` are classes that look like attention and were not recognised."""
    kinds = ", ".join(sorted({site.kind for site in scan.sites}))
    reasons = list(dict.fromkeys(f"{r.class_name}: {first_line(r.problem)}" for r in scan.refusals))
    if missed:
        reasons.append(f"has modules named {', '.join(missed)} that were not recognised")
    if scan.sites:
        status = "partly" if reasons else "found"
    else:
        status = "refused" if reasons else "no attention"
    return ZooRow(family, name, status, len(scan.sites), kinds, "; ".join(reasons))


def unrecognised_attention(model: nn.Module, scan: Scan) -> list[str]:
    """Classes called attention that hold query, key or value projections and were neither described nor refused."""
    missed = {
        type(module).__name__
        for name, module in model.named_modules()
        if ATTENTION_NAME.search(type(module).__name__) and holds_projection(module) and not is_known(name, scan)
    }
    return sorted(missed)


def is_known(name: str, scan: Scan) -> bool:
    """Whether a module is described or refused, lies inside such a module, or contains one."""
    known = [site.name for site in scan.sites] + [refusal.name for refusal in scan.refusals]
    return any(k in ("", name) or name.startswith(f"{k}.") or k.startswith(f"{name}.") for k in known)


def holds_projection(module: nn.Module) -> bool:
    """Whether a module has a child or parameter that is named like a query, key or value projection."""
    names = [name for name, _ in module.named_children()] + list(module._parameters)
    return any(PROJECTION_NAME.match(name) for name in names)


def first_line(message: object) -> str:
    """The first line of an error, shortened."""
    lines = str(message).strip().splitlines() or [""]
    return lines[0][:200]


def print_zoo(library: str, *, as_json: bool = False) -> None:
    """Walk every architecture of an installed library and print how much of it is understood.

    Args:
        library: timm or hf.
        as_json: print JSON, and nothing else.
    """
    from wellcond.cli.zoo_hf import walk_hf

    console, walk = Console(stderr=True), walk_timm if library == "timm" else walk_hf
    rows = walk(progress=lambda names: track(names, f"walking {library}", console=console, disable=as_json))
    if as_json:
        package = "transformers" if library == "hf" else library
        facts = {"version": __version__, "library": f"{library} {metadata.version(package)}"}
        print(to_json([asdict(row) | facts for row in rows], indent=2))
        return
    header = ("family", "model", "status", "sites", "kinds", "form of the Jacobian", "remark")
    shown = tuple(
        (row.family, row.model, row.status, str(row.num_sites), row.kinds, row.forms, row.detail) for row in rows
    )
    out = make_console()
    print_table(out, "", Table("zoo", "", header, shown, (), frozenset({0, 1, 2, 4, 5, 6})))
    counts = Counter(row.status for row in rows)
    out.print(", ".join(f"{status}: {count}" for status, count in counts.most_common()))
    with_attention = len(rows) - counts["no attention"] - counts["not built"]
    if with_attention:
        share = counts["found"] / with_attention
        out.print(f"coverage: {counts['found']} of {with_attention} architectures with attention ({share:.0%})")
    described = [row for row in rows if row.status == "found"]
    if described:
        structured = sum(is_structured(row.forms) for row in described)
        out.print(f"structured Jacobians: {structured} of {len(described)} ({structured / len(described):.0%})")
