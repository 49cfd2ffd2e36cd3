"""Tiny random models of the causal architectures of transformers, tried in every fast way.

What the trainer or the sampling loop takes for itself must agree with the model's own forward pass
of each row alone. What does not has to be left to TRL or to `generate`.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from sologrpo.config.arguments import SoloGRPOConfig
from sologrpo.sampling.decoding import Request, can_generate_fast, generate_fast
from sologrpo.sampling.stopping import StopStrings
from sologrpo.training.drop_in import unpacked_reason
from sologrpo.training.packed_loss import PackedScorer
from sologrpo.training.packing import Tokens

VOCABULARY, WIDTH, LAYERS, HEADS, WINDOW, NEW_TOKENS = 128, 64, 4, 4, 8, 24
BOUND = 1e-4  # nats, in fp32
END = 2
# Names that configurations have for the same sizes, and what else has to become small with them.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "lru_width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_decoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_query_heads", "mamba_n_heads"), HEADS),
    **dict.fromkeys(("sliding_window", "attention_window", "window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "dropout", "activation_dropout"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "mamba_d_state"), 8),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("hidden_size_per_layer_input", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **{"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"mamba_d_head": 32, "mamba_n_groups": 1, "mamba_expand": 2, "conv_L_cache": 3},
    **{"attention_chunk_size": WINDOW, "expert_ffn_hidden_size": 32, "zero_expert_num": 0},
    **{"num_kv_shared_layers": 0, "is_decoder": True},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END},
}
# Where the sizes above contradict one another.
ALL_HEADS = {"num_key_value_heads": HEADS}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk1", "axk2"), ALL_HEADS),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), ALL_HEADS),
    "longcat_flash": ALL_HEADS | {"head_dim": 8, "moe_topk": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jetmoe": {"kv_channels": 16},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "mamba2": {"num_heads": 8, "n_groups": 1, "expand": 2},
    "smollm3": {"no_rope_layer_interval": 2},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3},
    "zaya": {"num_experts_per_tok": 1},
}
# Models of text whose configuration no sizes of ours fit, or whose decoding is not causal.
NOT_BUILT = {
    "cohere_compass_text", "dbrx", "dots3_note_text", "gemma4_assistant", "qwen4_exp_text",
    "reformer", "xlm", "xmod", "zamba",
}  # fmt: skip


# TRL 1.16.0 finds no backbone in the first, and leaves out a part of the head of the second: both
# fail or are wrong in stock TRL too.
WRONG_IN_TRL = {"llama4_text", "modernbert-decoder"}


def names() -> list[str]:
    """List the architectures that are models of text alone: others contain one of these."""
    configs = [config for config in MODEL_FOR_CAUSAL_LM_MAPPING if not config.sub_configs]
    return sorted({config.model_type for config in configs} - NOT_BUILT)


def build(name: str, attention: str = "sdpa", **others: Any) -> PreTrainedModel:
    """Build a model whose attention matters: its weights are larger than those of a new model."""
    config_class = next(c for c in MODEL_FOR_CAUSAL_LM_MAPPING if c.model_type == name)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if isinstance(model_class, tuple | list):
        model_class = model_class[0]
    fields = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        fields |= set(vars(base).get("__annotations__", ()))
    sizes = {field: size for field, size in (SIZES | others).items() if field in fields}
    attention = attention if model_class._supports_sdpa else "eager"
    errors = []
    # Some compute a size from others, and do not take it.
    for left_out in ((), ("head_dim",), ("num_key_value_heads",), ("intermediate_size",)):
        chosen = {field: size for field, size in sizes.items() if field not in left_out}
        try:
            config = config_class(**chosen | OTHER_SIZES.get(name, {}))
            torch.manual_seed(0)
            model = model_class._from_config(config, attn_implementation=attention).float().eval()
        except Exception as error:  # of any kind: the next sizes may fit
            errors.append(error)
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2 and parameter.std() < 0.05:
                    parameter.mul_(3.0)
        return model
    raise errors[0]


@dataclass(frozen=True)
class Found:
    """Hold what is ours for a model, and its distance from the model's own forward pass.

    Attributes:
        packed_gap: nats at most between packed rows and each row alone; None if left to TRL.
        shares_prompts: the pass shares prompts.
        greedy: the loop's greedy completions equal those of `generate`; None if left to it.
    """

    packed_gap: float | None
    shares_prompts: bool
    greedy: bool | None


def prompts_and_completions() -> tuple[list[list[int]], list[list[int]]]:
    """Draw three completions, long and short, for each of three prompts that begin equally."""
    generator = torch.Generator().manual_seed(1)

    def draw(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    beginning = draw(7)
    prompts = [beginning + draw(length) for length in (5, 20, 11)]
    return (
        [prompt for prompt in prompts for _ in range(3)],
        [draw(length) for length in (3, 14, 1, 9, 30, 2, 25, 4, 17)],
    )


@torch.no_grad()
def alone(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Compute the (T,) log-probs of a completion from a row without any others."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    log_probs_TV = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return log_probs_TV.gather(1, torch.tensor(completion)[:, None])[:, 0]


def try_everything(name: str, output_dir: str) -> Found:
    """Build a model, let our code decide what it takes, and compare that with the model."""
    model = build(name)
    greedy = _greedy_is_right(model)
    args = SoloGRPOConfig(
        output_dir, use_cpu=True, bf16=False, report_to="none", router_aux_loss_coef=0.0
    )
    if unpacked_reason(args, {"model": model}) is not None or name in WRONG_IN_TRL:
        return Found(None, False, greedy)
    prompts, completions = prompts_and_completions()
    expected = [alone(model, *row) for row in zip(prompts, completions, strict=True)]
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    scorer = PackedScorer(args, model, Accelerator(cpu=True))
    tokens = Tokens([*map(tuple, prompts)], completions, 30, torch.device("cpu"))
    with torch.no_grad():
        scored_BT = scorer.score(model, tokens)[0]
    gaps = [
        float((scored_T[: len(row)] - row).abs().max())
        for scored_T, row in zip(scored_BT, expected, strict=True)
    ]
    return Found(max(gaps), scorer._shares_prompts, greedy)


@torch.no_grad()
def _greedy_is_right(model: PreTrainedModel) -> bool | None:
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=[END], repetition_penalty=1.0
    )
    if not can_generate_fast(model, config, {}):
        return None
    prompts = prompts_and_completions()[0]
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    request = Request(padded, mask, config, StopStrings(None, []))
    rows = generate_fast(model, request).completion_ids.tolist()
    for ids, row in list(zip(prompts, rows, strict=True))[::3]:
        own = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            generation_config=config,
        )[0, len(ids) :].tolist()  # fmt: skip
        if _up_to_end(row) != _up_to_end(own):
            return False
    return True


def _up_to_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(END)] if END in ids else ids
