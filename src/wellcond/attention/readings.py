"""Readings of an attention layer's weights that the names and shapes of its parts allow.

Names propose; the module's own output decides which reading is right (`wellcond.attention.structure`). Projections may
be modules (separate, fused, or in a part that holds nothing else) or parameters of the module: one per projection, one
matrix per head, or a stack of three or four matrices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from wellcond.attention import layout, names
from wellcond.attention.site import AttentionSite, ModuleContext
from wellcond.attention.slot import Slot, stored_parameter
from wellcond.errors import UnsupportedLayoutError

ARRANGEMENTS = ("blocks", "groups")
ORDERS: dict[int, list[tuple[tuple[str, ...], str]]] = {
    3: [(("q", "k", "v"), "blocks")],
    2: [(("q", "kv"), arrangement) for arrangement in ARRANGEMENTS],
    1: [(("".join(order),), one) for order in itertools.permutations("qkv") for one in ARRANGEMENTS],
}
"""By the number of projections: what their rows may hold, and in which arrangement."""
COUNTS = {"num_heads": names.HEADS, "num_kv_heads": names.KV_HEADS, "head_dim": names.HEAD_DIM}


@dataclass(frozen=True)
class Reading:
    """One way to read a module's weights."""

    streams: list[AttentionSite]
    """One site, or one per stream."""
    text: str
    """The call of a builder that says the same, with numbers."""
    code: str = ""
    """The same as a user would write it, by the module's own names."""

    def adapter_to_paste(self, place: ModuleContext) -> str:
        """Advice that ends in an adapter to correct and paste."""
        cls = type(place.module)
        importable = cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__
        lines = [
            "import torch",
            "import wellcond",
            *([f"from {cls.__module__} import {cls.__qualname__.partition('.')[0]}"] if importable else []),
            "",
            f"@wellcond.register_adapter({cls.__qualname__ if importable else cls.__name__})",
            "def my_attention(place):",
            "    m = place.module",
            f"    return {self.code}",
        ]
        return (
            "A wrong layout would be silent, so wellcond does not guess. Say what is right (strict=False leaves the "
            "layer out; see docs/extend/adapter.md):\n" + "\n".join(f"    {line}".rstrip() for line in lines)
        )


def list_readings(place: ModuleContext) -> list[Reading]:
    """Every reading of a module's projections that names and shapes allow; empty if it is no attention.

    Raises: UnsupportedLayoutError if rows do not fit the head count that the module declares.
    """
    found = list(_module_readings(place)) or list(_parameter_readings(place))
    fitting = [reading for reading in found if isinstance(reading, Reading)]
    if found and not fitting:
        raise next(problem for problem in found if isinstance(problem, UnsupportedLayoutError))
    return fitting


def _fitting(build: Callable[..., Reading], *arguments: Any) -> Reading | UnsupportedLayoutError:
    """What a function makes, or its error where sizes do not fit."""
    try:
        return build(*arguments)
    except UnsupportedLayoutError as problem:
        return problem


def _module_readings(place: ModuleContext) -> Iterator[Reading | UnsupportedLayoutError]:
    """Readings of projections that are modules, of this module or of one part of it that holds nothing else."""
    output = layout.find_output(place.module)
    parts_too = [] if output is None else list(place.module.named_children())  # such as torchtitan's qkv_linear
    for path in ("", *(name for name, part in parts_too if layout.holds_projections_only(part))):
        children = dict(place.module.get_submodule(path).named_children())
        wanted = (one for one in names.PROJECTIONS if all(layout.is_projection(children.get(name)) for name in one))
        found = next(wanted, None)
        if found is None:
            continue
        parts = tuple(f"{path}.{name}" if path else name for name in found)
        counts = _head_counts(place, path, parts)
        for count, (letters, arrangement) in itertools.product(counts, ORDERS[len(parts)]):
            reading = _fitting(build_reading, place, dict(zip(letters, parts, strict=True)), count, arrangement, output)
            yield reading
            if isinstance(reading, Reading) and 1 < reading.streams[0].num_kv_heads < reading.streams[0].num_heads:
                yield _strided(reading)
        return


