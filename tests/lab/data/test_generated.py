import pytest
import torch
from pydantic import ValidationError

from lab.data.helpers import load
from wellcond.lab.data import fingerprint, resolve_config


def test_generated_data_follow_the_seed_alone():
    def make(seed, num_train=64):
        return load(
            source="generated", generator="associative_recall", num_train=num_train, num_evaluation=32, seed=seed
        )

    first, again, other, longer = make(3), make(3), make(4), make(3, num_train=99)
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    assert longer.evaluation.inputs.equal(first.evaluation.inputs)
    assert not first.train.inputs[:32].equal(first.evaluation.inputs)
    # A stream per split: the evaluation data of one seed are the training data of no other.
    assert not other.train.inputs[:32].equal(first.evaluation.inputs)


def test_generated_data_leave_the_global_seed_alone():
    before = torch.get_rng_state()
    load(source="generated", generator="associative_recall", num_train=8, num_evaluation=8)
    assert torch.get_rng_state().equal(before)


def test_associative_recall_labels_follow_from_a_look_up():
    options = {"num_pairs": 5, "num_keys": 7, "num_values": 3}
    bundle = load(source="generated", generator="associative_recall", options=options, num_train=200)
    assert bundle.kind == "tokens" and bundle.vocabulary_size == 10 and len(bundle.class_names) == 3
    for index in range(200):
        example = bundle.train[index]
        *pairs, query = example["tokens"].tolist()
        table = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert len(table) == 5 and max(table) < 7 and example["label"] == table[query] - 7
    positions = (bundle.train.inputs[:, :-1:2] == bundle.train.inputs[:, -1:]).long().argmax(1)
    assert positions.bincount(minlength=5).min() > 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"generator": "noise"},
            "unknown data generator: got 'noise', expected one of 'associative_recall', 'listops'",
        ),
        ({"generator": "associative_recall", "options": {"num_pair": 3}}, "options.num_pair\n.*unknown field"),
        (
            {"generator": "associative_recall", "options": {"num_keys": 1}},
            "num_keys\n.*greater than or equal to 2",
        ),
        ({"generator": "associative_recall", "options": {"num_pairs": 99}}, "at most num_keys = 16, got 99"),
        ({"generator": "associative_recall", "num_train": 0}, "num_train\n.*greater than or equal to 1"),
    ],
)
def test_generated_settings_are_checked(fields, message):
    with pytest.raises(ValidationError, match=message):
        resolve_config({"source": "generated", **fields})


def test_generated_settings_record_the_defaults():
    config = resolve_config({"source": "generated", "generator": "associative_recall", "options": {"num_pairs": 4}})
    assert config.options == {"num_pairs": 4, "num_keys": 16, "num_values": 16}
