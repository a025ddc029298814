"""A report of runs is one page that needs nothing else, whatever their folders hold: src/tracking/report.py."""

import io
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
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
CHROMIUM = shutil.which("chromium")


def training(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "train/lr": 1e-3, "train/loss": 3 / step**0.5, "perf/compute_seconds": 0.08, **more}


def evaluation(step: int, loss: float, **tables: Any) -> dict[str, Any]:
    found = {"loss": loss, "examples": 359, "accuracy": 1 - loss / 10, **tables}
    return {"step": step, **{f"eval/{name}": value for name, value in found.items()}}


def run_folder(folder: Path, records: list[dict[str, Any]], task: str = "mnist", **optim: Any) -> Path:
    """Write a run that was killed: metrics.jsonl and config.yaml alone."""
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
)
def test_a_damaged_run_is_reported_without_its_damage_or_refused(
    tmp_path: Path, file: str, content: bytes, says: str
) -> None:
    folder = run_folder(tmp_path / "run", [training(10), evaluation(10, 0.5)])
    with (folder / file).open("ab" if file == "metrics.jsonl" else "wb") as stream:
        stream.write(content)
    if says:
        with pytest.raises(UserError, match=f"^{folder}: {says}.*$"):
            page(folder)
    else:
        assert "0.95" in page(folder)


def test_recorded_values_are_only_text_and_the_page_is_self_contained(tmp_path: Path) -> None:
    """And the same page each time."""
    tables = {"samples": [{"prompt": HOSTILE, "continuation": "Καλημέρα 早上好 \ud800 $x_"}]}
    tables["mistakes"] = [{HOSTILE: PIXEL, "label": HOSTILE, "image": PIXEL + '"><script>'}, {"image": PIXEL}]
    folder = run_folder(tmp_path / "run", [training(1), evaluation(1, 0.5, **tables)], name=HOSTILE)
    html = page(folder)
    assert not re.search(r"<script|<img src=x|url\(http", html)
    assert "早上好" in html
    assert {*re.findall(r"(?:src|href)=\"([^\"]{0,11})", html)} == {"data:image/"}
    assert "Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in html
    assert page(folder) == html


def test_a_run_with_hardly_anything_is_reported(tmp_path: Path) -> None:
    lossless, nan = training(1) | {"train/loss": None}, evaluation(1, float("nan"))
    for i, records in enumerate(([], [training(1)], [lossless], [nan], [nan | {"eval/loss": None}])):
        assert ">mnist</td>" in page(run_folder(tmp_path / f"{i}", records))


def test_values_are_shown_in_peoples_units(tmp_path: Path) -> None:
    """Only an address is a link."""
    folder = run_folder(tmp_path / "run", [training(1), evaluation(1, 43120.3)], nesterov=False, lr=5e-05)
    summary: dict[str, Any] = {"seconds": 4000.7, "peak_memory_bytes": [900_000_000, 1_103_392_768]}
    trackers = {"W&B": "https://wandb.ai/me/p/runs/1f3a", "TB": "javascript:alert(1)"}
    (folder / "summary.json").write_text(json.dumps(summary | {"trackers": trackers}))
    html = page(folder)
    for shown in (">43,120<", "<td>False</td>", ">5e-05<", "1:06:40", "1.1 GB", "TB: javascript:alert(1)"):
        assert shown in html
    assert re.findall(r'<a href="([^"]*)">', html) == [trackers["W&B"]]


