"""Vibration of ball bearings, normal and faulty: recordings of the Case Western Reserve University Bearing Data Center.

In: .npz files with the array DE, the accelerometer at the drive end; named …_Normal, or ending in DE12, DE48 or FE.
Out: the recordings by name, all at 12,000 readings a second; and spectra of windows of them, [N, BANDS] float32.
Promised: no file is unpickled, and none is read that would take more than MAX_BYTES.

    recording ├─ window 512 ─┤├─ window ─┤ …        43 ms each, none overlaps another
    window    → power spectrum → BANDS bands of like width → log → by its own mean and spread

A fault shakes more, and loudness alone would give it away. So each spectrum has mean 0 and spread 1: only its shape is
left.

Normal recordings were made at 48,000 readings a second (Smith and Randall 2015; at 12,000, the lines of the shaft, 30 a
second, would lie at quarters of where the others have them). Read as if at 12,000, they are told apart by that alone.

Source: https://engineering.case.edu/bearingdatacenter; as .npz: github.com/srigas/CWRU_Bearing_NumPy.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from edgetrain.errors import UserError
from edgetrain.files import require_regular

WINDOW, BANDS = 512, 40
RATE_HZ, FAST_HZ = 12_000, 48_000
MAX_BYTES = 256 << 20
_SENSOR = "DE"


def load(folder: str | Path) -> Mapping[str, torch.Tensor]:
    """All recordings of the folder, float64 [readings] at RATE_HZ, by the names of their files without the suffix."""
    files = sorted(Path(folder).expanduser().glob("*.npz"))
    if not files:
        raise UserError(
            f"{folder} holds no recordings", expected="files .npz with an array DE",
            next_step="get them from https://github.com/srigas/CWRU_Bearing_NumPy and give their folder",
        )  # fmt: skip
    return {file.stem: _recording(file) for file in files}


def spectra(recording: torch.Tensor) -> torch.Tensor:
    """float32 [N, BANDS]: of each whole window its log power by bands, with mean 0 and spread 1 over the bands."""
    windows = recording[: len(recording) // WINDOW * WINDOW].reshape(-1, WINDOW)
    hann = torch.hann_window(WINDOW, dtype=windows.dtype)
    power = torch.fft.rfft((windows - windows.mean(1, keepdim=True)) * hann).abs().square()[:, 1:]
    bands = torch.stack([part.mean(1) for part in power.tensor_split(BANDS, dim=1)], dim=1)
    logs = torch.log10(bands + 1e-12)
    return ((logs - logs.mean(1, keepdim=True)) / logs.std(1, correction=0, keepdim=True)).float()


def _recording(file: Path) -> torch.Tensor:
    expected = f"an .npz file with an array {_SENSOR} of readings, at most {MAX_BYTES:,} bytes"
    require_regular(file, "recording", MAX_BYTES)
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(item.file_size for item in archive.infolist())
        if size > MAX_BYTES:
            raise UserError(f"{file} is too large", expected=expected, received=f"{size:,} bytes")
        with np.load(file, allow_pickle=False) as arrays:
            values = arrays[_SENSOR]
            if values.dtype.kind not in "fiu":
                raise ValueError(f"{_SENSOR} holds {values.dtype}")
            readings = np.asarray(values, dtype=np.float64).ravel()
    except UserError:
        raise
    except Exception as error:  # a damaged archive can fail in any way
        raise UserError(f"{file} is no recording", expected=expected, received=str(error)[:200]) from error
    if len(readings) < WINDOW or not np.isfinite(readings).all():
        raise UserError(f"{file} has no whole window of numbers", expected=expected, received=f"{len(readings)}")
    found = torch.from_numpy(readings)
    return _slower(found) if file.stem.endswith(("_Normal", "DE48")) else found


def _slower(recording: torch.Tensor) -> torch.Tensor:
    """From FAST_HZ to RATE_HZ: without what lies above half the new rate."""
    part = FAST_HZ // RATE_HZ
    length = len(recording) // part
    spectrum = torch.fft.rfft(recording[: length * part])
    slower: torch.Tensor = torch.fft.irfft(spectrum[: length // 2 + 1] / part, n=length)
    return slower
