"""Causal and masked language modelling: cross entropy of the next or of hidden tokens, perplexity, samples of text."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from wellcond.attention.sharding import is_sharded, unwrap
from wellcond.attention.slot import is_conditioned
from wellcond.conditioning.apply import folded
from wellcond.errors import RecipeError
from wellcond.lab.data.base import Dataset
from wellcond.lab.data.text import TokenStream, open_token_stream
from wellcond.lab.seeding import derive
from wellcond.lab.settings import SequenceLength, Settings
from wellcond.lab.tasks.base import (
    EVALUATION,
    IGNORED,
    Batch,
    ClassificationTask,
    Keys,
    Metric,
    Samples,
    TaskContext,
    evaluating,
    logits_of,
    register_task,
)
from wellcond.lab.tokenizers import Tokenizer, TokenizerChoice, make_tokenizer

PROMPT_TOKENS, SAMPLE_TOKENS, TEMPERATURE = 10, 60, 0.8  # of the samples of text in a record


class LanguageModellingSettings(Settings):
    """Options of the task."""

    name: Literal["language_modelling"] = "language_modelling"
    context: Annotated[SequenceLength, Field(ge=2)]
    """Tokens a model sees at once."""
    tokenizer: TokenizerChoice = "bytes"
    limit_tokens: PositiveInt | None = None
    """Train on the text up to the document in which so many tokens are reached; null: all."""
    stride: PositiveInt | None = None
    """Tokens from one training window to the next; 1 for windows at every place; null: `context`, they meet."""
    metric: Literal["perplexity", "loss"] = "perplexity"
    """Of a token, by which runs are judged; the loss is its logarithm, in nats."""


def tokens_at(stream: TokenStream, places: NDArray[np.int64]) -> Tensor:
    """Tokens at places of a stream, int64 of their shape."""
    return torch.from_numpy(stream.tokens[places].astype(np.int64))


class TokenStreamTask(ClassificationTask):
    """Labels are tokens of a text: all documents of a split are joined and cut into blocks."""

    metric = Metric("perplexity", higher_is_better=False)
    kinds = ("text",)
    tokenizer: Tokenizer

    def __init__(self, settings: Any, context: TaskContext) -> None:
        super().__init__(settings, context)
        self.length: int = settings.context if settings.name == "language_modelling" else settings.length
        what = f"{self.data.name}, training split"
        self.tokenizer = make_tokenizer(settings.tokenizer, self.data.train, what, context.base)
        self.set_splits(self._cut)

    def _cut(self, split: Dataset, name: str) -> Samples:
        what, training = f"{self.data.name}, {name} split", name == "training"
        limit = self.settings.limit_tokens if training else None
        stream = open_token_stream(split, self.tokenizer, what, limit_tokens=limit)
        samples = self.blocks(stream, training=training)
        if not len(samples):
            raise RecipeError(
                f"{what}: expected at least one block of {self.length} tokens and what is predicted from it, found "
                f"{len(stream)} tokens"
            )
        return samples

    @abstractmethod
    def blocks(self, stream: TokenStream, *, training: bool) -> Samples:
        """The samples of a split."""

    def num_terms(self, batch: Batch) -> Tensor:
        """Tokens that are predicted."""
        return (batch["label"] != IGNORED).sum()


@dataclass(frozen=True)
class TokenBlocks(Samples):
    """Block k is the `context` tokens from k * stride on, and the token behind each."""

    stream: TokenStream
    context: int
    stride: int
    rest: bool
    """Whether there is a last block for what is less than one, so that every token but the first is predicted."""

    def __len__(self) -> int:
        beyond_first = len(self.stream) - 1 - self.context
        return max(0, 1 + (-(-beyond_first // self.stride) if self.rest else beyond_first // self.stride))

    def fetch(self, keys: Keys) -> Batch:
        """Tokens, targets, and the share of each block in the words and bytes of the text, by its number of targets."""
        predicted = len(self.stream) - 1
        starts = np.array([index for index, _ in keys])[:, None] * self.stride
        places = starts + np.arange(min(self.context, predicted))
        # Behind the end of the stream any token will do: it is not scored, and no token before it sees it.
        inside = torch.from_numpy(places < predicted)
        places = places.clip(max=predicted - 1)
        share = inside.sum(1).double() / predicted
        return {
            "input_ids": tokens_at(self.stream, places),
            "label": tokens_at(self.stream, places + 1).masked_fill(~inside, IGNORED),
            "words": share * self.stream.counts["words"],
            "bytes": share * self.stream.counts["bytes"],
        }


@register_task(LanguageModellingSettings)
class LanguageModelling(TokenStreamTask):
    """Next token."""

    auto_class = "AutoModelForCausalLM"

    def __init__(self, settings: Any, context: TaskContext) -> None:
        super().__init__(settings, context)
        self.metric = Metric(settings.metric, higher_is_better=False)

    def blocks(self, stream: TokenStream, *, training: bool) -> TokenBlocks:
        """Only in training a last block that is not full is left out, and blocks may overlap."""
        stride = self.settings.stride if training else None
        return TokenBlocks(stream, self.length, stride or self.length, rest=not training)

    def terms_to_train(self, batch: Batch) -> int:
        """Terms of the loss in training: all tokens, since every block is full."""
        return batch["label"].numel()

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, context, and the token that ends a document."""
        if kind == "wellcond":
            return {"vocab_size": self.tokenizer.vocabulary_size, "context": self.length}
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), self.tokenizer.document_end)
        return {"vocab_size": self.tokenizer.vocabulary_size, "max_position_embeddings": self.length, **ends}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits of every token."""
        logits = logits_of(model(input_ids=batch["input_ids"], use_cache=False))
        known, size = logits.shape[-1], self.tokenizer.vocabulary_size
        if known < size:
            raise RecipeError(f"task.tokenizer: the model knows {known} tokens, and the tokeniser has {size}")
        return logits.flatten(0, 1)

    def score(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Loss and count, and words and bytes of the text."""
        sums = {"loss": self.loss(model, batch), "count": self.num_terms(batch)}
        sums |= {name: batch[name].sum() for name in ("words", "bytes")}
        return {name: value.double() for name, value in sums.items()}

    def metrics(self, sums: Mapping[str, Any], samples: Samples) -> dict[str, float]:
        """Nats and perplexity per token; perplexity per word (by white space) and bits per byte, for any tokeniser."""
        loss = sums["loss"] / sums["count"]
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "perplexity_per_word": perplexity(sums["loss"] / sums["words"]),
            "bits_per_byte": sums["loss"] / sums["bytes"] / math.log(2),
        }

    def write_samples(self, model: nn.Module) -> list[dict[str, str]]:
        """One that continues the beginning of the evaluation text, and one without a prompt."""
        tokens, end = self.probe(1)["input_ids"][0].tolist(), self.tokenizer.document_end
        opening = self.tokenizer.decode(list(itertools.takewhile(lambda token: token != end, tokens))[:PROMPT_TOKENS])
        opening = opening.rstrip("\N{REPLACEMENT CHARACTER}")  # half a character, where tokens are bytes
        samples = [{"prompt": opening}, {"prompt": ""}]
        for sample in samples:
            try:
                sample["text"] = generate_text(model, self.tokenizer, sample["prompt"], context=self.length)
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                # A model may take no sequences but whole blocks; the run is still valid.
                sample["problem"] = f"{type(error).__name__}: {error}"
        return samples


