"""`edgetrain plan` as a user meets it: tables, drawings, files, JSON, answers that say no."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from edgetrain import Costs, Plan
from edgetrain.cli.plan import _parts
from edgetrain.cli.plan_study import _block
from edgetrain.plan.budget import show_bytes
from tests.cli.commands import Run, commands

DEEP = """
from torch import nn

def deep(classes):
    layers = [nn.Flatten(), nn.Linear(48, 32)]
    for _ in range(4):
        layers += [nn.GELU(), nn.Linear(32, 32)]
    return nn.Sequential(*layers, nn.Linear(32, classes))
"""
DEEP_WORDS = ("own.py:deep", "--batch", 256, "--input-size", 4, "--time-limit", 2)


@pytest.fixture(scope="module")
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_cache: Path) -> Run:
    """The command in a folder of its own; what was measured is shared by the tests of this file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EDGETRAIN_CACHE", str(one_cache))
    Path("own.py").write_text(DEEP)
    return commands(capsys, monkeypatch, "plan")


def keep_all_bytes(run: Run) -> tuple[int, int]:
    """The lasting bytes and the peak of the deep net when all is kept."""
    found = run(*DEEP_WORDS, "--planner", "keep-all", "--json").json
    return sum(found["lasting_bytes"].values()), found["keep_all"]["peak_bytes"]


def test_a_plan_keeps_its_budget_and_is_kept_in_a_run_folder(run: Run) -> None:
    lasting, peak = keep_all_bytes(run)
    budget = lasting + (peak - lasting) * 7 // 10
    ended = run(*DEEP_WORDS, "--memory", budget, "--out", "first", "--save", "saved.json", "--json")
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["budget_bytes"] == budget
    assert found["plan"]["peak_bytes"] <= budget < found["keep_all"]["peak_bytes"] == peak
    assert found["plan"]["recomputed_ops"] == sum(sum(row["ops"].values()) for row in found["plan"]["recomputed"]) > 0
    assert found["plan"]["peak_at"]["alive"]
    saved = Plan.load("saved.json")
    assert saved == Plan.load("first/plan.json")
    assert saved.peak_bytes == found["plan"]["peak_bytes"]
    assert Costs.load("first/costs.json").graph_key == saved.graph_key == found["graph"]
    record = json.loads(Path("first/record.json").read_text())
    assert record["status"] == "finished"
    assert record["summary"]["peak"]["value"] == saved.peak_bytes
    page = Path("first/plan.html").read_text()
    assert page.count("<svg") == 1
    assert "budget" in page
    assert "http" not in page

    shown = run(*DEEP_WORDS, "--load", "saved.json", "--memory", budget).out
    for words in ("peak memory", "keep all", "recomputed", "least possible", "peak at", "alive there", "numbers", "▄"):
        assert words in shown
    assert "gelu" in shown
    assert list(Path("runs").glob("plan-*/plan.html"))
    refused = run(*DEEP_WORDS, "--load", "saved.json", "--memory", saved.peak_bytes - 1)
    assert (refused.code, refused.out) == (1, "")
    assert "does not keep the budget" in refused.told


def test_a_sweep_shows_what_less_memory_costs_and_where_it_ends(run: Run) -> None:
    ended = run(*DEEP_WORDS, "--sweep", "1.0,0.7,0.001", "--json")
    sweep = ended.json["sweep"]
    whole, less, *_ = sweep["points"]
    assert (whole["extra"], whole["recomputed"], whole["planner"]) == (0.0, 0, "keep-all")
    assert less["recomputed"] > 0
    assert less["gap"] is not None
    assert sweep["points"][-1]["extra"] is None
    smallest = [point for point in sweep["points"] if point["memory_bytes"] == sweep["smallest_bytes"]]
    assert len(smallest) == 1
    assert smallest[0]["extra"] is not None
    assert "plan" not in ended.json
    assert Path(ended.json["page"]).read_text().count("<svg") == 2
    shown = run(*DEEP_WORDS, "--sweep", "1.0,0.7,0.001", "--planner", "fast").out
    assert "no plan found" in shown
    assert show_bytes(sweep["bound_bytes"]) in shown


