"""A trial run of one attention module: a private copy with random weights, and arguments that it can be called with.

The copy is in float64 on the CPU, with weights of healthy size: at that of an initialisation the output hardly depends
on queries and keys, and with a gate or an output projection at zero on nothing at all. Tokens have mean zero and equal
length, so that a norm inside the module passes them on as they are, and one feature that is zero in all tokens but one.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wellcond.attention import names
from wellcond.attention.evaluation import copy_argument, gathered, not_compiled, plain_copy, run, tensors_in
from wellcond.attention.site import AttentionSite, ModuleContext
from wellcond.attention.slot import remove_conditioning

FEATURE = 0
"""The feature that is zero in all tokens but one."""
TOKEN = 2
"""The number of that token."""
COUNTS = (6, 16)
"""Tokens of a trial: few, or as many as kernels ask for that work in blocks."""
MAX_PARAMETERS = 64_000_000
LOGITS = 1.5
"""Size of a query and of a key feature."""
ROTARY = ("cos_sin", "position_embeddings", "freqs", "rope", "rotary", "pos_emb", "rope_cache")


@dataclass(frozen=True)
class Trial:
    """A copy of a module, and one way to call it."""

    module: nn.Module
    batch: Any
    tokens: Tensor
    """(N, D), as the first argument holds them."""
    streams: int = 1
    local: tuple[int, int, int] | None = None
    """Feature, token and number of tokens, if one feature is zero in all tokens but one."""

    def run(self) -> Tensor:
        """The copy's output: the first tensor of what it returns, or those of all streams in a row."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]), not_compiled():
            returned = run(self.module, self.batch)
        found = list(itertools.islice(tensors_in(returned), self.streams))
        if len(found) < self.streams:
            raise TypeError(f"it returns {len(found)} tensors: expected {self.streams}")
        return found[0] if self.streams == 1 else torch.cat([part.flatten() for part in found])


Example = Callable[[nn.Module], Any]
"""From a module to what it is called with: a tensor, a tuple of arguments, a mapping of keyword arguments."""


def trials(place: ModuleContext, widths: Sequence[int], example: Example | None = None) -> Iterator[Trial | Exception]:
    """Ways to call a copy of a module that run, each as a trial; where one does not run, the exception that says why.

    `widths` are the features of the tokens that it reads, one number per stream. Without an example, arguments are
    random tokens, and guesses of others.
    """
    try:
        module = _random_copy(place.module)
        if example is not None:
            batch = copy_argument(example(place.module), {}, _in_float64)
            given = Trial(module, batch, next(tensors_in(batch)))
            given.run()
            yield given
            return
        copied = replace(place, module=module)
    except Exception as error:  # an arbitrary module, or its example, may raise anything
        yield error
        return
    for count in COUNTS:
        tokens = _make_tokens(count, widths[0])
        others = [_make_tokens(count, width, seed=seed)[None] for seed, width in enumerate(widths[1:], start=5)]
        failed: Exception | None = None
        for arranged, axis in _arrangements(tokens):
            for arguments in _argument_lists(copied, arranged, axis, others):
                trial = Trial(module, arguments, tokens, len(widths), (FEATURE, TOKEN, count))
                try:
                    output = trial.run()
                except Exception as error:  # and when it is called
                    failed = failed or error
                    continue
                if bool(torch.isfinite(output).all()):
                    yield trial
                    break
        if failed is not None:
            yield failed


