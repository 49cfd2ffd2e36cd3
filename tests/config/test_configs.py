"""Recipes work, and a bad key or batch size ends in one line that explains how to fix it."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, ModelConfig

from rewards import load_rewards
from sologrpo.base.errors import InputError
from sologrpo.base.files import describe_recipes, recipes
from sologrpo.config.arguments import ONE_GPU_DEFAULTS, RunArguments, SoloGRPOConfig
from sologrpo.config.evaluation import EvaluationArguments
from sologrpo.config.parsing import RENAMED, parse_config
from sologrpo.config.schedule import optimizer_steps

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
LAUNCHERS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
QUICKSTART = ["--config", "configs/quickstart.yaml"]
GSM8K_TRAIN_ROWS = 7473
# Shown together in every recipe, defaults or not: the batch is their sum.
BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
CONFIGS = (RunArguments, SoloGRPOConfig, ModelConfig)
KEYS = {field.name for cls in CONFIGS for field in fields(cls)}

# The reference notebook's settings, under TRL's present names.
NOTEBOOK = {
    "dataset_name": "openai/gsm8k",
    "prompt_format": "xml",
    "rewards": ["strict_format", "trailing_text", "integer_answer", "answer_correctness"],
    "reward_weights": None,
    "max_prompt_tokens": 512,
    "max_completion_length": 256,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": True,
    "attn_implementation": "sdpa",
    "lora_r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 500,
    "weight_decay": 0.01,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 3,
    "num_generations": 4,
    "num_iterations": 1,
    "beta": 0.02,
    "temperature": 0.7,
    "top_p": 0.9,
    "eval_strategy": "steps",
    "eval_steps": 250,
}
NOTEBOOK_FAST = NOTEBOOK | {
    "max_train_examples": 3000,
    "max_completion_length": 128,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 1,
    "num_generations": 2,
    "num_iterations": 4,
}


@pytest.fixture(autouse=True)
def in_repository_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def settings_of(path):
    run, args, model = parse_config(["--config", str(path)])
    return vars(run) | vars(args) | vars(model)


def the_error(argv):
    with pytest.raises(InputError) as caught:
        parse_config(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- shipped files ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path):
    run, args, model = parse_config(["--config", path.stem])
    assert args.output_dir == f"runs/{path.stem}"
    assert optimizer_steps(args, run.max_train_examples or GSM8K_TRAIN_ROWS) > 0
    assert len(load_rewards(run.rewards)) == len(run.rewards)
    assert model.model_name_or_path
    # Checkpoints are between generation batches: `trainer: stock` resumes exactly only there.
    steps_per_generation_batch = (
        args.steps_per_generation // args.gradient_accumulation_steps * args.num_iterations
    )
    assert args.save_steps % steps_per_generation_batch == 0
    # The quickstart is where people start to change numbers, so it shows some defaults too.
    if path.stem != "quickstart":
        defaults = {field.name: field.default for cls in CONFIGS for field in fields(cls)}
        defaults |= ONE_GPU_DEFAULTS
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
        same = [key for key, value in written.items() if value == defaults[key]]
        assert [key for key in same if key not in BATCH_KEYS] == []


@pytest.mark.parametrize(
    ("name", "notebook"), [("llama3.1-8b", NOTEBOOK), ("llama3.1-8b-fast", NOTEBOOK_FAST)]
)
def test_llama_recipes_equal_the_notebook(name, notebook):
    settings = settings_of(f"configs/{name}.yaml")
    assert {key: settings[key] for key in notebook} == notebook
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 32


def test_all_linear_is_the_seven_projections_of_a_llama_layer():
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1,
        )
    )  # fmt: skip
    target = settings_of("configs/llama3.1-8b.yaml")["lora_target_modules"]
    model = get_peft_model(model, LoraConfig(target_modules=target, task_type="CAUSAL_LM"))
    adapted = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert adapted == attention | mlp


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_accelerate_config_loads(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == 1
    assert not config.use_cpu  # a CPU is found by train.py; here it would shut out the GPU


def test_deepspeed_config_is_zero_2_and_the_one_that_accelerate_is_given():
    launcher = load_config_from_file("configs/accelerate/zero2.yaml").deepspeed_config
    deepspeed = json.loads((ROOT / launcher["deepspeed_config_file"]).read_text(encoding="utf-8"))
    assert deepspeed["zero_optimization"]["stage"] == 2
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"):
        assert deepspeed[key] == "auto"


# --- what a user can get wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("lerning_rate", "did you mean 'learning_rate'"),
        ("num_generation", "did you mean 'num_generations'"),
        ("max_completion_lenght", "did you mean 'max_completion_length'"),
        ("worked_example", "did you mean 'worked_examples'"),
        ("qqqq", "docs/configuration.md"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_name(written, says, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"{written}: 1\n")
    for argv in ([*QUICKSTART, f"--{written}", "1"], ["--config", str(config)]):
        message = the_error(argv)
        assert repr(written) in message
        assert says in message


@pytest.mark.parametrize("key", RENAMED)
def test_name_from_elsewhere_is_answered_with_a_key_that_exists(key):
    assert key not in KEYS
    message = the_error([*QUICKSTART, f"--{key}", "1"])
    named = re.findall(r"\w+", message.partition("here it is ")[2])
    assert named[0] in KEYS


BATCH = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"]
WRONG = {
    "--num_generations 3": [*BATCH, "batch of 64", "num_generations 3"],
    "--per_device_train_batch_size 3 --gradient_accumulation_steps 7": [*BATCH, "batch of 21"],
    "--reward_weights 1 2 3": ["3 reward_weights for 2 rewards"],
    "--eval_strategy steps --eval_steps 5": ["num_validation_examples"],
    "--model_name_or_path=": ["model_name_or_path"],
    "--config configs/nothing.yaml": ["configs/nothing.yaml", *(path.stem for path in RECIPES)],
    "--config": ["no config ''", "give a file or a recipe"],
}


@pytest.mark.parametrize("arguments", WRONG)
def test_settings_that_cannot_work_are_refused(arguments):
    argv = arguments.split() if "--config" in arguments else [*QUICKSTART, *arguments.split()]
    message = the_error(argv)
    assert [part for part in WRONG[arguments] if part not in message] == []


def test_without_a_model_the_recipes_are_named():
    assert "a recipe: here fit " in the_error([])


# What torch reports for an L4 of 24 GB, in GiB.
@pytest.mark.parametrize(("gibibytes", "first_larger"), [(0, 16), (22.0, 48), (79.3, None)])
def test_recipes_are_told_apart_by_the_memory_of_the_gpu(gibibytes, first_larger):
    fitting, *larger = describe_recipes(gibibytes).split("; on a GPU of ")
    assert "quickstart" in fitting
    assert [line.split(" GB")[0] for line in larger[:1]] == [str(first_larger)] * bool(first_larger)
    assert all(name in describe_recipes(gibibytes) for name in recipes())


def test_the_command_line_wins_over_the_file():
    _, args, _ = parse_config([*QUICKSTART, "--learning_rate", "1e-5"])
    assert args.learning_rate == 1e-5


# --- documentation ------------------------------------------------------------------------------


def test_documentation_names_every_key_of_ours():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    inherited = {field.name for field in fields(GRPOConfig)}
    keys = {field.name for field in fields(RunArguments)}
    keys |= {field.name for field in fields(SoloGRPOConfig)} - inherited
    keys |= {field.name for field in fields(EvaluationArguments)}
    keys |= {*ONE_GPU_DEFAULTS, *RENAMED}
    assert sorted(key for key in keys if f"`{key}`" not in text) == []
