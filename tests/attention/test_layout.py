import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond.attention.layout import QKVLayout, head_rows
from wellcond.errors import UnknownChoiceError

layouts = st.builds(
    lambda kv, g, d, arrangement, order: QKVLayout(kv * g, d, kv, arrangement=arrangement, order=order),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from(["blocks", "groups"]),
    st.sampled_from(["qkv", "qvk", "kqv"]),
)


@given(layouts)
def test_rows_cover_every_row_once(layout):
    rows = torch.cat([layout.rows(role).flatten() for role in layout.order])
    assert sorted(rows.tolist()) == list(range(layout.num_rows))


def test_rows_match_the_reshape_of_native_code():
    H, K, d = 6, 2, 3
    w = torch.randn((H + 2 * K) * d, 5)
    blocks = {role: w[QKVLayout(H, d, K).rows(role)] for role in "qkv"}
    q, k, v = w.split([H * d, K * d, K * d])
    assert torch.equal(blocks["q"], q.reshape(H, d, 5)) and torch.equal(blocks["v"], v.reshape(K, d, 5))
    groups = {role: w[QKVLayout(H, d, K, arrangement="groups").rows(role)] for role in "qkv"}
    b = w.reshape(K, H // K + 2, d, 5)
    assert torch.equal(groups["q"], b[:, :-2].reshape(H, d, 5))
    assert torch.equal(groups["k"], b[:, -2]) and torch.equal(groups["v"], b[:, -1])


def test_shards_match_codegen():
    # CodeGen: four shards, each [query | value | key] of its share of the heads.
    H, d = 8, 2
    w = torch.randn(3 * H * d, 4)
    layout = QKVLayout(H, d, order="qvk", shards=4)
    shards = w.reshape(4, 3, 2 * d, 4)
    for role, at in (("q", 0), ("v", 1), ("k", 2)):
        assert torch.equal(w[layout.rows(role)], shards[:, at].reshape(H, d, 4))


def test_bad_counts_and_roles_are_refused():
    with pytest.raises(ValueError, match="multiple of key/value heads"):
        QKVLayout(6, 2, 4)
    with pytest.raises(UnknownChoiceError, match="'blocks', 'groups'"):
        QKVLayout(6, 2, arrangement="interleaved")
    with pytest.raises(UnknownChoiceError, match="unknown role"):
        QKVLayout(6, 2, order="kv").rows("q")


def test_head_rows_stride():
    assert head_rows(2, 2, start=1, stride=6).tolist() == [[1, 2], [7, 8]]
