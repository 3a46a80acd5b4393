"""ListOps: the language, and the generator against a recursion that is written for this test alone."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from lab.data.helpers import failure, load
from wellcond.errors import DataError
from wellcond.lab.data.listops import SYMBOLS, ListOpsOptions, evaluate, length_distribution, listops

MIRROR = Path(os.environ.get("WELLCOND_DATA") or Path(__file__).parents[3] / "../shared/data")
SHORT = {"max_depth": 4, "max_args": 4, "min_length": 4, "max_length": 60}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WELLCOND_CACHE", str(tmp_path / "cache"))


def to_tokens(text):
    """As published, with round brackets that carry no information, or without them."""
    return [SYMBOLS.index(symbol) for symbol in text.replace("(", " ").replace(")", " ").split()]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", 7),
        ("( 7 )", 7),
        ("[MIN 4 2 9 ]", 2),
        ("[MAX 4 2 9 ]", 9),
        ("[MED 4 2 9 ]", 4),
        ("[MED 9 2 4 5 ]", 4),  # 4.5, rounded down
        ("[SM 4 2 9 ]", 5),
        ("[SM 5 [SM 5 ] 0 ]", 0),
        ("( ( ( ( [MAX ( ( ( [MIN 8 ) 3 ) ] ) ) 2 ) 1 ) ] )", 3),
        ("[MAX " * 3000 + "6" + " ]" * 3000, 6),
    ],
)
def test_expressions_have_answers(text, answer):
    assert evaluate(to_tokens(text)) == answer


def test_answers_of_the_first_published_listops():
    path = MIRROR / "listops-nangia" / "test_d8.tsv"
    if not path.exists():
        pytest.skip(f"no {path}: set WELLCOND_DATA to a folder that holds listops-nangia")
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    rows = [(label, text) for label, text in rows if not {"[FIRST", "[LAST"} & set(text.split())]
    assert len(rows) == 1476
    assert [text for label, text in rows if evaluate(to_tokens(text)) != int(label)] == []


def acceptance(options):
    return float(length_distribution(options)[options.min_length + 1 :].sum())


def recursion(depth, options, source):
    """Tokens, answer, length, and greatest depth of a random tree, drawn and evaluated node by node."""
    if depth >= options.max_depth or source.random() > 0.25:
        digit = source.randrange(10)
        return [digit], digit, 1, depth
    children = [recursion(depth + 1, options, source) for _ in range(source.randint(2, options.max_args))]
    operator = source.randrange(4)
    values = [value for _, value, _, _ in children]
    answer = (min, max, lambda v: int(np.median(v)), lambda v: sum(v) % 10)[operator](values)
    tokens = [10 + operator, *(token for tokens, *_ in children for token in tokens), 14]
    return tokens, answer, 2 + sum(child[2] for child in children), max(child[3] for child in children)


def recursive_sample(options, count, seed):
    source, kept, tried = random.Random(seed), [], 0
    while len(kept) < count:
        tried += 1
        tree = recursion(1, options, source)
        if options.min_length < tree[2] < options.max_length:
            kept.append(tree)
    return kept, count / tried


def features(tokens):
    depth = deepest = 1
    for token in tokens:
        depth += (10 <= token < 14) - (token == 14)
        deepest = max(deepest, depth)
    counts = np.bincount(tokens, minlength=15)
    return [len(tokens), deepest, *counts[10:14], counts[0], counts[7], tokens[0], tokens[1], tokens[-2]]


def same_distribution(a, b):
    """P-value of the chi-square test that two samples have one distribution; rare values are joined."""
    values = np.unique(np.concatenate([a, b]))
    edges, total = [], 0
    for value in values:
        total += int((a == value).sum() + (b == value).sum())
        if total >= 40:
            edges.append(value)
            total = 0
    table = [np.bincount(np.searchsorted(edges[:-1], x), minlength=len(edges)) for x in (a, b)]
    return 1.0 if len(edges) < 2 else stats.chi2_contingency(np.array(table)).pvalue


@pytest.mark.parametrize(
    ("fields", "count"), [(SHORT, 6000), ({"max_depth": 6, "max_args": 3, "min_length": 10, "max_length": 100}, 3000)]
)
def test_samples_are_distributed_like_those_of_the_recursion(fields, count):
    options = ListOpsOptions(**fields)
    made = listops(count, options, torch.Generator().manual_seed(1))
    ours = [row[: int((row >= 0).sum())].tolist() for row in made.inputs]
    reference, rate = recursive_sample(options, count, seed=2)
    deviation = (acceptance(options) * (1 - acceptance(options)) / (count / rate)) ** 0.5
    assert abs(rate - acceptance(options)) < 4 * deviation
    a = np.array([features(tokens) for tokens in ours])
    b = np.array([features(tokens) for tokens, *_ in reference])
    assert (b[:, 1] == [depth for *_, depth in reference]).all()
    p_values = [same_distribution(a[:, k], b[:, k]) for k in range(a.shape[1])]
    p_values.append(same_distribution(made.labels.numpy(), np.array([answer for _, answer, *_ in reference])))
    assert min(p_values) > 0.001, p_values


def shape(tokens):
    """Greatest depth, most and fewest arguments of an expression."""
    counts, done = [0], []
    deepest = 1
    for token in tokens:
        if token == 14:
            done.append(counts.pop())
        else:
            counts[-1] += 1
            if token >= 10:
                counts.append(0)
        deepest = max(deepest, len(counts))
    return deepest, max(done, default=2), min(done, default=2)


def test_rows_are_expressions_within_the_limits():
    for options in (ListOpsOptions(), ListOpsOptions(**SHORT), ListOpsOptions(max_args=2, min_length=0, max_length=9)):
        made = listops(300, options, torch.Generator().manual_seed(3))
        assert made.inputs.shape == (300, options.max_length)
        for row, label in zip(made.inputs, made.labels.tolist(), strict=True):
            length = int((row >= 0).sum())
            tokens = row[:length].tolist()
            assert min(tokens) >= 0 and options.min_length < length < options.max_length
            depth, most, fewest = shape(tokens)
            assert depth <= options.max_depth and 2 <= fewest and most <= options.max_args
            assert evaluate(tokens) == label


def test_no_expression_occurs_twice_even_where_there_are_few():
    options = {"max_depth": 2, "max_args": 3, "min_length": 3, "max_length": 6}  # 4 (10^2 + 10^3) expressions
    bundle = load(
        source="generated",
        generator="listops",
        options=options,
        num_train=2000,
        num_evaluation=200,
        num_test=200,
        seed=5,
    )
    splits = [bundle.train, bundle.evaluation, bundle.others["test"]]
    rows = [tuple(row) for split in splits for row in split.inputs.tolist()]
    assert len(rows) == len(set(rows)) == 2400
    assert bundle.train.inputs[-1].tolist() == [10, 1, 1, 0, 14, -1]  # on every machine
    assert "too few different samples" in failure(
        source="generated", generator="listops", options=options, num_train=4000
    )


def test_lengths_that_next_to_never_occur_are_refused():
    for fields in (
        {"max_depth": 2, "max_args": 5},
        {"min_length": 500, "max_length": 501},
        {"min_length": 1, "max_length": 4},
        {"max_args": 2, "max_depth": 20, "min_length": 900},
    ):
        with pytest.raises(DataError, match="length"):
            listops(1, ListOpsOptions(**fields), torch.Generator())