def _in_float64(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


def why_not(module: nn.Module) -> str | None:
    """Why a module is not tried at all; None where it is."""
    if sum(parameter.numel() for parameter in module.parameters()) > MAX_PARAMETERS:
        return f"it has more than {MAX_PARAMETERS:,} parameters"
    on_meta = any(parameter.device.type == "meta" for parameter in module.parameters())
    if on_meta and any(True for _ in module.buffers()):
        return "it is on the meta device and has buffers"
    return None


def _random_copy(module: nn.Module) -> nn.Module:
    """A plain copy in float64 and evaluation mode with random weights of healthy size; buffers keep their values."""
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            return gathered(tensor)
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        is_vector = tensor.numel() == max(tensor.shape, default=1)
        return 1 + 0.1 * drawn if is_vector else drawn / tensor.shape[-1] ** 0.5

    copied = plain_copy(module, noise)
    for part in copied.modules():
        remove_conditioning(part)  # a correction follows the weights: symmetries are those of W, not of W + C
    copied = copied.double()
    copied.eval()  # on its own: some classes override train() and return nothing
    for name, parameter in copied.named_parameters():
        if parameter.dim() == 1 and name.rpartition(".")[2] in ("bias", "beta"):
            parameter.data.zero_()  # a norm's bias would fill the feature that is zero
    return copied


@contextlib.contextmanager
def healthy(streams: list[AttentionSite]) -> Iterator[list[AttentionSite]]:
    """A reading of a copy, for a while with random weights at which logits spread by about 1, and random biases."""
    kept = [(tensor, tensor.detach().clone()) for tensor in streams[0].module.parameters()]
    try:
        for site in streams:
            _make_healthy_(site)
        yield streams
    finally:
        for tensor, values in kept:
            tensor.data.copy_(values)


@torch.no_grad()
def _make_healthy_(site: AttentionSite) -> None:
    generator = torch.Generator().manual_seed(3)
    for slot in site.slots.values():
        heads = slot.read_raw()
        fan_in = slot.rows.numel() if slot.heads_on_input else slot.in_features
        drawn = torch.randn(heads.shape, generator=generator, dtype=torch.float64)
        slot.write_(drawn.to(heads) * LOGITS / fan_in**0.5)
        bias = slot.read_bias()
        if bias is not None:
            slot.write_bias_(torch.randn(bias.shape, generator=generator, dtype=torch.float64).to(bias) / 2)


def _make_tokens(count: int, width: int, *, seed: int = 1) -> Tensor:
    """Random tokens (count, width) of mean zero and equal length; one feature is zero in all but one of them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, width, generator=generator, dtype=torch.float64)
    special = torch.zeros(count, dtype=torch.float64)
    special[TOKEN] = 2.0
    others = [feature for feature in range(width) if feature != FEATURE]
    tokens[:, FEATURE] = special
    tokens[:, others] -= tokens.sum(1, keepdim=True) / max(len(others), 1)
    return tokens * width**0.5 / tokens.norm(dim=1, keepdim=True)


def _arrangements(tokens: Tensor) -> Iterator[tuple[Tensor, int]]:
    """The tokens as modules may want them, and the axis that counts them."""
    count = len(tokens)
    yield tokens[None], 1
    yield tokens[:, None], 0
    yield tokens, 0
    rows = 2 if count == 6 else 4
    grid = tokens.unflatten(0, (rows, count // rows))[None]
    yield grid, 1
    yield grid.movedim(-1, 1), 2


def _argument_lists(
    place: ModuleContext, tokens: Tensor, axis: int, others: Sequence[Tensor]
) -> Iterator[tuple[Any, ...]]:
    """Lists of arguments for the required parameters of a module's forward, the likeliest first."""
    required = required_names(place.module)
    if len(required) == 3 and all(name[0] == letter for name, letter in zip(required, "qkv", strict=True)):
        yield (tokens,) * 3
        return
    choices: list[list[Any]] = [[tokens], *([other] for other in others)]
    for name in required[len(choices) :]:
        choices.append(list(_guesses(place, name.lower(), tokens, axis)))
    yield from itertools.islice(itertools.product(*choices), 64)


def required_names(module: nn.Module) -> list[str]:
    """Names of the arguments that a module's forward cannot do without; its first one where it could."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    return [p.name for p in parameters if p.default is p.empty] or [p.name for p in parameters[:1]]


def _guesses(place: ModuleContext, name: str, tokens: Tensor, axis: int) -> Iterator[Any]:
    if any(part in name for part in ROTARY):
        yield from _rotations(place, tokens.shape[axis])
    yield None
    if "mask" in name:
        yield _causal_block_mask(tokens.shape[axis])
    yield tokens


def _causal_block_mask(count: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda _, __, query, key: query >= key, None, None, count, count, device="cpu")


def _rotations(place: ModuleContext, count: int) -> Iterator[Any]:
    """Tables of rotary positions: the model's own, cut to so many tokens, then the usual shapes."""
    for module in (place.module, *place.ancestors()):
        cos, sin = getattr(module, "cos", None), getattr(module, "sin", None)
        if isinstance(cos, Tensor) and isinstance(sin, Tensor):
            for axis in range(cos.dim()):
                if cos.shape[axis] >= count and axis < cos.dim() - 1:
                    yield tuple(table.detach().cpu().double().narrow(axis, 0, count) for table in (cos, sin))
        table = getattr(module, "freqs_cis", None)
        if isinstance(table, Tensor) and table.shape[0] >= count:
            yield table.detach().cpu()[:count]
    widths = (getattr(place.module, name, None) for name in names.HEAD_DIM)
    width = next((width for width in widths if isinstance(width, int)), None)
    if width is not None:
        angles = torch.arange(count, dtype=torch.float64)[:, None] * 10.0 ** -torch.arange(width // 2).double()
        both = torch.cat([angles, angles], -1)
        yield both.cos()[None], both.sin()[None]
        yield angles.cos()[None, :, None], angles.sin()[None, :, None]
        yield angles.cos(), angles.sin()
        yield torch.polar(torch.ones_like(angles), angles)
