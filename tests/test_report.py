"""src/tracking/report.py: one page about any runs, whatever their folders hold, that needs nothing but itself."""

import base64
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from playwright.sync_api import sync_playwright

from src.config.errors import UserError
from src.tracking.report import report_line, write_report
from tests.launching import Launch, needs, run_command

PIXEL = (
    "data:image/png;base64,"
    + base64.b64encode(
        bytes.fromhex(
            "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
            "1f15c4890000000d49444154789c63f8ffff3f0005fe02fea7356081a00000000049454e44ae426082"
        )
    ).decode()
)
HOSTILE = "</td><script>document.title='taken'; fetch('http://127.0.0.1:9/x')</script><img src=x onerror=alert(1)>"
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; .ci/run installs Debian's")


def training(step: int, **more: Any) -> dict[str, Any]:
    figures = {"perf/samples_per_second": 800.0, "perf/data_seconds": 0.001, "perf/compute_seconds": 0.08}
    record = {"step": step, "epoch": step / 23, "train/lr": 1e-3, "train/grad_norm": 2.0, "train/loss": 3 / step**0.5}
    return record | figures | {"perf/peak_memory_bytes": 2**30} | more


def evaluation(step: int, loss: float, **tables: Any) -> dict[str, Any]:
    numbers = {"eval/loss": loss, "eval/examples": 359, "eval/accuracy": 1 - loss / 10}
    return {"step": step, "epoch": step / 23, **numbers, **{f"eval/{name}": rows for name, rows in tables.items()}}


