"""Causal language modelling: cross entropy of the next token, perplexity, samples of text."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellcond.attention.distributed import is_held_together
from wellcond.attention.effective import is_conditioned
from wellcond.conditioning.apply import folded
from wellcond.lab.data.text import TokenStream, open_token_stream
from wellcond.lab.settings import RecipeError, SequenceLength, Settings
from wellcond.lab.tasks.base import AbstractTask, Batch, Keys, Metric, TaskContext, logits_of, register_task
from wellcond.lab.tokenizers import Tokenizer, TokenizerChoice, make_tokenizer

IGNORED = -100
"""Target that is not scored, as in `cross_entropy`."""
PROMPT_TOKENS, SAMPLE_TOKENS, TEMPERATURE = 10, 60, 0.8
"""Of the samples of text in a record."""


class LanguageModellingSettings(Settings):
    """Options of the task."""

    name: Literal["language_modelling"] = "language_modelling"
    context: Annotated[SequenceLength, Field(ge=2)]
    """Tokens a model sees at once."""
    tokenizer: TokenizerChoice = "bytes"
    limit_tokens: PositiveInt | None = None
    """Train on the text up to the document in which so many tokens are reached; null: all."""


def tokens_at(stream: TokenStream, places: NDArray[np.int64]) -> Tensor:
    """Tokens at places of a stream, int64 of their shape."""
    return torch.from_numpy(stream.tokens[places].astype(np.int64))


def need_tokens(stream: TokenStream, count: int, what: str) -> None:
    """Raise RecipeError if a stream has fewer tokens than one block."""
    if len(stream) < count:
        raise RecipeError(f"{what}: expected at least {count} tokens, those of one block, found {len(stream)}")


@dataclass(frozen=True)
class TokenBlocks:
    """Block k is the `context` tokens from k * context on, and the token behind each."""

    stream: TokenStream
    context: int
    rest: bool
    """Whether there is a last block for what is less than one, so that every token but the first is predicted once."""
    in_memory: ClassVar[bool] = True

    def __len__(self) -> int:
        """Number of blocks."""
        predicted = len(self.stream) - 1
        return -(-predicted // self.context) if self.rest else predicted // self.context

    def fetch(self, keys: Keys) -> Batch:
        """Tokens, targets, and the share of each block in the words and bytes of the text, by its number of targets."""
        predicted = len(self.stream) - 1
        starts = np.array([index for index, _ in keys])[:, None] * self.context
        places = starts + np.arange(min(self.context, predicted))
        # Behind the end of the stream any token will do: it is not scored, and no token before it sees it.
        inside = torch.from_numpy(places < predicted)
        places = places.clip(max=predicted - 1)
        share = inside.sum(1).double() / predicted
        return {
            "input_ids": tokens_at(self.stream, places),
            "targets": tokens_at(self.stream, places + 1).masked_fill(~inside, IGNORED),
            "words": share * self.stream.counts["words"],
            "bytes": share * self.stream.counts["bytes"],
        }


@register_task(LanguageModellingSettings)
class LanguageModelling(AbstractTask):
    """Next token."""

    metric = Metric("perplexity", higher_is_better=False)
    auto_class = "AutoModelForCausalLM"
    tokenizer: Tokenizer

    def __init__(self, settings: LanguageModellingSettings, context: TaskContext) -> None:
        """Join the documents of each split into one stream."""
        context.need_kind(settings.name, "text")
        self.context = settings.context
        what = f"{context.data.name}, training split"
        self.tokenizer = make_tokenizer(settings.tokenizer, context.data.train, what, context.base)
        samples = {}
        for name, split in context.splits.items():
            what, training = f"{context.data.name}, {name} split", name == "training"
            limit = settings.limit_tokens if training else None
            stream = open_token_stream(split, self.tokenizer, what, limit_tokens=limit)
            need_tokens(stream, self.context + 1 if training else 2, what)
            samples[name] = TokenBlocks(stream, self.context, rest=not training)
        self.train, self.evaluation, self.test = samples["training"], samples["evaluation"], samples.get("test")

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, context, and the token that ends a document."""
        end, size = self.tokenizer.document_end, self.tokenizer.vocabulary_size
        ends = {"bos_token_id": end, "eos_token_id": end}
        return {"vocab_size": size, "max_position_embeddings": self.context, **ends}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy in nats, summed over the tokens predicted."""
        logits = logits_of(model(input_ids=batch["input_ids"], use_cache=False))
        _check_vocabulary(logits, self.tokenizer)
        targets = batch["targets"].flatten()
        return cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum", ignore_index=IGNORED)

    def num_terms(self, batch: Batch) -> Tensor:
        """Tokens predicted."""
        return (batch["targets"] != IGNORED).sum()

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Loss and count, and words and bytes of the text."""
        sums = {"loss": self.loss(model, batch), "count": self.num_terms(batch)}
        sums |= {name: batch[name].sum() for name in ("words", "bytes")}
        return {name: value.double() for name, value in sums.items()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Nats per token and perplexity; perplexity per word and bits per byte of the text.

        The last two compare models with different tokenisers: the loss of all tokens, those that end documents among
        them, is divided by the words, separated by white space, and the bytes of the text that was tokenised.
        """
        loss = sums["loss"] / sums["count"]
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "perplexity_per_word": perplexity(sums["loss"] / sums["words"]),
            "bits_per_byte": sums["loss"] / sums["bytes"] / math.log(2),
        }

    def write_samples(self, model: nn.Module) -> list[dict[str, str]]:
        """One that continues the beginning of the evaluation text, and one without a prompt."""
        tokens, end = self.first_samples(1)["input_ids"][0].tolist(), self.tokenizer.document_end
        opening = self.tokenizer.decode(list(itertools.takewhile(lambda token: token != end, tokens))[:PROMPT_TOKENS])
        opening = opening.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character, where tokens are bytes
        return [self._sample(model, prompt) for prompt in (opening, "")]

    def _sample(self, model: nn.Module, prompt: str) -> dict[str, str]:
        try:
            text = generate_text(
                model, self.tokenizer, prompt, SAMPLE_TOKENS, temperature=TEMPERATURE, context=self.context
            )
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            # A model may take no sequences but whole blocks; the run is still valid.
            return {"prompt": prompt, "problem": f"{type(error).__name__}: {error}"}
        return {"prompt": prompt, "text": text}


def perplexity(nats: float) -> float:
    """The exponential of a loss, finite where that would overflow."""
    return math.exp(min(nats, 700.0))


def _check_vocabulary(logits: Tensor, tokenizer: Tokenizer) -> None:
    if logits.shape[-1] < tokenizer.vocabulary_size:
        raise RecipeError(
            f"task.tokenizer: the model knows {logits.shape[-1]} tokens, and the tokeniser has "
            f"{tokenizer.vocabulary_size}"
        )


@torch.no_grad()
def generate_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str = "",
    num_tokens: int = 100,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    context: int,
) -> str:
    """The prompt and what the model writes behind it, up to the end of the document.

    The model is always run `num_tokens` times: where its weights are sharded, processes wait for each other. It sees
    the last `context` tokens. Logits are divided by the temperature; 0 takes the likeliest token each time. Tokens are
    drawn on the CPU, so that every device draws the same; mode and global random state are as before afterwards.

    Raises: RecipeError if the model knows fewer tokens than the tokeniser.
    """
    end = tokenizer.document_end
    given = [end, *(int(id) for id in tokenizer.encode_batch([prompt])[0])]
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    tokens = list(given)
    # Every token is a forward pass, in which a correction would be computed again.
    folding = is_conditioned(model) and not is_held_together(model)
    try:
        with folded(model) if folding else contextlib.nullcontext():
            for _ in range(num_tokens):
                output = model(input_ids=torch.tensor([tokens[-context:]], device=device), use_cache=False)
                logits = logits_of(output)[0, -1].double().cpu()
                _check_vocabulary(logits, tokenizer)
                # A model may have more embeddings than there are tokens.
                tokens.append(_draw(logits[: tokenizer.vocabulary_size], temperature, generator))
    finally:
        for module, training in was_training:
            module.training = training
    written = tokens[len(given) :]
    return tokenizer.decode(given + (written[: written.index(end)] if end in written else written))


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # The place where the cumulative chances pass a uniform number: a change of the logits by rounding moves the borders
    # between tokens by as little, so that a folded model draws the same text but for a very rare draw at a border.
    chances = (logits / temperature).softmax(0).cumsum(0)
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * chances[-1]
    return min(int(torch.searchsorted(chances, drawn, right=True)), len(logits) - 1)