def build_reading(
    place: ModuleContext, parts: Mapping[str, str], counts: dict[str, Any], arrangement: str, output: str | None
) -> Reading:
    """The reading that `build_site` makes of parts of a module, given by their paths, with the call as text."""
    module = place.module
    given = {key: value for key, value in counts.items() if value is not None}
    if given.get("num_kv_heads") == given["num_heads"]:
        del given["num_kv_heads"]
    options = {"arrangement": arrangement} if len(parts) < 3 else {}
    last = {} if output is None else {"output": module.get_submodule(output)}
    modules = {letters: module.get_submodule(path) for letters, path in parts.items()}
    site = layout.build_site(place, modules, **given, **options, **last, **_stated_facts(module))  # type: ignore[arg-type]

    def call(number: Callable[[str], object]) -> str:
        held = ", ".join(f'"{letters}": {_expression(path)}' for letters, path in parts.items())
        arguments = ["place", f"{{{held}}}", *(f"{key}={number(key)}" for key in given)]
        arguments += [f'{key}="{value}"' for key, value in options.items()]
        arguments += [] if output is None else [f"output={_expression(output)}"]
        return f"build_site({', '.join(arguments)})"

    def own_name(key: str) -> object:
        named = (name for name in COUNTS[key] if getattr(module, name, None) == given[key])
        return next((f"m.{name}" for name in named), given[key])

    return Reading(_streams(site), call(lambda key: given[key]), f"wellcond.{call(own_name)}")


def _expression(path: str) -> str:
    """A part of the module `m` in Python: m.to_out[0] for to_out.0."""
    return "m" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)


def _strided(reading: Reading) -> Reading:
    """The reading in which query head i uses key head i modulo their number (x-transformers).

    Query heads are then listed group by group, as everywhere.
    """
    site = reading.streams[0]
    order = torch.arange(site.num_heads).view(-1, site.num_kv_heads).T.flatten()
    strided = replace(site, q=site.q.regrouped(order), o=site.o and site.o.regrouped(order))
    return Reading(_streams(strided), f"{reading.text} with strided groups", reading.code)