def run_folder(folder: Path, records: list[dict[str, Any]], task: str = "mnist", **optim: Any) -> Path:
    """A run that was killed: with metrics.jsonl and config.yaml alone."""
    folder.mkdir(parents=True)
    settings = {"run_name": folder.name, "task": {"name": task}, "optim": {"lr": 0.003} | optim}
    settings |= {"checkpoint": {"metric": "eval/loss", "mode": None}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def page(*folders: Path) -> str:
    target = folders[0] / "report.html"
    write_report(list(folders), target)
    return target.read_text()


def readable(html: str) -> str:
    """The text of a page without its style and its tags."""
    return " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", html, flags=re.DOTALL).split())


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "mnist: not finished, recorded up to step 0; not evaluated."),
        ([training(1)], "mnist: not finished, recorded up to step 1; not evaluated."),
        ([evaluation(1, 0.5)], "recorded up to step 1 gave loss 0.5000, accuracy 0.9500."),
        ([training(1, **{"train/loss": None, "train/grad_norm": None})], "recorded up to step 1; not evaluated."),
        ([training(1, **{"train/loss": float("nan")}), evaluation(1, float("nan"))], "gave loss nan, accuracy nan."),
        ([training(1), evaluation(1, float("inf"))], "gave loss inf, accuracy -inf."),
    ],
    ids=["nothing", "one record", "one evaluation", "None", "NaN", "infinite"],
)
def test_a_run_may_have_hardly_anything(tmp_path: Path, records: list[dict[str, Any]], says: str) -> None:
    assert says in readable(page(run_folder(tmp_path / "run", records)))


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    """Tried without suppressing ValueError: JSONDecodeError."""
    folder = run_folder(tmp_path / "run", [training(10), training(20)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "trai')
    assert "recorded up to step 20;" in readable(page(folder))


NUMBER = {"step": 20, "train/loss": 0.5}
SUMMARY = {
    "step": 20, "epoch": 1.0, "seconds": 9.5, "num_processes": 1, "strategy": "single", "device": "cpu",
    "precision": "fp32", "samples_per_second": 8.0, "parameters": 7, "trained_parameters": 7,
    "peak_memory_bytes": [2**30],
}  # fmt: skip
ODD = "not as a run writes its files"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "holds no run"),
        (b"", "holds no run"),
        (b"- a\n- list", "holds no run"),
        (b"name: CI\non: [push]\njobs: {test: {steps: []}}", "holds no run"),
        (b"run_name: x\ncheckpoint: {metric: eval/loss}", "holds no run"),
        (b"task: mnist", "holds no run"),
        (b"task: {name: [mnist]}\ncheckpoint: {metric: eval/loss, mode: null}", ODD),
        (b"task: {name: mnist}\ncheckpoint: []", ODD),
        (b"task: {name: mnist}\ncheckpoint: {metric: eval/loss, mode: 5}\nsince: 2026-11-23", ""),
        (b"task: {name: mnist}\n2026-11-23: x", "holds no run"),
        (b"task: &task {name: mnist, more: *task}", "holds no run"),
        (b"task: " + b"[" * 3000, "holds no run"),
        (b"task: {name: \xff\xfe}", "holds no run"),
        (b"\0" * 100, "holds no run"),
    ],
    ids=[
        "missing", "empty", "a list", "another program's", "without task", "a task without a name", "an odd name",
        "an odd group", "a date", "a date's", "contains itself", "3,000 brackets", "not UTF-8", "zeros",
    ],
)  # fmt: skip
def test_a_folder_whose_settings_are_not_a_runs_is_one_line(tmp_path: Path, config: bytes | None, says: str) -> None:
    """Or has its report. Tried without each of `saved_settings`' errors, and without its way through JSON."""
    folder = run_folder(tmp_path / "run", [training(10), evaluation(20, 0.5)])
    (folder / "config.yaml").unlink()
    if config is not None:
        (folder / "config.yaml").write_bytes(config)
    if says:
        with pytest.raises(UserError, match=f"{folder}: {says}") as error:
            page(folder)
        assert "\n" not in str(error.value)
    else:
        assert "recorded up to step 20 gave loss 0.5000" in readable(page(folder))


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("metrics.jsonl", b"7\n[]\n[1, 2]\n\"text\"\nnull\n\n", "6 lines of metrics.jsonl"),
        ("metrics.jsonl", b'{"train/loss": 1.0}\n', "1 line of metrics.jsonl"),
        ("metrics.jsonl", b'{"step": "20", "train/loss": 1.0}\n{"step": NaN}\n', "2 lines of metrics.jsonl"),
        ("metrics.jsonl", b"\0" * 50 + b"\n\xff\xfe\x80\n" + b"[" * 10**5 + b"\n", "3 lines of metrics.jsonl"),
        ("metrics.jsonl", b'{"step": 1' + b"0" * 400 + b', "train/loss": 1}\n', "1 line of metrics.jsonl"),
        ("metrics.jsonl", json.dumps(NUMBER | {"train/loss": "0.5", "eval/loss": {"a": {"b": [1]}}}).encode(), ""),
        ("metrics.jsonl", json.dumps(NUMBER | {"train/loss": 10**400}).encode(), ""),
        ("metrics.jsonl", json.dumps(NUMBER | {"eval/loss": 10**400}).encode(), ODD),
        ("metrics.jsonl", json.dumps(evaluation(20, 0.5, samples=[1, None])).encode(), ODD),
        ("metrics.jsonl", json.dumps(evaluation(20, 0.5, samples=[{"a": [1], "b": 2}])).encode(), ODD),
        ("metrics.jsonl", json.dumps(evaluation(20, 0.5, samples=[{"a": 1}])).encode(), ODD),
        ("metrics.jsonl", json.dumps(evaluation(20, 0.5, c=[{"a": {}}, {"b": []}, {}])).encode(), ""),
        ("metrics.jsonl", json.dumps(evaluation(20, 0.5, loss_by_a=[{"a": 1}])).encode(), ODD),
        ("summary.json", b"{", "summary.json"),
        ("summary.json", b"[[1, 2]]", "summary.json"),
        ("summary.json", b"\xff", "summary.json"),
        ("summary.json", b'{"seconds": 5}', ODD),
        ("status.json", b"null", "status.json"),
        ("status.json", b'{"reason": {"a": 1}}', ""),
        ("check.json", b'"passed"', "check.json"),
        ("check.json", b'{"checks": 5, "config": [], "passed": {}}', ODD),
    ],
)  # fmt: skip
def test_what_is_damaged_in_a_folder_is_left_out_and_said_and_what_no_run_writes_is_refused(
    tmp_path: Path, file: str, content: bytes, says: str
) -> None:
    """Tried without each of the errors that they raise: a traceback; without the note: nobody hears of it."""
    folder = run_folder(tmp_path / "run", [training(10), evaluation(10, 0.5)])
    if file == "metrics.jsonl":
        content = (folder / file).read_bytes() + content + b"\n" * (content[-1:] == b"}")
    (folder / file).write_bytes(content)
    if says == ODD:
        with pytest.raises(UserError, match=f"^{folder}: {says}: .*$"):
            page(folder)
    else:
        text = readable(page(folder))
        assert "mnist: " in text
        assert re.findall(r"Left out, as damaged: (.*?\.jsonl?)", text) == ([says] if says else [])
        assert report_line(folder).endswith(f"report.html (left out, as damaged: {says})" if says else "report.html")


