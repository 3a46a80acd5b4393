"""Causal language modelling on tokens or bytes: cross entropy of the next token, perplexity, samples of text."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellcond.attention.distributed import is_held_together
from wellcond.attention.effective import is_conditioned
from wellcond.conditioning.apply import folded
from wellcond.lab.data.base import Dataset
from wellcond.lab.data.text import TokenStream, open_token_stream, text_columns
from wellcond.lab.settings import RecipeError, SequenceLength, Settings
from wellcond.lab.tasks.base import AbstractTask, Batch, Keys, Metric, Samples, TaskContext, logits_of, register_task
from wellcond.lab.tokenizers import Tokenizer, TokenizerChoice, make_tokenizer

IGNORED = -100
"""Target that is not scored, as in `cross_entropy`."""
PROMPT_TOKENS, SAMPLE_TOKENS, TEMPERATURE = 10, 60, 0.8
"""Of the samples of text in a record."""


class LanguageModellingSettings(Settings):
    """Options of the task.

    With bytes and without a stride, blocks predict their own tokens from the second on, and a rest shorter than a block
    is not scored. Else the first token of a block is predicted by the last of the block before it.
    """

    name: Literal["language_modelling"] = "language_modelling"
    context: Annotated[SequenceLength, Field(ge=2)]
    """Tokens a model sees at once."""
    tokenizer: TokenizerChoice = "bytes"
    stride: PositiveInt | None = None
    """By how many tokens the windows of an evaluation advance: each but the first scores only its last `stride` tokens,
    so that every token of the text but its first is scored exactly once. Null: the context, no window overlaps."""
    limit_tokens: PositiveInt | None = None
    """Train on the text up to the document in which so many tokens are reached; null: all."""

    @model_validator(mode="after")
    def _fits_together(self) -> LanguageModellingSettings:
        if self.stride is not None and self.stride > self.context:
            raise ValueError(f"stride: expected at most the context of {self.context}, found {self.stride}")
        return self

    @property
    def plain_bytes(self) -> bool:
        """Whether text is read as blocks of bytes in memory."""
        return self.tokenizer == "bytes" and self.stride is None and self.limit_tokens is None


@dataclass(frozen=True)
class TokenBlocks:
    """Block k is the tokens from k * length on; with `overlap` 1 it also has the first token of the next block.

    A rest shorter than a block is left out.
    """

    stream: TokenStream
    length: int
    what: str
    """Name of the text in messages."""
    overlap: int = 0
    in_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise RecipeError if there is not one block."""
        if len(self) < 1:
            raise RecipeError(
                f"{self.what}: expected at least {self.length + self.overlap} tokens, those of one block, found "
                f"{len(self.stream)}"
            )

    def __len__(self) -> int:
        """Number of blocks."""
        return max(0, len(self.stream) - self.overlap) // self.length

    def tokens(self, keys: Keys) -> Tensor:
        """Tokens of blocks, int64 of shape (blocks, length + overlap)."""
        places = np.array([index for index, _ in keys])[:, None] * self.length + np.arange(self.length + self.overlap)
        return torch.from_numpy(self.stream.tokens[places].astype(np.int64))

    def fetch(self, keys: Keys) -> Batch:
        """Tokens; with an overlap, those that are seen and those to predict from them."""
        tokens = self.tokens(keys)
        if not self.overlap:
            return {"input_ids": tokens}
        return {"input_ids": tokens[:, : -self.overlap], "targets": tokens[:, self.overlap :]}


