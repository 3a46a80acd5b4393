r"""Corrections of tokens instead of weights: what an embedding puts out is changed before the first block reads it.

Conditioned Embedded Tokens (Saratchandran and Lucey, arXiv 2505.12789) and Token Graying (Ji, Saratchandran, Moghadam
and Lucey, arXiv 2505.01996), with X = U S V^T the tokens of one sample (tokens, width):

.. math:: X + C = U (S + S_1 I) V^T, \qquad \kappa(X + C) \le 2
.. math:: X + C = S_1 \, U (S / S_1)^\varepsilon V^T

Every token of X + C depends on all tokens of its sample. In a causal model that would show a token those which come
after it, so that there the table of words takes the place of X: one matrix for all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellcond.arguments import check_choice, check_flag, check_names, check_number
from wellcond.attention.find import find_attention
from wellcond.attention.record import record
from wellcond.attention.sharding import is_sharded, unwrap
from wellcond.attention.site import AttentionSite, find_blocks
from wellcond.conditioning.attach import make_marker
from wellcond.conditioning.checkpoint import read_settings
from wellcond.conditioning.corrections import straight_through
from wellcond.errors import CheckpointMismatchError, ConditioningError, OptionError
from wellcond.init.tokens import embedding_layers
from wellcond.linalg.polar import mix_with_polar
from wellcond.linalg.powers import graying_by_dct, with_power

MARKER = "wellcond_tokens"
"""Name of the buffer that tells a checkpoint of a model whose tokens are corrected."""
HELD = "_wellcond_tokens"
Of = Literal["samples", "table"]
Correct = Callable[[Tensor], Tensor]
"""Tokens (samples, tokens, width) to those that the first block reads."""


def conditioned(*, keep_scale: bool = False) -> Correct:
    """Conditioned Embedded Tokens: the largest singular value is added to all, so that kappa is at most 2.

    Args:
        keep_scale: halve the result, so that the largest singular value stays.
    """
    check_flag("keep_scale", keep_scale)
    factor = 0.5 if keep_scale else 1.0
    return partial(mix_with_polar, keep=factor, share=factor)


def grayed(*, eps: float = 0.95, by: Literal["svd", "dct"] = "svd") -> Correct:
    """Token Graying: singular values, relative to the largest, to the power of eps; the largest stays.

    Args:
        eps: from 0 to 1, which changes nothing.
        by: the left singular vectors themselves, or the cosine transform over the tokens in their place, whose
            frequencies have their norms for singular values.
    """
    eps = check_number("eps", eps, at_least=0.0)
    if eps > 1:
        raise OptionError(f"eps: expected at most 1, got {eps:g}")
    check_choice("by", by, ("svd", "dct"))
    return partial(with_power if by == "svd" else graying_by_dct, eps=eps)


METHODS: Mapping[str, Callable[..., Correct]] = {"conditioned": conditioned, "grayed": grayed}


class _Hook:
    """Puts X + C in the place of X; the gradient of X is that of X + C."""

    def __init__(self, settings: Mapping[str, Any], batch_axis: int = 0) -> None:
        self.settings, self.batch_axis = settings, batch_axis

    def corrected(self, tokens: Tensor) -> Tensor:
        correct = make_correct(self.settings["method"], self.settings["options"])
        samples = tokens.transpose(0, 1) if self.batch_axis else tokens
        with torch.no_grad():
            value = correct(samples.detach())
        return straight_through(tokens, value.transpose(0, 1) if self.batch_axis else value)


class BeforeBlock(_Hook):
    """Hook before the first block that corrects the tokens of each sample."""

    def __call__(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments of the block with corrected tokens."""
        if args and _is_tokens(args[0]):
            return (self.corrected(args[0]), *args[1:]), kwargs
        name = next((name for name, value in kwargs.items() if _is_tokens(value)), None)
        if name is None:
            raise ConditioningError(
                f"{type(block).__name__}: expected tokens (samples, tokens, width) as its first input, found none; "
                "token corrections do not fit this model"
            )
        return args, {**kwargs, name: self.corrected(kwargs[name])}


class AfterEmbedding(_Hook):
    """Hook after the embedding of words that corrects its table as one matrix."""

    def __call__(self, embedding: nn.Embedding, args: Any, output: Tensor) -> Tensor:
        """The embeddings of the corrected table."""
        table = self.corrected(embedding.weight[None])[0]
        return nn.functional.embedding(args[0], table, embedding.padding_idx)


