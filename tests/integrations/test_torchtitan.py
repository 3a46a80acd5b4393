"""Of torchtitan 0.3.0, which needs an older version of datasets than wellcond's own tests: put its wheel, spmd_types,
tyro and torchdata on PYTHONPATH.

Its flex attention has no backward pass on a CPU: models train here with torchtitan's own SDPA, and flex is run forward.
"""

import math
import subprocess
import sys

import pytest
import torch

import wellcond as wc
from distributed.processes import run_on_two

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:flex_attention called without")]
TAU = 1e-3


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("torchtitan", reason="torchtitan is not installed; put its wheel on PYTHONPATH")


def build(family="llama3", kernel="sdpa"):
    import importlib

    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = importlib.import_module(f"torchtitan.models.{family}").model_registry("debugmodel").model
    config.layers = config.layers[:2]
    for layer in config.layers if kernel == "sdpa" else ():
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def trainer_config(*imports):
    """A configuration of torchtitan's trainer with these overrides applied, as its command line applies them."""
    from torchtitan.config.override import apply_overrides, parse_cli_imports
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.optimizer.implementation = "for-loop"
    config.override.imports = parse_cli_imports([f"wellcond.integrations.torchtitan.{one}" for one in imports])
    apply_overrides(config.override, config)
    return config


def loss_of(model, part=slice(None)):
    tokens = torch.randint(0, 2048, (2, 16), generator=torch.Generator().manual_seed(0))[part]
    return model(tokens, positions=torch.arange(16).expand_as(tokens)).float().logsumexp(-1).mean()


def test_overrides_initialise_condition_and_clip():
    config = trainer_config(f'prepare={{"init": "orthogonal", "condition": "balanced", "clip": {TAU}}}')
    model = build()
    optimizers = config.optimizer.build(model_parts=[model])
    for site in wc.find_attention(model):
        sigma = torch.linalg.svdvals(site.q.read_raw().detach())
        torch.testing.assert_close(sigma, torch.ones_like(sigma), rtol=1e-4, atol=1e-4)
    assert wc.conditioning_of(model)["method"] == "balanced"
    before = [site.q.read_raw().detach().clone() for site in wc.find_attention(model)]
    optimizers.state_dict()  # of no step yet: torchtitan steps with a rate of zero, and no logits were seen
    assert all(row["steps_seen"] == 0 for row in optimizers.clips[0].records())
    loss_of(model).backward()
    optimizers.step()
    records = optimizers.clips[0].records()
    assert len(records) == 32 and all(row["times_clipped"] == 1 for row in records)
    for old, site in zip(before, wc.find_attention(model), strict=True):
        assert bool(site.q.read_raw().norm() < 0.1 * old.norm())


def test_each_override_alone():
    model = build()
    assert trainer_config("init").optimizer.init == {"method": "gaussian"}
    optimizers = trainer_config('condition={"method": "polar"}').optimizer.build(model_parts=[model])
    assert wc.conditioning_of(model)["method"] == "polar" and optimizers.clips == []
    loss_of(model).backward()
    optimizers.step()
    assert bool(loss_of(model).isfinite())


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(wc.OptionError, match="needs a batch"):
        trainer_config('init={"method": "calibrated"}')
    with pytest.raises(ValueError, match="both claim"):
        trainer_config("init", "clip")


def test_the_monitor_reads_what_the_optimisers_step():
    from wellcond.integrations.torchtitan import Watch, WatchedMetrics

    config = trainer_config('monitor={"every": 1}')
    assert config.metrics._owner is WatchedMetrics and config.metrics.monitor == {"every": 1}
    model = build()
    optimizers = config.optimizer.build(model_parts=[model])
    watch = Watch([model], optimizers, **config.metrics.monitor)
    for _ in range(2):
        loss_of(model).backward()
        optimizers.step()
        optimizers.zero_grad()
    watch.close()
    found = watch.metrics()
    assert watch.monitors[0].series.steps == [1, 2]
    assert 0 < found["attention/layers.0.attention/entropy"] < math.log(16)
    assert math.isfinite(found["attention/layers.1.attention/max_logit"])


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_flex_attention_shows_its_log_sum_exp(family, monkeypatch):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.models.common.attention import FlexAttention, get_causal_mask_mod

    from wellcond.integrations.torchtitan import Logits

    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", flex_attention)
    model = build(family, "flex")
    sites = wc.find_attention(model)
    mask = create_block_mask(get_causal_mask_mod(), None, None, 128, 128, device="cpu")
    tokens = torch.randint(0, 2048, (2, 128))
    with torch.no_grad():
        plain = model(tokens, positions=torch.arange(128).expand(2, -1), attention_masks=mask)
        logits = Logits(model)
        watched = model(tokens, positions=torch.arange(128).expand(2, -1), attention_masks=mask)
    assert torch.equal(plain, watched)
    largest = logits.max_logits()
    assert set(largest) == {site.name for site in sites}
    assert all(one.shape == (sites[0].num_heads,) and bool(one.isfinite().all()) for one in largest.values())
    logits.clear()
    assert all(bool(one.isnan().all()) for one in logits.max_logits().values())


def sharded_run():
    from torch.distributed.fsdp import fully_shard

    distributed = torch.distributed.is_initialized()
    model = build()
    if distributed:
        for layer in model.layers.values():
            fully_shard(layer)
        fully_shard(model)
    config = trainer_config(f'prepare={{"clip": {TAU}}}')
    optimizers = config.optimizer.build(model_parts=[model])
    rank = torch.distributed.get_rank() if distributed else None
    loss_of(model, slice(None) if rank is None else slice(rank, rank + 1)).backward()
    optimizers.step()
    return {site.name: site.q.read().detach().clone() for site in wc.find_attention(model)}


@pytest.mark.processes
def test_two_processes_of_fsdp_clip_as_one_does(tmp_path):
    [two] = run_on_two(tmp_path, sharded_run, [()]).values()
    assert not isinstance(two, str), two
    for name, value in sharded_run().items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)


def test_without_torchtitan_the_error_names_it():
    code = "import sys; sys.modules['torchtitan'] = None\nimport wellcond.integrations.torchtitan"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "this needs torchtitan" in done.stderr.splitlines()[-1]
