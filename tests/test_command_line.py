"""Command line of the scripts: two steps of training, evaluation, and bad input."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scripts import (
    Printed,
    exit_code,
    launch_command,
    load_script,
    printed_by,
    run_here,
    script_environment,
    train_without_report,
)
from server import Server
from sologrpo.config.arguments import RunArguments
from sologrpo.data.dataset import load_test_prompts, prompt_token_ids
from sologrpo.model.loading import load_tokenizer
from sologrpo.sampling.generation import generate_greedily
from tiny import NEW_TOKENS, tiny_config

RESULT_FIELDS = {
    "n", "accuracy", "accuracy_ci95", "accuracy_lenient", "format_rate", "truncated_rate",
    "trailing_text_rate", "mean_completion_tokens", "model", "adapter", "precision",
    "prompt_format", "seed", "versions",
}  # fmt: skip
PAIRED_FIELDS = {"baseline_accuracy", "delta", "delta_ci95", "mcnemar_p"}


# -- two runs and an evaluation -------------------------------------------------------------------


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def config_file(work: Path, tiny_llama: Path, tiny_data: Path) -> Path:
    path = work / "tiny.yaml"
    settings = tiny_config(tiny_llama, tiny_data, work / "unused")
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(work: Path, config_file: Path, server: Server) -> tuple[Path, Path, str]:
    """Two runs with one seed, the first in a separate process, and what that printed."""
    first, second = work / "first", work / "second"
    command = ("train", "--config", config_file, "--output_dir", first)
    ended = server.run_command(*command, cwd=work)
    assert ended.code == 0, ended
    options = ("--config", config_file, "--output_dir", second)
    assert exit_code(train_without_report(), *options) == 0
    return first, second, ended.out


@pytest.fixture(scope="module")
def evaluated(work: Path, runs: tuple[Path, Path, str]) -> tuple[Path, str]:
    """Evaluate the first run; return the folder of the merged model, and the output."""
    merged = work / "merged"
    printed = run_here("evaluate", "--run", runs[0], "--save_merged", merged)
    assert printed.code == 0, printed
    return merged, printed.stdout


def adapter_weights(run: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_file(str(run / "adapter/adapter_model.safetensors"))
    return weights


def test_training_changes_every_layer_of_the_adapter(runs: tuple[Path, Path, str]) -> None:
    # B starts at zero: what is not zero has been trained.
    trained = {name: w for name, w in adapter_weights(runs[0]).items() if "lora_B" in name}
    assert len(trained) == 14
    assert all(torch.count_nonzero(weight) > 0 for weight in trained.values())


def test_one_seed_gives_one_adapter(runs: tuple[Path, Path, str]) -> None:
    first, second = map(adapter_weights, runs[:2])
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_run_directory(runs: tuple[Path, Path, str], tiny_llama: Path) -> None:
    run = runs[0]
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert config["model_name_or_path"] == str(tiny_llama)
    assert config["lora_r"] == 4
    assert config["temperature"] == 1.0  # a default of TRL, written down
    environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert environment["versions"]["torch"] == torch.__version__
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "reward" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all("rewards/digit_share/mean" in row for row in steps)
    adapter = json.loads((run / "adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["base_model_name_or_path"] == str(tiny_llama)
    assert (run / "report.html").read_text(encoding="utf-8").count("<html") == 1
    assert (run / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not (run / "README.md").exists()  # TRL's card, of a model it does not know


def test_the_first_and_the_last_lines_can_be_copied(runs: tuple[Path, Path, str]) -> None:
    run, printed = runs[0], runs[2]
    assert f"follow   sologrpo report --follow {run}\n" in printed
    last = [f"adapter  {run}/adapter", f"report   {run}/report.html",
            f"next     sologrpo evaluate --run {run}"]  # fmt: skip
    assert printed.splitlines()[-3:] == last
    assert re.search(r"^step 2/2  .*  s \d+\.\d$", printed, re.MULTILINE)


def test_the_last_lines_of_an_evaluation_can_be_copied(
    runs: tuple[Path, Path, str], evaluated: tuple[Path, str]
) -> None:
    run, (merged, printed) = runs[0], evaluated
    saved, accuracy, *last = printed.splitlines()[-5:]
    assert saved == f"merged    {merged}"
    assert re.fullmatch(
        r"accuracy  \S+% -> \S+%: \S+ points \(95 % interval \S+ to \S+\)", accuracy
    )
    assert last == [f"adapter   {run}/adapter", f"report    {run}/report.html",
                    f"next      sologrpo chat --run {run}"]  # fmt: skip


def test_completions_are_kept_with_their_rewards(runs: tuple[Path, Path, str]) -> None:
    files = sorted((runs[0] / "completions").glob("*.parquet"))
    assert len(files) == 2
    for file in files:
        table = pyarrow.parquet.read_table(file).to_pydict()
        assert len(table["completion"]) == 8
        assert len(set(map(str, table["completion"]))) > 1
        assert set(table["strict_format"]) == {-1.0}
        assert len(set(table["digit_share"])) > 1


def test_one_readable_line_a_step(runs: tuple[Path, Path, str]) -> None:
    lines = [line for line in runs[2].splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    for part in ("reward", "strict_format -1.00", "digit_share", "cut off", "entropy"):
        assert all(part in line for line in lines)


def test_results_have_every_field(
    runs: tuple[Path, Path, str], evaluated: tuple[Path, str], tiny_llama: Path
) -> None:
    baseline, trained = (
        json.loads((runs[0] / "eval" / label / "results.json").read_text(encoding="utf-8"))
        for label in ("baseline", "trained")
    )
    assert not RESULT_FIELDS - baseline.keys()
    assert not RESULT_FIELDS - trained.keys()
    assert not PAIRED_FIELDS - trained.keys()
    assert (baseline["adapter"], trained["adapter"]) == (None, str(runs[0] / "adapter"))
    assert baseline["n"] == trained["n"] == 6
    assert baseline["model"] == trained["model"] == str(tiny_llama)
    assert set(trained["by_kind"]) == {"add", "subtract"}
    assert "report" in evaluated[1]
    assert "6 test problems, greedy" in evaluated[1]


def test_merged_model_equals_base_and_adapter(
    runs: tuple[Path, Path, str],
    evaluated: tuple[Path, str],
    tiny_llama: Path,
    tiny_data: Path,
) -> None:
    tokenizer = load_tokenizer(str(tiny_llama))
    problems = load_test_prompts(RunArguments(dataset_name=str(tiny_data)))
    prompts = prompt_token_ids(problems["prompt"], tokenizer)

    def outputs(model: torch.nn.Module) -> list[str]:
        return [c.text for c in generate_greedily(model, tokenizer, prompts, NEW_TOKENS)]

    base = AutoModelForCausalLM.from_pretrained(str(tiny_llama), dtype=torch.float32)
    untrained = outputs(base)
    unmerged = outputs(PeftModel.from_pretrained(base, str(runs[0] / "adapter")))
    merged = outputs(AutoModelForCausalLM.from_pretrained(str(evaluated[0]), dtype="auto"))
    recorded = (runs[0] / "eval/trained/records.jsonl").read_text(encoding="utf-8").splitlines()
    assert merged == unmerged
    assert [json.loads(line)["completion"] for line in recorded] == unmerged
    assert merged != untrained


# -- the same scripts, called in this process ----------------------------------------------------

Call = Callable[..., Printed]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run `train.py` or `evaluate.py` with these arguments; capture what it prints."""
    scripts = {"train": train_without_report, "evaluate": lambda: load_script("evaluate")}
    return lambda script, *arguments: printed_by(scripts[script](), capfd, *arguments)


