"""The trainer's sampling engines: corrections for rounded weights, validation, and vLLM."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_metrics import unexplained

from digits import digit_share
from fixed_rollouts import config, make_trainer
from sologrpo.base.errors import InputError, RunError
from sologrpo.sampling.decoding import Request, generate_fast
from sologrpo.training.trainer import SoloGRPOTrainer


def trained(
    path: Path, output: Path, watch: Callable[[Any], None] = lambda trainer: None, **settings: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """Train a step; the trainer and the batches that it trained on."""
    args = config(output, logging_steps=1, **settings)
    trainer = make_trainer(SoloGRPOTrainer, path, args, digit_share)
    seen: list[dict[str, Any]] = []
    original = trainer._prepare_inputs
    trainer._prepare_inputs = lambda inputs: seen.append(original(inputs)) or seen[-1]
    watch(trainer)
    trainer.train()
    return trainer, seen


INEXACT = [
    {"bf16": True, "sampling_engine": "merged"},
    {"bf16": True, "sampling_engine": "merged", "num_iterations": 2, "max_steps": 2},
]


@pytest.mark.parametrize("settings", INEXACT)
def test_an_inexact_engine_is_corrected_for(
    settings: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    trainer, batches = trained(tiny_llama, tmp_path, temperature=0.9, **settings)
    assert not trainer._rollout.sampler.is_exact
    for batch in batches:
        assert torch.equal(batch["old_per_token_logps"], batch["sampling_per_token_logps"])
        mask = batch["completion_mask"].bool()
        assert batch["old_per_token_logps"].shape == mask.shape
        assert (batch["old_per_token_logps"][mask] < 0).all()
    first = trainer.state.log_history[0]
    assert first["ratio/mean"] == pytest.approx(1, abs=0.02)
    assert first["ratio/min"] > 0.5
    assert first["ratio/max"] < 2
    if settings.get("bf16"):
        assert first["ratio/min"] < 1 < first["ratio/max"]
    assert abs(first["sampling/kl"]) < 0.02
    assert unexplained([first]) == set()


@pytest.mark.parametrize(("engine", "passes"), [("merged", 0), ("adapter", 1)])
def test_old_log_probs_are_not_computed_twice(
    engine: str, passes: int, tiny_llama: Path, tmp_path: Path
) -> None:
    scored = []

    def watch(trainer: Any) -> None:
        original, sampler = trainer._scorer.log_probs, trainer._rollout.sampler

        def log_probs(*args: Any) -> Any:
            if sampler.engine is not None:  # not the trial that chooses it
                scored.append(args)
            return original(*args)

        trainer._scorer.log_probs = log_probs

    settings = {"bf16": True, "num_iterations": 2, "max_steps": 2, "sampling_engine": engine}
    trained(tiny_llama, tmp_path, watch, **settings)
    assert len(scored) == passes


def test_an_exact_engine_needs_no_correction(tiny_llama: Path, tmp_path: Path) -> None:
    for engine in ("auto", "adapter"):
        trainer, (batch,) = trained(tiny_llama, tmp_path, sampling_engine=engine)
        assert trainer._rollout.sampler.is_exact
        assert "old_per_token_logps" not in batch
        assert "sampling_per_token_logps" not in batch
        logs = trainer.state.log_history[0]
        assert logs["ratio/min"] == logs["ratio/max"] == 1
        assert "sampling/kl" not in logs


@pytest.mark.parametrize("engine", ["adapter", "merged"])
def test_validation_uses_the_weights_of_the_engine(
    engine: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = config(tmp_path, sampling_engine=engine)
    trainer = make_trainer(SoloGRPOTrainer, tiny_llama, args, digit_share)
    has_adapter: list[bool] = []

    def evaluate(model: Any, *args: Any) -> dict[str, float]:
        has_adapter.append(any(hasattr(m, "lora_A") for m in model.modules()))
        return {"accuracy": 0.0}

    monkeypatch.setattr("sologrpo.training.trainer.evaluate_greedily", evaluate)
    trainer.evaluate(trainer.train_dataset)
    assert has_adapter == [engine == "adapter"]


def test_an_engine_for_a_call_that_it_does_not_cover(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sampling_engine merged covers plain sampling"):
        trained(tiny_llama, tmp_path, sampling_engine="merged", repetition_penalty=1.1)


@pytest.mark.parametrize("is_corrected", [True, False])
@pytest.mark.parametrize("off", [0.0, 0.5])
def test_vllm_is_compared_with_the_trainer(
    off: float, is_corrected: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    """With a stand-in for vLLM that samples with our loop, and is `off` nats away."""

    def stand_in(trainer: Any) -> None:
        model = trainer.model

        def generate(prompts: list[list[int]], **kwargs: Any) -> Any:
            padded = trainer.processing_class.pad({"input_ids": prompts}, return_tensors="pt")
            asked = Request(
                padded["input_ids"], padded["attention_mask"], trainer.generation_config,
                trainer._rollout.stops,
            )  # fmt: skip
            done = generate_fast(model, asked, with_log_probs=True)
            lengths = asked.mask_of(done.completion_ids).sum(dim=1).tolist()
            log_probs = [
                [[p - off] for p in row[:n]]
                for row, n in zip(done.log_probs.tolist(), lengths, strict=True)
            ]
            pairs = zip(done.completion_ids.tolist(), lengths, strict=True)
            return prompts, [row[:n] for row, n in pairs], log_probs, None

        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(generate=generate, sync_weights=lambda: None)

    correction = {"vllm_importance_sampling_correction": is_corrected}
    if off:
        with pytest.raises(RunError, match=r"vLLM is 0\.5.. nats per token off .* use_vllm"):
            trained(tiny_llama, tmp_path, stand_in, **correction)
    else:
        trainer, (batch,) = trained(tiny_llama, tmp_path, stand_in, **correction)
        logs = trainer.state.log_history[0]
        assert 0 < abs(logs["sampling/kl"]) < logs["sampling/max_gap"] < 1e-4
        assert unexplained([logs]) == set()
        if not is_corrected:
            return
        # TRL itself corrects for vLLM, with its own old log-probs.
        torch.testing.assert_close(
            batch["old_per_token_logps"] * batch["completion_mask"],
            batch["sampling_per_token_logps"], rtol=0, atol=1e-4,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling_engine": "fast"}, "sampling_engine: 'fast'; expected 'auto', 'adapter'"),
        ({"sampling_engine": "continuous"}, "expected 'auto', 'adapter' or 'merged'$"),
        ({"sampling_token_budget": 0}, "sampling_token_budget: 0; expected greater than"),
        ({"sampling_engine": "merged", "use_vllm": True}, "both choose the engine"),
        ({"use_vllm": True, "top_k": 50}, "use_vllm with top_k 50: vLLM's log-probs"),
        ({"use_vllm": True, "min_p": 0.1}, "use_vllm with min_p 0.1"),
        ({"use_vllm": True, "repetition_penalty": 1.1}, "use_vllm with repetition_penalty 1.1"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "1 processes cannot be divided"),
        ({"use_transformers_continuous_batching": True}, "to bf16 permanently: leave it out"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        config(tmp_path, **settings)
