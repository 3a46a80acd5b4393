"""The real Trainer with FSDP2 on two gloo processes: measures, saves, resumes and exports."""

import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE

pytestmark = pytest.mark.processes

LAYERS = {"bert": "BertLayer", "gpt2": "GPT2Block"}

SCRIPT = """
import os, sys
import torch; torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
os.environ |= dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
                   FSDP_TRANSFORMER_CLS_TO_WRAP={layer!r}, FSDP_STATE_DICT_TYPE={kind!r})
import accelerate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
import wellcond as wc
from integrations.trainer_runs import conditioned, logits, losses, make_trainer
from integrations.test_transformers_checkpoints import AUTO, EVERY, WellcondCallback
from wellcond.lab.train.prepare import _shard_on_cpu

make = accelerate.Accelerator.__init__
def make_sharded(self, *arguments, **options):  # Accelerate shards on GPUs only
    make(self, *arguments, **options)
    _shard_on_cpu(self)
    accelerate.PartialState._shared_state["distributed_type"] = self.state.distributed_type
accelerate.Accelerator.__init__ = make_sharded

def train(**options):
    trainer = make_trainer(conditioned({name!r}), {name!r}, {folder!r}, save_strategy="steps", save_steps=2,
                           per_device_train_batch_size=2)
    callback = WellcondCallback(**EVERY, export="plain").add_to(trainer)
    trainer.train(**options)
    return trainer, callback

trainer, callback = train()
assert any(hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters())
assert sorted({{point.step for point in callback.points}}) == [0, 2, 4]
with wc.folded(trainer.model):
    effective = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))
same = AUTO[{name!r}].from_config(trainer.model.config)
same.load_state_dict(effective)
for saved in ["plain"] + ["checkpoint-4"] * ({kind!r} == "FULL_STATE_DICT"):
    torch.distributed.barrier()
    loaded = AUTO[{name!r}].from_pretrained({folder!r} + "/" + saved)
    torch.testing.assert_close(logits(loaded, {name!r}), logits(same, {name!r}), rtol=0, atol=1e-6)
again, callback = train(resume_from_checkpoint={folder!r} + "/checkpoint-2")
assert sorted({{point.step for point in callback.points}}) == [4]
assert losses(again) == losses(trainer) and len(losses(again)) == 4
print("done", trainer.args.process_index, flush=True)
torch.distributed.barrier()
os._exit(0)  # gloo's threads do not survive the end of an interpreter
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [("bert", "FULL_STATE_DICT"), ("gpt2", "SHARDED_STATE_DICT")])
def test_a_sharded_model_trains_saves_resumes_and_is_exported(tmp_path, name, kind):
    script, tests = tmp_path / "script.py", str(Path(__file__).parents[1])
    script.write_text(
        SCRIPT.format(tests=tests, folder=str(tmp_path / "run"), name=name, layer=LAYERS[name], kind=kind)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "done 0" in done.stdout and "done 1" in done.stdout, done.stderr
