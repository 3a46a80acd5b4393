import numpy as np

from wellcond.training import series as module
from wellcond.training.alarms import Alarms
from wellcond.training.series import Series


def test_old_readings_are_kept_in_a_file_and_are_the_same(monkeypatch):
    monkeypatch.setattr(module, "BYTES_IN_MEMORY", 30 * 3 * 2 * 4)
    tables = np.random.default_rng(0).normal(80.0, 20.0, (200, 3, 2)).astype(np.float32)
    series = Series([("a", 2), ("b", 1)], ["max_logit", "entropy"])
    alarms = Alarms(to=[], only=["logits"])
    for step, table in enumerate(tables):
        series.add(step, table)
        alarms.look(series)
        assert series._stored._rolled == (step >= 30)
    assert np.array_equal(series.values, tables)
    assert np.array_equal(series.column("entropy"), tables[..., 1])
    assert np.array_equal(series.readings(175, 190), tables[175:190])
    assert np.array_equal(series.to_frame()["max_logit"].to_numpy(np.float32), tables[..., 0].ravel())
    replayed = Alarms.replay(series, only=["logits"])
    assert replayed and replayed == alarms.raised
