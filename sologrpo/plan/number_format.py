"""Choose the number format of a run: configured, recorded, or measured on this CPU."""

from contextlib import suppress
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from transformers import PretrainedConfig
from trl import ModelConfig

from sologrpo.base.device import faster_dtype, gemm_rates
from sologrpo.base.environment import read_environment
from sologrpo.base.errors import InputError
from sologrpo.config.arguments import RunArguments, SoloGRPOConfig
from sologrpo.model.loading import pick_dtype

DTYPES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}  # by mixed precision
MEASURED = ("float32", "bfloat16")


def choose_number_format(
    run: RunArguments, args: SoloGRPOConfig, model_args: ModelConfig, policy: PeftModel
) -> dict[str, int]:
    """Set the dtype and the mixed precision that the settings leave open on a CPU.

    What is given decides the other: `dtype` the mixed precision, `bf16` or `fp16` the dtype. If
    neither is, a resumed run keeps the dtype that it recorded, and a new one takes the faster. On a
    GPU nothing is changed.

    Returns:
        The GFLOP/s by dtype that decided, here or when the run was started; empty if none did.
    """
    if torch.cuda.is_available():
        return {}
    gflops: dict[str, int] = {}
    # A launcher may have set the mixed precision too, and DeepSpeed takes it when it is parsed.
    is_open = not (args.is_precision_given or args.mixed_precision != "no" or args.deepspeed_plugin)
    if model_args.dtype in (None, "auto"):
        model_args.dtype = DTYPES[args.mixed_precision]
        if is_open:
            model_args.dtype, gflops = _agree(run, args, policy.config.get_text_config())
        policy.to(pick_dtype(model_args.dtype))
    if is_open and model_args.dtype == "bfloat16":
        args.bf16, args.mixed_precision = True, "bf16"
    return gflops


def _agree(
    run: RunArguments, args: SoloGRPOConfig, config: PretrainedConfig
) -> tuple[str, dict[str, int]]:
    """Return the dtype of the first process, and the rates that it was chosen by."""
    chosen = None
    if args.process_index == 0:
        chosen = _recorded(run, args)
        if chosen is None:
            intermediate = getattr(config, "intermediate_size", None)
            if not isinstance(intermediate, int):  # none, or one for each layer
                intermediate = 4 * config.hidden_size
            gflops = gemm_rates(config.hidden_size, intermediate)
            chosen = faster_dtype(gflops), gflops
    agreed: tuple[str, dict[str, int]] = broadcast_object_list([chosen])[0]
    return agreed


def _recorded(run: RunArguments, args: SoloGRPOConfig) -> tuple[str, dict[str, int]] | None:
    """Return what the run to resume recorded; None if it recorded nothing that a CPU trains in."""
    before = None
    if run.resume:
        with suppress(InputError):  # it is damaged: `open_run_directory` says so
            before = read_environment(Path(args.output_dir))
    if before is None or before.dtype not in MEASURED:
        return None
    return before.dtype, before.gflops
