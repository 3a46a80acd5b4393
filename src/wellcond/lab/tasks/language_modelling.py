"""Causal language modelling on tokens or bytes: cross entropy of the next token, perplexity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellcond.lab.data.base import Dataset
from wellcond.lab.data.progress import telling
from wellcond.lab.data.token_cache import open_token_stream
from wellcond.lab.settings import RecipeError, SequenceLength, Settings
from wellcond.lab.tasks.base import (
    EVALUATION,
    AbstractTask,
    Batch,
    Metric,
    SampleKey,
    Samples,
    TaskContext,
    logits_of,
    need_kind,
    register_task,
)
from wellcond.lab.tasks.byte_text import byte_stream
from wellcond.lab.tasks.token_blocks import IGNORED, ScoredWindows, TokenBlocks
from wellcond.lab.tokenizers.base import Tokenizer, document_end
from wellcond.lab.tokenizers.choose import make_tokenizer
from wellcond.lab.tokenizers.generate import generate_text
from wellcond.lab.tokenizers.settings import TokenizerChoice

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


class Blocks:
    """A stream of tokens in blocks that do not overlap; each predicts its own tokens from the second on."""

    in_memory = True

    def __init__(self, stream: Tensor, context: int, what: str) -> None:
        """A rest shorter than a block is left out."""
        count = len(stream) // context
        if count == 0:
            raise RecipeError(f"{what}: expected at least {context} bytes of text (task.context), found {len(stream)}")
        self.rows = stream[: count * context].view(count, context)

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.rows)

    def fetch(self, keys: Sequence[SampleKey]) -> Batch:
        """Tokens."""
        return {"input_ids": self.rows[torch.tensor([index for index, _ in keys])].long()}


@register_task(LanguageModellingSettings)
class LanguageModelling(AbstractTask):
    """Next token."""

    metric = Metric("perplexity", higher_is_better=False)
    tokenizer: Tokenizer

    def __init__(self, settings: LanguageModellingSettings, context: TaskContext) -> None:
        """Join the documents of each split into one stream."""
        data = context.data
        need_kind(data, settings.name, "text")
        self.settings, self.context = settings, settings.context
        with telling(context.progress):
            what = f"{data.name}, training split"
            self.tokenizer = make_tokenizer(settings.tokenizer, data.train, what, context.base)
            self.train = self._train(data.train, what)
            self.evaluation = self._scored(data.evaluation, f"{data.name}, evaluation split")
            if context.test is not None:
                self.test = self._scored(context.test, f"{data.name}, test split")

    def _train(self, split: Dataset, what: str) -> Samples:
        if self.settings.plain_bytes:
            return Blocks(byte_stream(split, what), self.context, what)
        stream = open_token_stream(split, self.tokenizer, what, limit_tokens=self.settings.limit_tokens)
        return TokenBlocks(stream, self.context, what, overlap=1)

    def _scored(self, split: Dataset, what: str) -> Samples:
        if self.settings.plain_bytes:
            return Blocks(byte_stream(split, what), self.context, what)
        stride = self.settings.stride or self.context
        return ScoredWindows(open_token_stream(split, self.tokenizer, what), self.context, stride, what)

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, context, and the token that ends a document."""
        end = document_end(self.tokenizer)
        return {
            "vocab_size": self.tokenizer.vocabulary_size,
            "max_position_embeddings": self.context,
            "bos_token_id": end,
            "eos_token_id": end,
        }

    def auto_class(self) -> str:
        """With a language-model head."""
        return "AutoModelForCausalLM"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy in nats, summed over the tokens predicted."""
        tokens = batch["input_ids"]
        logits = logits_of(model(input_ids=tokens, use_cache=False))
        if logits.shape[-1] < self.tokenizer.vocabulary_size:
            raise RecipeError(
                f"task.tokenizer: the model knows {logits.shape[-1]} tokens, and the tokeniser has "
                f"{self.tokenizer.vocabulary_size}"
            )
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
        found = {"loss": loss, "perplexity": _exp(loss)}
        if "words" in sums:
            found["perplexity_per_word"] = _exp(sums["loss"] / sums["words"])
            found["bits_per_byte"] = sums["loss"] / sums["bytes"] / math.log(2)
        return found

    def probe(self, num_samples: int) -> dict[str, Tensor]:
        """Evaluation blocks."""
        keys = [(index, EVALUATION) for index in range(min(num_samples, len(self.evaluation)))]
        return {"input_ids": self.evaluation.fetch(keys)["input_ids"]}

    def sample_text(
        self, model: nn.Module, *, prompt: str = "", num_tokens: int = 100, temperature: float = 1.0, seed: int = 0
    ) -> str:
        """What a model writes behind a prompt."""
        return generate_text(model, self.tokenizer, prompt, num_tokens, temperature, seed, context=self.context)

    def write_samples(self, model: nn.Module) -> list[dict[str, str]]:
        """One that goes on from the beginning of the evaluation text, and one without a prompt."""
        return [self._sample(model, prompt) for prompt in dict.fromkeys((self._opening(), ""))]

    def _opening(self) -> str:
        """The first tokens of the first document in the evaluation text that is not blank."""
        tokens = self.evaluation.fetch([(0, EVALUATION)])["input_ids"][0].tolist()
        end = document_end(self.tokenizer)
        for _, document in itertools.groupby(tokens, key=lambda token: token != end):
            text = self.tokenizer.decode(list(document)[:PROMPT_TOKENS])
            if text.strip():
                return text.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character, where tokens are bytes
        return ""

    def _sample(self, model: nn.Module, prompt: str) -> dict[str, str]:
        try:
            text = self.sample_text(model, prompt=prompt, num_tokens=SAMPLE_TOKENS, temperature=TEMPERATURE)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            # A model may take no sequences but whole blocks; its training is not in vain for that.
            return {"prompt": prompt, "problem": f"{type(error).__name__}: {error}"}
        return {"prompt": prompt, "text": text}


def _exp(nats: float) -> float:
    return math.exp(min(nats, 700.0))