def test_the_folder_of_a_check_may_be_damaged_too(tmp_path: Path) -> None:
    """Tried without a look at what the settings are: a traceback."""
    config: object
    for config in (5, [], {"task": 5}):
        (tmp_path / "check.json").write_text(json.dumps({"config": config}))
        with pytest.raises(UserError, match="holds no run"):
            page(tmp_path)
    (tmp_path / "check.json").write_text(json.dumps({"config": {"task": {"name": "mnist"}}}))
    with pytest.raises(UserError, match=ODD):
        page(tmp_path)


def test_values_that_are_not_finite_are_not_drawn(tmp_path: Path) -> None:
    """Tried without isfinite: another picture."""
    losses = [3.0, float("nan"), 2.0, float("inf"), 1.0]
    records = [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]
    all_of_them, finite = run_folder(tmp_path / "all", records), run_folder(tmp_path / "finite", records[::2])
    pictures = [re.findall("<svg.*?</svg>", page(folder), re.DOTALL) for folder in (all_of_them, finite)]
    assert len(pictures[0]) == 1
    assert pictures[0] == pictures[1]


def test_a_folder_without_a_run_is_one_line_each(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [training(1)])
    with pytest.raises(UserError) as error:
        write_report([tmp_path / "a", run, tmp_path], tmp_path / "report.html")
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [str(tmp_path / "a"), str(tmp_path)]
    assert not (tmp_path / "report.html").exists()


def test_whatever_a_run_recorded_is_text_and_no_markup(tmp_path: Path) -> None:
    """Tried without autoescape: the script is in the page."""
    rows = [{"prompt": HOSTILE, "continuation": "Καλημέρα 早上好 \ud800 $x_"}]
    by = [{"position": HOSTILE, "targets": 1, "loss": 1.0}, {"position": "早 $", "targets": 1, "loss": 2.0}]
    mistakes = [{HOSTILE: PIXEL, "label": HOSTILE, "image": PIXEL + '"><script>'}]
    records = [training(1), evaluation(1, 0.5, samples=rows, loss_by_position=by, mistakes=mistakes)]
    folder = run_folder(tmp_path / "run", records, name=HOSTILE)
    html = page(folder)
    assert not re.search(r"<script|<img src=x", html)
    assert "早上好" in html


def test_the_page_names_nothing_outside_itself(tmp_path: Path) -> None:
    records = [training(1), evaluation(1, 0.5, mistakes=[{"image": PIXEL, "label": "3"}])]
    html = page(run_folder(tmp_path / "run", records))
    links = re.findall(r"(?:src|href)=\"([^\"]{0,22})", html)
    assert links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "url(http" not in html
    assert "<script" not in html
    assert "Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in html


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    """Tried without svg.hashsalt: names within the pictures differ."""
    folder = run_folder(tmp_path / "run", [*map(training, range(1, 100)), evaluation(99, 0.5)])
    assert page(folder) == page(folder)


def test_many_records_and_huge_tables_stay_below_a_megabyte(tmp_path: Path) -> None:
    """Tried without `fitting`'s limit: 6 MB."""
    noise = (f'{{"step": {step}, "train/loss": {2 + step % 7}}}\n' for step in range(1, 100_001))
    rows = [{"text": "<" * 100_000, "label": "3"}] * 30
    pictures = [{"image": PIXEL + "A" * 50_000, "label": "3"}] * 24
    confusion = [{"label": "a"} | {str(i): i for i in range(300)}] * 300
    last = evaluation(100_000, 0.5, mistakes=rows, pictures=pictures, confusion=confusion)
    folder = run_folder(tmp_path / "run", [training(1)])
    (folder / "metrics.jsonl").write_text("".join(noise) + json.dumps(last) + "\n")
    html = page(folder)
    assert len(html.encode()) < 2**20
    assert "of 300 rows; metrics.jsonl has all" in html


def test_a_long_text_is_cut_and_noise_is_thinned(tmp_path: Path) -> None:
    """Tried without the cut, and with POINTS = 10**6: 159,000 characters."""
    noise = [{"step": step, "train/loss": 2 + step * 7919 % 1000 / 1000} for step in range(1, 50_001)]
    said = [{"prompt": "I", "continuation": "said " * 2000}]
    html = page(run_folder(tmp_path / "run", [*noise, evaluation(50_000, 0.5, samples=said)]))
    assert html.count("said ") == 300
    assert len(html) < 100_000


