"""Attention of a class that nobody named: readings of its weights that names and shapes allow, and the proof of one.

Names propose, the module's own output decides (`wellcond.attention.proof`). A fused weight, a stack of matrices or
projections without a head count leave several readings; the one that is proven is believed. Separate projections
and a head count leave a single reading, which is also taken (as evidence by structure) where the module cannot be run.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.attention import layout, names, trial
from wellcond.attention.products import ProductRecorder, expected_heads, facts_of
from wellcond.attention.proof import Proof, prove
from wellcond.attention.site import AttentionSite, Place, Slot
from wellcond.errors import UnsupportedLayoutError

ORDERS = ("qkv", "qvk", "kqv", "kvq", "vqk", "vkq")


@dataclass(frozen=True)
class Reading:
    """One way to read a module's weights: `describe` says it of the module, or of a copy."""

    text: str
    describe: Callable[[nn.Module], AttentionSite]
    code: str = "fused_site(place, m.qkv, num_heads=m.num_heads, output=m.proj)"
    """The call of a builder that says the same."""

    def streams(self, on: nn.Module) -> list[AttentionSite]:
        """The sites of a module: one, or one per stream."""
        site = self.describe(on)
        added = added_stream(site)
        return [site] if added is None else [site, added]


def describe_by_structure(place: Place) -> list[AttentionSite]:
    """The sites of a module (one per stream) of which one reading is proven; none if it is no attention.

    Raises: UnsupportedLayoutError if it looks like an attention and no reading is proven.
    """
    readings = list_readings(place)
    if not readings:
        return []
    verdict = _judge(place, readings)
    if verdict.chosen is not None:
        streams = readings[verdict.chosen].streams(place.module)
        return [replace(site, evidence="forward", **verdict.facts) for site in streams]
    if len(readings) == 1 and verdict.untried is not None:
        return [replace(site, evidence="structure") for site in readings[0].streams(place.module)]
    raise UnsupportedLayoutError(
        place.name, verdict.reason, class_name=place.class_name, advice=adapter_to_paste(place, readings[0])
    )


def adapter_to_paste(place: Place, reading: Reading) -> str:
    """A description of the module to correct and paste, with its own attribute names."""
    return (
        "A wrong layout would be silent, so wellcond does not guess. Say what is right (strict=False leaves the layer "
        "out; see docs/layouts.md):\n"
        f"    @wellcond.register_adapter({place.class_name})\n"
        "    def my_attention(place):\n"
        "        m = place.module\n"
        f"        return wellcond.{reading.code}"
    )


@dataclass(frozen=True)
class Verdict:
    """Which reading is proven, or why none is. `untried` says why the module could not be run."""

    chosen: int | None
    reason: str
    facts: dict[str, Any]
    untried: str | None = None


_VERDICTS: dict[object, Verdict] = {}
"""By class, sizes and settings of a module: equal layers of a model are proven once."""


def _judge(place: Place, readings: list[Reading]) -> Verdict:
    key = (signature(place.module), tuple(reading.text for reading in readings))
    if key not in _VERDICTS:
        _VERDICTS[key] = _prove_one(place, readings)
    return _VERDICTS[key]


def signature(module: nn.Module) -> object:
    """What decides which reading of a module is right: classes, shapes and plain settings of all its parts."""
    parts = []
    for name, part in module.named_modules():
        shapes = tuple((key, tuple(value.shape)) for key, value in part._parameters.items() if value is not None)
        plain = (bool, int, float, str, type(None))
        settings = tuple((key, repr(value)) for key, value in vars(part).items() if isinstance(value, plain))
        parts.append((name, type(part), getattr(type(part), "forward", None), shapes, settings))
    return tuple(parts)


