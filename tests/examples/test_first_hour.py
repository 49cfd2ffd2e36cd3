"""`examples/first_hour.ipynb` runs from start to end, shortened and on a tiny model."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from quickstart import get_model
from tiny import ROOT

nbclient = pytest.importorskip("nbclient", reason="needs nbclient: make setup")
nbformat = pytest.importorskip("nbformat")

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"
SMALL = (
    "--num_generations 2 --per_device_train_batch_size 4 --max_completion_length 8 "
    "--max_train_examples 16 --max_steps 3"
)
PARAMETERS = f'TRAIN = MY_TRAINING = "{SMALL}"\nEVALUATE = "--limit 4"'
# A command of a notebook that fails stops nothing; this does.
CHECK = "\nassert _exit_code == 0, _exit_code"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: Any) -> str:
    """Return what a cell printed; a terminal ends lines with two characters."""
    return "".join(output.get("text", "") for output in cell.outputs).replace("\r\n", "\n")


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, Any]:
    """Run the notebook; its code cells by id, and the folder that it wrote to as `folder`."""
    folder = tmp_path_factory.mktemp("examples")
    model = folder / "first_hour" / "models" / "SmolLM2-135M-Instruct"
    shutil.copytree(tiny_llama, model)
    get_model.write_manifest(model)  # `sologrpo model` then has nothing to download
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in code_cells(notebook):
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = PARAMETERS
        elif "!sologrpo" in cell.source or "| sologrpo" in cell.source:
            cell.source += CHECK
    paths = (ROOT, os.environ.get("PYTHONPATH"))
    environment = {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "jupyter"),
    }
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=os.environ | environment)
    cells = {cell.id: cell for cell in code_cells(notebook)}
    return cells | {"folder": folder / "first_hour"}


@pytest.mark.timeout(900)
def test_every_command_does_its_work(executed: dict[str, Any]) -> None:
    folder = executed["folder"]
    assert "already" in text_of(executed["get-model"])
    trained = text_of(executed["run-train"])
    assert "step 3/3" in trained
    assert "adapter  runs/first/adapter" in trained
    assert executed["show-curve"].outputs[0]["data"]["image/png"]
    assert "4 test problems, greedy" in text_of(executed["run-evaluate"])
    assert (folder / "runs/first/eval/trained-test_unseen-limit4/records.jsonl").is_file()
    assert len(re.findall("of 4 became", text_of(executed["read-records"]))) == 2
    assert "all checks passed" in text_of(executed["run-check"])
    assert len(re.findall("^step", text_of(executed["show-metrics"]), re.MULTILINE)) == 3
    assert (folder / "merged/config.json").is_file()
    assert "answer" in text_of(executed["run-chat"])


def test_outputs_are_plain_text(executed: dict[str, Any]) -> None:
    """A terminal's colours and cursor movements would be rubbish in the rendered notebook."""
    cells = (cell for name, cell in executed.items() if name != "folder")
    assert [cell.id for cell in cells if "\x1b" in text_of(cell) or "\r" in text_of(cell)] == []


def test_the_notebook_shows_what_it_printed_and_not_where() -> None:
    """Replace the paths of your machine by `~/sologrpo` after `make notebook`."""
    cells = code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert [cell.id for cell in cells if not cell.outputs] == ["parameters", "installation"]
    places = re.compile(r"https?://|/(home|Users|root|tmp|opt|work|content|mnt)/")
    assert [cell.id for cell in cells if places.search(text_of(cell))] == []


def test_links_lead_somewhere() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    links = re.findall(r"\]\((\.\./[^)#]+)", text)
    assert len(links) >= 3
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []
