"""Export, as users meet it: train four-bit, save, compare, write the card, push."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from test_parity import GAP
from trl import ModelConfig

from hub_stand_in import HubStandIn, running_hub
from sologrpo.config.evaluation import EvaluationSettings, parse_evaluation
from sologrpo.errors import InputError
from sologrpo.export import export as export_module
from sologrpo.export.export import MARKER, begin_export, export_and_push
from sologrpo.model.loading import load_base_model
from tiny import ROOT

# The slowest step loads torch in five processes, one after another.
pytestmark = pytest.mark.timeout(600)
SECRET = "hf_writes"
OWN_FILES = {"README.md", "reward_curve.png", "tokenizer.json", "tokenizer_config.json",
             "chat_template.jinja"}  # fmt: skip
MODEL_FILES = OWN_FILES | {"config.json", "generation_config.json", "model.safetensors"}
ADAPTER_FILES = OWN_FILES | {"adapter_config.json", "adapter_model.safetensors"}


def start(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=False,
        timeout=560, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"} | variables,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished four-bit run whose adapter is a real change, with results of an evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "shells"
    config = {
        "model_name_or_path": str(tiny_llama), "dataset_name": str(tiny_data),
        "output_dir": str(folder), "dtype": "float32", "bf16": False,
        "rewards": ["strict_format", "tiny:digit_share"], "reward_weights": [0.5, 1.0],
        "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 12,
        "max_steps": 2, "learning_rate": 0.02, "lora_r": 4, "seed": 3, "num_validation_examples": 4,
    }  # fmt: skip
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    done = start("train.py", "--config", file)
    assert done.returncode == 0, done.stderr
    for label, adapter in (("baseline", None), ("trained", str(folder / "adapter"))):
        results = {
            "n": 6, "accuracy": 0.5, "accuracy_ci95": [0.19, 0.81], "accuracy_lenient": 0.5,
            "format_rate": 1.0, "truncated_rate": 0.0, "adapter": adapter, "split": "test",
            "precision": "NF4 dequantised, float32", "dataset": str(tiny_data),
        }  # fmt: skip
        if adapter:
            results |= {"delta": 0.0, "delta_ci95": [-0.2, 0.2], "mcnemar_p": 1.0}
        (folder / "eval" / label).mkdir(parents=True)
        (folder / "eval" / label / "results.json").write_text(json.dumps(results))
    return folder


def machine_paths(folder: Path) -> list[str]:
    """Lines of text files that name a folder of this machine, or the token."""
    found = []
    names = re.compile(rf"{ROOT}|{Path.home()}/|/tmp/|pytest|{SECRET}")
    for file in sorted(folder.iterdir()):
        if file.suffix in (".png", ".safetensors"):
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        found += [f"{file.name}: {line}" for line in lines if names.search(line)]
    return found


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


# -- the adapter folder of train.py ----------------------------------------------------------------


def test_adapter_folder_is_complete(run: Path, tiny_llama: Path) -> None:
    assert names(run / "adapter") == ADAPTER_FILES
    model = ModelConfig(model_name_or_path=str(tiny_llama), dtype="float32", load_in_4bit=True)
    loaded = PeftModel.from_pretrained(load_base_model(model), str(run / "adapter"))
    weights = loaded.state_dict()
    trained = load_file(str(run / "adapter/adapter_model.safetensors"))
    for name, weight in trained.items():
        inside = name.replace(".weight", ".default.weight")
        assert torch.equal(weights[inside].cpu(), weight)
    assert all(torch.count_nonzero(w) for n, w in trained.items() if "lora_B" in n)


def test_adapter_is_one_that_vllm_takes(run: Path) -> None:
    # What vllm/lora/peft_helper.py and vllm/lora/utils.py ask of a folder.
    config = json.loads((run / "adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert {"r", "lora_alpha", "target_modules"} <= config.keys()
    assert config["bias"] == "none"
    assert not config["modules_to_save"]
    assert not config["use_dora"]
    supported = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {name.rpartition(".")[2] for name in config["target_modules"]} <= supported
    weights = load_file(str(run / "adapter/adapter_model.safetensors"))
    for name, weight in weights.items():
        match = re.fullmatch(r"base_model\.model\.(model\..+)\.(lora_[AB])\.weight", name)
        assert match, name
        assert match[1].rpartition(".")[2] in supported
        assert weight.shape[0 if match[2] == "lora_A" else 1] == config["r"]
        assert math.prod(weight.shape) > 0


def test_card_of_the_adapter(run: Path, tiny_llama: Path, tiny_data: Path) -> None:
    text = (run / "adapter/README.md").read_text(encoding="utf-8")
    assert not [line for line in machine_paths(run / "adapter") if line.startswith("README")]
    assert f"A LoRA adapter for {tiny_llama.name}, trained with GRPO on {tiny_data.name}" in text
    assert "| strict_format | 0.5 |" in text
    assert "| digit_share | 1.0 |" in text
    assert "| learning_rate | 0.02 |" in text
    assert "load_in_4bit=True" in text  # the weights that it belongs onto
    assert "--max-lora-rank 8" in text
    assert "Not evaluated." in text
    assert "licence" in text
    card = ModelCard(text)
    assert card.data.library_name == "peft"
    assert card.data.base_model is None  # a local folder is nothing that the Hub could link to


# -- saving ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A merged and a four-bit folder, and what the command printed."""
    folder = tmp_path_factory.mktemp("exported")
    merged, four_bit = folder / "merged", folder / "4bit"
    done = start(
        "-m", "sologrpo.export.export", "--run", run, "--save_merged", merged,
        "--save_4bit", four_bit,
        COLUMNS="160",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return merged, four_bit, done.stdout


def test_folders_are_whole_and_nothing_else_is_left(exported: tuple[Path, Path, str]) -> None:
    merged, four_bit, _ = exported
    assert names(merged) == names(four_bit) == MODEL_FILES | {MARKER}
    assert names(merged.parent) == {"merged", "4bit"}
    assert machine_paths(merged) == machine_paths(four_bit) == []


def test_merge_into_the_trained_weights_is_the_closer_one(
    run: Path, exported: tuple[Path, Path, str]
) -> None:
    noted = json.loads((run / "eval/trained/results.json").read_text())["merge_parity"]
    assert noted["kept"] == "dequantised"
    gaps = {gap["name"]: gap for gap in noted["gaps"]}
    assert list(gaps) == ["dequantised", "original", "4bit"]
    assert gaps["dequantised"]["kl"] < 0.1 * gaps["original"]["kl"]
    assert gaps["dequantised"]["problems"] == 4  # the rows held out of the training
    assert gaps["dequantised"]["training_kl"] > gaps["dequantised"]["kl"]
    assert "dequantised (kept)" in exported[2]
    # A four-bit run's merge is saved in half precision.
    weights = load_file(str(exported[0] / "model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_card_of_a_merge_has_scores_and_gap(exported: tuple[Path, Path, str]) -> None:
    card = ModelCard((exported[0] / "README.md").read_text(encoding="utf-8"))
    result = card.data.eval_results[0]
    assert (result.metric_type, result.metric_value) == ("accuracy", 50.0)
    assert "NF4 dequantised, float32" in result.metric_name
    assert "| accuracy, strict | 50.0 % (19.0 to 81.0) | 50.0 % (19.0 to 81.0) |" in card.text
    assert "exact McNemar p = 1." in card.text
    assert "| saved as | dequantised | original | 4bit |" in card.text
    assert "![Reward over the steps](reward_curve.png)" in card.text
    assert card.data.library_name == "transformers"


# -- in this process, with the slow parts made already ---------------------------------------------

Do = Callable[..., str]


def settings_of(run: Path, *flags: str | Path) -> EvaluationSettings:
    return parse_evaluation(["--run", str(run), *map(str, flags)])


@pytest.fixture
def do(run: Path, monkeypatch: pytest.MonkeyPatch) -> Do:
    """Export as the command line does; loading a model is an error."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was made again")

    monkeypatch.setattr(export_module, "_merge_to_disk", refuse)
    monkeypatch.setattr(export_module, "save_4bit", refuse)

    def call(*flags: str | Path) -> str:
        settings = settings_of(run, *flags)
        export = begin_export(settings.export, settings)
        assert export is not None
        with open(os.devnull, "w") as nowhere:
            console = Console(file=nowhere, record=True, width=160)
            export_and_push(export, console)
        return console.export_text()

    return call


@pytest.fixture
def copied(exported: tuple[Path, Path, str], tmp_path: Path) -> tuple[Path, Path]:
    """Copies that a test may change."""
    merged, four_bit = tmp_path / "merged", tmp_path / "4bit"
    shutil.copytree(exported[0], merged)
    shutil.copytree(exported[1], four_bit)
    return merged, four_bit


def widen(folder: Path, **changes: float) -> None:
    """Make the measured gap of a finished folder another."""
    marker = json.loads((folder / MARKER).read_text())
    marker["gaps"] = [gap | changes for gap in marker["gaps"]]
    (folder / MARKER).write_text(json.dumps(marker))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Path]]:
    """What was pushed where, without a Hub; `tests/test_hub.py` has one."""
    pushed: dict[str, dict[str, Path]] = {}

    def push(folder: Path, repository: str, message: str, leave_out: list[str]) -> str:
        files = {file.name: file for file in folder.iterdir() if file.name not in leave_out}
        pushed[repository] = files
        return f"https://hub.example/{repository}"

    monkeypatch.setattr(export_module, "open_repository", lambda name, private: f"ana/{name}")
    monkeypatch.setattr(export_module, "push_folder", push)
    return pushed


def test_second_call_goes_on_from_what_is_there(
    do: Do, copied: tuple[Path, Path], hub: dict[str, dict[str, Path]]
) -> None:
    widen(copied[0], kl=0.0, training_kl=1.0)
    printed = do("--save_merged", copied[0], "--push_to_hub", "mine", "--what", "merged")
    assert set(hub["ana/mine"]) == MODEL_FILES
    assert "https://hub.example/ana/mine" in printed
    assert "# mine" in (copied[0] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("what", "place"), [("merged", 0), ("4bit", 1)])
def test_model_that_is_too_far_is_not_pushed(
    do: Do, copied: tuple[Path, Path], hub: dict[str, dict[str, Path]], what: str, place: int
) -> None:
    for folder in copied:
        widen(folder, kl=0.0, training_kl=1.0)
    widen(copied[place], kl=0.3)
    flags = ("--save_merged", copied[0], "--save_4bit", copied[1],
             "--push_to_hub", "mine", "--what", what)  # fmt: skip
    with pytest.raises(InputError, match=r"not pushed: .* KL .* 0\.3 nats a token, over 0\.01"):
        do(*flags)
    assert hub == {}
    assert names(copied[place]) == MODEL_FILES | {MARKER}
    do(*flags, "--push_despite_gap")
    assert set(hub["ana/mine"]) == MODEL_FILES


def test_other_models_gap_does_not_matter(
    do: Do, copied: tuple[Path, Path], hub: dict[str, dict[str, Path]]
) -> None:
    widen(copied[0], kl=0.0, training_kl=1.0)
    widen(copied[1], kl=0.3)
    do("--save_merged", copied[0], "--save_4bit", copied[1], "--push_to_hub", "mine",
       "--what", "merged")  # fmt: skip
    assert "ana/mine" in hub


def test_pushed_adapter_names_its_base_model_for_others(
    do: Do, run: Path, hub: dict[str, dict[str, Path]]
) -> None:
    do("--push_to_hub", "mine", "--base_model", "meta/tiny-llama")
    assert set(hub["ana/mine"]) == ADAPTER_FILES
    config = json.loads(hub["ana/mine"]["adapter_config.json"].read_text())
    assert config["base_model_name_or_path"] == "meta/tiny-llama"
    card = ModelCard(hub["ana/mine"]["README.md"].read_text(encoding="utf-8"))
    assert card.data.base_model == "meta/tiny-llama"
    assert card.data.eval_results is not None
    here = json.loads((run / "adapter/adapter_config.json").read_text())
    assert Path(here["base_model_name_or_path"]).is_dir()  # what evaluate.py loads


def test_dry_run_asks_nobody(do: Do, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("open_repository", "push_folder"):
        monkeypatch.setattr(export_module, name, lambda *args, **kwargs: pytest.fail("asked"))
    printed = do("--push_to_hub", "mine", "--dry_run")
    folder = run / "export/adapter"
    assert f"would push {folder}" in printed
    assert names(folder) == ADAPTER_FILES
    assert machine_paths(folder) == []


# -- bad input, before any work --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--what", "merged"], "--what: add --push_to_hub NAME"),
        (["--private", "--dry_run"], "--dry_run and --private: add --push_to_hub NAME"),
        (["--push_to_hub", "mine", "--what", "gguf"], "invalid choice: 'gguf'"),
        (["--save_merged", "x", "--parity_problems", "0"], "give at least 1"),
        (["--save_merged", "x", "--max_kl", "wide"], "invalid float value: 'wide'"),
        (["--save_merged", "x", "--max_kl", "nan"], "--max_kl nan: give a number above 0"),
        (["--save_merged", "x", "--max_kl", "inf"], "--max_kl inf: give a number above 0"),
        (["--save_merged", "x", "--max_kl", "-1"], "--max_kl -1.0: give a number above 0"),
        (["--save_merged", "x", "--save_4bit", "x"], "need two different folders"),
    ],
)
def test_flags_that_cannot_work(run: Path, flags: list[str], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)) as caught:
        settings_of(run, *flags)
    assert "\n" not in str(caught.value)


def refusal(run: Path, *flags: str | Path, **changes: Any) -> str:
    settings = settings_of(run, *flags)
    with pytest.raises(InputError) as caught:
        begin_export(settings.export, replace(settings, **changes))
    return str(caught.value)


def test_folder_in_use(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty: give another folder" in refusal(run, "--save_merged", tmp_path)
    assert "is a file" in refusal(run, "--save_merged", tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_folder_with_an_export_of_another_adapter(run: Path, tmp_path: Path) -> None:
    marker = {"made_from": {"adapter_sha256": "0"}, "gaps": [asdict(GAP)]}
    (tmp_path / MARKER).write_text(json.dumps(marker))
    assert "holds an export of another adapter" in refusal(run, "--save_4bit", tmp_path)


def test_repository_name(run: Path) -> None:
    assert "is no repository name" in refusal(run, "--push_to_hub", "a/b/c")


def test_no_adapter(run: Path) -> None:
    assert "there is no adapter to export" in refusal(run, "--save_merged", "x", adapter=None)


def test_no_problems_to_compare_on(run: Path, tmp_path: Path) -> None:
    data = replace(settings_of(run).data, dataset_name=str(tmp_path / "gone"))
    assert "gone" in refusal(run, "--save_merged", tmp_path / "x", data=data)


# -- through the real client -----------------------------------------------------------------------


def push(run: Path, hub: HubStandIn, token: str) -> subprocess.CompletedProcess[str]:
    return start(
        "-m", "sologrpo.export.export", "--run", run, "--push_to_hub", "mine", "--private",
        HF_ENDPOINT=hub.endpoint, HF_TOKEN=token, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1",
    )  # fmt: skip


def test_push_of_the_adapter(run: Path) -> None:
    with running_hub() as hub:
        hub.fail("POST", "/commit/", 403)
        refused = push(run, hub, SECRET)
        done = push(run, hub, SECRET)
        assert done.returncode == 0, done.stderr
        repository = hub.repositories["ana/mine"]
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("is whole: the same command goes on from it")
    assert repository.private
    assert set(repository.files) == ADAPTER_FILES
    original = (run / "adapter/adapter_model.safetensors").read_bytes()
    assert repository.files["adapter_model.safetensors"] == original
    assert f"pushed    {hub.endpoint}/ana/mine/commit/" in done.stdout
    assert SECRET not in done.stdout + done.stderr
    assert not any(SECRET.encode() in content for content in repository.files.values())


def test_push_that_is_not_allowed(run: Path) -> None:
    with running_hub() as hub:
        done = push(run, hub, "hf_reads")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors == [done.stderr.strip().splitlines()[-1]]
    assert "may not write to ana/mine (403)" in errors[0]
    assert "Traceback" not in done.stderr
