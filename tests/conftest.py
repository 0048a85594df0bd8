"""Settings of all tests: a cache of their own, one thread, and what several folders share (see `helpers/`)."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from edgetrain.costs.measured import measure_costs
from edgetrain.measure.record import RunFolder

# In CI the same examples each time; a developer's run and `make soak` look for new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("EDGETRAIN_NO_SKIPS"):
    settings.load_profile("ci")

# A shell that starts the tests in the background has Ctrl-C ignored, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's graphs and settings are found, and none is left behind."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("EDGETRAIN_CACHE", str(folder))
    monkeypatch.setenv("EDGETRAIN_CONFIG", str(folder / "config"))
    return folder


@pytest.fixture(autouse=True)
def distributions_check() -> None:
    """As in a process that has not called torch.compile, which turns the checks of all distributions off."""
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def one_cache(kept: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One cache for all tests of a file, so that each layer is measured once."""
    monkeypatch.setenv("EDGETRAIN_CACHE", str(kept))
    return kept


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are planned with costs that were measured in one round."""
    monkeypatch.setattr("edgetrain.run.graph_planner.measure_costs", functools.partial(measure_costs, rounds=1))


@pytest.fixture(scope="session")
def kept_profile(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A profile run: a real step, traced, with samples whose truth is known. `profile` is a copy that may change."""
    from tests.helpers.profiles import BATCH, prepared, profiled  # only where it is asked for: it takes seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGETRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("edgetrain.run.graph_planner.measure_costs", functools.partial(measure_costs, rounds=1))
        return profiled(tmp_path_factory.mktemp("runs") / "run", prepared(), BATCH, steps=8, period_s=0.0005)


@pytest.fixture
def profile(kept_profile: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(kept_profile.path, tmp_path / "profile")))


@pytest.fixture(autouse=True, scope="session")
def shared_objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Firmware that a test runs is built from kernels that another test has compiled, where they are the same."""
    from tests.helpers.kept_objects import Store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgetrain.firmware.emulate.build", Store(tmp_path_factory.mktemp("objects")).build)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine take ten times as long as one. For the whole session, so
    that what fixtures of a wider scope compute has the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """CI has all that a test may need (`EDGETRAIN_NO_SKIPS`): there a skipped test is a failed one."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.skipped and "EDGETRAIN_NO_SKIPS" in os.environ and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and CI must run it: {report.longrepr}"
