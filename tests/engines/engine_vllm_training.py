"""Training with the real vLLM in the trainer's process: hot-swapped adapters, on NF4 weights."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from trl import ModelConfig

from digits import digit_share
from scripts import last_line, run_script, script_environment
from sologrpo.base.environment import read_environment
from sologrpo.base.errors import RunError
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.data.dataset import build_prompts, prompt_token_ids
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.sampling.generation import generate_greedily
from sologrpo.sampling.vllm_engine import MEMORY_BACKED
from sologrpo.training.packing import rows_of_sequences
from sologrpo.training.trainer import SoloGRPOTrainer
from tiny import ROOT, rows

MODEL = str(ROOT / "models/SmolLM2-135M-Instruct")
UPDATES, TOKENS = 20, 16
# Differences of fp32 sums in another order, nats. A wrong adapter or base is off by 0.1 and more.
ROUNDING = 1e-4


# -- twenty updates on NF4 weights ----------------------------------------------------------------


def digest(named: Iterable[tuple[str, torch.nn.Parameter]]) -> str:
    """Hash the bits of all weights but the adapter's."""
    total = hashlib.sha256()
    for name, parameter in named:
        if "lora_" not in name:
            total.update(name.encode())
            total.update(parameter.data.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def engine_of(trainer: Any) -> Any:
    return trainer.vllm_generation.llm.llm_engine


def digests(trainer: Any) -> list[str]:
    """Hash the base weights of the trainer and of vLLM."""
    inside = engine_of(trainer).model_executor.driver_worker.model_runner.model
    return [digest(model.named_parameters()) for model in (trainer.model, inside)]


class Run:
    """A trainer after its updates, and what was seen before and after."""

    def __init__(self, output: Path) -> None:
        model_args = ModelConfig(
            model_name_or_path=MODEL, dtype="float32", load_in_4bit=True, use_bnb_nested_quant=True
        )
        args = SoloGRPOConfig(
            str(output), use_vllm=True, vllm_mode="colocate", num_generations=4, bf16=False,
            per_device_train_batch_size=8, max_completion_length=TOKENS, max_steps=UPDATES,
            learning_rate=3e-4, lr_scheduler_type="constant", gradient_checkpointing=False,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        self.tokenizer = load_tokenizer(MODEL)
        data = build_prompts(Dataset.from_list(rows(8)), RunArguments(system_prompt="Solve it."))
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.trainer = SoloGRPOTrainer(
            load_base_model(model_args), digit_share, args, train_dataset=data,
            processing_class=self.tokenizer, peft_config=lora,
        )  # fmt: skip
        self.prompts = prompt_token_ids(data["prompt"], self.tokenizer)[:4]
        self.before = digests(self.trainer)
        self.trainer.train()
        self.after = digests(self.trainer)
        self.logs = [log for log in self.trainer.state.log_history if "reward" in log]

    def sample(self, **settings: Any) -> tuple[list[list[int]], list[list[float]]]:
        """Sample from vLLM as the trainer does; (token ids, log-probs) of every prompt."""
        generation = self.trainer.vllm_generation
        kept = generation.generation_kwargs
        generation.generation_kwargs = kept | settings
        try:
            _, ids, log_probs, _ = generation.generate(self.prompts, None, 1)
        finally:
            generation.generation_kwargs = kept
        return ids, [[token[0] for token in row] for row in log_probs]

    def texts(self, **settings: Any) -> list[str]:
        ids, _ = self.sample(temperature=0.0, **settings)
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    variables = os.environ.copy()
    done = Run(tmp_path_factory.mktemp("nf4"))
    # TRL and vLLM describe this process to themselves; scripts that are started here are others.
    os.environ.clear()
    os.environ.update(variables)
    done.trainer.vllm_generation.sync_weights()  # after the last update, nothing was sampled
    yield done
    engine_of(done.trainer).engine_core.shutdown()


def test_the_base_weights_stay_as_they_are(run: Run) -> None:
    assert run.before == run.after
    assert len(run.logs) == UPDATES


def test_the_gap_does_not_grow(run: Run) -> None:
    print("\n| update | `sampling/kl` | mean absolute gap | `sampling/max_gap` |")
    for update, log in enumerate(run.logs, start=1):
        mean = log["sampling/sampling_logp_difference/mean"]
        kl, highest = log["sampling/kl"], log["sampling/max_gap"]
        print(f"| {update} | {kl:+.1e} | {mean:.1e} | {highest:.1e} |")
    gaps = [log["sampling/sampling_logp_difference/mean"] for log in run.logs]
    assert max(gaps) < ROUNDING
    assert sum(gaps[-5:]) <= sum(gaps[:5])


def test_one_adapter_and_no_file_is_left(run: Run) -> None:
    assert engine_of(run.trainer).list_loras() == {UPDATES + 1}
    assert not list(MEMORY_BACKED.glob("sologrpo-vllm-*"))


def test_vllm_completes_greedily_as_the_trained_model_does(run: Run) -> None:
    trained = generate_greedily(run.trainer.model, run.tokenizer, run.prompts, TOKENS)
    assert run.texts() == [completion.text for completion in trained]
    with run.trainer.model.disable_adapter():
        untrained = generate_greedily(run.trainer.model, run.tokenizer, run.prompts, TOKENS)
    assert [completion.text for completion in untrained] != run.texts()


def test_vllm_samples_with_the_log_probs_of_the_trained_model(run: Run) -> None:
    ids, log_probs = run.sample(temperature=1.0, seed=1)
    for prompt, completion, sampled in zip(run.prompts, ids, log_probs, strict=True):
        row = torch.tensor([[*prompt, *completion]])
        batch = rows_of_sequences(row, torch.ones_like(row), len(completion))
        with torch.no_grad():
            trained = run.trainer._scorer.log_probs(run.trainer.model, batch)[0]
        torch.testing.assert_close(torch.tensor(sampled), trained, rtol=0, atol=ROUNDING)


def test_the_adapter_of_a_prefix_is_part_of_its_key(run: Run) -> None:
    """The prompts are cached by now: another adapter must not be given what this one computed."""
    adapter = [p for name, p in run.trainer.model.named_parameters() if "lora_B" in name]
    trained = run.texts()
    for parameter in adapter:
        parameter.data.neg_()
    run.trainer.vllm_generation.sync_weights()
    turned = generate_greedily(run.trainer.model, run.tokenizer, run.prompts, TOKENS)
    assert run.texts() == [completion.text for completion in turned] != trained
    for parameter in adapter:
        parameter.data.neg_()
    run.trainer.vllm_generation.sync_weights()
    assert run.texts() == trained


def test_stop_strings_end_completions_as_in_our_loop(run: Run) -> None:
    stop = run.texts()[0][2:4]
    ours = generate_greedily(
        run.trainer.model, run.tokenizer, run.prompts, TOKENS, stop_strings=[stop]
    )
    ids, _ = run.sample(temperature=0.0, stop=[stop], include_stop_str_in_output=True)
    assert [len(row) for row in ids] == [completion.token_count for completion in ours]
    assert ours[0].stop_reason == "stop_string"


def test_an_adapter_of_a_higher_rank_is_one_line(run: Run) -> None:
    base = load_base_model(ModelConfig(model_name_or_path=MODEL, dtype="float32"))
    high = get_peft_model(base, LoraConfig(r=32, target_modules=["q_proj"]))
    with pytest.raises(
        RunError, match=r"load the adapter: LoRA rank 32 is greater .* 16"
    ) as caught:
        run.trainer.vllm_generation.llm.load_adapter(high)
    assert "\n" not in str(caught.value)
    run.trainer.vllm_generation.sync_weights()


def test_a_request_that_fails_is_one_line(run: Run) -> None:
    with pytest.raises(RunError, match=r"vLLM could not sample: .*--resume continues"):
        run.trainer.vllm_generation.llm.generate([{"prompt_token_ids": [1] * 9000}])
    assert run.texts()


# -- the quickstart, by train.py -------------------------------------------------------------------

STEPS = 4
SHORT = (
    "--max_steps", STEPS, "--save_steps", STEPS // 2, "--per_device_train_batch_size", 16,
    "--lr_scheduler_type", "constant", "--lr_scheduler_kwargs", "{}",
    "--model_name_or_path", MODEL, "--warmup_steps", 0,
)  # fmt: skip
WITH_VLLM = ("--use_vllm", "true", "--vllm_mode", "colocate")
SMALL_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}


def train(output: Path, *flags: object, **environment: str) -> CompletedProcess[str]:
    return run_script(
        "train", "--config", "quickstart", *SHORT, "--output_dir", output, *flags,
        env=script_environment(**SMALL_CACHE | environment),
    )  # fmt: skip


def metrics(output: Path) -> list[dict[str, float]]:
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "reward" in row]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quickstart") / "vllm"
    done = train(output, *WITH_VLLM)
    assert done.returncode == 0, done.stderr
    return output