def _prove_one(place: Place, readings: list[Reading]) -> Verdict:
    untried = trial.why_not(place.module)
    if untried is not None:
        return Verdict(None, _nothing_shown(untried), {}, untried)
    widths = [site.in_features for site in readings[0].streams(place.module)]
    best: list[Proof] = []
    first_run: trial.Trial | None = None
    failures: list[Exception] = []
    with trial.quiet():
        for attempt in trial.trials(place, widths):
            if isinstance(attempt, Exception):
                failures.append(attempt)
                continue
            first_run = first_run or attempt
            proofs = []
            for number, reading in enumerate(readings):
                proof = _prove(attempt, reading)
                if proof.holds:
                    seen = seen_facts(attempt, reading.streams(attempt.module))
                    facts = {"scale": None, **seen, **proof.facts}
                    if any("mask" in name for name in trial.required_names(place.module)):
                        facts["causal"] = None  # the caller's mask decides
                    return Verdict(number, proof.reason, facts)
                proofs.append(proof)
            best = best or proofs
    if first_run is not None:
        multiplied = [number for number, reading in enumerate(readings) if _is_multiplied(first_run, reading)]
        if len(multiplied) == 1:
            facts = seen_facts(first_run, readings[multiplied[0]].streams(first_run.module))
            return Verdict(multiplied[0], "its forward pass multiplies these heads", facts)
    if best:
        why = "; ".join(f"{reading.text}: {proof.reason}" for reading, proof in zip(readings[:3], best, strict=False))
        return Verdict(None, f"its output contradicts every reading of its weights ({why}).", {})
    reason = f"{type(failures[0]).__name__}: {failures[0]}" if failures else "no arguments could be made"
    required = ", ".join(trial.required_names(place.module))
    untried = f"its forward pass could not be tried: it needs the arguments {required} ({reason})"
    return Verdict(None, _nothing_shown(untried), {}, untried)


def _nothing_shown(untried: str) -> str:
    return f"no reading of its weights could be proven: {untried}."


def _prove(attempt: trial.Trial, reading: Reading) -> Proof:
    try:
        with trial.healthy(reading.streams(attempt.module)) as streams:
            return prove(streams, attempt.run, local=attempt.local)
    except Exception as error:  # a module may raise anything with other weights
        return Proof(False, f"it could not be run ({type(error).__name__}: {error})")


def _is_multiplied(attempt: trial.Trial, reading: Reading) -> bool:
    """Whether products that the kernel shows are of these heads.

    That is evidence as well, where something else breaks the symmetries: a weight that is tied or used twice.
    """
    try:
        return bool(seen_facts(attempt, reading.streams(attempt.module)))
    except Exception:  # a module may raise anything with other weights
        return False


def seen_facts(attempt: trial.Trial, streams: list[AttentionSite]) -> dict[str, Any]:
    """Scale, position bias and rotary positions, where the kernel's products and softmax can be seen."""
    with trial.healthy(streams) as (site, *_):
        read = [attempt.tokens]

        def keep(_: nn.Module, args: Any) -> None:
            read[0] = args[0].detach().reshape(-1, args[0].shape[-1])

        owner = site.q.owner
        handle = None if owner is site.module else owner.register_forward_pre_hook(keep)
        recorder = ProductRecorder()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), contextlib.suppress(Exception), recorder:
            attempt.run()
        if handle is not None:
            handle.remove()
        if read[0].shape[-1] != site.in_features:
            return {}
        with torch.no_grad():
            return facts_of(recorder, expected_heads(site, read[0]))


# Readings


def list_readings(place: Place) -> list[Reading]:
    """Every reading of a module's projections that names and shapes allow; empty if it is no attention.

    Raises: UnsupportedLayoutError if rows do not fit the head count that the module declares.
    """
    found = list(_module_readings(place)) or list(_parameter_readings(place))
    fitting: list[Reading] = []
    problem: UnsupportedLayoutError | None = None
    for reading in found:
        try:
            reading.describe(place.module)
            fitting.append(reading)
        except UnsupportedLayoutError as error:
            problem = problem or error
    if found and not fitting:
        assert problem is not None
        raise problem
    return fitting


def _module_readings(place: Place) -> Iterator[Reading]:
    """Readings of projections that are modules, of this module or of one part of it that holds nothing else."""
    for path in _holders(place.module):
        children = dict(place.module.get_submodule(path).named_children())

        def has(wanted: tuple[str, ...], children: dict[str, nn.Module] = children) -> bool:
            return all(layout.is_projection(children.get(name)) for name in wanted)

        separate = next((wanted for wanted in names.SEPARATE if has(wanted)), None)
        query_kv = next((wanted for wanted in names.QUERY_AND_FUSED if has(wanted)), None)
        fused = next((name for name in names.FUSED if has((name,))), None)
        if separate is not None:
            yield from _with_heads(place, path, layout.separate_site, separate, [{}])
            return
        if query_kv is not None:
            options = [{"arrangement": arrangement} for arrangement in ("blocks", "groups")]
            yield from _with_heads(place, path, layout.query_and_kv_site, query_kv, options)
            return
        if fused is not None:
            options = [{"arrangement": a, "order": order} for order in ORDERS for a in ("blocks", "groups")]
            yield from _with_heads(place, path, layout.fused_site, (fused,), options)
            return


