"""The options of `measure` as a record, and how far one call walks."""

import dataclasses
import sys
from pathlib import Path

import pytest

import wellcond as wc
from measurement.test_measure import X, vit
from wellcond.measurement.measure import MeasureOptions


def test_settings_are_a_record_and_keywords_replace_its_fields():
    model, settings = vit(depth=1), wc.MeasureSettings(samples=2, kappa="pseudo")
    report = wc.measure(model, X, settings=settings, heads=[0])
    assert report == wc.measure(model, X, samples=2, kappa="pseudo", heads=[0])
    [alone] = wc.measure(model, X, settings=settings, samples=1, heads=[0]).layers[0].heads
    assert len(alone.samples) == 1 and alone.samples == report.layers[0].heads[0].samples[:1]
    with pytest.raises(TypeError, match="sample"):
        wc.measure(model, X, sample=2)
    with pytest.raises(ValueError, match="defined without biases"):
        wc.MeasureSettings(convention="stack", biases=True)


def test_keywords_of_measure_are_the_fields_of_its_settings():
    fields = {field.name: field.type for field in dataclasses.fields(wc.MeasureSettings)}
    assert fields == {name: hint.__forward_arg__ for name, hint in MeasureOptions.__annotations__.items()}


def test_one_call_walks_through_few_files():
    """A reader who follows `measure` opens this many files of wellcond; a second call imports nothing."""
    model, root, walked = vit(depth=1), str(Path(wc.__file__).parent), set()
    wc.measure(model, X[:1])

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            walked.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        wc.measure(model, X[:1], heads=[0])
    finally:
        sys.setprofile(before)
    assert len(walked) <= 31, sorted(walked)