def perplexity(nats: float) -> float:
    """The exponential of a loss, finite where that would overflow."""
    return math.exp(min(nats, 700.0))


def generate_text(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, num_tokens: int = SAMPLE_TOKENS, *, context: int
) -> str:
    """The prompt and what the model, which sees the last `context` tokens, writes behind it, up to the document's end.

    Text without a prompt begins behind the token that ends a document, or token 0 where there is none.

    The model is always run `num_tokens` times: where its weights are sharded, processes wait for each other. Tokens
    are drawn on the CPU, so that every device draws the same, without the global random state.
    """
    end = tokenizer.document_end
    given = [0 if end is None else end, *(int(id) for id in tokenizer.encode_batch([prompt])[0])]
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    tokens = list(given)
    # Every token is a forward pass, in which a correction would be computed again.
    folding = is_conditioned(model) and not is_sharded(model)
    with evaluating(model), folded(model) if folding else contextlib.nullcontext():
        for _ in range(num_tokens):
            output = model(input_ids=torch.tensor([tokens[-context:]], device=device), use_cache=False)
            logits = logits_of(output)[0, -1].double().cpu()
            # Where the cumulative chances pass a uniform number: rounding of the logits moves the borders between
            # tokens by as little, so that a folded model draws the same text. There may be more embeddings than tokens.
            chances = (logits[: tokenizer.vocabulary_size] / TEMPERATURE).softmax(0).cumsum(0)
            drawn = torch.rand((), generator=generator, dtype=torch.float64) * chances[-1]
            tokens.append(min(int(torch.searchsorted(chances, drawn, right=True)), len(chances) - 1))
    written = tokens[len(given) :]
    opening = given[1:] if end is None else given
    return tokenizer.decode(opening + (written[: written.index(end)] if end in written else written))


