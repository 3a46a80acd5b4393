"""What our runs do otherwise than the paper: size, data, length, seeds; read from the records."""

from __future__ import annotations

from collections.abc import Iterator

from wellcond.lab.report.values import show_seeds
from wellcond.lab.reproduce.catalogue_files import Entry, studies
from wellcond.lab.reproduce.collect import Collection, StoredStudy, may_be_paired


def differences_from_paper(entry: Entry, records: Collection) -> list[str]:
    """A line for each study that has runs."""
    lines = []
    for name in entry.studies:
        for variant in dict.fromkeys(row.variant for row in entry.all_rows.values() if row.is_in(name)):
            stored = records.study(name, variant)
            if stored is not None and stored.comparison is not None:
                title = studies()[name].title + (f", {variant}," if variant else "")
                apart = _apart(name, variant, stored, records)
                lines.append(f"{title} ran as: {'; '.join(_facts(name, stored))}{apart}.")
    return lines


def _apart(name: str, variant: str, stored: StoredStudy, records: Collection) -> str:
    """A variant whose committed records are of another recipe cannot be paired with the study's own runs."""
    plain = records.study(name)
    if plain is None or plain.comparison is None or plain is stored or may_be_paired(plain, stored, (variant,)):
        return ""
    return "; another recipe or other settings than the rows above, so that there is no gain over them"


def _facts(name: str, stored: StoredStudy) -> Iterator[str]:
    assert stored.comparison is not None
    run = stored.comparison.runs[0].record
    published = studies()[name].paper
    model, data, progress = run.get("model") or {}, run.get("data") or {}, run.get("progress") or {}
    yield f"recipe {stored.comparison.recipe}, scale {stored.comparison.scale}"
    size = f"{model['parameters'] / 1e6:.2f} M parameters" if model.get("parameters") else "parameters not recorded"
    yield size + (f" (at scale paper: {published.parameters:g} M)" if published else "")
    yield f"{data.get('name', 'data not recorded')}, {data.get('train', '?')} training samples" + (
        f" (at scale paper: {published.samples})" if published and published.samples else ""
    )
    yield f"{progress.get('num_steps', '?')} updates, {float(progress.get('num_epochs') or 0):.3g} epochs"
    count = len(stored.comparison.seeds)
    yield show_seeds(count)
    settings = studies()[name].at(stored.comparison.scale)
    if settings is not None and settings.note:
        yield settings.note
