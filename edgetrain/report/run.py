"""One run folder, read whole: all that a report, a trace or a table is made of.

In:  a run folder, from anywhere. Out: `Run`, plain data. Nothing is run.

Promised: what a run did not write is None or empty. What was cut off is read up to there, and `notes` say so; what is
not ours, or of a newer version, is a `UserError` that names the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgetrain.measure import picture
from edgetrain.measure.attributed import Attributed, load_attributed
from edgetrain.measure.picture import Picture
from edgetrain.measure.record import Record, RunFolder
from edgetrain.measure.samples import Samples, read_samples, read_summary
from edgetrain.measure.samples_file import SAMPLES, SUMMARY
from edgetrain.measure.timeline import WHEN_FILE, Timeline, load_timeline
from edgetrain.report.tracks import Track, tracks


@dataclass(frozen=True)
class Run:
    """energy: what was attributed in joules. notes: what the reader must know, as sentences."""

    folder: RunFolder
    record: Record
    timeline: Timeline | None
    samples: Samples | None
    tracks: tuple[Track, ...]
    attributed: tuple[Attributed, ...]
    picture: Picture | None
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.folder.path.absolute().name

    @property
    def energy(self) -> Attributed | None:
        return next((each for each in self.attributed if each.unit == "J"), None)

    @property
    def is_profile(self) -> bool:
        return self.timeline is not None or self.samples is not None

    @property
    def typical_step(self) -> int | None:
        """The step whose time is nearest to the median."""
        if self.timeline is None or not self.timeline.steps:
            return None
        times = self.timeline.step_s
        return int(np.argmin(np.abs(times - np.median(times))))


def load_run(folder: RunFolder) -> Run:
    record, path = folder.load(), folder.path
    timeline = load_timeline(path)
    samples = read_samples(path) if (path / SAMPLES).exists() else None
    return Run(
        folder,
        record,
        timeline,
        samples,
        tuple(tracks(samples)) if samples is not None else (),
        load_attributed(path, len(timeline.ops)) if timeline is not None else (),
        picture.load(path) if (path / picture.FILE).exists() else None,
        (*record.notes, *_notes(path, record, timeline, samples)),
    )


def _notes(path: Path, record: Record, timeline: Timeline | None, samples: Samples | None) -> list[str]:
    notes = []
    if record.status in ("running", "failed", "stopped") and (timeline is not None or samples is not None):
        notes.append(f"The run did not end by itself (its status is “{record.status}”): what it had recorded is shown.")
    if timeline is not None and (path / WHEN_FILE).stat().st_size % (16 * (1 + len(timeline.ops))):
        notes.append(
            f"{WHEN_FILE} was cut off in the middle of a step; the {timeline.steps} steps before it are shown."
        )
    if timeline is not None and not timeline.steps:
        notes.append("No step was recorded whole, so there is no op timeline.")
    if samples is not None and samples.cut_off:
        notes.append(f"{SAMPLES} was cut off; the samples before that are shown.")
    if (path / SUMMARY).exists():
        notes += read_summary(path).notes
    elif samples is not None:
        notes.append("The sampler did not say how it fared: it was killed, or the copy of the run is not complete.")
    return [note for note in notes if note not in record.notes]