# Masked language modelling. Which tokens are hidden, and behind what, is a pure function of seed, sample and draw.

Words = NDArray[np.uint64]
MASKED, HIDDEN, RANDOM = 0.25, 0.8, 0.1
"""Share of the tokens of every sequence that are masked; of these, shares that become [MASK] and that become a random
token; the others stay. As in the release of Crammed BERT, they are exact in every sequence, not only on average."""


class MaskedLanguageModellingSettings(Settings):
    """Options of the task."""

    name: Literal["masked_language_modelling"] = "masked_language_modelling"
    length: Annotated[SequenceLength, Field(ge=2)] = 128
    """Tokens of a sequence; documents follow each other, and a sequence may hold the end of one and the next."""
    tokenizer: TokenizerChoice = "bytes"
    limit_tokens: PositiveInt | None = None
    """Train on the text up to the document in which so many tokens are reached; null: all."""


# SplitMix64 (Steele, Lea, Flood 2014): number n of the stream of a seed s is mix(s + n * gamma), any n at once.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def random_words(seed: int, keys: Keys, count: int) -> Words:
    """`count` random 64-bit numbers for each key, (keys, count), the same whatever other keys there are."""
    sample, draw = np.array(keys, dtype=np.int64).astype(np.uint64).T
    start = _mix(_mix(np.uint64(seed) + _GAMMA * sample) + _GAMMA * draw)
    return _mix(start[:, None] + _GAMMA * np.arange(1, count + 1, dtype=np.uint64))


def _number_masked(ordinary: NDArray[Any]) -> NDArray[np.int64]:
    """Of so many tokens that are not special: a share, rounded, but at least one."""
    return np.minimum(np.maximum(np.rint(MASKED * ordinary).astype(np.int64), 1), ordinary)


class MaskedBlocks(Samples):
    """Sequences with other tokens hidden in every epoch, and always the same in evaluation; special ones never are."""

    def __init__(
        self, stream: TokenStream, length: int, *, mask: int, special: Sequence[int], vocabulary: int, seed: int
    ) -> None:
        self.stream, self.length, self.mask_token = stream, length, mask
        self.is_special = np.zeros(vocabulary, dtype=bool)
        self.is_special[[mask, *special]] = True
        self.ordinary = np.flatnonzero(~self.is_special)
        # Every seed is evaluated on the same masked tokens.
        self.seeds = derive(seed, "masking"), derive(0, "masking for evaluation")

    def __len__(self) -> int:
        return len(self.stream) // self.length  # a rest that is shorter is left out

    def fetch(self, keys: Keys) -> Batch:
        """What `hide` makes of the sequences."""
        places = np.array([index for index, _ in keys])[:, None] * self.length + np.arange(self.length)
        return self.hide(tokens_at(self.stream, places).numpy(), keys)

    def hide(self, tokens: NDArray[np.int64], keys: Keys) -> Batch:
        """`input_ids` (sequences, length) with masked tokens, their `positions` (sequences, most that are masked).

        `label` is what stood there; a sequence with fewer has label -100 in the rest.
        """
        length = tokens.shape[1]
        most = int(_number_masked(np.array(length)))
        training, evaluation = self.seeds  # batches do not mix the two
        words = random_words(evaluation if keys[0][1] == EVALUATION else training, keys, length + most)
        special = self.is_special[tokens]
        # The smallest of as many random numbers as there are tokens choose without bias, and in a random order.
        ranks = np.where(special, np.iinfo(np.uint64).max, words[:, :length])
        positions = ranks.argsort(axis=1, kind="stable")[:, :most]
        chosen = np.take_along_axis(tokens, positions, axis=1)
        number = _number_masked(length - special.sum(axis=1))[:, None]
        place = np.arange(most)
        hidden, replaced = (np.rint(share * number) for share in (HIDDEN, HIDDEN + RANDOM))
        drawn = self.ordinary[words[:, length:] % np.uint64(len(self.ordinary))]
        seen = np.where(place < hidden, self.mask_token, np.where(place < replaced, drawn, chosen))
        masked = tokens.copy()
        np.put_along_axis(masked, positions, seen, axis=1)
        batch = {"input_ids": masked, "positions": positions, "label": np.where(place < number, chosen, IGNORED)}
        return {name: torch.from_numpy(np.ascontiguousarray(values, np.int64)) for name, values in batch.items()}


@register_task(MaskedLanguageModellingSettings)
class MaskedLanguageModelling(TokenStreamTask):
    """Hidden tokens."""

    auto_class = "AutoModelForMaskedLM"

    @property
    def vocabulary(self) -> int:
        """Number of tokens; a tokeniser without a mask gets one behind its own."""
        return self.tokenizer.vocabulary_size + ("mask" not in self.tokenizer.special)

    def blocks(self, stream: TokenStream, *, training: bool) -> MaskedBlocks:
        """Masked alike in every split."""
        special, size = list(self.tokenizer.special.values()), self.vocabulary
        mask = self.tokenizer.special.get("mask", size - 1)
        return MaskedBlocks(stream, self.length, mask=mask, special=special, vocabulary=size, seed=self.seed)

    def model_arguments(self, kind: str) -> dict[str, Any]:
        """Vocabulary, longest sequence and the padding token."""
        length = "length" if kind == "wellcond" else "max_position_embeddings"
        return {"vocab_size": self.vocabulary, length: self.length, "pad_token_id": self.tokenizer.special.get("pad")}

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits of the places to guess, one sequence after the other."""
        tokens, positions = batch["input_ids"], batch["positions"]
        rows, length = tokens.shape
        flat = (positions + length * torch.arange(rows, device=tokens.device)[:, None]).flatten()
        # A model that takes them computes no others: the product with the vocabulary is a large part of a step.
        if "positions" in inspect.signature(type(unwrap(model)).forward).parameters:
            return logits_of(model(input_ids=tokens, positions=flat))
        return logits_of(model(input_ids=tokens)).flatten(0, 1)[flat]

    def metrics(self, sums: Mapping[str, Any], samples: Samples) -> dict[str, float]:
        """Mean loss of a hidden token, its exponential, and the share of right guesses."""
        means = super().metrics(sums, samples)
        return {"loss": means["loss"], "perplexity": perplexity(means["loss"]), "masked_accuracy": means["accuracy"]}
