"""Memory of a run on each GPU, counted on tensors without content, and the fewest GPUs that hold it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.lab.models.build import build_model
from wellcond.lab.recipe import Recipe
from wellcond.lab.train.prepare import blocks_of, recompute_

GPU_BYTES = 80e9
"""Memory of a GPU where this machine has none to ask."""
USABLE = 0.9
"""Share of it that a run may plan with; the rest is fragments, and buffers of the communication."""
MOST_GPUS = 64
PIXELS = 1024
"""Tokens of an image of the Long Range Arena."""


@dataclass(frozen=True)
class Needs:
    """Memory of one run of a recipe, in bytes; what a batch needs is None where it was not counted."""

    parameters: float
    fixed: float
    """Weights, gradients, both moments of Adam, and an average of the weights if there is one."""
    casts: float = 0.0
    """Copies of weights in half precision."""
    per_sample: float | None = None
    """Kept for the backward pass."""

    def on_each(self, gpus: int, recipe: Recipe) -> float:
        """Bytes that each of several GPUs needs."""
        samples = recipe.training.batch_size / gpus / recipe.training.accumulate
        shared = self.fixed / gpus if recipe.training.shard else self.fixed
        return shared + self.casts + samples * (self.per_sample or 0.0)


def count_memory(recipe: Recipe, millions: float | None) -> Needs:
    """Count what a run holds on a GPU; activations on tensors without content, so that any size takes seconds.

    `millions` of parameters are taken where the forward pass of a model is not counted.
    """
    made = _forward_pass(recipe)
    counted = (1e6 * (millions or 0.0), 0.0, None) if made is None else _count_activations(recipe, *made)
    each = 16 if recipe.training.averaging is None else 20
    return Needs(counted[0], each * counted[0], *counted[1:])


def _forward_pass(recipe: Recipe) -> tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Any]] | None:
    """Functions that make the model, and that run it on so many samples; None for detection, which is not counted."""
    name, given, task = recipe.model.name, recipe.model.arguments, recipe.task.model_dump()
    kind, auto_class, known = task["name"], None, {}
    shape: tuple[Any, ...]
    length = task.get("context") or task.get("pad_to") or task.get("length") or PIXELS
    if kind == "image_classification" and name.startswith("timm:") and (size := task.get("image_size")):
        shape, dtype = (3, size, size), torch.float32
    elif kind == "language_modelling" and name == "hf:gpt2":
        auto_class, known = "AutoModelForCausalLM", {"vocab_size": 50257, "max_position_embeddings": length}
    elif kind == "masked_language_modelling":
        auto_class = "AutoModelForMaskedLM" if name.startswith("hf:") else None
        known = {"vocab_size": 32768, ("max_position_embeddings" if auto_class else "length"): length}
    elif name == "wellcond:long_range":
        known = {"num_labels": 10, "length": length}
    else:
        return None
    if kind != "image_classification":
        shape, dtype = (length,), torch.int64

    def run(model: nn.Module, count: int) -> Any:
        inputs = torch.zeros(count, *shape, dtype=dtype)
        if kind == "pair_classification":
            return model(inputs, pair_input_ids=inputs)
        return model(inputs, use_cache=False) if auto_class == "AutoModelForCausalLM" else model(inputs)

    return partial(build_model, name, known | given, auto_class=auto_class, on_meta=True), run


def _count_activations(
    recipe: Recipe, make: Callable[[], nn.Module], run: Callable[[nn.Module, int], Any]
) -> tuple[float, float, float]:
    """Parameters, and bytes that are kept for the backward pass: whatever the batch, and for each sample."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mixed = {"bf16": torch.bfloat16, "fp16": torch.bfloat16}.get(recipe.precision.mixed)
    model = make().train()
    blocks = blocks_of(model) if recipe.training.recompute else []
    if recipe.training.recompute:
        recompute_(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _move_to_cpu(model)
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

        def kept(count: int) -> float:
            held: dict[int, int] = {}
            recomputed = 0

            def note(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in own:
                    held[storage._cdata] = storage.nbytes()
                return tensor

            def note_input(module: nn.Module, given: tuple[Any, ...]) -> None:
                nonlocal recomputed
                recomputed += given[0].numel() * given[0].element_size()

            hooks = [block.register_forward_pre_hook(note_input) for block in blocks]
            with (
                torch.autocast("cpu", dtype=mixed or torch.bfloat16, enabled=mixed is not None),
                torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            ):
                output = run(model, count)
                logits = getattr(output, "logits", output)
                alive = logits.float().log_softmax(-1)
            del alive
            for hook in hooks:
                hook.remove()
            return float(sum(held.values()) + recomputed)

        few, more = kept(2), kept(4)
        per_sample = (more - few) / 2
        parameters = float(sum(parameter.numel() for parameter in model.parameters()))
    return parameters, max(0.0, few - 2 * per_sample), per_sample


def _move_to_cpu(model: nn.Module) -> None:
    """Give a model on the meta device weights on the CPU, which in fake mode have no content either."""
    kept = list(model.parameters())  # alive, so that each has an id of its own
    made: dict[int, nn.Parameter] = {}  # weights may be tied
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in made:
                    made[id(weight)] = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype))
                module._parameters[name] = made[id(weight)]
        for name, values in module._buffers.items():
            if values is not None:
                module._buffers[name] = torch.empty(values.shape, dtype=values.dtype)
    del kept


def gpu_bytes() -> float:
    """Memory of a GPU of this machine, or of the usual one."""
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else GPU_BYTES


def choose_gpus(needs: Needs, recipe: Recipe) -> int | None:
    """The fewest GPUs, a power of two, on which a run fits and its batch can be divided; None if none do."""
    for power in range(int(math.log2(MOST_GPUS)) + 1):
        gpus, parts = 2**power, 2**power * recipe.training.accumulate
        if recipe.training.batch_size % parts == 0 and needs.on_each(gpus, recipe) <= USABLE * gpu_bytes():
            return gpus
    return None