def _head_counts(place: ModuleContext, path: str, parts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What is declared of the heads; where nothing is, every number that the rows allow."""
    holder = replace(place, module=place.module.get_submodule(path))
    counts = {key: place.first_int(known) or holder.first_int(known) for key, known in COUNTS.items()}
    rows = [layout.out_features(place.module.get_submodule(part)) for part in parts]
    if counts["num_heads"] is None and counts["head_dim"] and len(parts) == 3:
        counts["num_heads"], counts["num_kv_heads"] = (size // counts["head_dim"] for size in rows[:2])
    if counts["num_heads"] is not None:
        yield counts
        return
    width = rows[0] // 3 if len(parts) == 1 else rows[0]
    for number in range(1, width // 4 + 1):
        if width % number == 0 and width // number <= 256:
            yield {"num_heads": number}


def _stated_facts(module: nn.Module) -> dict[str, Any]:
    """Scale and causality where the module says them."""
    scales = (getattr(module, name, None) for name in names.SCALE)
    scale = next((scale for scale in scales if isinstance(scale, float)), None)
    return {"scale": scale, "causal": getattr(module, "is_causal", None)}


def _streams(site: AttentionSite) -> list[AttentionSite]:
    """The site, and the second stream of a joint attention, with the same heads, where there is one."""
    wanted, output_name = names.ADDED
    parts = [getattr(site.module, name, None) for name in wanted]
    if not all(layout.is_projection(part) for part in parts):
        return [site]
    output = getattr(site.module, output_name, None)
    added = layout.build_site(
        ModuleContext(f"{site.name}.added" if site.name else "added", site.module, site.module),
        dict(zip("qkv", parts, strict=True)),  # type: ignore[arg-type]
        num_heads=site.num_heads,
        num_kv_heads=site.num_kv_heads,
        output=output if layout.is_projection(output) else None,
        scale=site.scale,
    )
    return [site, replace(added, stream="added")]


# Projections that are parameters of the module


def _parameter_readings(place: ModuleContext) -> Iterator[Reading | UnsupportedLayoutError]:
    own = {name: value for name, value in place.module.named_parameters(recurse=False) if value.dim() >= 2}
    trio = next((wanted for wanted in names.SEPARATE if all(name in own for name in wanted)), None)
    stack = next((name for name in own if name in names.STACKS), None)
    if trio is not None:
        output = next((name for name in names.OUTPUT if name in own), None)
        turns = itertools.product((True, False), (True, False) if output else (False,))
        for transposed, out_transposed in turns:
            yield _fitting(_three_parameters, place, trio, output, transposed, out_transposed)
    elif stack is not None:
        for view in _views(tuple(own[stack].shape)):
            for transposed, out_transposed in itertools.product(
                (False, True), (False, True) if view[0] == 4 else (False,)
            ):
                yield _fitting(_stack, place, stack, view, transposed, out_transposed)


def _three_parameters(
    place: ModuleContext, trio: Sequence[str], output: str | None, transposed: bool, out_transposed: bool
) -> Reading:
    """Three parameters (heads, ., .) or (., .), and the output's if it has one."""
    q, k, v = (_parameter_slot(place, name, transposed) for name in trio)
    o = _module_output(place, q) if output is None else _parameter_slot(place, output, out_transposed, on_input=True)
    return _parameter_reading(place, q, k, v, o)


def _parameter_slot(place: ModuleContext, name: str, transposed: bool, *, on_input: bool = False) -> Slot:
    stored = place.module.get_parameter(name)
    out, columns = (stored.shape[-1], stored.shape[-2]) if transposed else (stored.shape[-2], stored.shape[-1])
    width = columns if on_input else out
    by_head = stored.dim() == 3
    heads, head_dim = (stored.shape[0], width) if by_head else _heads_of_rows(place, width)
    rows = layout.head_rows(heads, head_dim)
    bias = _bias_of(place.module, name)
    return Slot(place.module, name, rows, transposed, on_input, bias_name=bias, by_head=by_head)


def _stack(place: ModuleContext, name: str, view: tuple[int, ...], transposed: bool, out_transposed: bool) -> Reading:
    """One parameter with Q, K, V and perhaps O, one below the other or along a first axis."""
    rows, width = (view[2], view[1]) if transposed else (view[1], view[2])
    table = layout.head_rows(*_heads_of_rows(place, rows))
    base = Slot(place.module, name, table, transposed, view=view, index=0)
    q, k, v = (replace(base, index=index) for index in range(3))
    o = _module_output(place, q)
    if view[0] == 4:
        o = replace(base, index=3, transposed=out_transposed, heads_on_input=True)
        if (o.in_features, o.out_features) != (rows, width):
            place.refuse("its stack of matrices is not one of Q, K, V and O.")
    return _parameter_reading(place, q, k, v, o)


def _views(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Shapes under which a parameter may be a stack of four or three matrices."""
    if len(shape) == 3:
        yield shape
        return
    for count in (4, 3):
        if shape[0] % count == 0:
            yield count, shape[0] // count, shape[1]
        if shape[1] % count == 0:
            yield count, shape[0], shape[1] // count


def _heads_of_rows(place: ModuleContext, rows: int) -> tuple[int, int]:
    heads, kv_heads, width = (place.first_int(known) for known in (names.HEADS, names.KV_HEADS, names.HEAD_DIM))
    for count in (heads, kv_heads):
        if count and rows % count == 0 and (width is None or count * width == rows):
            return count, rows // count
    place.refuse(f"{rows} rows of a parameter do not fit the heads that it declares ({heads} of width {width}).")


def _parameter_reading(place: ModuleContext, q: Slot, k: Slot, v: Slot, o: Slot | None) -> Reading:
    if q.head_dim != k.head_dim or q.in_features != k.in_features:
        place.refuse("its queries and keys have other sizes.")
    if q.num_heads % k.num_heads or k.num_heads != v.num_heads:
        place.refuse("its heads do not divide into groups.")
    if o is not None and (o.num_heads, o.head_dim) != (q.num_heads, v.head_dim):
        place.refuse("its output has other heads.")
    site = AttentionSite(place.name, place.module, q, k, v, o, **_stated_facts(place.module))
    paths = {id(part): name for name, part in place.module.named_modules()}
    slots = {letter: _slot_text(paths[id(slot.owner)], slot) for letter, slot in site.slots.items()}
    text = ", ".join(f"{letter}={slot}" for letter, slot in slots.items())
    return Reading([site], text, f"wellcond.AttentionSite(place.name, m, {text})")


def _slot_text(path: str, slot: Slot) -> str:
    """The slot as a user would write it: heads that follow each other in a parameter."""
    fields = ("transposed", "heads_on_input", "bias_name", "index", "by_head", "view")
    stated = {name: getattr(slot, name) for name in fields}
    options = {name: value for name, value in stated.items() if value is not None and value is not False}
    rows = f"torch.arange({slot.rows.numel()}).view({slot.num_heads}, {slot.head_dim})"
    arguments = [_expression(path), f'"{slot.weight_name}"', rows, *(f"{key}={one!r}" for key, one in options.items())]
    return f"wellcond.Slot({', '.join(arguments)})"


def _module_output(place: ModuleContext, q: Slot) -> Slot | None:
    output = layout.find_output(place.module)
    module = None if output is None else place.module.get_submodule(output)
    return layout.output_slot(place, module, q.num_heads, q.head_dim)


def _bias_of(module: nn.Module, weight: str) -> str | None:
    """The bias parameter beside a weight: b_Q of W_Q, q_bias of q_weight."""
    for name in (weight.replace("W_", "b_"), weight.replace("weight", "bias"), f"{weight}_bias"):
        value = stored_parameter(module, name)
        if name != weight and value is not None and value.dim() in (1, 2):
            return name
    return None
