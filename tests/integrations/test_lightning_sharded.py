"""Lightning's ModelParallelStrategy (FSDP2) on two gloo processes: trains, measures, exports, loads its checkpoints."""

import json
import subprocess
import sys

import pytest

from patience import PATIENCE

pytestmark = pytest.mark.processes

SCRIPT = """
import sys, warnings
import lightning.pytorch as pl
import timm
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from wellcond.integrations.lightning import WellcondCallback

warnings.simplefilter("ignore")
torch.set_num_threads(1)
FOLDER, CONDITION, IN_PARTS = {folder!r}, {condition!r}, {in_parts!r}
NET = dict(img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=2)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = timm.create_model("vit_tiny_patch16_224", **NET)
    def configure_model(self):
        for block in self.model.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
    def forward(self, images):
        return self.model(images)
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

def fit(checkpoint=None):
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(16, 3, 16, 16), torch.arange(16) % 2), batch_size=4)
    callback = WellcondCallback(condition=CONDITION, network="model", every=1, budget=None,
                                export=FOLDER + "/x.safetensors")
    keep = pl.callbacks.ModelCheckpoint(dirpath=FOLDER, filename="last", every_n_train_steps=2)
    trainer = pl.Trainer(strategy=ModelParallelStrategy(save_distributed_checkpoint=IN_PARTS), accelerator="cpu",
                         devices=2, max_steps=2, callbacks=[callback, keep], default_root_dir=FOLDER, logger=False,
                         enable_progress_bar=False, enable_model_summary=False)
    module = Module()
    trainer.fit(module, data, ckpt_path=checkpoint)
    assert any(hasattr(parameter, "device_mesh") for parameter in module.parameters())
    return trainer, module, callback

if __name__ == "__main__":
    trainer, module, callback = fit()
    assert sorted({{point.step for point in callback.points}}) == [0, 1, 2]
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        trained = module.eval()(images)
        trainer.strategy.barrier()
        plain = timm.create_model("vit_tiny_patch16_224", **NET).eval()
        plain.load_state_dict(load_file(FOLDER + "/x.safetensors"))
        torch.testing.assert_close(plain(images), trained, rtol=0, atol=1e-6)
        _, again, _ = fit(FOLDER + "/last.ckpt")
        torch.testing.assert_close(again.eval()(images), trained, rtol=0, atol=0)
    trainer.strategy.barrier()
    open(FOLDER + f"/done{{trainer.global_rank}}", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("condition, in_parts", [("balanced", False), ({"method": "polar", "frozen": True}, True)])
def test_a_sharded_module_trains_is_exported_and_goes_on(tmp_path, condition, in_parts):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    folder.mkdir()
    script.write_text(SCRIPT.format(folder=str(folder), condition=condition, in_parts=in_parts))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE)
    assert (folder / "done0").exists() and (folder / "done1").exists(), done.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "wellcond.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0, 1, 2}
