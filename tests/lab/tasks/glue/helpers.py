"""Sentences that can be told apart, and runs of pre-training that take a second."""

import json

import numpy as np

from lab.data.helpers import write_csv, write_jsonl, write_parquet
from wellcond.lab.methods import MethodSettings
from wellcond.lab.recipe import Recipe
from wellcond.lab.records import seal
from wellcond.lab.train.run import Job, run_job

WORDS = "the cat sat on a mat and saw that no dog was near so it ran home to tell her of this good bad day".split()
MODELS = {
    "bert": {
        "name": "hf:bert",
        "arguments": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    },
    "crammed": {
        "name": "wellcond:crammed_bert",
        "arguments": {"width": 16, "layers": 2, "heads": 2, "feed_forward": 16},
    },
}
FAST = {"lr": 1e-2, "batch_size": 32, "epochs": 1, "rows": None}
"""In place of how models of scale tiny are fine-tuned."""


def sentence(seed, words=8):
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def write_glue(folder, rows=64):
    """Four tasks, each in another format; whether a sentence has the word good decides its label."""
    for count, split in ((rows, "train"), (24, "validation")):
        start = 0 if split == "train" else 1000
        texts = [sentence(start + row) for row in range(count)]
        others = [sentence(5000 + start + row, 5) for row in range(count)]
        labels = [int("good" in text) for text in texts]
        (folder / "cola").mkdir(parents=True, exist_ok=True)
        write_csv(folder / f"cola/{split}.tsv", ["sentence", "label"], zip(texts, labels, strict=True))
        pairs = zip(texts, others, labels, strict=True)
        rows_of = [{"sentence1": a, "sentence2": b, "label": 2.5 * label + 0.1} for a, b, label in pairs]
        write_jsonl(folder / f"stsb/{split}.jsonl", rows_of)
        columns = {"question1": texts, "question2": others, "label": labels}
        write_parquet(folder / f"qqp/{split}-00000-of-00001.parquet", columns)
        columns = {"premise": texts, "hypothesis": others, "label": [row % 3 for row in range(count)]}
        for name in ["train"] if split == "train" else ["validation_matched", "validation_mismatched"]:
            cut = slice(10) if name.endswith("mismatched") else slice(None)
            write_parquet(
                folder / f"mnli/{name}-00000-of-00001.parquet", {key: value[cut] for key, value in columns.items()}
            )
    return folder


def pretrain(folder, model="bert", method="default", seed=0, text=None):
    """A finished run of masked language modelling, on the text of a file beside it or given."""
    text = text or folder.parent / "text.txt"
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text("\n".join(sentence(row, 30) for row in range(60)))
    fields = {
        "name": "words",
        "scale": "tiny",
        "task": {
            "name": "masked_language_modelling",
            "length": 24,
            "tokenizer": {"train": "wordpiece", "vocabulary": 60},
        },
        "data": {"source": "files", "train": str(text), "evaluation_fraction": 0.2},
        "model": MODELS[model],
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "training": {"length": {"steps": 8}, "batch_size": 8, "threads": 1},
        "tracking": {"weights_every": None, "jacobian_points": 0},
    }
    job = Job(Recipe.model_validate(fields), MethodSettings.model_validate(method), seed, folder, cpu=True)
    assert run_job(job)["status"] == "finished"
    return folder


def edit_record(folder, change):
    """Change run.json in place."""
    record = json.loads((folder / "run.json").read_text())
    change(record)
    (folder / "run.json").write_text(json.dumps(seal(record)))