def test_a_run_records_its_start_and_its_commit(whole: Whole) -> None:
    run = whole("cpu", *SHORT)
    wrote = (run.folder / "summary.json").stat().st_mtime
    assert wrote - 600 < datetime.fromisoformat(run.summary["date"]).timestamp() < wrote
    command = ["git", "describe", "--always", "--exclude=*"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert (run.summary["commit"] or "").removesuffix("-dirty") == done.stdout.strip()
    html = (run.folder / "report.html").read_text()
    assert run.summary["date"] in html
    assert (run.summary["commit"] or "") in html


def test_each_cell_with_a_picture_shows_it(tmp_path: Path) -> None:
    """In any column and row, beside text."""
    masks = [
        {"image": PIXEL, "truth": PIXEL, "prediction": None},
        {"image": PIXEL, "truth": PIXEL, "prediction": PIXEL},
    ]
    tables = {"masks": masks, "text": [{"prompt": f"what is {PIXEL}?", "image": PIXEL}]}
    html = page(run_folder(tmp_path / "run", [evaluation(1, 0.5, **tables)]))
    names = [re.findall(rf'<img src="{re.escape(PIXEL)}" alt="(\w+)">', part) for part in html.split("<section>")[1:]]
    assert names == [["image", "truth", "image", "truth", "prediction"], ["image"]]


def test_curves_that_are_flat_are_not_drawn(tmp_path: Path) -> None:
    records = [training(1), evaluation(1, 0.5), training(2), evaluation(2, 0.25)]
    html = page(run_folder(tmp_path / "run", records))
    assert re.findall(r'svg\+xml;base64,[^"]*" alt="([^"]*)"', html) == ["loss", "accuracy"]


def drawn(title: str, *curves: list[float]) -> list[str]:
    """Return the texts in the plot of these curves, a, b, …, at steps 1, 2, 3."""
    points: Any = [("abc"[i], [*zip((1, 2, 3), curve, strict=True)]) for i, curve in enumerate(curves)]
    svg = b64decode(draw_curves(title, points))
    return [str(text.text) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_axes_have_whole_steps_and_units() -> None:
    ticks = drawn("peak_memory_bytes", [1.1e9, 1.2e9, 1.3e9])
    assert [tick for tick in ticks if tick[0].isdigit()][:3] == ["1", "2", "3"]
    assert {"1.2 GB", "1.3 GB"} < {*ticks}
    assert "0.983220" in drawn("accuracy", [0.98321, 0.98322, 0.98323])  # and not +9.832e-1


def test_curves_that_hide_each_other_are_named() -> None:
    found = drawn("loss", [2.0, 1.0, 0.5], [2.0002, 1.0002, 0.5002], [2.0, 1.5, 0.5])
    assert [text for text in found if "and" in text] == ["a and b: largest difference 2e\N{MINUS SIGN}4"]


def test_many_records_and_long_texts_stay_below_a_megabyte(tmp_path: Path) -> None:
    noise = [training(step, **{"train/loss": 2 + step % 7}) for step in range(1, 20_001)]
    mistakes = [{"text": "<" * 100_000, "label": "3"}] * 300
    confusion = [{"label": "a", "a": 3, "b": 1}, {"label": "b", "a": 0, "b": 4}]
    last = evaluation(20_000, 0.5, mistakes=mistakes, confusion=confusion)
    html = page(run_folder(tmp_path / "run", [*noise, last]))
    assert len(html.encode()) < 2**20
    assert re.findall(r"--share:([\d.]+)", html) == ["0.75", "0.25", "1.0"]


def test_runs_are_ranked_best_first_by_their_metric(tmp_path: Path) -> None:
    losses = [3, 0, 4, 1, 2]
    html = page(*(run_folder(tmp_path / f"trial-{i}", [evaluation(9, loss)], lr=i) for i, loss in enumerate(losses)))
    assert re.findall(r"<td[^>]*>[^<]*/trial-(\d+)</td>", html)[:5] == ["1", "3", "4", "0", "2"]
    differing, _, alike = html.partition("<details>")
    assert ["<td>optim.lr</td>" in differing, "<td>task.name</td>" in differing] == [True, False]
    assert "<td>task.name</td>" in alike


def test_a_failed_report_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run", [training(1)])
    report = Report(Mock(**{"config.folder": folder}), "id")
    report.end({"step": 1}, None)
    assert report.closing == f"  report     {folder}/report.html"
    monkeypatch.setitem(sys.modules, "src.tracking.plots", None)
    report.end({"step": 1}, None)
    assert re.fullmatch(r"  report     none: .*", report.closing)


def test_a_report_shows_what_a_check_found(launch: Launch, tmp_path: Path) -> None:
    """Alone and beside its run. The command writes the page where it is told."""
    run, other = run_folder(tmp_path / "run", [training(1)]), tmp_path / "other.html"
    check = launch("cpu", "--check", "--global_batch_size=16").succeeded()
    assert "all checks passed" in page(check.folder)
    shutil.copy(check.folder / "check.json", run)
    done = launch("cpu", str(run), f"--output={other}", script="src/tracking/report.py").succeeded()
    assert done.stdout == f"{other}\n"
    assert "What --check found" in other.read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; .ci/run installs Debian's")
@pytest.mark.parametrize(("width", "mode"), [(390, "dark"), slow(1400, "light")])
def test_a_browser_shows_it_without_javascript_network_or_scrolling(tmp_path: Path, width: int, mode: Any) -> None:
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