def test_the_quickstart_is_rewarded_as_without_vllm(quickstart: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    sampled, ours = metrics(quickstart), metrics(tmp_path / "ours")
    assert len(sampled) == len(ours) == STEPS
    environment = read_environment(quickstart)
    assert environment is not None
    if environment.dtype == "float32":  # what is faster on this machine
        assert max(row["sampling/max_gap"] for row in sampled) < ROUNDING
    assert max(abs(row["sampling/kl"]) for row in sampled) < 0.01
    for name in ("rewards/strict_format/mean", "reward", "completions/mean_length"):
        print(name, [row[name] for row in sampled], [row[name] for row in ours])
    # The same prompts, other completions of them: 16 per step.
    by_vllm, by_us = (sum(row["reward"] for row in run) / STEPS for run in (sampled, ours))
    assert abs(by_vllm - by_us) < 0.25
    assert all(run[-1]["reward"] > run[0]["reward"] for run in (sampled, ours))


def test_a_resumed_run_ends_with_the_same_bits(quickstart: Path, tmp_path: Path) -> None:
    output = tmp_path / "resumed"
    shutil.copytree(quickstart, output)
    shutil.rmtree(output / f"checkpoint-{STEPS}")
    shutil.rmtree(output / "adapter")
    done = train(output, *WITH_VLLM, "--resume")
    assert done.returncode == 0, done.stderr
    adapters = [
        load_file(run / "adapter/adapter_model.safetensors") for run in (quickstart, output)
    ]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    last = [metrics(run)[-1] for run in (quickstart, output)]
    assert last[0]["reward"] == last[1]["reward"]
    assert last[0]["sampling/kl"] == last[1]["sampling/kl"]


@pytest.mark.parametrize(
    ("flags", "environment", "code", "line"),
    [
        ((), {"VLLM_CPU_KVCACHE_SPACE": "4000"}, 2, "vLLM cannot start: Available memory on node"),
        (("--vllm_max_model_length", 64), {}, 1, "vLLM could not sample: "),
        (("--use_dora", "true"), {}, 2, "vLLM does not support DoRA"),
    ],
)
def test_what_vllm_refuses_is_one_line(
    flags: tuple[object, ...], environment: dict[str, str], code: int, line: str, tmp_path: Path
) -> None:
    done = train(tmp_path / "run", *WITH_VLLM, *flags, **environment)
    assert done.returncode == code, done.stderr
    assert line in last_line(done.stderr)
    assert "Traceback" not in done.stderr