def test_the_best_evaluation_is_the_one_that_checkpoint_mode_says(tmp_path: Path) -> None:
    """Tried without the mode."""
    folder = run_folder(tmp_path / "run", [evaluation(1, 0.5), evaluation(2, 0.7), evaluation(3, 0.6)])
    assert "best 0.5000 at step 1 " in readable(page(folder))
    settings = (folder / "config.yaml").read_text().replace("mode: null", "mode: max")
    (folder / "config.yaml").write_text(settings)
    assert "best 0.7000 at step 2 " in readable(page(folder))


def test_thirty_trials_are_ranked_best_first_by_their_metric(tmp_path: Path) -> None:
    """Tried without the sort."""
    steps = range(10, 2000, 10)
    trials = [
        run_folder(tmp_path / f"trial-{i}", [*map(training, steps), evaluation(1990, (7 * i % 30) / 10)], lr=i / 1000)
        for i in range(30)
    ]
    html = page(*trials)
    assert len(html.encode()) < 2**20
    ranking = re.findall(r"<td>(trial-\d+)</td>", html)[:30]
    assert ranking == [f"trial-{i}" for i in sorted(range(30), key=lambda i: 7 * i % 30)]
    assert "The best is trial-0." in readable(html)
    assert "24 others" in html
    differing, _, alike = html.partition("<details>")
    assert "<td>optim.lr</td>" in differing
    assert "<td>task.name</td>" in alike


def test_runs_of_different_tasks_do_not_compete(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", [evaluation(1, 2.0)], "causal_lm")
    b = run_folder(tmp_path / "b", [evaluation(1, 0.1)], "mnist")
    text = readable(page(a, b))
    assert "2 runs of causal_lm and mnist" in text
    assert "losses don't compare" in text.replace("&#39;", "'")


@pytest.mark.parametrize("file", [None, "accelerate_configs/ddp.yaml"])
def test_it_says_how_to_repeat_the_run(tmp_path: Path, file: str | None) -> None:
    """By the same accelerate yaml, if the run was started by one. Tried without: with none."""
    folder = run_folder(tmp_path / "run", [training(10)])
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"config_file": file}))
    launch = "accelerate launch " + (f"--config_file {file} " if file else "")
    assert f"{launch}train.py --config={folder}/config.yaml --run_name=run-again" in readable(page(folder))


def test_the_last_evaluations_tables_are_shown_and_samples_over_time(tmp_path: Path) -> None:
    records = []
    for step in (10, 20, 30):
        records += [training(step), evaluation(step, 1.0, samples=[{"prompt": "I", "continuation": f"said {step}"}])]
    records[-1]["eval/confusion"] = [{"label": "a", "a": 3, "b": 1}, {"label": "b", "a": 0, "b": 4}]
    html = page(run_folder(tmp_path / "run", records))
    assert re.search("step 10.*step 20.*step 30.*said 10.*said 20.*said 30", html, re.DOTALL)
    assert re.findall(r"--share:([\d.]+)", html) == ["0.75", "0.25", "1.0"]


def test_pictures_lie_beside_the_page_and_have_names_for_those_who_do_not_see_them(tmp_path: Path) -> None:
    html = page(
        run_folder(tmp_path / "run", [training(1), evaluation(1, 0.5, mistakes=[{"image": PIXEL, "label": 3}])])
    )
    names = {path.name for path in (tmp_path / "run/report").iterdir()}
    names = {name.partition("_")[2] for name in names}
    assert {"loss.png", "accuracy.png", "learning_rate.png", "examples_per_second.png"} <= names
    assert html.count('<svg role="img"') == html.count("<title>") - 1
    assert 'alt="label 3 "' in html


def test_names_in_a_run_lead_to_no_file_outside_the_report_and_each_picture_has_its_own(tmp_path: Path) -> None:
    """Tried with the table's name as the file's: it is beside the run; with letters alone: one picture for top 1 and 5;
    with writing into what is there: a link leads outside."""
    rows = [{"position": "a", "loss": 1.0}, {"position": "b", "loss": 2.0}]
    names = {"top1": 0.5, "top5": 0.9, "早": 0.1, "上": 0.2, "top_" + "x" * 300: 0.3, "../../up": 0.4}
    tables = {"loss_by_x/../../../x": rows, "loss_by_/tmp/x": rows, "loss_by_早": rows, "loss_by_上": rows}
    record = evaluation(1, 0.5, **tables) | {f"eval/{name}": value for name, value in names.items()}
    folder = run_folder(tmp_path / "a/b/run", [record])
    (folder / "report").mkdir()
    (tmp_path / "precious").write_text("mine")
    (folder / "report/01_loss.png").symlink_to(tmp_path / "precious")
    html = page(folder)
    assert (tmp_path / "precious").read_text() == "mine"
    files = {path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".png"}
    assert {path.parent for path in files} == {folder / "report"}
    assert html.count("<svg ") == len(files) == 11  # the loss, six metrics and the tables
    assert {path.name.partition("_")[2] for path in files} >= {"top1.png", "top5.png"}


