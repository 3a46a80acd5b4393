"""Tokens per second and use of the processor: tokenising a corpus, opening what is kept, and batches of blocks.

Run: python benchmarks/tokens.py [CORPUS.parquet or .txt or .jsonl] [TOKENIZER folder or file]
Without a corpus the words are drawn at random, by Zipf's law; without a tokeniser one of 4,096 byte pairs is trained.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def random_corpus(folder: Path, megabytes: int = 8) -> Path:
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(letters[random.zipf(1.5, random.integers(2, 10)) % 26]) for _ in range(20_000)]
    path = folder / "corpus.txt"
    with path.open("w") as file:
        size = 0
        while size < megabytes * 2**20:
            size += file.write(" ".join(words[number % 20_000] for number in random.zipf(1.3, 200)) + "\n")
    return path


def measured(what: str, work, count=None):
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    number = count(result) if count else 0
    rate = f"{number / wall:14,.0f} tokens/s {number / cpu:14,.0f} tokens/s of processor time" if number else ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"{what:34} {wall:8.3f} s, {100 * cpu / wall / cores:4.0f} % of {cores} cores {rate}", flush=True)
    return result


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    os.environ["WELLCOND_CACHE"] = str(folder / "cache")
    from pydantic import TypeAdapter

    from wellcond.lab.data import load_data, resolve_config
    from wellcond.lab.data.text import open_token_stream
    from wellcond.lab.tasks.language_modelling import TokenBlocks
    from wellcond.lab.tokenizers import TokenizerChoice, make_tokenizer

    corpus = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else random_corpus(folder)
    choice = {"file": str(Path(sys.argv[2]).absolute())} if len(sys.argv) > 2 else {"train": "bpe", "vocabulary": 4096}
    config = resolve_config({"source": "text_stream", "files": str(corpus), "evaluation_documents": 10})
    data = measured("reading the corpus", lambda: load_data(config))
    chosen = TypeAdapter(TokenizerChoice).validate_python(choice)
    tokenizer = measured("making the tokeniser", lambda: make_tokenizer(chosen, data.train, "corpus"))
    stream = measured("tokenising", lambda: open_token_stream(data.train, tokenizer, "corpus"), len)
    print(f"{len(stream):,} tokens of {stream.counts['bytes']:,} bytes in {stream.counts['documents']:,} documents")
    measured("opening it again", lambda: open_token_stream(data.train, tokenizer, "corpus"))
    blocks = TokenBlocks(stream, 512, rest=False)
    order = np.random.default_rng(0).permutation(len(blocks)).tolist()

    def fetch() -> int:
        for first in range(0, len(order), 64):
            blocks.fetch([(number, 0) for number in order[first : first + 64]])
        return len(order) * 512

    measured("batches of 64 blocks of 512", fetch, lambda number: number)


if __name__ == "__main__":
    main()