def assert_one_line_error(stderr: str, code: int, *says: str) -> None:
    """Exit code 2, and the error is one line, the last; bars and warnings may precede it."""
    assert code == 2
    assert "Traceback" not in stderr
    assert stderr.count("error: ") == 1
    assert stderr.endswith("\n")
    line = stderr[:-1].split("\n")[-1]
    assert line.startswith("error: ")
    for text in says:
        assert text in line


@pytest.fixture
def train(call: Call, config_file: Path, tmp_path: Path) -> Call:
    """`train.py` on the tiny config, into a fresh folder."""

    def run(*arguments: str | Path) -> Printed:
        return call("train", "--config", config_file, "--output_dir", tmp_path / "run", *arguments)

    return run


# Arguments, and what the one line names.
TRAIN_ERRORS: dict[str, list[str]] = {
    "--dataset_name no/data": ["'no/data'", "works without a hub"],
    "--dataset_train_split dev": ["has no dev.jsonl"],
    "--rewards strict_fromat": ["'strict_fromat'", "'strict_format'"],
    "--rewards tiny:rows": ["'rows'", "'count'", "no such column"],
    "--num_generation 4": ["'num_generation'", "'num_generations'"],
    "--group_size 4": ["'group_size'", "num_generations"],
    "--qqqqq 4": ["unknown key 'qqqqq'"],
    "--max_steps many": ["max_steps", "many"],
    "--dtype bfloat17": ["bfloat17"],
    "--prompt_format yaml": ["prompt_format", "xml"],
    "--num_generations 3": ["8", "3", "per_device_train_batch_size"],
    "--model_name_or_path no/model": ["'no/model'", "local folder works"],
    "--max_prompt_tokens 1": ["max_prompt_tokens 1"],
    "--num_validation_examples 12": ["num_validation_examples 12"],
    "--eval_strategy steps": ["num_validation_examples"],
    "--outcome_reward strict": ["'strict'", "not among the rewards: strict_format, digit_share"],
    "--outcome_reward digit_share --trainer stock": ["trainer: solo"],
    "--outcome_gate all": ["outcome_gate", "completion"],
    "--reward_weights 1.0": ["1 reward_weights for 2 rewards"],
    "--worked_examples no.yaml": ["no file no.yaml"],
    "--max_train_examples 0": ["max_train_examples: 0"],
    "--max_train_examples 1": ["1", "2 prompts"],
    "--output_dir RUN/file/run": ["cannot write to"],
}


