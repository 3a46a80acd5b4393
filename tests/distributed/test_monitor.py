"""The monitor on two processes has the numbers of one process that sees all samples and heads."""

import pytest
import torch

import wellcond as wc
from distributed.models import IMAGES, LABELS, TOKENS, WRAPPERS, build
from distributed.processes import on_two, rank

pytestmark = pytest.mark.processes

CASES = [("ddp", "vit"), ("tp", "llama"), pytest.param("fsdp", "vit", marks=pytest.mark.slow),
         pytest.param("fsdp over tp", "llama", marks=pytest.mark.slow)]  # fmt: skip


def part_loss(model, name, part):
    if name == "vit":
        return torch.nn.functional.cross_entropy(model(IMAGES[part]), LABELS[part])
    return model(input_ids=TOKENS[part], labels=TOKENS[part]).loss


def watch(wrapper, name):
    """Two steps; under data parallelism each process sees half of the samples."""
    model = WRAPPERS[wrapper](build(name)).train()
    parallel = wrapper in ("ddp", "fsdp")
    mine = slice(2 * rank(), 2 * rank() + 2) if parallel else slice(None)
    monitor = wc.AttentionMonitor(model, every=1, weights_every=1)
    tables, largest = [], []
    for _ in range(2):
        part_loss(model, name, mine).backward()
        largest.append(torch.cat(list(monitor.max_logits().values())))
        for parameter in model.parameters():
            parameter.grad = None
        monitor.step()
    monitor.close()
    tables = torch.tensor(monitor.series.values)
    both = [None, None]
    torch.distributed.all_gather_object(both, (tables, largest[0]))
    assert torch.equal(both[0][0].nan_to_num(7.0), both[1][0].nan_to_num(7.0)), "both have the same numbers"
    assert torch.equal(both[0][1], both[1][1])
    return {"tables": tables, "largest": largest[0], "unseen": len(monitor.not_seen)}


@pytest.mark.parametrize("wrapper, name", CASES)
def test_numbers_are_those_of_one_process(wrapper, name, tmp_path):
    done = on_two(tmp_path, watch, wrapper, name)
    assert isinstance(done, dict), done
    model = build(name).train()
    monitor = wc.AttentionMonitor(model, every=1, weights_every=1)
    for _ in range(2):
        part_loss(model, name, slice(None))
        monitor.step()
    monitor.close()
    alone = torch.tensor(monitor.series.values)
    assert done["unseen"] == 0 and alone.isfinite().float().mean() > 0.9
    torch.testing.assert_close(done["tables"], alone, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert torch.equal(done["largest"], done["tables"][0, :, 0])
