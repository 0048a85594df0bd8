"""The report in a real browser: one hovers, zooms, sorts, and nothing leaves the page and nothing is logged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgetrain.measure.record import RunFolder
from edgetrain.measure.timeline import WHEN_FILE
from edgetrain.report.html import write_page
from edgetrain.report.run import Run, load_run
from tests.helpers.profiles import EVIL, HOSTILE
from tests.report.browser import Browser, Page, started

VIEW = "#run-0 .view[data-view=step]"
STATE = f"(({{from, to, op}}) => [+from, +to, +op])(document.querySelector('{VIEW}').dataset)"
TIP = f"document.querySelector('{VIEW} .tip')"
CANVAS = (
    f"(() => {{ const box = document.querySelector('{VIEW} canvas').getBoundingClientRect();"
    " return [box.left, box.top, box.width, box.height]; })()"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    yield from started(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="module")
def run(kept_profile: RunFolder) -> Run:
    return load_run(kept_profile)


@pytest.fixture(scope="module")
def file(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page([run.folder, run.folder], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    made = Page(browser)
    made.open(file)
    made.until(f"document.querySelector('{VIEW}').dataset.drawn")
    yield made
    assert made.requests() == []
    assert made.complaints() == []
    made.close()


def box(page: Page) -> tuple[float, float, float, float]:
    """Where the canvas of the first step is, scrolled into sight."""
    page.value(f"document.querySelector('{VIEW}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    left, top, width, height = page.value(CANVAS)
    return left, top, width, height


def state(page: Page) -> tuple[float, float, float]:
    """From, to (µs) and op of the view, after it was drawn anew."""
    page.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    begin, end, op = page.value(STATE)
    return begin, end, op


def longest(run: Run) -> tuple[int, float, float]:
    """Place, and the middle as a part of the step, of its longest op; the step in µs."""
    assert run.timeline is not None
    step = run.typical_step
    assert step is not None
    begin, end = run.timeline.begin_ns[step], run.timeline.end_ns[step]
    place = int(np.argmax(end - begin))
    first, last = run.timeline.step_ns[step]
    return place, float((begin[place] + end[place]) / 2 - first) / float(last - first), float(last - first) / 1e3


def test_hovering_tells_all_of_an_op(page: Page, run: Run) -> None:
    place, part, _ = longest(run)
    left, top, width, _ = box(page)
    assert page.value(f"{TIP}.hidden")
    page.mouse("mouseMoved", left + part * width, top + 120)
    assert state(page)[2] == place
    told = page.value(f"{TIP}.innerText")
    assert run.timeline is not None
    op = run.timeline.ops[place]
    for text in (op.name, op.kind, op.module, op.phase, "median of 8", "energy, measured", "power", "cores busy"):
        assert text in told
    assert "µs" in told or "ms" in told
    page.mouse("mouseMoved", left + part * width, top - 30)
    assert page.value(f"{TIP}.hidden")


def test_the_wheel_zooms_where_the_pointer_is_and_keys_go_on(page: Page, run: Run) -> None:
    _, part, span = longest(run)
    left, top, width, _ = box(page)
    x, y = left + part * width, top + 120
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
    assert list(state(page)[:2]) == pytest.approx([0, span], rel=1e-6)  # without Ctrl the page scrolls
    left, top, width, _ = box(page)
    x, y = left + part * width, top + 120
    for _ in range(3):
        page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240, modifiers=2)
    begin, end, _ = state(page)
    assert end - begin < 0.3 * span
    assert begin + part * (end - begin) == pytest.approx(part * span, rel=0.02)
    page.value(f"document.querySelector('{VIEW} canvas').focus()")
    page.press("+")
    closer = state(page)
    assert closer[1] - closer[0] == pytest.approx((end - begin) / 2, rel=1e-6)
    page.press("ArrowRight")
    assert state(page)[0] > closer[0]
    page.press(".")
    assert not page.value(f"{TIP}.hidden")
    page.press("0")
    assert list(state(page)[:2]) == pytest.approx([0, span], rel=1e-6)


def test_dragging_selects_and_buttons_zoom(page: Page, run: Run) -> None:
    _, _, span = longest(run)
    left, top, width, _ = box(page)
    page.drag(left + 0.25 * width, top + 150, left + 0.5 * width)
    begin, end, _ = state(page)
    assert [begin / span, end / span] == pytest.approx([0.25, 0.5], abs=0.01)
    page.value(f"document.querySelector('{VIEW} .tools button[aria-label=\"zoom out\"]').click()")
    assert state(page)[1] - state(page)[0] == pytest.approx(2 * (end - begin), rel=1e-6)
    page.value(f"document.querySelector('{VIEW} .tools button[aria-label=\"show all\"]').click()")
    assert list(state(page)[:2]) == pytest.approx([0, span], rel=1e-6)


def test_tables_sort_unfold_and_lead_to_the_op(page: Page, run: Run) -> None:
    assert run.timeline is not None
    rows = "[...document.querySelectorAll('#run-0 .breakdown .tab[data-tab=ops] tbody tr')]"
    page.value("document.querySelector('#run-0 .breakdown button[data-tab=ops]').click()")
    assert page.value(f"{rows}.length") == len(run.timeline.ops)
    assert page.value(f"{rows}.filter(row => row.offsetParent).length") == 15
    page.value("document.querySelector('#run-0 .tab[data-tab=ops] .more').click()")
    assert page.value(f"{rows}.filter(row => row.offsetParent).length") == len(run.timeline.ops)
    head = "[...document.querySelectorAll('#run-0 .tab[data-tab=ops] th button')].find(b => b.textContent === 'energy')"
    for sign in (-1, 1):
        page.value(f"{head}.click()")
        values = page.value(
            f"{rows}.map(row => row.querySelector('.energy').dataset.v).map(v => v === undefined ? null : +v)"
        )
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=sign < 0)
        assert values[-1] is None  # what has no figure comes last either way
    page.value(f"{rows}[0].querySelector('.find').click()")
    begin, end, op = state(page)
    assert op == int(page.value(f"{rows}[0].querySelector('.find').dataset.place"))
    assert end - begin < longest(run)[2]


def test_on_a_phone_it_fits_and_two_fingers_zoom(browser: Browser, file: Path, run: Run) -> None:
    page = Page(browser, width=390, height=800, phone=True)
    page.open(file)
    page.until(f"document.querySelector('{VIEW}').dataset.drawn")
    assert page.value("document.documentElement.scrollWidth") <= 390
    left, top, width, _ = box(page)
    y, middle = top + 120, left + width / 2
    page.fingers("touchStart", (middle - 30, y), (middle + 30, y))
    page.fingers("touchMove", (middle - 60, y), (middle + 60, y))
    page.fingers("touchMove", (middle - 120, y), (middle + 120, y))
    page.fingers("touchEnd")
    begin, end, _ = state(page)
    assert end - begin == pytest.approx(longest(run)[2] / 4, rel=0.1)
    page.fingers("touchStart", (middle, y))
    page.fingers("touchEnd")
    assert not page.value(f"{TIP}.hidden")
    assert (page.requests(), page.complaints()) == ([], [])
    page.close()


def test_dark_mode_is_dark(page: Page) -> None:
    brightest = (  # of the first lane's title: letters on a canvas that is clear
        f"(() => {{ const c = document.querySelector('{VIEW} canvas').getContext('2d');"
        " return Math.max(...c.getImageData(0, 34, 60, 16).data.filter((_, n) => n % 4 < 3)); })()"
    )
    shade = "getComputedStyle(document.body).backgroundColor"
    assert page.value(shade) == "rgb(255, 255, 255)"
    page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    state(page)
    assert page.value(shade) == "rgb(18, 23, 26)"
    assert page.value(brightest) > 200


def test_a_hostile_run_is_drawn_and_runs_nothing(browser: Browser, profile: RunFolder, tmp_path: Path) -> None:
    for change in HOSTILE:
        change(profile)
    page = Page(browser)
    page.open(write_page([profile], tmp_path / "hostile.html"))
    page.until(f"document.querySelector('{VIEW}').dataset.drawn")
    left, top, width, _ = box(page)
    page.mouse("mouseMoved", left + longest(load_run(profile))[1] * width, top + 120)
    assert EVIL in page.value(f"{TIP}.innerText")
    assert page.value("document.scripts.length") == 2
    assert (page.requests(), page.complaints()) == ([], [])
    page.close()


@pytest.mark.parametrize("times", ["all at once", "in disorder"])
def test_times_that_cannot_be_are_drawn_without_an_error(
    browser: Browser, profile: RunFolder, tmp_path: Path, times: str
) -> None:
    whole = load_run(profile).timeline
    assert whole is not None
    rows = np.zeros((3, 2 + 2 * len(whole.ops)), dtype="<i8")
    if times == "in disorder":  # later steps and ops before earlier ones
        rows[:, 2:] = np.random.default_rng(0).integers(0, 10**9, (3, len(whole.ops))).repeat(2, axis=0).reshape(3, -1)
        n = len(whole.ops)
        rows[:, 2 + n :] = rows[:, 2 : 2 + n]
        rows[:, 1] = [10**9, 5, 7]
    (profile.path / WHEN_FILE).write_bytes(rows.tobytes())
    page = Page(browser)
    page.open(write_page([profile], tmp_path / "odd.html"))
    page.until(f"document.querySelector('{VIEW}').dataset.drawn")
    left, top, width, _ = box(page)
    page.mouse("mouseMoved", left + width / 2, top + 120)
    page.mouse("mouseWheel", left + width / 2, top + 120, deltaX=0, deltaY=-240, modifiers=2)
    state(page)
    assert (page.requests(), page.complaints()) == ([], [])
    page.close()


def test_the_page_may_ask_for_nothing_and_run_nothing_else(browser: Browser, file: Path, tmp_path: Path) -> None:
    """Even if something got into it: its policy holds a script and an image off."""
    planted = "<script>window.planted = true</script><img src='http://127.0.0.1:9/x.png'>"
    changed = tmp_path / "changed.html"
    changed.write_text(file.read_text().replace("<h1>", f"{planted}<h1>", 1))
    page = Page(browser)
    page.open(changed)
    page.until(f"document.querySelector('{VIEW}').dataset.drawn")
    assert page.value("window.planted === undefined")
    assert sum("Content Security Policy" in text for text in page.complaints()) == 2
    page.close()


def test_the_means_of_this_file_can_fail(browser: Browser, tmp_path: Path) -> None:
    """A page that asks for something and that throws is seen to."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><img src='http://127.0.0.1:9/x.png'><script>setTimeout(() => nothing.there)</script>"
    )
    page = Page(browser)
    page.open(bad)
    assert page.requests() == ["http://127.0.0.1:9/x.png"]
    page.until("new Promise(done => setTimeout(() => done(true), 20))")
    assert any("nothing is not defined" in text for text in page.complaints())
    page.close()