@pytest.mark.parametrize("arguments", TRAIN_ERRORS)
def test_bad_input_of_training(train: Call, tmp_path: Path, arguments: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    printed = train(*arguments.replace("RUN", str(tmp_path)).split())
    assert_one_line_error(printed, printed.code, *TRAIN_ERRORS[arguments])
    assert not (tmp_path / "run").exists()


def test_the_best_adapter_is_kept_by_held_out_accuracy(
    train: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = iter([0.25, 0.75, 0.5])
    scores = {"accuracy_lenient": 0.0, "format_rate": 0.0, "truncated_rate": 0.0, "n": 4}
    monkeypatch.setattr(
        "sologrpo.training.trainer.evaluate_greedily",
        lambda *args, **kwargs: {"accuracy": next(accuracies)} | scores,
    )
    stderr = train(
        *("--num_validation_examples", "4", "--eval_strategy", "steps", "--eval_steps", "1"),
        *("--max_steps", "3", "--save_steps", "1", "--load_best_model_at_end", "true"),
    )
    assert stderr.code == 0, stderr
    run = tmp_path / "run"
    kept = adapter_weights(run)
    best = load_file(str(run / "checkpoint-2" / "adapter_model.safetensors"))
    last = load_file(str(run / "checkpoint-3" / "adapter_model.safetensors"))
    assert all(torch.equal(kept[name], best[name]) for name in best)
    assert not all(torch.equal(kept[name], last[name]) for name in last)


def test_a_reward_that_raises_ends_the_run_and_loses_nothing(
    train: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faulty_rewards.py").write_text(
        "calls = []\n"
        "def third_time(completions, **kwargs):\n"
        "    calls.append(1)\n"
        "    if len(calls) >= 3:\n"
        "        raise KeyError('no such unit')\n"
        "    return [len(completion[0]['content']) for completion in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    stderr = train(
        "--rewards", "faulty_rewards:third_time", "--max_steps", "4", "--save_steps", "1"
    )
    assert stderr.code == 1
    assert "reward 'third_time' raised KeyError: 'no such unit'" in stderr
    assert "on completion 0 of the batch of 8" in stderr
    assert 'faulty_rewards.py", line 5, in third_time' in stderr
    assert "grpo_trainer.py" not in stderr  # the trainer's frames would bury it
    run = tmp_path / "run"
    checkpoints = sorted(folder.name for folder in run.glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-1", "checkpoint-2"]
    assert load_file(str(run / "checkpoint-2" / "adapter_model.safetensors"))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    assert len(list((run / "completions").glob("*.parquet"))) == 2
    assert f"{run / 'checkpoint-2'} is complete: resume with --resume" in stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, ["no config"]),
        ("cliprange: 0.2", ["'cliprange'", "epsilon"]),
        ("a: [", ["not valid YAML"]),
    ],
)
def test_bad_config_file(call: Call, tmp_path: Path, text: str | None, says: list[str]) -> None:
    config = tmp_path / "bad.yaml"
    if text is not None:
        config.write_text(text, encoding="utf-8")
    printed = call("train", "--config", config)
    assert_one_line_error(printed, printed.code, *says)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, config_file: Path, tmp_path: Path
) -> None:
    from rewards import RewardSpecError

    arguments = ["--config", config_file, "--rewards", "nothing", "--traceback"]
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    with pytest.raises(RewardSpecError, match="nothing"):
        load_script("train").main()


