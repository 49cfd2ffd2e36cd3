"""Parse the configuration of a run: flat YAML and command line, into three dataclasses.

A key means the same in the file and on the command line, and the command line takes precedence.
"""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from trl import ModelConfig

from rewards import OF_ANY_FORMAT, OF_ONE_FORMAT, make_importable, name_of_spec
from rewards.contained import RESERVED_COLUMNS
from sologrpo.base.device import gpu_gibibytes
from sologrpo.base.errors import SETTING_ERRORS, InputError, refusing
from sologrpo.base.files import describe_recipes, find_config
from sologrpo.base.redact import HIDDEN, count_redacted, redact, redact_text
from sologrpo.base.schema import read_yaml
from sologrpo.command_line import Parser
from sologrpo.config.arguments import ONE_GPU_DEFAULTS, RunArguments, SoloGRPOConfig
from sologrpo.config.checks import check_settings
from sologrpo.prompts import PROMPT_FORMATS

CONFIG_CLASSES = (RunArguments, SoloGRPOConfig, ModelConfig)
# Origins of a setting, besides a config file.
COMMAND_LINE, PROJECT = "command line", "SoloGRPO"
_UNSET = object()

# Names from other trainers and older versions of TRL, and what to write instead.
RENAMED: dict[str, str] = {
    # CS336 / Tinker scripts
    "model_name": "model_name_or_path",
    "base_url": "vllm_server_base_url, with vllm_mode: server; without vLLM nothing is remote",
    "group_size": "num_generations",
    "rollout_batch_size": "generation_batch_size (counts completions: questions x num_generations)",
    "n_grpo_steps": "max_steps",
    "cliprange": "epsilon",
    "lora_rank": "lora_r",
    "epochs_per_rollout_batch": "num_iterations",
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps",
    "micro_batch_size": "per_device_train_batch_size",
    "sampling_temperature": "temperature",
    "sampling_max_tokens": "max_completion_length",
    "sampling_top_p": "top_p",
    "max_tokens": "max_completion_length",
    "use_std_normalization": "scale_rewards (group or none)",
    "use_r1_zero_format": "prompt_format: r1_zero",
    "save_every": "save_steps",
    "eval_every": "eval_steps",
    "log_path": "output_dir",
    "wandb_project": "project, with report_to: wandb",
    "wandb_name": "run_name, with report_to: wandb",
    "lora_dim": "lora_r",
    # Names that TRL, transformers or PEFT removed or call differently
    "max_prompt_length": "max_prompt_tokens",
    "evaluation_strategy": "eval_strategy",
    "torch_dtype": "dtype",
    "kl_coef": "beta",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "reward_funcs": "rewards",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "trainer_class": "trainer",
}


class CheckedParser(Parser):
    """Parse options into dataclasses, and check each value that is given."""

    def given(self, argv: Sequence[str]) -> dict[str, Any]:
        """Parse a command line, without the command's name, into the settings that it gives.

        Raises:
            InputError: for an unknown option, a value that an option does not take, or a value
                without an option.
        """
        unset = Namespace(**dict.fromkeys((action.dest for action in self._actions), _UNSET))
        parsed, rest = self.parse_known_args(argv, unset)
        if rest:
            raise InputError(f"unexpected {rest[0]!r}: write an option before it, with two dashes")
        found = {name: value for name, value in vars(parsed).items() if value is not _UNSET}
        return found | check_settings(
            {name: value for name, value in found.items() if name != "config"},
            COMMAND_LINE, *self.dataclass_types,
        )  # fmt: skip

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """Parse a command line into one instance per dataclass.

        Raises:
            InputError: as `given`.
        """
        return tuple(self.parse_dict(self.given(argv)))


def parse_config(
    argv: Sequence[str] | None = None,
) -> tuple[RunArguments, SoloGRPOConfig, ModelConfig]:
    """Parse `--config NAME` and `--key value` pairs, by default those of the process.

    Raises:
        InputError: for an unreadable file, an unknown key, a value of the wrong type, or settings
            that contradict each other. The message is one line that says how to fix it.
    """
    parser = CheckedParser(*CONFIG_CLASSES, renamed=RENAMED)
    parser.add_argument(
        "--config", nargs="?", const="", metavar="NAME", help="Config file, or name of a recipe"
    )
    parser.set_defaults(**ONE_GPU_DEFAULTS)  # for --help
    words = list(sys.argv[1:] if argv is None else argv)
    if sum(word.partition("=")[0] == "--config" for word in words) > 1:
        raise InputError("--config is there more than once: give one file")
    given = parser.given(words)
    settings, origins = dict(ONE_GPU_DEFAULTS), dict.fromkeys(ONE_GPU_DEFAULTS, PROJECT)
    name = given.pop("config", None)
    if name is not None:
        path = find_config(name)
        make_importable(path.parent)  # a reward module may be next to the config
        content = _read_config(path, parser)
        settings |= content
        origins |= dict.fromkeys(content, str(path))
    with refusing(errors=SETTING_ERRORS):  # our code runs too: its defects are not the user's
        run_args, trainer_args, model_args = parser.parse_dict(settings | given)
    shown = given.keys() - {"dry_run", "traceback"}
    run_args.origins = origins | dict.fromkeys(shown, COMMAND_LINE)
    _hide_secrets(run_args, trainer_args, model_args)
    _as_names(model_args)
    _resolve_rewards(run_args)
    _cross_check(run_args, trainer_args, model_args)
    return run_args, trainer_args, model_args


