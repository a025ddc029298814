"""examples/notebook.ipynb: it runs from top to bottom, stops where a run fails, and is kept without its outputs."""

import json
import shutil
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.launching import PROJECT, clean_environment
from tests.pages.links import leads_somewhere, links_of

NOTEBOOK = PROJECT / "examples/notebook.ipynb"
NEEDS = ("src", "accelerate_configs", "configs", "train.py", "requirements.txt", "pyproject.toml")
PIP = """\
import pathlib, sys
folder = pathlib.Path(__file__).parent / "nowhere_to_be_found-2.0.dist-info"
folder.mkdir()
(folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: nowhere-to-be-found\\nVersion: 2.0\\n")
print("pip", *sys.argv[1:])
"""
"""A pip that installs a package of this name, whatever it is asked for."""
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the notebook needs of the project, in a folder that it may write to."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # files of the kernel
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "clone/examples").mkdir(parents=True)
    for name in NEEDS:
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


def run(folder: Path, last: str = "", **environment: str) -> dict[str, str]:
    """Run the notebook, or up to a cell, as if it were in this folder, from an environment that is not activated.
    Return what each cell of code shows, a figure as `[figure]`."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = notebook.cells[: [*(cell.id for cell in notebook.cells), last].index(last) + 1]
    client = NotebookClient(notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(folder)}})
    others = {*psutil.Process().children(recursive=True)}
    try:
        client.execute(env=clean_environment(PATH="/usr/bin:/bin", **environment))
    finally:
        assert not {*psutil.Process().children(recursive=True)} - others, "nothing is left behind"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.id: "".join(output.get("text", "[figure]") for output in cell.outputs) for cell in cells}


def test_the_notebook_trains_plots_and_uses_the_model(clone: Path) -> None:
    """It installs nothing where all is there. The model that it reads predicts what the run evaluated."""
    shown = run(clone / "examples")
    summary = json.loads((clone / "runs/notebook/summary.json").read_text())
    assert summary["eval/accuracy"] > 0.9
    assert "\n  model      runs/notebook/model" in shown.pop("train")
    accuracy = f"accuracy {summary['eval/accuracy']:.4f} on 359 digits\n"
    assert shown == {"project": "", "install": "", "curves": "[figure]", "model": f"{accuracy}[figure]"}


def test_the_notebook_installs_what_is_missing_and_goes_on(clone: Path) -> None:
    with (clone / "requirements.txt").open("a") as requirements:
        requirements.write("nowhere-to-be-found>=2\n")
    (clone / "site").mkdir()
    (clone / "site/pip.py").write_text(PIP)
    shown = run(clone / "examples", last="install", PYTHONPATH=str(clone / "site"))
    assert "pip install --quiet --editable .\n" in shown["install"].replace("\r", "")


@pytest.mark.slow
def test_the_notebook_stops_at_a_run_that_fails(clone: Path) -> None:
    with (clone / "configs/digits.yaml").open("a") as config:
        config.write("epochz: 3\n")
    with pytest.raises(CellExecutionError, match="the run did not finish, and says why above") as error:
        run(clone / "examples")
    assert "unknown setting, did you mean epochs?" in str(error.value)


def test_the_notebook_says_what_to_do_outside_of_a_clone(clone: Path) -> None:
    with pytest.raises(CellExecutionError, match="is not in a clone of the project: clone it and go there"):
        run(clone.parent)


def test_the_notebook_is_kept_without_outputs() -> None:
    """In Jupyter or VS Code, clear all outputs before you save it. What those add about the kernel is not kept."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata == KERNEL | {"language_info": {"name": "python"}}
    for cell in notebook.cells:
        assert cell.metadata == {}, cell.id
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None), cell.id
    names = [cell.id for cell in notebook.cells]
    assert len({*names}) == len(names) == len(json.loads(NOTEBOOK.read_text())["cells"])


def test_each_link_of_the_notebook_leads_somewhere() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    targets = [target for cell in notebook.cells if cell.cell_type == "markdown" for target in links_of(cell.source)]
    assert len(targets) > 5
    assert not [target for target in targets if not leads_somewhere(NOTEBOOK, target)]
