"""Source `generated`: data made from a seed by a registered generator."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator

from wellcond.errors import check_choice
from wellcond.lab.data.base import Data, TensorDataset, describe_sizes
from wellcond.lab.data.chunks import make_split
from wellcond.lab.data.generated import GENERATORS, Generated
from wellcond.lab.data.registry import SourceConfig, register_source

MOST_SAMPLES = 10_000_000


class GeneratedConfig(SourceConfig):
    """Settings of `generated`; `options` are those of the generator, and are completed with their defaults."""

    source: Literal["generated"] = "generated"
    generator: str
    options: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    num_train: int = Field(4096, ge=1, le=MOST_SAMPLES)
    num_evaluation: int = Field(1024, ge=1, le=MOST_SAMPLES)
    num_test: int = Field(0, ge=0, le=MOST_SAMPLES)
    """Samples of a third split, named test; 0 for none."""
    seed: int = 0

    @field_validator("generator")
    @classmethod
    def _check_generator(cls, name: str) -> str:
        check_choice("data generator", name, sorted(GENERATORS))
        return name

    @field_validator("options")
    @classmethod
    def _complete_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("generator")
        return options if name is None else GENERATORS[name].options_class.model_validate(options).model_dump()


@register_source(GeneratedConfig)
def load(config: GeneratedConfig, base: Path) -> Data:
    """All splits; each has its own stream of random numbers, so its size does not change the others."""
    counts = {"train": config.num_train, "evaluation": config.num_evaluation, "test": config.num_test}
    made = {split: _make(config, split, count) for split, count in counts.items() if count > 0}
    first = made["train"]
    splits = {name: TensorDataset(data.kind, data.inputs, data.labels) for name, data in made.items()}
    train, evaluation = splits.pop("train"), splits.pop("evaluation")
    description = (
        f"{config.generator} generated from seed {config.seed}: {describe_sizes(train, evaluation, first.class_names)}"
    )
    return Data(
        config.generator,
        first.kind,
        train,
        evaluation,
        first.class_names,
        description + (f", {config.num_test} test examples" if splits else ""),
        others=splits,
        vocabulary_size=first.vocabulary_size,
    )


def _make(config: GeneratedConfig, split: str, count: int) -> Generated:
    entry = GENERATORS[config.generator]
    options = entry.options_class.model_validate(config.options)
    if entry.chunk is None:
        return entry.generate(count, options, _stream(config, split))
    return make_split(config.generator, options, seed=config.seed, split=split, count=count)


def _stream(config: GeneratedConfig, split: str) -> torch.Generator:
    # Hashed: with seed and seed + 1 the evaluation split of one seed would be the training split of the next.
    digest = hashlib.sha256(f"{config.generator}/{config.seed}/{split}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
