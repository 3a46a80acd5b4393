"""Row-wise forms that are read off the graph of real modules, against automatic differentiation of the modules."""

import pytest
import torch
import transformers as tf

from contracts import cases_hf
from contracts.harness import randomise_
from jacobian.families import BUILD, family
from jacobian.test_capture import NOT_PLAIN
from wellcond.jacobian.capture import CapturedAttention, capture_attention
from wellcond.jacobian.module import ModuleJacobian
from wellcond.jacobian.select import select_operator
from wellcond.jacobian.trace import NotTracedError, trace_rowwise

# Olmo2's norm mixes the heads.
OTHERS = {*NOT_PLAIN["nystrom"], *NOT_PLAIN["cross_covariance"], "hf-olmo2"}
ROW_WISE = [name for names in NOT_PLAIN.values() for name in names if name not in OTHERS]
NARROW = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
CONFORMER = {
    "conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
SPEECH = {
    "wav2vec2-bert": (tf.Wav2Vec2BertModel, tf.Wav2Vec2BertConfig(feature_projection_input_dim=8, **NARROW), (7, 8)),
    "conformer": (tf.Wav2Vec2ConformerModel, tf.Wav2Vec2ConformerConfig(**CONFORMER, **NARROW), (50,)),
}
"""Positions that multiply the queries: relative keys, and those of Transformer-XL."""


def captured_from(name: str) -> list[CapturedAttention]:
    """The attention layers that are not plain; those of speech models, which are no case of the contracts."""
    if name in BUILD:
        found = family(name).captured
    else:
        build, config, shape = SPEECH[name]
        found = capture_attention(randomise_(build(config)), torch.randn(1, *shape, dtype=torch.float64))
    return [c for c in found if c.call is not None and not c.is_plain]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # jacrev through unfold
@pytest.mark.parametrize("name", [*ROW_WISE, *SPEECH])
def test_singular_values_are_those_of_the_module(name):
    """`jacrev` of the module's own copy, float64; layers differ in windows and caps."""
    kinds = {(type(c.site.module), c.site.modifiers): c for c in captured_from(name)}
    assert kinds
    for captured in kinds.values():
        kv_head = captured.site.num_kv_heads - 1
        chosen = select_operator(captured, kv_head)
        assert chosen.how.startswith("structured: "), chosen.how
        generic = ModuleJacobian(captured, kv_head, samples=[0])
        weights = generic.w_q, generic.w_k, generic.w_v
        parts = torch.func.jacrev(generic.output, argnums=(0, 1, 2))(*weights)
        dense = torch.cat([part.reshape(generic.shape[0], -1) for part in parts], 1)
        expected, form = torch.linalg.svdvals(dense), chosen.operator
        scale = float(expected[0])
        found = torch.linalg.svdvals(form.as_matrix())
        count = min(len(found), len(expected))
        kept = expected[:count] > 1e-6 * scale  # below, 1e-8 of a value is less than the rounding of the largest
        torch.testing.assert_close(found[:count][kept], expected[:count][kept], rtol=1e-8, atol=0)
        torch.testing.assert_close(form.gram().matrix(), dense @ dense.T, rtol=0, atol=1e-12 * scale**2)
        v, u = (torch.randn(size, dtype=torch.float64) for size in (dense.shape[1], len(dense)))
        pulled = form.rmatvec(u)
        close = {"rtol": 1e-9, "atol": 1e-11 * scale**2}
        torch.testing.assert_close(form.matvec(pulled), dense @ (dense.T @ u), **close)
        assert float(u @ form.matvec(v)) == pytest.approx(float(pulled @ v), rel=1e-9, abs=1e-9 * scale)
        rank = int((expected > 1e-12 * scale).sum())
        assert rank <= form.rank_bound().rank
        if "query position term" in captured.site.modifiers:
            assert rank == form.rank_bound().rank
            u = torch.randn(generic.shape[0], dtype=torch.float64)
            torch.testing.assert_close(form.gram().matvec(u), dense @ (dense.T @ u), rtol=1e-9, atol=1e-12 * scale**2)
        assert form.shape == tuple(dense.shape)


@pytest.mark.parametrize("name", ["hf-gpt-oss", "timm-rope_grouped"])
def test_one_query_head_of_a_group_has_the_singular_values_of_autograd(name):
    """Its rows of the group's Jacobian, without the columns of the other query heads; exact by what iterations use."""
    captured = captured_from(name)[0]
    group = range(captured.site.num_heads)[captured.query_heads(0)]
    assert len(group) > 1
    joint = ModuleJacobian(captured, 0, samples=[0])
    j_q, j_k, j_v = torch.func.jacrev(joint.output, argnums=(0, 1, 2))(joint.w_q, joint.w_k, joint.w_v)
    for number, head in enumerate(group):
        own = torch.cat([part[number].flatten(0, 1).flatten(1) for part in (j_q[:, :, :, number], j_k, j_v)], 1)
        expected = torch.linalg.svdvals(own)
        chosen = select_operator(captured, 0, query_head=head)
        assert chosen.how.startswith("structured: ")
        found = torch.linalg.svdvals(chosen.operator.as_matrix())[: len(expected)]
        kept = expected > 1e-6 * expected[0]
        torch.testing.assert_close(found[kept], expected[kept], rtol=1e-8, atol=0)
        torch.testing.assert_close(
            chosen.operator.gram().matrix(), own @ own.T, rtol=0, atol=1e-12 * float(expected[0]) ** 2
        )
        assert chosen.operator.shape[1] == own.shape[1]
    with pytest.raises(IndexError, match="query head"):
        select_operator(captured, 0, query_head=group.stop)


@pytest.mark.parametrize("name", ["hf-gpt-oss", "timm-eva_fused"])
def test_biases_count_if_they_are_asked_for(name):
    """Columns of the biases, by differences of the module's copy: its biases are no argument of a generic head."""
    [captured, *_] = captured_from(name)
    without, form = (select_operator(captured, 0, biases=counted).operator for counted in (False, True))
    more = form.gram().matrix() - without.gram().matrix()
    expected, step = torch.zeros_like(more), 1e-5
    for role in ("query", "key", "value"):
        slot = captured.site.by_role(role)
        stored = slot.stored_bias()
        if stored is None:
            continue
        heads = range(captured.site.num_heads)[captured.query_heads(0)] if role == "query" else [0]
        rows = slot.rows if slot.bias_rows is None else slot.bias_rows
        for place in rows[list(heads)].flatten().tolist():
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    before = stored[place].clone()
                    stored[place] += sign * step
                    ends.append(output_now(captured))
                    stored[place] = before
            column = (ends[0] - ends[1]).flatten() / (2 * step)
            expected += torch.outer(column, column)
    torch.testing.assert_close(more, expected, rtol=1e-5, atol=1e-7 * float(expected.abs().max()))


def output_now(captured: CapturedAttention) -> torch.Tensor:
    """Output of the group of head 0 with the biases as they are now."""
    module = Unchecked(captured)
    with torch.no_grad():
        return module.run()[:, module.columns].transpose(0, 1)


class Unchecked(ModuleJacobian):
    """A copy that may give something else than the model gave."""

    def _check_replay(self, everything):
        pass


@pytest.mark.parametrize("name", ["timm-cait", "hf-nystromformer"])
def test_what_is_not_row_wise_is_not_believed(name):
    captured = captured_from(name)[0]
    try:
        form = trace_rowwise(ModuleJacobian(captured, 0, samples=[0]))
    except NotTracedError:
        return
    assert isinstance(select_operator(captured, 0).operator, ModuleJacobian) and not isinstance(form, ModuleJacobian)


def test_samples_are_stacked_as_one_jacobian():
    ids = torch.randint(5, cases_hf.VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(0))
    captured = capture_attention(family("hf-llama").model, {"input_ids": ids})[0]
    both = select_operator(captured, 0, samples=(0, 2))
    assert both.how.startswith("structured")
    jacobian = ModuleJacobian(captured, 0, samples=[0, 2]).as_matrix()
    torch.testing.assert_close(both.operator.gram().matrix(), jacobian @ jacobian.T)