@dataclass(frozen=True)
class ScoredWindows:
    """Windows over a stream in which every token but the first is predicted exactly once.

    Window w sees the `context` tokens from w * stride on and predicts the one behind each. The first window scores all
    of them, so tokens 1 to context; window w >= 1 scores those of its last `stride` places, tokens
    context + 1 + (w - 1) stride to context + w stride, each from at least context - stride + 1 tokens before it. The
    last window ends with the stream.
    """

    stream: TokenStream
    context: int
    stride: int
    in_memory: ClassVar[bool] = True

    def __len__(self) -> int:
        """Number of windows."""
        return 1 + max(0, -(-(len(self.stream) - 1 - self.context) // self.stride))

    def fetch(self, keys: Keys) -> Batch:
        """Tokens, targets, and the share of each window in the words and bytes of the text.

        Shares are by the number of tokens that a window scores, so that their sum over all windows is the text's.
        """
        predicted, counts = len(self.stream) - 1, self.stream.counts
        starts = torch.tensor([index for index, _ in keys]) * self.stride
        width = min(self.context, predicted)
        places = starts[:, None] + torch.arange(width)
        # Behind the end of the stream any token will do: it is not scored, and no token before it sees it.
        inside = places < predicted
        places = places.clamp(max=predicted - 1)
        scored = inside & ((starts[:, None] == 0) | (torch.arange(width) >= self.context - self.stride))
        share = scored.sum(1).double() / predicted
        seen, following = (
            torch.from_numpy(self.stream.tokens[p.numpy()].astype(np.int64)) for p in (places, places + 1)
        )
        return {
            "input_ids": seen,
            "targets": following.masked_fill(~scored, IGNORED),
            "words": share * counts["words"],
            "bytes": share * counts["bytes"],
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
        self.settings, self.context = settings, settings.context
        what = f"{context.data.name}, training split"
        self.tokenizer = make_tokenizer(settings.tokenizer, context.data.train, what, context.base)
        samples = {name: self._samples(name, split, context.data.name) for name, split in context.splits.items()}
        self.train, self.evaluation, self.test = samples["training"], samples["evaluation"], samples.get("test")

    def _samples(self, name: str, split: Dataset, data: str) -> Samples:
        what, context = f"{data}, {name} split", self.context
        if self.settings.plain_bytes:
            return TokenBlocks(self._bytes(split, what), context, what)
        limit = self.settings.limit_tokens if name == "training" else None
        stream = open_token_stream(split, self.tokenizer, what, limit_tokens=limit)
        if name == "training":
            return TokenBlocks(stream, context, what, overlap=1)
        return ScoredWindows(stream, context, self.settings.stride or context)

    def _bytes(self, split: Dataset, what: str) -> TokenStream:
        """All documents, the empty ones among them, in memory."""
        end = np.zeros(1, np.uint16)
        batches = (self.tokenizer.encode_batch(texts) for texts, *_ in text_columns(split))
        stream = np.concatenate([part for batch in batches for ids in batch for part in (ids, end)])
        if not stream.any():
            raise RecipeError(f"{what}: expected text, found none in {len(split)} documents")
        return TokenStream(stream, {})

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, context, and the token that ends a document."""
        end, size = self.tokenizer.document_end, self.tokenizer.vocabulary_size
        ends = {"bos_token_id": end, "eos_token_id": end}
        return {"vocab_size": size, "max_position_embeddings": self.context, **ends}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy in nats, summed over the tokens predicted."""
        tokens = batch["input_ids"]
        logits = logits_of(model(input_ids=tokens, use_cache=False))
        _check_vocabulary(logits, self.tokenizer)
        targets = batch.get("targets")
        if targets is None:
            logits, targets = logits[:, :-1], tokens[:, 1:]
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED)

    def num_terms(self, batch: Batch) -> Tensor | int:
        """Tokens predicted."""
        if "targets" not in batch:
            return batch["input_ids"][:, 1:].numel()
        return (batch["targets"] != IGNORED).sum()

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Loss and count; and words and bytes of the text, where they are known."""
        loss = self.loss(model, batch).double()
        known: dict[str, Tensor] = {name: batch[name].sum() for name in ("words", "bytes") if name in batch}
        return {"loss": loss, "count": torch.zeros_like(loss) + self.num_terms(batch), **known}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Nats per token and perplexity; perplexity per word and bits per byte of the text, where it is known.

        These two compare models with different tokenisers: the loss of all tokens, those that end documents among
        them, is divided by the words, separated by white space, and the bytes of the text that was tokenised.
        """
        loss = sums["loss"] / sums["count"]
        found = {"loss": loss, "perplexity": perplexity(loss)}
        if "words" in sums:
            found["perplexity_per_word"] = perplexity(sums["loss"] / sums["words"])
            found["bits_per_byte"] = sums["loss"] / sums["bytes"] / math.log(2)
        return found

    def write_samples(self, model: nn.Module) -> list[dict[str, str]]:
        """One that continues the beginning of the evaluation text, and one without a prompt."""
        return [self._sample(model, prompt) for prompt in dict.fromkeys((self._opening(), ""))]

    def _opening(self) -> str:
        """The first tokens of the first document in the evaluation text that is not blank."""
        tokens = self.first_samples(1)["input_ids"][0].tolist()
        end = self.tokenizer.document_end
        for _, document in itertools.groupby(tokens, key=lambda token: token != end):
            text = self.tokenizer.decode(list(document)[:PROMPT_TOKENS])
            if text.strip():
                return text.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character, where tokens are bytes
        return ""

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