def _holders(module: nn.Module) -> list[str]:
    """The module itself, then parts of it that hold projections and nothing else (torchtitan's qkv_linear)."""
    if find_output(module) is None:
        return [""]
    return ["", *(name for name, part in module.named_children() if _holds_projections_only(part))]


def _holds_projections_only(part: nn.Module) -> bool:
    children = list(part.children())
    is_attention = find_output(part) is not None or any(hasattr(part, name) for name in names.HEADS)
    return bool(children) and not is_attention and all(layout.is_projection(child) for child in children)


def _with_heads(
    place: Place, path: str, build: Callable[..., AttentionSite], wanted: tuple[str, ...], options: list[dict[str, Any]]
) -> Iterator[Reading]:
    projections = [place.module.get_submodule(path).get_submodule(name) for name in wanted]
    for heads, option in itertools.product(_head_counts(place, path, wanted, projections), options):

        def describe(on: nn.Module, heads: dict[str, Any] = heads, option: dict[str, Any] = option) -> AttentionSite:
            here = replace(place, module=on)
            holder = on.get_submodule(path)
            parts = [holder.get_submodule(name) for name in wanted]
            facts = declared_facts(place)
            return build(here, *parts, output=find_output(on), **facts, **heads, **option)

        words = [f"{heads['num_heads']} heads", *map(str, option.values())]
        text = " ".join(["separate" if len(wanted) == 3 else "fused", *words])
        code = _call_text(place, path, build, wanted, heads, option)
        yield Reading(text, describe, code)
        if heads["num_kv_heads"] not in (None, 1, heads["num_heads"]):
            yield Reading(f"{text}, groups strided", lambda on, describe=describe: _strided(describe(on)), code)


def _call_text(
    place: Place,
    path: str,
    build: Callable[..., AttentionSite],
    wanted: tuple[str, ...],
    heads: dict[str, Any],
    option: dict[str, Any],
) -> str:
    """The call of a builder as a user would write it."""
    module = place.module
    holder = f"m.{path}." if path else "m."
    counts = {"num_heads": names.HEADS, "num_kv_heads": names.KV_HEADS, "head_dim": names.HEAD_DIM}
    arguments = ["place", *(holder + name for name in wanted)]
    for key, known in counts.items():
        if heads[key] is not None:
            own = next((name for name in known if getattr(module, name, None) == heads[key]), None)
            arguments.append(f"{key}={f'm.{own}' if own else heads[key]}")
    arguments += [f'{key}="{value}"' for key, value in option.items()]
    output = find_output(module)
    path_of_output = next(
        (name for name, part in module.named_modules() if part is output and output is not None), None
    )
    arguments += [f"output=m.{path_of_output}"] if path_of_output else []
    return f"{build.__name__}({', '.join(arguments)})"


def _strided(site: AttentionSite) -> AttentionSite:
    """The reading in which query head i attends to key head i modulo their number (x-transformers).

    Query heads are then listed group by group, as everywhere.
    """
    order = torch.arange(site.num_heads).view(-1, site.num_kv_heads).T.flatten()

    def sorted_heads(slot: Slot) -> Slot:
        bias_rows = None if slot.bias_rows is None else slot.bias_rows[order]
        return replace(slot, rows=slot.rows[order], bias_rows=bias_rows)

    return replace(site, q=sorted_heads(site.q), o=None if site.o is None else sorted_heads(site.o))


