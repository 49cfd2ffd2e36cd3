"""Warn about settings that are allowed but seldom intended."""

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.data.dataset import prompt_format_of

# Adapters of these recipes learn at 1e-5 to 5e-4. At higher rates, only a KL term keeps the policy
# close to a working model.
HIGH_LEARNING_RATE = 1e-3
LOW_TEMPERATURE = 0.5
LONG_RUN = 20  # steps; a run of more should save before its end


def suspicious_settings(
    run: RunArguments, args: SoloGRPOConfig, steps: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Warn about settings that are allowed but seldom intended, each with reason and fix."""
    if args.trust_remote_code:
        yield (
            "trust_remote_code: code from the model's repository runs on this machine with your "
            "rights, and its weights may be pickled; read it first, or leave it off"
        )
    warmup = args.get_warmup_steps(steps)
    if warmup >= steps:
        yield (
            f"the warm-up of {warmup} steps is as long as the run of {steps}: the learning rate "
            f"never reaches {args.learning_rate:g}; try --warmup_steps {steps // 10}"
        )
    decay = (args.lr_scheduler_kwargs or {}).get("num_decay_steps", 0)
    if warmup < steps < warmup + decay:
        yield (
            f"{warmup} steps of warm-up and {decay} of decay are more than the run of {steps}: the "
            f"learning rate never reaches {args.learning_rate:g}; try --lr_scheduler_kwargs "
            f"'{{\"num_decay_steps\": {steps // 3}}}'"
        )
    if args.beta == 0 and args.learning_rate >= HIGH_LEARNING_RATE:
        yield (
            f"learning_rate {args.learning_rate:g} without a KL term can ruin the model in a few "
            "steps: use at most 5e-4, the highest that was tested, or set beta 0.02"
        )
    if args.temperature < LOW_TEMPERATURE:
        yield (
            f"temperature {args.temperature:g}: the completions of a group will be nearly equal, "
            "and equal rewards teach nothing; 1.0 is usual"
        )
    longest = _longest_example(run, tokenizer)
    if longest > args.max_completion_length:
        yield (
            f"the worked example has {longest} tokens, and a completion at most "
            f"{args.max_completion_length}: the model cannot write what the prompt shows; set "
            f"max_completion_length {2 * longest} or more"
        )
    saves_nothing = args.save_strategy == "no" or (
        args.save_strategy == "steps" and args.save_steps >= steps
    )
    if saves_nothing and steps > LONG_RUN:
        yield (
            f"no checkpoint before step {steps}: a crash would lose everything; set save_steps "
            f"{max(1, steps // 10)}"
        )


def _longest_example(run: RunArguments, tokenizer: PreTrainedTokenizerBase) -> int:
    prompt_format = prompt_format_of(run)
    texts = [prompt_format.render_example(example) for example in prompt_format.worked_examples]
    return max((len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts),
               default=0)  # fmt: skip