def _read_config(path: Path, parser: CheckedParser) -> dict[str, Any]:
    content = read_yaml(path, dict[str, Any])
    if "env" in content:  # some variables let every Python process that is started run code
        raise InputError(
            f"{path}: env is not taken from a file: write NAME=VALUE before the command"
        )
    parser.check_keys(content)
    kernel = "/" in str(content.get("attn_implementation"))
    trusted = content.pop("trust_remote_code", False) is not False
    for key, is_code in (("trust_remote_code", trusted), ("attn_implementation", kernel)):
        if is_code:
            raise InputError(
                f"{path}: {key} lets code from the Hub run here, and is not taken from a file: "
                f"leave it out, and add --{key} to the command"
            )
    return check_settings(content, path, *CONFIG_CLASSES)


def _hide_secrets(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> None:
    """Move the Hub's token to the environment, and hide secrets in what W&B uploads."""
    for key, value in (vars(run) | vars(args) | vars(model)).items():
        if count_redacted(value):  # in what was copied from the config.yaml of a run
            raise InputError(
                f"{key} holds {HIDDEN}, which stands for a secret that is not recorded: give {key} "
                "again, in the config or on the command line"
            )
    if args.hub_token is not None:
        os.environ["HF_TOKEN"], args.hub_token = args.hub_token, None
    sys.argv[1:] = [redact(redact_text(arg), before) for before, arg in pairwise(sys.argv)]


def _as_names(model: ModelConfig) -> None:
    """Take a single LoRA target as the name of a module, unless it is a regular expression.

    TRL 1.16.0 turns a list of one into a text (model_config.py:177-178), and to PEFT a text is a
    regular expression for the whole name of a module.
    """
    target = model.lora_target_modules
    if isinstance(target, str) and re.fullmatch(r"[\w.]+", target):
        model.lora_target_modules = [target]


def _resolve_rewards(run: RunArguments) -> None:
    if run.rewards is None:
        own = PROMPT_FORMATS[run.prompt_format].rewards
        run.rewards = list(OF_ANY_FORMAT if run.prompt_formats else own)
    if not isinstance(run.rewards, list):
        raise InputError(f"rewards must be a list: write rewards: [{run.rewards}]")
    if not run.rewards:
        raise InputError("rewards is empty: name at least one; `sologrpo rewards` lists them")


def _cross_check(run: RunArguments, args: SoloGRPOConfig, model: ModelConfig) -> None:
    if not model.model_name_or_path:
        raise InputError(
            "no model: set model_name_or_path to a Hub name or a local folder, or give --config "
            f"with a recipe: {describe_recipes(gpu_gibibytes())}"
        )
    if not model.use_peft:
        raise InputError("use_peft: false is not supported: SoloGRPO trains LoRA adapters")
    if args.reward_weights is not None and len(args.reward_weights) != len(run.rewards):
        raise InputError(
            f"{len(args.reward_weights)} reward_weights for {len(run.rewards)} rewards; "
            "give one weight per reward"
        )
    _check_reward_names(run, args)
    # Loads transformers' models and their compiler, which `--help` need not wait for.
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    with refusing("report_to"):  # the trainer would do this after loading the model
        for callback in get_reporting_integration_callbacks(args.report_to):
            callback()
    _leave_out_of_stock(run, args)
    validates = args.eval_strategy != "no" or args.eval_on_start
    if validates and run.num_validation_examples < 1:
        name = "eval_on_start" if args.eval_strategy == "no" else "eval_strategy"
        raise InputError(
            f"{name} is set but nothing is held out: set num_validation_examples, e.g. 100"
        )
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise InputError(
            "save_strategy best saves after a validation: set eval_strategy steps, eval_steps and "
            "num_validation_examples, or save_strategy steps"
        )


def _leave_out_of_stock(run: RunArguments, args: SoloGRPOConfig) -> None:
    """Choose the best adapter by loss: TRL's own validation reports no accuracy."""
    if run.trainer == "stock" and args.metric_for_best_model == "eval_accuracy":
        args.metric_for_best_model, args.greater_is_better = None, None


def _check_reward_names(run: RunArguments, args: SoloGRPOConfig) -> None:
    names = [name_of_spec(spec) for spec in run.rewards]
    if taken := sorted(RESERVED_COLUMNS.intersection(names)):
        raise InputError(
            f"a reward cannot be called {taken[0]!r}: completions are logged under that name; "
            "rename it"
        )
    if run.prompt_formats and (alien := sorted(OF_ONE_FORMAT.intersection(names))):
        raise InputError(
            f"reward {alien[0]!r} knows one prompt format only, and prompt_formats names several: "
            f"use {' and '.join(OF_ANY_FORMAT)}"
        )
    if args.outcome_reward is None:
        return
    if run.trainer == "stock":
        raise InputError("outcome_reward needs trainer: solo; TRL's trainer cannot gate rewards")
    if args.outcome_reward not in names:
        raise InputError(
            f"outcome_reward {args.outcome_reward!r} is not among the rewards: {', '.join(names)}"
        )