def test_why_there_is_no_report_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without `except`: it fails the run."""
    folder = run_folder(tmp_path / "run", [training(1)])
    assert report_line(folder) == f"  report     {folder}/report.html"
    monkeypatch.setitem(sys.modules, "src.tracking.figures", None)
    assert "none: " in report_line(folder)
    assert report_line(tmp_path).count("\n") == 0


def test_a_run_ends_with_a_report(launch: Launch) -> None:
    run = launch("cpu", "--max_steps=2", "--log_every=1").succeeded()
    assert f"  report     {run.folder}/report.html" in run.stdout
    assert "2 steps" in readable((run.folder / "report.html").read_text())


@needs("src/check")
def test_a_check_ends_with_a_report_which_that_of_a_run_shows_too(launch: Launch) -> None:
    run = launch("cpu", "--max_steps=2", "--log_every=1").succeeded()
    check = launch("cpu", "--check").succeeded()
    text = readable((check.folder / "report.html").read_text())
    assert "mnist: all checks passed." in text
    assert "To repeat it" not in text
    shutil.copy(check.folder / "check.json", run.folder)
    assert "To repeat it" in readable(page(run.folder))
    assert "What --check found" in text


def test_the_command_writes_it_where_it_is_told(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [training(1)])
    command = [sys.executable, "-m", "src.tracking.report", str(folder), f"--output={tmp_path}/other.html"]
    assert run_command(command, tmp_path).stdout == f"{tmp_path}/other.html\n"
    assert (tmp_path / "other.html").exists()
    refused = run_command([*command[:3], str(tmp_path / "no")], tmp_path)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    full = run_command([*command[:-1], "--output=/proc/report.html"], tmp_path)
    assert (full.exit_code, full.stderr.count("\n")) == (2, 1)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@needs_chromium
@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_shows_it_without_javascript_a_network_or_scrolling_sideways(
    tmp_path: Path, browser: Any, width: int, mode: Any
) -> None:
    """Tried with a picture from a server, and with a table that does not scroll by itself."""
    many = {f"prediction {i}": i for i in range(40)}
    tables = {"mistakes": [{"image": PIXEL, "label": HOSTILE}] * 24, "confusion": [{"label": "a"} | many]}
    tables |= {"samples": [{"prompt": "w" * 3000, "continuation": HOSTILE}], "odd": [{"text": "早" * 900, "n": 1}]}
    run = run_folder(tmp_path / "run", [*map(training, range(1, 60)), evaluation(60, 0.5, **tables)], name="x" * 900)
    other = run_folder(tmp_path / ("long" * 40), [training(1), evaluation(2, 0.4)], "a-task-" * 20)
    address, requests, messages = f"file://{run}/report.html", [], []
    for folders in ([run], [run, other]):
        page(*folders)
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=mode, java_script_enabled=False
        )
        tab = context.new_page()
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("console", lambda message: messages.append(message.text))
        tab.on("pageerror", lambda error: messages.append(str(error)))
        tab.goto(address)
        tab.locator("summary").click()
        assert tab.get_by_role("heading", name="Curves").is_visible()
        assert tab.get_by_role("img", name="Learning rate").first.bounding_box()["width"] > 250
        assert tab.locator("img").count() == 24
        right = [box["x"] + box["width"] for e in tab.locator("main > *").all() if (box := e.bounding_box())]
        assert max(right) <= width
        tab.mouse.wheel(500, 0)
        assert tab.locator("h1").bounding_box()["x"] >= 0
        corner = Image.open(io.BytesIO(tab.screenshot(clip={"x": 0, "y": 0, "width": 10, "height": 10})))
        assert (corner.convert("L").tobytes()[0] > 128) == (mode == "light")
        context.close()
    assert [url for url in requests if not url.startswith("data:image/png;base64,")] == [address, address]
    assert messages == []