def test_dry_run_prints_the_plan_and_writes_nothing(
    train: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    planted = "hf_" + "planted" * 4
    printed = train("--dry_run", "--hub_token", planted)
    assert printed.code == 0
    assert planted not in printed.stdout
    assert "2 prompts x 4 completions = 8 per generation batch" in printed.stdout
    assert "2 optimizer steps" in printed.stdout
    assert tiny_llama.name in printed.stdout
    assert "strict_format, digits:digit_share" in printed.stdout
    assert "<|im_start|>system" in printed.stdout
    assert "####" not in printed.stdout
    assert re.search(r"^dry_run", printed.stdout, re.MULTILINE) is None
    assert re.search(r"^num_generations +4 +\S+\.yaml$", printed.stdout, re.MULTILINE)
    assert re.search(r"^use_bnb_nested_quant .* SoloGRPO$", printed.stdout, re.MULTILINE)
    assert re.search(r"^adapter  LoRA r \d+, 0\.\dM parameters", printed.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "times", "free", "warned"),
    [
        (["--dtype", "float32"], 3.2, 7, True),
        (["--dtype", "float32"], 3.2, 12, False),
        (["--dtype", "bfloat16"], 2.5, 2, True),
        (["--dtype", "bfloat16"], 2.5, 7, False),
        (["--gradient_checkpointing", "false"], 2.5, 99, False),
    ],
)
def test_the_plan_has_room_for_the_whole_process_on_a_cpu(
    settings: list[str],
    times: float,
    free: int,
    warned: bool,
    train: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sologrpo.plan.plan.free_bytes", lambda _: free * 2**20)
    printed = train("--dry_run", *settings)
    assert f" MiB (the process up to {times} times that), {free} MiB free" in printed.stdout
    assert ("MiB of memory (the process up to" in printed.stdout) == warned


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], ": what prompts share once in a pass"),
        (["--attn_implementation", "eager"], ""),
        (["--loss_type", "bnpo"], None),
    ],
)
def test_the_plan_counts_the_tokens_that_are_computed(
    settings: list[str], says: str | None, train: Call
) -> None:
    printed = train("--dry_run", *settings).stdout
    line = re.search(r"^tokens   of (\S+) in .*, (\S+) are computed(.*)$", printed, re.MULTILINE)
    assert (line is None) == (says is None)
    if line is not None:
        in_rows, computed = (int(line[i].replace(",", "")) for i in (1, 2))
        assert line[3] == says
        assert (computed < in_rows / 2) == bool(says)