def test_what_fits_is_kept(run: Run) -> None:
    found = run("lenet", "--batch", 2, "--memory", "1GB")
    assert found.code == 0
    assert "nothing is computed twice" in found.out
    assert "Recomputed" not in found.out
    lasting, peak = 10_000, 8_000_000_000
    assert lasting < run("lenet", "--batch", 2, "--process-memory", peak, "--json").json["budget_bytes"] < peak


def test_a_budget_that_is_too_small_is_one_message(run: Run) -> None:
    ended = run("lenet", "--batch", 2, "--memory", "10kB", "--time-limit", 1)
    assert (ended.code, ended.out) == (1, "")
    assert "no plan fits in 10 kB: the smallest budget known to work is" in ended.told
    assert "Traceback" not in ended.err
    assert not Path("runs").exists()
    ended = run("lenet", "--batch", 2, "--process-memory", "10MB")
    assert ended.code == 1
    assert "ask for --process-memory " in ended.told


def test_a_plan_of_another_graph_or_none_at_all_is_refused(run: Run) -> None:
    run("lenet", "--batch", 2, "--planner", "keep-all", "--save", "two.json", "--out", "two")
    ended = run("lenet", "--batch", 1, "--load", "two.json")
    assert ended.code == 1
    assert "this plan was made for another graph" in ended.told
    data = json.loads(Path("two.json").read_text())
    Path("two.json").write_text(json.dumps(data | {"schedule": data["schedule"][1:]}))
    ended = run("lenet", "--batch", 2, "--load", "two.json")
    assert ended.code == 1
    assert "holds no legal plan" in ended.told
    assert "defect" not in ended.told
    assert run("lenet", "--load", "nowhere.json").code == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "a budget is missing: give --memory, --process-memory or --sweep"),
        (("--memory", "much"), "--memory"),
        (("--process-memory", "0MB"), "--process-memory"),
        (("--memory", "1MB", "--planner", "magic"), "--planner"),
        (("--memory", "1MB", "--optimizer", "magic"), "--optimizer"),
        (("--memory", "1MB", "--time-limit", "0"), "--time-limit"),
        (("--sweep", "1"), "--sweep"),
        (("--sweep", "0.5,2"), "--sweep"),
        (("--sweep", "nan"), "--sweep"),
        (("--sweep", "some"), "--sweep"),
        (("--sweep", "3", "--save", "plan.json"), "--save"),
        (("--load", "plan.json", "--planner", "fast"), "--planner"),
    ],
)
def test_wrong_use_ends_with_2(run: Run, words: tuple[str, ...], told: str) -> None:
    ended = run("lenet", *words)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err


def test_an_unknown_model_is_told_before_anything_else(run: Run) -> None:
    ended = run("mobilenet_v9", "--page")
    assert ended.code == 1
    assert "did you mean 'mobilenet_v2'" in ended.told


def test_an_unknown_planner_is_wrong_use(run: Run) -> None:
    ended = run("lenet", "--planner", "optimel")
    assert ended.code == 2
    assert "did you mean optimal?" in ended.told


def test_a_batch_that_the_model_refuses_is_told_by_its_shape(run: Run) -> None:
    ended = run("own.py:deep", "--batch", 2, "--input-size", 5, "--memory", "1MB")
    assert ended.code == 1
    assert "inputs of 2×3×5×5 float32" in ended.told
    assert "loss(model" not in ended.err


def test_ctrl_c_leaves_nothing_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        assert Path("first").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["edgetrain.cli.plan"], "costs_of", interrupted)
    ended = run("lenet", "--memory", "1MB", "--out", "first")
    assert (ended.code, ended.out) == (130, "")
    assert "stopped by Ctrl-C" in ended.told
    assert "give the same command" in ended.told
    assert not Path("first").exists()


def test_help_has_an_example(run: Run) -> None:
    assert "Example: edgetrain plan mobilenet_v2" in " ".join(run("--help").out.split())


def test_words_for_modules_ops_and_parts() -> None:
    assert _block("features.2.conv.0.1") == "features.2"
    assert _block("encoder.layer.11.output") == "encoder.layer.11"
    assert (_block("conv1"), _block("")) == ("conv1", "")
    assert _parts("4") == (1.0, 0.75, 0.5, 0.25)
    assert _parts("0.3, 0.5") == (0.5, 0.3)