def _is_tokens(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def make_correct(method: str, options: Mapping[str, Any]) -> Correct:
    """Validate a method and its options."""
    check_choice("token correction", method, tuple(METHODS))
    check_names(METHODS[method], method, options)
    return METHODS[method](**options)


def condition_tokens_(
    model: nn.Module, method: str = "conditioned", *, of: Of | None = None, **options: Any
) -> nn.Module:
    """Correct what an embedding puts out, before the first block reads it, in every forward pass, in place.

    No parameter is added; a buffer of the model tells checkpoints, which fit models with the same correction only.

    Args:
        model: any model whose attention `find_attention` recognises.
        method: ``conditioned`` (Conditioned Embedded Tokens) or ``grayed`` (Token Graying).
        of: ``samples``, the tokens of each sample as they enter the first block, positions included; ``table``, the
            table of words as one matrix. By default the table in causal models, where a correction of samples would
            show a token what comes after it, and samples elsewhere.
        **options: of the method: ``keep_scale``; ``eps``, ``by``.

    Returns: the same model.

    Raises:
        UnknownChoiceError, OptionError: a method or option that does not exist, or is out of range.
        ConditioningError: tokens that are corrected already; samples in a causal model; no table of words, no block.

    Example:
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        >>> model = condition_tokens_(model, "grayed", of="samples", eps=0.9)
    """
    given, model = model, unwrap(model)
    make_correct(method, options)
    if of is not None:
        check_choice("of", of, get_args(Of))
    if HELD in vars(model):
        raise ConditioningError("the tokens of this model are corrected already; build it again for another correction")
    sites = find_attention(model)
    is_causal = any(site.causal for site in sites)
    of = of or ("table" if is_causal else "samples")
    settings = {"method": method, "options": dict(options), "of": of, "projections": "", "sites": []}
    if of == "samples":
        if is_causal:
            raise ConditioningError(
                "of='samples' would show every token of a causal model those that come after it: expected of='table'"
            )
        block = _first_block(model, sites)
        batch_axis = 1 if getattr(sites[0].module, "batch_first", True) is False else 0
        handle = block.register_forward_pre_hook(BeforeBlock(settings, batch_axis), with_kwargs=True)
    else:
        handle = _table(model).register_forward_hook(AfterEmbedding(settings))
    model.register_buffer(MARKER, make_marker(settings))
    vars(model)[HELD] = settings, [handle, model.register_load_state_dict_pre_hook(_check_incoming)]
    return given


def _first_block(model: nn.Module, sites: list[AttentionSite]) -> nn.Module:
    blocks = find_blocks(model, sites)
    if not blocks:
        raise ConditioningError("no block with attention and MLP was found, so that where tokens enter is not known")
    return blocks[0].module


def _table(model: nn.Module) -> nn.Embedding:
    tables = [layer for _, layer in embedding_layers(model) if isinstance(layer, nn.Embedding)]
    if len(tables) != 1:
        raise ConditioningError(f"of='table': expected one table of words, found {len(tables)}; try of='samples'")
    return tables[0]


def _check_incoming(model: nn.Module, state: dict[str, Tensor], prefix: str, *_rest: Any) -> None:
    found = state.get(prefix + MARKER)
    if found is not None and read_settings(found) != vars(model)[HELD][0]:
        raise CheckpointMismatchError(
            "the checkpoint is of a model whose tokens are corrected in another way; nothing was loaded.\n"
            f"  expected (this model): {vars(model)[HELD][0]}\n  got (the checkpoint):  {read_settings(found)}"
        )


@torch.no_grad()
def fold_tokens_(model: nn.Module, batch: Any) -> nn.Module:
    """Write a corrected table of words into the embedding for good: a plain model again, with the same outputs.

    Only a table can be folded, and only where nothing else reads it: an output layer that is tied to it uses the raw
    one. Corrections of samples depend on the sample.

    Args:
        model: after ``condition_tokens_(model, of="table")``.
        batch: what the model is called with; its embeddings, attention and output before and after are compared.

    Raises: ConditioningError where it is not possible; the model is then as it was.
    """
    given, model = model, unwrap(model)
    if HELD not in vars(model):
        raise ConditioningError("the tokens of this model are not corrected: there is nothing to fold")
    settings, handles = vars(model)[HELD]
    if settings["of"] == "samples":
        raise ConditioningError("a correction of samples depends on the sample and cannot be folded into weights")
    if is_sharded(model):
        raise ConditioningError("the model is sharded: gather its weights into a plain model first")
    table = _table(model)
    raw, before = table.weight.clone(), _output(model, batch)
    hook = AfterEmbedding(settings)
    handles[0].remove()
    table.weight.copy_(hook.corrected(raw[None])[0])
    if not torch.allclose(_output(model, batch), before, rtol=1e-3, atol=1e-4):
        table.weight.copy_(raw)
        handles[0] = table.register_forward_hook(hook)
        raise ConditioningError(
            "the table of words is read by something else too, such as a tied output layer, which uses the raw one: "
            "folding would change the outputs. Untie it first"
        )
    handles[1].remove()
    del vars(model)[HELD], model._buffers[MARKER]
    return given


def _output(model: nn.Module, batch: Any) -> Tensor:
    """The output of the model on a batch, in evaluation mode."""
    found: list[Any] = []
    handle = model.register_forward_hook(lambda _module, _args, output: found.append(output))
    try:
        record(model, batch, (), ())
    finally:
        handle.remove()
    output = found[-1]
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    return (
        output if isinstance(output, Tensor) else next(iter(output.values() if hasattr(output, "values") else output))
    )