EVALUATION_ERRORS: dict[str, list[str]] = {
    "": ["--run runs/NAME, or --model NAME"],
    "--run nowhere": ["nowhere", "no file"],
    "--rum nowhere": ["'rum'", "'run'"],
    "--model no/model --dataset_name DATA": ["'no/model'", "local folder works"],
    "--model MODEL --dataset_name no/data": ["'no/data'", "test.jsonl works without a hub"],
    "--model MODEL --adapter DATA": ["holds no adapter"],
    "--model MODEL --dataset_name DATA --limit 0": ["limit"],
    "--run STOPPED": ["holds no adapter"],  # before it saved its adapter
    "--run RUN --model QWEN": ["made for base model", "tiny-llama", "tiny-qwen"],
    "--run RUN --num_samples -1": ["num_samples: -1"],
    "--run RUN --num_samples 4 --temperature 0": ["temperature: 0"],
    "--run RUN --num_samples 4 --top_p 1.5": ["top_p: 1.5"],
    "--run RUN --temperature 0.7": ["add --num_samples"],
    "--run RUN --max_completion_length 0": ["max_completion_length: 0"],
    "--run RUN --precision fp8": ["invalid choice: 'fp8'"],
    "--run RUN --prompt_formats xml,yaml": ["'yaml'; expected xml, r1_zero, boxed"],
    "--run RUN --prompt_formats xml,boxed,xml": ["xml is named twice"],
    "--run RUN --prompt_formats xml": ["name xml, and at least one other"],
    "--run RUN --prompt_formats boxed r1_zero": ["name xml, and at least one other"],
    "--run RUN --prompt_formats ,": ["prompt_formats"],
    "--run RUN --prompt_formats xml,boxed --baseline false": ["leave --baseline false out"],
    "--run RUN --prompt_formats xml,boxed --prompt_format boxed": ["work with --prompt_format:"],
    "--run RUN --prompt_formats xml,boxed --label prompt_formats.json": ["is reserved"],
    "--model MODEL --prompt_formats xml,boxed": ["give --run runs/NAME"],
    "--run RUN --precision nf5": ["invalid choice: 'nf5'"],
    "--run RUN --num_sample 4": ["did you mean 'num_samples'"],
    "--label": ["expected one argument"],
}


@pytest.mark.parametrize("arguments", EVALUATION_ERRORS)
def test_bad_input_of_evaluation(
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: tuple[Path, Path, str],
    tiny_llama: Path,
    tiny_qwen: Path,
    tiny_data: Path,
    arguments: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"model_name_or_path": str(tiny_llama)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    real = {
        "MODEL": tiny_llama, "QWEN": tiny_qwen, "DATA": tiny_data, "RUN": runs[1],
        "STOPPED": tmp_path,
    }  # fmt: skip
    before = contents(runs[1]) | contents(tmp_path)
    printed = call("evaluate", *(real.get(word, word) for word in arguments.split()))
    assert_one_line_error(printed, printed.code, *EVALUATION_ERRORS[arguments])
    assert contents(runs[1]) | contents(tmp_path) == before


def test_bad_input_under_accelerate_launch(runs: tuple[Path, Path, str], config_file: Path) -> None:
    before = contents(runs[1])
    ended = subprocess.run(
        launch_command("--config", config_file, "--output_dir", runs[1]),
        env=script_environment(), capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 1  # the launcher's, whatever the script's is
    assert_one_line_error(ended.stderr, 2, "already holds a run: add --resume")
    assert contents(runs[1]) == before


def test_4bit_run_is_merged_into_the_weights_it_was_trained_on(
    call: Call, train: Call, tmp_path: Path
) -> None:
    trained = train("--load_in_4bit", "true", "--max_steps", "1")
    assert trained.code == 0, trained
    evaluated = call("evaluate", "--run", tmp_path / "run", "--limit", "2")
    assert evaluated.code == 0, evaluated
    original = call(
        "evaluate", "--run", tmp_path / "run", "--limit", "2",
        "--merge_into", "original", "--label", "original",
    )  # fmt: skip
    assert original.code == 0, original
    precision = {
        label: json.loads((tmp_path / "run/eval" / label / "results.json").read_text())["precision"]
        for label in ("trained-limit2", "original")
    }
    assert precision == {
        "trained-limit2": "NF4 dequantised, float32, adapter merged",
        "original": "unquantised, float32, adapter merged",
    }


def test_merged_folder_is_evaluated_as_a_model(
    call: Call, tmp_path: Path, runs: tuple[Path, Path, str], evaluated: tuple[Path, str],
    tiny_data: Path,
) -> None:  # fmt: skip
    merged = evaluated[0]
    printed = call(
        "evaluate", "--model", merged, "--dataset_name", tiny_data, "--output_dir", tmp_path,
        "--max_completion_length", NEW_TOKENS,
    )  # fmt: skip
    assert printed.code == 0, printed
    label = f"{merged.name}-{tiny_data.name}-length{NEW_TOKENS}"
    alone = tmp_path / "eval" / label / "records.jsonl"
    assert alone.read_bytes() == (runs[0] / "eval/trained/records.jsonl").read_bytes()
