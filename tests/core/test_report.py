"""src/tracking/report.py: one page about any runs, whatever their folders hold, that needs nothing but itself."""

import io
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import yaml
from PIL import Image
from playwright.sync_api import sync_playwright

from src.config.errors import UserError
from src.tracking.plots import draw_curves
from src.tracking.report import Report, write_report
from tests.core.test_tables import SHORT
from tests.launching import PROJECT, Launch, Whole, slow

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4//8/AAX+Av6nNWCB"
    "oAAAAABJRU5ErkJggg=="
)
HOSTILE = "</td><script>document.title='taken'; fetch('http://127.0.0.1:9/x')</script><img src=x onerror=alert(1)>"
CAN_CHECK = (PROJECT / "src/check").exists()
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; .ci/run installs Debian's")


def training(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "train/lr": 1e-3, "train/loss": 3 / step**0.5, "perf/compute_seconds": 0.08, **more}


def evaluation(step: int, loss: float, **tables: Any) -> dict[str, Any]:
    found = {"loss": loss, "examples": 359, "accuracy": 1 - loss / 10, **tables}
    return {"step": step, **{f"eval/{name}": value for name, value in found.items()}}


def run_folder(folder: Path, records: list[dict[str, Any]], task: str = "mnist", **optim: Any) -> Path:
    """A run that was killed: with metrics.jsonl and config.yaml alone."""
    folder.mkdir(parents=True)
    best = {"metric": "eval/loss", "mode": None}
    settings = {"run_name": folder.name, "task": {"name": task}, "optim": optim, "checkpoint": best}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def page(*folders: Path) -> str:
    target = folders[0] / "report.html"
    write_report([*folders], target)
    return target.read_text()


ODD, NONE = "files are not as a run writes them", "not a run's folder"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.yaml", b"", NONE),
        ("config.yaml", b"task: {name: mnist}\ncheckpoint: []", ODD),
        ("metrics.jsonl", json.dumps(evaluation(20, 0.5, samples=[1, None])).encode(), ODD),
        ("metrics.jsonl", b"7\n[]\n\xff\xfe\x80\n" + b"\0" * 50 + b'\n{"step": 30, "trai', ""),
    ],
)  # fmt: skip
def test_what_is_damaged_is_left_out_or_refused(tmp_path: Path, file: str, content: bytes, says: str) -> None:
    """In one line. Tried without each of the errors that they raise: a traceback."""
    folder = run_folder(tmp_path / "run", [training(10), evaluation(10, 0.5)])
    with (folder / file).open("ab" if file == "metrics.jsonl" else "wb") as stream:
        stream.write(content)
    if says:
        with pytest.raises(UserError, match=f"^{folder}: {says}.*$"):
            page(folder)
    else:
        assert "0.95" in page(folder)


def test_whatever_a_run_recorded_is_text_and_the_page_names_nothing_outside_itself(tmp_path: Path) -> None:
    """The same page each time. Tried without autoescape: the script is in it; without svg.hashsalt: names differ."""
    tables = {"samples": [{"prompt": HOSTILE, "continuation": "Καλημέρα 早上好 \ud800 $x_"}]}
    tables["mistakes"] = [{HOSTILE: PIXEL, "label": HOSTILE, "image": PIXEL + '"><script>'}, {"image": PIXEL}]
    folder = run_folder(tmp_path / "run", [training(1), evaluation(1, 0.5, **tables)], name=HOSTILE)
    html = page(folder)
    assert not re.search(r"<script|<img src=x|url\(http", html)
    assert "早上好" in html
    assert {*re.findall(r"(?:src|href)=\"([^\"]{0,11})", html)} == {"data:image/"}
    assert "Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in html
    assert page(folder) == html


def test_a_run_may_have_hardly_anything(tmp_path: Path) -> None:
    """Or a loss that is not finite."""
    lossless, diverged = training(1, **{"train/loss": None}), evaluation(1, float("nan")) | {"eval/loss": None}
    for i, records in enumerate(([], [training(1)], [lossless], [evaluation(1, float("nan"))], [diverged])):
        assert ">mnist</td>" in page(run_folder(tmp_path / f"{i}", records))


def test_numbers_are_as_people_write_them(tmp_path: Path) -> None:
    """Tried with four digits for all numbers, 4.312e+04, and without a look at booleans, 0."""
    of_run = run_folder(tmp_path / "run", [evaluation(1, 43120.3)], nesterov=False, lr=5e-05)
    html = page(of_run)
    for shown in (">43,120<", "<td>False</td>", ">5e-05<"):
        assert shown in html


