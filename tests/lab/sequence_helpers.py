"""Small data, tasks and a model of the tests on sequences."""

import torch
from torch import nn

from lab.helpers import ListSplit, bundle, texts
from wellcond.lab.data import TensorDataset
from wellcond.lab.tasks.base import EVALUATION, TASKS, AugmentationSettings, TaskContext


def make_task(name, data, **fields):
    settings, make = TASKS[name]
    return make(settings(name=name, **fields), TaskContext(data, 0, AugmentationSettings()))


def classify(data, **fields):
    return make_task("sequence_classification", data, **fields)


def classify_pairs(data, **fields):
    return make_task("pair_classification", data, **fields)


def everything(samples):
    return samples.fetch([(index, EVALUATION) for index in range(len(samples))])


def ids(samples):
    return everything(samples)["input_ids"].tolist()


def pairs(*rows):
    return ListSplit([{"text": a, "text_pair": b, "label": n % 2} for n, (a, b) in enumerate(rows)])


def tokens(*rows, vocabulary=5, **others):
    split = TensorDataset("tokens", torch.tensor(rows), torch.arange(len(rows)) % 2)
    return bundle("tokens", split, classes=2, vocabulary_size=vocabulary, **others)


def written(*documents):
    return bundle("text", texts(*documents, labels=[n % 2 for n in range(len(documents))]), classes=2)


class MaskedMean(nn.Module):
    """Means of the embeddings that are not masked, of one sequence or of two."""

    def __init__(self, vocabulary=257, classes=2, longest=64, sequences=1):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8 * sequences, classes)
        self.longest = longest

    def pool(self, tokens, mask):
        if tokens.shape[1] > self.longest:
            raise ValueError(f"at most {self.longest} tokens, found {tokens.shape[1]}")
        count = mask.sum(1, keepdim=True)
        return (self.embed(tokens) * mask[..., None]).sum(1) / count.clamp_min(1)

    def forward(self, input_ids, attention_mask, pair_input_ids=None, pair_attention_mask=None):
        parts = [self.pool(input_ids, attention_mask)]
        if pair_input_ids is not None:
            parts.append(self.pool(pair_input_ids, pair_attention_mask))
        return self.head(torch.cat(parts, 1))
