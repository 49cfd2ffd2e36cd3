"""Export, as users see it: train four-bit, save, compare, write the card, push."""

import json
import math
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from test_parity import GAP
from transformers import PreTrainedModel
from trl import ModelConfig

from hub_stand_in import HubStandIn
from made_up_run import eval_record, write_eval, write_lines
from scripts import Printed, exit_code, last_line, printed_by
from sologrpo.base.errors import InputError
from sologrpo.base.manifest import MANIFEST
from sologrpo.config import export as export_arguments
from sologrpo.config.evaluation import EvaluationSettings
from sologrpo.data.dataset import load_train_and_validation
from sologrpo.export import export as export_module
from sologrpo.export import parity
from sologrpo.export.export import begin_export
from sologrpo.export.model_card import write_card
from sologrpo.model.loading import load_base_model, load_tokenizer
from tiny import ROOT

OWN_FILES = {"README.md", "reward_curve.png", "tokenizer.json", "tokenizer_config.json",
             "chat_template.jinja"}  # fmt: skip
MODEL_FILES = OWN_FILES | {"config.json", "generation_config.json", "model.safetensors"}
ADAPTER_FILES = OWN_FILES | {"adapter_config.json", "adapter_model.safetensors"}


def machine_paths(folder: Path) -> list[str]:
    """Find lines of text files that name a folder of this machine, or the token."""
    found = []
    names = re.compile(rf"{ROOT}|{Path.home()}/|/tmp/|pytest|hf_writes")
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
    assert names(run / "adapter") == ADAPTER_FILES | {MANIFEST}
    model = ModelConfig(model_name_or_path=str(tiny_llama), dtype="float32", load_in_4bit=True)
    loaded = PeftModel.from_pretrained(load_base_model(model), str(run / "adapter"))
    weights = loaded.state_dict()
    trained = load_file(str(run / "adapter/adapter_model.safetensors"))
    for name, weight in trained.items():
        inside = name.replace(".weight", ".default.weight")
        assert torch.equal(weights[inside].cpu(), weight)
    assert all(torch.count_nonzero(w) for n, w in trained.items() if "lora_B" in n)


def test_vllm_accepts_the_adapter(run: Path) -> None:
    # What vllm/lora/peft_helper.py and vllm/lora/utils.py require of a folder.
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
    # The weights that it was trained on, in the dtype that `auto` was on this machine.
    assert "load_in_4bit=True" in text
    dtype = json.loads((run / "environment.json").read_text(encoding="utf-8"))["dtype"]
    assert f'bnb_4bit_compute_dtype="{dtype}"' in text
    assert "Not evaluated." in text
    assert "licence" in text
    card = ModelCard(text)
    assert card.data.library_name == "peft"
    assert card.data.base_model is None  # the Hub cannot link to a local folder


# -- saving ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A merged and a four-bit folder, and what the command printed."""
    folder = tmp_path_factory.mktemp("exported")
    merged, four_bit = folder / "merged", folder / "4bit"
    flags = ("--run", run, "--save_merged", merged, "--save_4bit", four_bit)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setenv("COLUMNS", "160")
        assert exit_code(export_module, *flags) == 0
    return merged, four_bit, printed.getvalue()


def test_folders_are_complete_and_nothing_else_is_left(exported: tuple[Path, Path, str]) -> None:
    merged, four_bit, _ = exported
    assert names(merged) == names(four_bit) == MODEL_FILES | {MANIFEST}
    assert names(merged.parent) == {"merged", "4bit"}
    assert machine_paths(merged) == machine_paths(four_bit) == []


