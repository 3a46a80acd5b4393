"""Labels of methods in words."""

import pytest

from wellcond.lab.report.names import readable, rename


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("default", "default"),
        ("default(library=true)", "library default"),
        ("tokens(embeddings=1, positions=30)", "larger positions (x 30)"),
        ("tokens(embeddings=3, positions=50)", "larger embeddings (x 3), positions (x 50)"),
        ("tokens(positions=0.5)", "smaller positions (x 0.5)"),
        ("tokens(positions=5)+conditioned", "larger positions (x 5) + conditioned"),
        ("default+set(optimizer.name=muon)", "default + Muon"),
        ("identity(lam=10, layout=per_head)", "identity (λ 10, layout per_head)"),
        ("weight_selection(teacher=runs/teachers/mimetic/seed0)", "weight selection (teacher mimetic)"),
        ("theorem 3.5 (SVD)", "theorem 3.5 (SVD)"),
    ],
)
def test_a_label_is_read_as_words(label, words):
    assert readable(label) == words


def test_words_of_english_are_no_labels_within_a_text():
    text = "by default identity(lam=1) is small, identity(lam=10) is not"
    assert rename(text, ["default", "small", "identity(lam=1)", "identity(lam=10)"]) == (
        "by default identity (λ 1) is small, identity (λ 10) is not"
    )