def test_the_head_says_when_how_long_with_which_code_and_where_it_is_logged(tmp_path: Path) -> None:
    """In units as people read them: the number of seconds and of bytes appears nowhere. Only an address is a link."""
    folder = run_folder(tmp_path / "run", [training(1), evaluation(1, 0.5)])
    summary: dict[str, Any] = {"seconds": 4000.7, "peak_memory_bytes": [900_000_000, 1_103_392_768]}
    summary |= {"date": "2026-02-03 04:05:06", "commit": "51a775f1-dirty"}
    trackers = {"W&B": "https://wandb.ai/me/p/runs/1f3a", "TB": "javascript:alert(1)"}
    (folder / "summary.json").write_text(json.dumps(summary | {"trackers": trackers}))
    html = page(folder)
    for shown in ("2026-02-03 04:05:06", "51a775f1-dirty", "1:06:40", "1.1 GB", "TB: javascript:alert(1)"):
        assert shown in html
    assert re.findall(r'<a href="([^"]*)">', html) == [trackers["W&B"]]
    for raw in ("4000.7", "4,001", "1103392768", "1,103,392,768"):
        assert raw not in html


def test_a_run_records_when_it_began_and_the_code_it_ran(whole: Whole) -> None:
    run = whole("cpu", *SHORT)
    began, wrote = datetime.fromisoformat(run.summary["date"]), (run.folder / "summary.json").stat().st_mtime
    assert wrote - 600 < began.timestamp() < wrote
    command = ["git", "describe", "--always", "--exclude=*"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert (run.summary["commit"] or "").removesuffix("-dirty") == done.stdout.strip()
    assert str(run.summary["date"]) in (run.folder / "report.html").read_text()


def test_each_cell_that_is_a_picture_is_shown_as_one(tmp_path: Path) -> None:
    """In any column and row: image, truth and prediction beside text. Tried with the first cell deciding for all."""
    masks = [{"file": "a", "image": PIXEL, "truth": PIXEL, "prediction": None, "iou": 0.5}]
    masks.append({"file": "b", "image": PIXEL, "truth": PIXEL, "prediction": PIXEL, "iou": 0.25})
    cards = [{"image": PIXEL, "label": "a"}, {"image": None, "label": "b"}]
    tables = {"masks": masks, "cards": cards, "text": [{"prompt": f"what is {PIXEL}?", "image": PIXEL}]}
    html = page(run_folder(tmp_path / "run", [evaluation(1, 0.5, **tables)]))
    names = [re.findall(rf'<img src="{re.escape(PIXEL)}" alt="(\w+)">', part) for part in html.split("<section>")[1:]]
    assert names == [["image", "truth", "image", "truth", "prediction"], ["image"], ["image"]]
    assert html.count(PIXEL) == 5 + 1 + 2  # once within a text
    assert html.count('<div class="gallery">') == 1
    assert "<td>\N{EN DASH}</td>" in html


def test_curves_that_are_flat_are_not_drawn(tmp_path: Path) -> None:
    """Tried without: a plot of lr, which is the same all along, and of the number of examples."""
    records = [training(1), evaluation(1, 0.5), training(2), evaluation(2, 0.25)]
    html = page(run_folder(tmp_path / "run", records))
    assert re.findall(r'svg\+xml;base64,[^"]*" alt="([^"]*)"', html) == ["loss", "accuracy"]


def drawn(title: str, *curves: list[float], steps: Sequence[int] = (1, 2, 3)) -> list[str]:
    """The texts in the plot of these curves, a, b, …, at these steps."""
    points: Any = [("abc"[i], [*zip(steps, curve, strict=True)]) for i, curve in enumerate(curves)]
    svg = b64decode(draw_curves(title, points))
    return [str(text.text) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_axes_are_labelled_as_people_read_them(tmp_path: Path) -> None:
    """Tried with matplotlib's own labels: 1e9, 0.02, and step 1.5."""
    *ticks, title = drawn("peak_memory_bytes", [1.1e9, 1.2e9, 1.3e9])
    assert [tick for tick in ticks if tick[0].isdigit()][:3] == ["1", "2", "3"]
    assert {"1.2 GB", "1.3 GB"} < {*ticks}
    assert title == "peak_memory_bytes"
    assert "20 ms" in drawn("data_seconds", [0.01, 0.02, 0.03])
    assert "0.983220" in drawn("accuracy", [0.98321, 0.98322, 0.98323])  # and not +9.832e-1


def test_curves_that_hide_each_other_are_said_to(tmp_path: Path) -> None:
    """If one lies on another within the thickness of a line, where both are. Tried without: b alone is seen."""
    says = "{} and {}: largest difference {}"
    losses, other = [2.0, 1.0, 0.5], [2.0, 1.5, 0.5]
    found = drawn("loss", losses, [loss + 2e-4 for loss in losses], other)
    assert [text for text in found if "and" in text] == [says.format("a", "b", "2e\N{MINUS SIGN}4")]
    assert says.format("a", "b", 0) in drawn("lr", losses, losses)
    assert says.format("a", "b", "1 MB") in drawn("peak_memory_bytes", [1e9, 2e9, 3e9], [1.001e9, 2e9, 3e9])
    assert not [text for text in drawn("loss", losses, other) if "and" in text]


def test_many_records_and_long_texts_stay_below_a_megabyte(tmp_path: Path) -> None:
    """Tried without the cuts: 6 MB; with POINTS = 10**6: 4 MB."""
    noise = [training(step, **{"train/loss": 2 + step % 7}) for step in range(1, 20_001)]
    mistakes = [{"text": "<" * 100_000, "label": "3"}] * 300
    confusion = [{"label": "a", "a": 3, "b": 1}, {"label": "b", "a": 0, "b": 4}]
    last = evaluation(20_000, 0.5, mistakes=mistakes, confusion=confusion)
    html = page(run_folder(tmp_path / "run", [*noise, last]))
    assert len(html.encode()) < 2**20
    assert re.findall(r"--share:([\d.]+)", html) == ["0.75", "0.25", "1.0"]


def test_trials_are_ranked_best_first_by_their_metric(tmp_path: Path) -> None:
    """Tried without the sort."""
    losses = [3, 0, 4, 1, 2]
    html = page(*(run_folder(tmp_path / f"trial-{i}", [evaluation(9, loss)], lr=i) for i, loss in enumerate(losses)))
    assert re.findall(r"<td[^>]*>[^<]*/trial-(\d+)</td>", html)[:5] == ["1", "3", "4", "0", "2"]
    differing, _, alike = html.partition("<details>")
    assert ["<td>optim.lr</td>" in differing, "<td>task.name</td>" in differing] == [True, False]
    assert "<td>task.name</td>" in alike


def test_why_there_is_no_report_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without `except`: it fails the run."""

    def closing(folder: Path) -> str:
        part = Report(Mock(**{"config.folder": folder}), "id")
        part.end({"step": 1}, None)
        return part.closing

    folder = run_folder(tmp_path / "run", [training(1)])
    assert closing(folder) == f"  report     {folder}/report.html"
    monkeypatch.setitem(sys.modules, "src.tracking.plots", None)
    assert "none: " in closing(folder)
    assert closing(tmp_path).count("\n") == 0


def test_the_command_shows_what_a_check_found_alone_and_beside_its_run(launch: Launch, tmp_path: Path) -> None:
    """It writes the page where it is told."""
    run, other = run_folder(tmp_path / "run", [training(1)]), tmp_path / "other.html"
    if CAN_CHECK:
        check = launch("cpu", "--check", "--global_batch_size=16").succeeded()
        assert "all checks passed" in page(check.folder)
        shutil.copy(check.folder / "check.json", run)
    done = launch("cpu", str(run), f"--output={other}", script="src/tracking/report.py").succeeded()
    assert done.stdout == f"{other}\n"
    assert ("What --check found" in other.read_text()) == CAN_CHECK


@needs_chromium
@pytest.mark.parametrize(("width", "mode"), [(390, "dark"), slow(1400, "light")])
def test_a_browser_shows_it_without_javascript_network_or_scrolling(tmp_path: Path, width: int, mode: Any) -> None:
    """Tried with a picture from a server, and with a table that does not scroll by itself."""
    mistakes, samples = [{"image": PIXEL, "label": HOSTILE}] * 24, [{"prompt": "w" * 3000, "n": HOSTILE}]
    confusion = [{"label": "a"} | {f"prediction {i}": i for i in range(40)}]
    last = evaluation(60, 0.5, mistakes=mistakes, samples=samples, confusion=confusion)
    run = run_folder(tmp_path / "run", [*map(training, range(1, 60)), last], name="x" * 900)
    other = run_folder(tmp_path / ("long" * 40), [training(1), evaluation(2, 0.4)], "other-task-" * 20)
    address, events = f"file://{run}/report.html", []
    page(run, other)
    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=mode, java_script_enabled=False)
        for kind in ("request", "console", "pageerror"):
            tab.on(kind, lambda event: events.append(getattr(event, "url", event)))
        tab.goto(address)
        tab.locator("summary").click()
        assert tab.get_by_role("img", name="loss").first.bounding_box()["width"] > 250
        boxes = filter(None, (part.bounding_box() for part in tab.locator("main > *").all()))
        assert max(box["x"] + box["width"] for box in boxes) <= width
        corner = Image.open(io.BytesIO(tab.screenshot(clip={"x": 0, "y": 0, "width": 10, "height": 10})))
    assert (corner.convert("L").tobytes()[0] > 128) == (mode == "light")
    assert [event for event in events if not str(event).startswith("data:image/")] == [address]