def test_the_merge_is_into_the_weights_that_were_trained_on(
    exported: tuple[Path, Path, str],
) -> None:
    gap = json.loads((exported[0] / MANIFEST).read_text())["gap"]
    assert gap["name"] == "dequantised"
    assert gap["kl"] < 1e-3 < gap["training_kl"]
    assert re.search(r"^dequantised: KL from the trained model \S+ nats per", exported[2], re.M)
    # A four-bit run's merge is saved in half precision.
    weights = load_file(str(exported[0] / "model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_card_of_a_merge_has_scores_and_gap(exported: tuple[Path, Path, str]) -> None:
    card = ModelCard((exported[0] / "README.md").read_text(encoding="utf-8"))
    result = card.data.eval_results[0]
    assert (result.metric_type, result.metric_value) == ("accuracy", 50.0)
    assert "NF4 dequantised, float32" in result.metric_name
    assert (
        "| accuracy (strict) | 50.0% | 50.0% |\n|   95 % interval | 18.8% to 81.2% |" in card.text
    )
    assert "exact McNemar p = 1" in card.text
    assert "\n- dequantised: KL from the trained model " in card.text
    assert "\n- 4bit: KL from the trained model " in card.text
    assert "![Reward by step](reward_curve.png)" in card.text
    assert card.data.library_name == "transformers"


# -- with models that were saved already -----------------------------------------------------------

Export = Callable[..., Printed]


@pytest.fixture
def export(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Export:
    """Run the command; to make a model is an error."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was made again")

    monkeypatch.setattr(export_module, "load_base_model", refuse)
    monkeypatch.setattr(export_module, "save_4bit", refuse)
    return lambda *flags: printed_by(export_module, capfd, "--run", run, *flags)


@pytest.fixture
def copied(exported: tuple[Path, Path, str], tmp_path: Path) -> tuple[Path, Path]:
    """Copies that a test may change, with gaps that allow a push."""
    merged, four_bit = tmp_path / "merged", tmp_path / "4bit"
    for folder, copy in zip(exported, (merged, four_bit), strict=False):
        shutil.copytree(folder, copy)
        change_gap(copy, kl=0.0, training_kl=1.0)
    return merged, four_bit


def change_gap(folder: Path, **changes: float) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["gap"] |= changes
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_damaged_model_is_neither_reused_nor_pushed(
    export: Export, copied: tuple[Path, Path], hub: HubStandIn
) -> None:
    weights = copied[0] / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    refused = export("--save_merged", copied[0], "--push_to_hub", "mine", "--what", "merged")
    assert refused.code == 2
    assert "is damaged, model.safetensors has changed since it was saved" in last_line(refused)
    assert "ana/mine" not in hub.repositories


@pytest.mark.parametrize(("what", "other", "place"), [("merged", "4bit", 0), ("4bit", "merged", 1)])
def test_model_that_is_too_far_is_not_pushed(
    export: Export, copied: tuple[Path, Path], hub: HubStandIn, what: str, other: str, place: int
) -> None:
    change_gap(copied[place], kl=0.3)
    flags = ("--save_merged", copied[0], "--save_4bit", copied[1], "--push_to_hub", "mine")
    refused = export(*flags, "--what", what)
    assert refused.code == 2
    message = r"error: not pushed: .* KL .* 0\.3 nats per token, over 0\.01"
    assert re.match(message, last_line(refused))
    assert hub.repositories["ana/mine"].files == {}
    assert names(copied[place]) == MODEL_FILES | {MANIFEST}
    assert export(*flags, "--what", other).code == 0  # which is close enough
    assert export(*flags, "--what", what, "--push_despite_gap").code == 0
    assert set(hub.repositories["ana/mine"].files) == MODEL_FILES


def test_an_interrupted_export_is_made_again(run: Path, copied: tuple[Path, Path]) -> None:
    merged, _ = copied
    manifest = json.loads((merged / MANIFEST).read_text())
    (merged / MANIFEST).write_text(json.dumps({"made_from": manifest["made_from"]}))
    whole = (merged / "model.safetensors").read_bytes()
    (merged / "model.safetensors").write_bytes(whole[:99])
    (merged / ".tmpA1b2").write_bytes(whole[:99])  # of safetensors
    (merged / "notes.txt").write_text("mine")
    assert exit_code(export_module, "--run", run, "--save_merged", merged) == 0
    assert (merged / "model.safetensors").read_bytes() == whole
    assert (merged / "notes.txt").read_text() == "mine"
    assert names(merged) == MODEL_FILES | {MANIFEST, "notes.txt"}


def test_the_copy_of_an_adapter_replaces_no_files_of_the_user(
    export: Export, run: Path, tmp_path: Path
) -> None:
    own = tmp_path / "export" / "adapter"
    shutil.copytree(run / "adapter", own)
    flags = ("--output_dir", tmp_path, "--push_to_hub", "mine", "--dry_run")
    refused = export(*flags)
    assert refused.code == 2
    assert "is not empty: give another folder" in last_line(refused)
    shutil.rmtree(own)
    assert export(*flags).code == 0
    assert export(*flags).code == 0  # over the earlier copy


def test_dry_run_does_not_ask_the_hub(export: Export, run: Path, hub: HubStandIn) -> None:
    printed = export("--push_to_hub", "mine", "--dry_run")
    folder = run / "export/adapter"
    assert f"would push {folder}" in printed.stdout
    assert names(folder) == ADAPTER_FILES | {MANIFEST}
    assert machine_paths(folder) == []
    assert hub.requests == []


def test_push_of_the_adapter(export: Export, run: Path, hub: HubStandIn) -> None:
    flags = ("--push_to_hub", "mine", "--private", "--base_model", "meta/tiny-llama")
    hub.fail("POST", "/commit/", 403)
    refused, done = export(*flags), export(*flags)
    assert (refused.code, done.code) == (2, 0)
    assert [line for line in refused.splitlines() if line.startswith("error: ")] == [
        last_line(refused)
    ]
    assert last_line(refused).endswith("is complete: run the same command again")
    assert "Traceback" not in refused
    repository = hub.repositories["ana/mine"]
    assert repository.private
    assert set(repository.files) == ADAPTER_FILES
    original = (run / "adapter/adapter_model.safetensors").read_bytes()
    assert repository.files["adapter_model.safetensors"] == original
    # It names its base model for others; the one here names the folder that evaluate.py loads.
    config = json.loads(repository.files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "meta/tiny-llama"
    here = json.loads((run / "adapter/adapter_config.json").read_text())
    assert Path(here["base_model_name_or_path"]).is_dir()
    card = ModelCard(repository.files["README.md"].decode())
    assert card.data.base_model == "meta/tiny-llama"
    assert card.data.eval_results is not None
    assert f"pushed    {hub.endpoint}/ana/mine/commit/" in done.stdout
    printed = done.stdout + done + refused.stdout + refused
    assert not any(b"hf_writes" in content for content in repository.files.values())
    assert "hf_writes" not in printed


def test_a_card_compares_only_what_can_be_compared_and_shows_no_path(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "model"
    folder.mkdir()
    stale = {"baseline": "baseline", "delta": 0.99}
    write_eval(run, "baseline", [False] * 4)
    write_eval(run, "trained", [True] * 4, **stale)
    write_eval(run, "trained-mine", [True] * 4, settings={"dataset": "/home/ana/mine"}, **stale)
    write_card(folder, "adapter", "x", run, "meta/tiny-llama")
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "trained against baseline, same problems: +100.0 points" in text
    assert "trained-mine against" not in text
    assert "/home/ana" not in text
    assert "99.0" not in text
    write_lines(run / "eval/trained/records.jsonl", [eval_record(0, False, "")])
    with pytest.raises(InputError, match=r"eval/trained is damaged: .* evaluate again"):
        write_card(folder, "adapter", "x", run, "meta/tiny-llama")


# -- bad input, before any work --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["runs/x"], "unexpected 'runs/x': write an option before it"),
        ([], "nothing to do: give --save_merged FOLDER"),
        (["--what", "merged"], "--what: add --push_to_hub NAME"),
        (["--private", "--dry_run"], "--dry_run and --private: add --push_to_hub NAME"),
        (
            ["--push_to_hub", "mine", "--what", "gguf"],
            "choose the type of the GGUF file: --gguf f32",
        ),
        (["--save_gguf", "x"], "choose the type of the GGUF file: --gguf f32"),
        (["--save_merged", "x", "--save_gguf", "x", "--gguf", "f16"], "need two different folders"),
        (["--save_merged", "x", "--max_kl", "nan"], "max_kl: nan; expected a finite number"),
        (["--save_merged", "x", "--save_4bit", "x"], "need two different folders"),
    ],
)
def test_flags_that_cannot_work(run: Path, flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        settings_of(run, *flags)
    assert "\n" not in str(caught.value)


def settings_of(
    run: Path, *flags: str | Path
) -> tuple[EvaluationSettings, export_arguments.ExportArguments]:
    return export_arguments.parse_export(["--run", str(run), *map(str, flags)])


def refusal(run: Path, *flags: str | Path, **changes: Any) -> str:
    settings, arguments = settings_of(run, *flags)
    with pytest.raises(InputError) as caught:
        begin_export(replace(settings, **changes), arguments)
    return str(caught.value)


def test_refused_before_any_work(run: Path, tmp_path: Path) -> None:
    assert "is not a repository name" in refusal(run, "--push_to_hub", "a/b/c")
    base = ("--save_merged", "x", "--base_model", "./models/mine")
    assert "'./models/mine' is not a repository name" in refusal(run, *base)
    assert "there is no adapter to export" in refusal(run, "--save_merged", "x", adapter=None)
    data = replace(
        settings_of(run, "--save_merged", "x")[0].data, dataset_name=str(tmp_path / "gone")
    )
    assert "gone" in refusal(run, "--save_merged", tmp_path / "x", data=data)


def test_folder_in_use(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty: give another folder" in refusal(run, "--save_merged", tmp_path)
    with pytest.raises(NotADirectoryError):
        refusal(run, "--save_merged", tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"made_from": {"adapter_sha256": "0"}, "gap": GAP.model_dump()}),
         "holds an export of another adapter"),
        ("", f"{MANIFEST} is empty: remove"),
        ("[]", "expected key: value pairs: remove"),
        ('{"files": {}}', "is not empty: give another folder"),
        (json.dumps({"made_from": {}, "gap": {}}), "gap.name: missing: remove"),
    ],
)  # fmt: skip
def test_folder_of_another_export(run: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    assert message in refusal(run, "--save_4bit", tmp_path / "x", "--save_merged", tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "eval/trained/results.json"])
@pytest.mark.parametrize("content", [b"\x89PNG\r\n\xff", b"7"])
def test_damaged_files_of_a_run_are_found_before_a_model_is_made(
    run: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(Path(name).name)):
        begin_export(*settings_of(copy, "--save_merged", tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_problems_are_those_held_out_of_the_training(run: Path, tmp_path: Path) -> None:
    settings, arguments = settings_of(run, "--save_merged", tmp_path / "x")
    export = begin_export(settings, arguments)
    assert export.problems is not None
    tokenizer = load_tokenizer(str(settings.model.model_name_or_path))
    seed = yaml.safe_load((run / "config.yaml").read_text())["seed"]
    assert seed != settings.seed  # which is the evaluation's
    _, held_out = load_train_and_validation(settings.data, tokenizer, seed)
    assert held_out is not None
    assert export.problems["question"] == held_out["question"]


def test_gguf_without_its_packages_is_refused_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_arguments, "GGUF_MODULES", ("gone", "torch", "gone_too"))
    message = "--gguf needs gone and gone_too: pip install 'sologrpo[gguf]'"
    with pytest.raises(InputError, match=re.escape(message)):
        settings_of(run, "--gguf", "f16")


# -- memory ----------------------------------------------------------------------------------------


def test_the_merge_into_the_original_weights_stays_off_the_gpu(
    run: Path, exported: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load(model: ModelConfig, trust: bool, device: str | None) -> PreTrainedModel:
        loaded.append((model.load_in_4bit, device))
        return load_base_model(model, trust, device)

    monkeypatch.setattr(export_module, "load_base_model", load)
    folder = tmp_path / "original"
    flags = ("--save_merged", folder, "--merge_into", "original")
    assert exit_code(export_module, "--run", run, *flags) == 0
    assert loaded == [(False, "cpu")]
    gap, trained = (
        json.loads((path / MANIFEST).read_text())["gap"] for path in (folder, exported[0])
    )
    assert gap["name"] == "original"
    assert gap["kl"] > 10 * trained["kl"]


def test_a_merge_that_main_memory_has_no_room_for_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "free_bytes", lambda device: 2**16)
    said = refusal(run, "--save_merged", tmp_path / "x")
    assert re.match(r"merging takes \d MiB of main memory, and 0 MiB are free: close other", said)
    begin_export(*settings_of(run, "--push_to_hub", "mine", "--dry_run"))


def test_memory_that_runs_out_in_the_comparison_is_one_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr(parity, "generate_batch", fill)
    ended = printed_by(export_module, capfd, "--run", run, "--save_merged", tmp_path / "x")
    assert ended.code == 2
    assert last_line(ended).startswith("error: out of memory: close other programs and run the")
    assert "Traceback" not in ended
