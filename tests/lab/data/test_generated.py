import pytest
import torch
from pydantic import ValidationError

from lab.data.helpers import load
from wellcond.lab.data import fingerprint, resolve_config


@pytest.mark.parametrize("generator", ["gratings", "associative_recall"])
def test_generated_data_follow_the_seed_alone(generator):
    def make(seed, num_train=64):
        return load(source="generated", generator=generator, num_train=num_train, num_evaluation=32, seed=seed)

    first, again, other, longer = make(3), make(3), make(4), make(3, num_train=99)
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    assert longer.evaluation.inputs.equal(first.evaluation.inputs)
    assert not first.train.inputs[:32].equal(first.evaluation.inputs)
    # A stream per split: the evaluation data of one seed are the training data of no other.
    assert not other.train.inputs[:32].equal(first.evaluation.inputs)


def test_generated_data_leave_the_global_seed_alone():
    before = torch.get_rng_state()
    load(source="generated", generator="gratings", num_train=8, num_evaluation=8)
    assert torch.get_rng_state().equal(before)


def test_gratings_are_balanced_normalised_and_separable():
    options = {"noise": 0.3, "num_classes": 4}
    bundle = load(source="generated", generator="gratings", options=options, num_train=2000, num_evaluation=400)
    images, labels = bundle.train.inputs, bundle.train.labels
    assert images.shape == (2000, 1, 16, 16) and images.dtype == torch.float32
    assert labels.bincount().tolist() == [500] * 4 and bundle.class_names[0] == "22.5 degrees"
    assert abs(float(images.mean())) < 0.02 and abs(float(images.std()) - 1) < 0.02

    # The nearest mean power spectrum, which knows nothing of phase, tells the classes apart; mean images do not.
    def power(x):
        return torch.fft.rfft2(x[:, 0]).abs().flatten(1)

    def accuracy(features):
        train, test = features(images), features(bundle.evaluation.inputs)
        means = torch.stack([train[labels == c].mean(0) for c in range(4)])
        return float((torch.cdist(test, means).argmin(1) == bundle.evaluation.labels).float().mean())

    assert accuracy(power) > 0.9
    assert accuracy(lambda x: x.flatten(1)) < 0.5


def test_associative_recall_labels_follow_from_a_look_up():
    options = {"num_pairs": 5, "num_keys": 7, "num_values": 3}
    bundle = load(source="generated", generator="associative_recall", options=options, num_train=200)
    assert bundle.kind == "tokens" and bundle.vocabulary_size == 10 and bundle.num_classes == 3
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
            "unknown data generator: got 'noise', expected one of 'associative_recall', 'gratings'",
        ),
        ({"generator": "gratings", "options": {"sise": 3}}, "options.sise\n.*unknown field"),
        ({"generator": "gratings", "options": {"size": 2}}, "options.size\n.*greater than or equal to 4"),
        ({"generator": "associative_recall", "options": {"num_pairs": 99}}, "at most num_keys = 16, got 99"),
        ({"generator": "gratings", "num_train": 0}, "num_train\n.*greater than or equal to 1"),
    ],
)
def test_generated_settings_are_checked(fields, message):
    with pytest.raises(ValidationError, match=message):
        resolve_config({"source": "generated", **fields})


def test_generated_settings_record_the_defaults():
    config = resolve_config({"source": "generated", "generator": "associative_recall", "options": {"num_pairs": 4}})
    assert config.options == {"num_pairs": 4, "num_keys": 16, "num_values": 16}