def _head_counts(
    place: Place, path: str, wanted: tuple[str, ...], projections: list[nn.Module]
) -> Iterator[dict[str, Any]]:
    """What is declared of the heads; where nothing is, every number that the rows allow."""
    holder = replace(place, module=place.module.get_submodule(path), name=place.name)
    counts = first_int(place, names.HEADS) or first_int(holder, names.HEADS)
    kv_counts = first_int(place, names.KV_HEADS) or first_int(holder, names.KV_HEADS)
    width = first_int(place, names.HEAD_DIM) or first_int(holder, names.HEAD_DIM)
    rows = layout.out_features(projections[0])
    if counts is None and width and len(wanted) == 3:
        counts, kv_counts = rows // width, layout.out_features(projections[1]) // width
    if counts is not None:
        yield {"num_heads": counts, "num_kv_heads": kv_counts, "head_dim": width}
        return
    if len(wanted) == 1:
        rows //= 3
    for number in range(1, rows // 4 + 1):
        if rows % number == 0 and rows // number <= 256:
            yield {"num_heads": number, "num_kv_heads": None, "head_dim": None}


def find_output(module: nn.Module) -> nn.Module | None:
    """The output projection, by its usual names; inside a Sequential, its first projection."""
    for name in names.OUTPUT:
        child = getattr(module, name, None)
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            child = next((part for part in child if layout.is_projection(part)), None)
        if layout.is_projection(child):
            return child
    return None


def first_int(place: Place, wanted: tuple[str, ...]) -> int | None:
    """The first whole number under one of these names: of the module, else of a config object around it."""
    for name in wanted:
        value = getattr(place.module, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    for name in wanted:
        value = place.config(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def declared_facts(place: Place) -> dict[str, Any]:
    """Scale and causality where the module says them."""
    scales = (getattr(place.module, name, None) for name in names.SCALE)
    return {
        "scale": next((scale for scale in scales if isinstance(scale, float)), None),
        "causal": getattr(place.module, "is_causal", None),
    }


def added_stream(site: AttentionSite) -> AttentionSite | None:
    """The second stream of a joint attention, with the same heads; None where there is none."""
    wanted, output_name = names.ADDED
    module = site.module
    parts = [getattr(module, name, None) for name in wanted]
    if not all(layout.is_projection(part) for part in parts):
        return None
    place = Place(f"{site.name}.added" if site.name else "added", module, module)
    output = getattr(module, output_name, None)
    added = layout.separate_site(
        place,
        *parts,
        num_heads=site.num_heads,
        num_kv_heads=site.num_kv_heads,
        output=output if layout.is_projection(output) else None,
        scale=site.scale,
    )
    return replace(added, stream="added")


# Projections that are parameters of the module


def _parameter_readings(place: Place) -> Iterator[Reading]:
    own = {name: value for name, value in place.module._parameters.items() if value is not None and value.dim() >= 2}
    trio = next((wanted for wanted in names.SEPARATE if all(name in own for name in wanted)), None)
    if trio is not None:
        yield from _readings_of_three(place, trio, own)
        return
    stack = next((name for name in own if name in names.STACKS), None)
    if stack is not None:
        yield from _readings_of_stack(place, stack, own[stack])


def _readings_of_three(place: Place, trio: tuple[str, ...], own: dict[str, nn.Parameter]) -> Iterator[Reading]:
    """Three parameters (heads, ., .) or (., .), and the output's if it has one."""
    output = next((name for name in names.OUTPUT if name in own), None)
    biases = {name: _bias_of(place.module, name) for name in (*trio, *([output] if output else []))}
    shape = own[trio[0]].shape
    for transposed, out_transposed in itertools.product((True, False), repeat=2):

        def describe(
            on: nn.Module, transposed: bool = transposed, out_transposed: bool = out_transposed
        ) -> AttentionSite:
            here = replace(place, module=on)

            def slot(name: str, turned: bool, on_input: bool = False) -> Slot:
                return _parameter_slot(here, name, turned, on_input, biases[name])

            q, k, v = (slot(name, transposed) for name in trio)
            o = slot(output, out_transposed, True) if output else _module_output(here, q)
            return _parameter_site(here, q, k, v, o, "parameters")

        yield Reading(
            f"parameters {'(in, out)' if transposed else '(out, in)'}, output "
            f"{'(in, out)' if out_transposed else '(out, in)'}",
            describe,
        )
        if output is None and out_transposed is False:
            return
    del shape


def _readings_of_stack(place: Place, name: str, stack: nn.Parameter) -> Iterator[Reading]:
    """One parameter with Q, K, V and perhaps O, one below the other or along a first axis."""
    for view in _views(stack):
        for transposed, out_transposed in itertools.product((False, True), repeat=2):

            def describe(
                on: nn.Module, view: Any = view, transposed: bool = transposed, out_transposed: bool = out_transposed
            ) -> AttentionSite:
                here = replace(place, module=on)
                width = view[1] if transposed else view[2]
                rows = view[2] if transposed else view[1]
                heads, head_dim = _heads_of_rows(here, rows)
                table = layout.head_rows(heads, head_dim)
                base = Slot(on, name, table, transposed, view=view, index=0)
                q, k, v = (replace(base, index=index) for index in range(3))
                o = _module_output(here, q)
                if view[0] == 4:
                    o = replace(base, index=3, transposed=out_transposed, heads_on_input=True)
                    if o.in_features != rows or o.out_features != width:
                        raise UnsupportedLayoutError(here.name, "its stack of matrices is not one of Q, K, V and O.")
                return _parameter_site(here, q, k, v, o, "stack")

            words = (
                f"{'(in, out)' if transposed else '(out, in)'}, output {'(in, out)' if out_transposed else '(out, in)'}"
            )
            yield Reading(f"stack {tuple(view)} of {words}", describe)
            if view[0] == 3 and out_transposed is False and transposed is True:
                return


def _views(stack: nn.Parameter) -> Iterator[tuple[int, ...]]:
    shape = tuple(stack.shape)
    if stack.dim() == 3:
        yield shape
        return
    for count in (4, 3):
        if shape[0] % count == 0:
            yield count, shape[0] // count, shape[1]
        if shape[1] % count == 0:
            yield count, shape[0], shape[1] // count


def _parameter_slot(place: Place, name: str, transposed: bool, on_input: bool, bias: str | None) -> Slot:
    stored: Tensor = place.module._parameters[name]  # type: ignore[assignment]
    if stored.dim() == 3:
        heads = stored.shape[0]
        out, columns = (stored.shape[2], stored.shape[1]) if transposed else (stored.shape[1], stored.shape[2])
        width = columns if on_input else out
        rows = layout.head_rows(heads, width)
        bias_rows = None
        return Slot(place.module, name, rows, transposed, on_input, bias_name=bias, bias_rows=bias_rows, by_head=True)
    rows_of = stored.shape[1] if transposed else stored.shape[0]
    columns = stored.shape[0] if transposed else stored.shape[1]
    heads, width = _heads_of_rows(place, columns if on_input else rows_of)
    return Slot(place.module, name, layout.head_rows(heads, width), transposed, on_input, bias_name=bias)


def _heads_of_rows(place: Place, rows: int) -> tuple[int, int]:
    heads, width = first_int(place, names.HEADS), first_int(place, names.HEAD_DIM)
    kv_heads = first_int(place, names.KV_HEADS)
    for count in (heads, kv_heads):
        if count and rows % count == 0 and (width is None or count * width == rows):
            return count, rows // count
    raise UnsupportedLayoutError(
        place.name,
        f"{rows} rows of a parameter do not fit the heads that it declares ({heads} of width {width}).",
        class_name=place.class_name,
    )


def _parameter_site(place: Place, q: Slot, k: Slot, v: Slot, o: Slot | None, arrangement: str) -> AttentionSite:
    if q.head_dim != k.head_dim or q.in_features != k.in_features:
        raise UnsupportedLayoutError(place.name, "its queries and keys have other sizes.", class_name=place.class_name)
    if q.num_heads % k.num_heads or k.num_heads != v.num_heads:
        raise UnsupportedLayoutError(place.name, "its heads do not divide into groups.", class_name=place.class_name)
    if o is not None and (o.num_heads, o.head_dim) != (q.num_heads, v.head_dim):
        raise UnsupportedLayoutError(place.name, "its output has other heads.", class_name=place.class_name)
    facts = declared_facts(place)
    return AttentionSite(name=place.name, module=place.module, arrangement=arrangement, q=q, k=k, v=v, o=o, **facts)


def _module_output(place: Place, q: Slot) -> Slot | None:
    output = find_output(place.module)
    return layout.output_slot(place, output, q.num_heads, q.head_dim)


def _bias_of(module: nn.Module, weight: str) -> str | None:
    """The bias parameter beside a weight: b_Q of W_Q, q_bias of q_weight."""
    for name in (weight.replace("W_", "b_"), weight.replace("weight", "bias"), f"{weight}_bias"):
        value = module._parameters.get(name)
        if name != weight and value is not None and value.dim() in (1, 2):
            return name
    return None
