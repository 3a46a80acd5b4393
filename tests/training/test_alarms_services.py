"""W&B and trackio for real, offline: alarms and numbers of heads reach a run; what they refuse stops no training."""

import logging
import sys

import numpy as np
import pytest
from lightning.pytorch.loggers import WandbLogger

import wellcond as wc
from integrations.test_beside import fit_lightning, fit_transformers
from wellcond.errors import OptionError
from wellcond.integrations import lightning, transformers
from wellcond.training.series import Series, logged_name

LAST = "train/" + logged_name("transformer.h.1.attn", 2, "entropy")


def wandb_or_skip(folder, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    for name, value in {"MODE": "offline", "DIR": str(folder), "SILENT": "true", "PROJECT": "heads"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    return wandb


def trackio_or_skip(folder, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    trackio = pytest.importorskip("trackio", reason="trackio is not installed: pip install trackio")
    return trackio


SERVICES = {"wandb": wandb_or_skip, "trackio": trackio_or_skip}


def feed(alarms):
    series = Series([("attn", 2)], ["max_logit"])
    for step, largest in enumerate([5.0, 20.0, 70.0, 200.0], 1):
        series.add(step, np.array([[1.0], [largest]]))
        alarms.look(series)
    return alarms.raised


@pytest.mark.parametrize("name", SERVICES)
def test_without_a_run_that_is_open_an_alarm_goes_to_the_log(name, tmp_path, monkeypatch, caplog):
    SERVICES[name](tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING, "wellcond"):
        raised = feed(wc.Alarms(to=name, limits={"logits": 50.0}))
    assert len(raised) == 1 and str(raised[0]) in caplog.messages and name in caplog.messages[0]


def test_a_service_that_is_not_installed_is_refused_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(OptionError) as error:
        wc.Alarms(to=["log", "wandb"])
    assert error.value.field == "to" and error.value.found == "wandb"


def fit(folder, name):
    """Readings at steps 1, 2 and 4, after the last of which, when Trainer has ended, an alarm is raised."""
    alarms = wc.Alarms(to=name, only=["one-key"], limits={"one-key": 1e9})
    monitor = {"every": 2, "weights": False, "alarms": alarms}
    fit_transformers(folder, transformers.WellcondCallback(measure=False, monitor=monitor), [name])
    assert {alarm.step for alarm in alarms.raised} == {4}
    return [str(alarm) for alarm in alarms.raised]


@pytest.mark.slow  # a service of its own in another process
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*(num_workers|logging interval|litmodels).*")
def test_wandb(tmp_path, monkeypatch):
    wandb, sent = wandb_or_skip(tmp_path, monkeypatch), []
    send = wandb.Run.alert

    def alert(run, **what):
        sent.append(what["text"])
        send(run, **what)

    monkeypatch.setattr(wandb.Run, "alert", alert)
    raised = fit(tmp_path / "a", "wandb")
    summary = wandb.run.summary._as_dict()
    assert summary["train/wellcond/monitored_step"] == 4 and 0 < summary[LAST] < 3
    wandb.finish()
    assert sent == raised
    logger = WandbLogger(project="heads", save_dir=tmp_path, offline=True)
    callback = lightning.WellcondCallback(measure=False, monitor={"every": 2})
    fit_lightning(tmp_path / "b", callback, logger=logger)
    assert 0 < logger.experiment.summary["wellcond.layer.self_attn/head01.entropy"] < 2
    wandb.finish()


@pytest.mark.slow
def test_trackio(tmp_path, monkeypatch):
    trackio = trackio_or_skip(tmp_path, monkeypatch)
    raised = fit(tmp_path / "a", "trackio")
    alerts = trackio.Api().alerts("huggingface")
    assert sorted(alert["text"] for alert in alerts) == sorted(raised)
    assert alerts[0]["level"] == "error"
    (run,) = trackio.Api().runs("huggingface")
    from trackio.sqlite_storage import SQLiteStorage

    logged = SQLiteStorage.get_logs("huggingface", run.name)
    assert max(line.get("train/wellcond/monitored_step", 0) for line in logged) == 4
    assert sum(LAST in line for line in logged) == 3
