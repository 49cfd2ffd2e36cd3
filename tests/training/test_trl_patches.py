"""The lines of TRL that the overrides and patches rely on, and that patches leave no trace."""

import inspect
import math
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
import trl.trainer.utils as trl_utils
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from sologrpo.training import loss, trl_patches
from sologrpo.training.trl_patches import replaced

RELIED_ON: dict[Any, tuple[str, ...]] = {
    GRPOTrainer.compute_loss: ("return self._compute_loss(model, inputs)",),
    GRPOTrainer._compute_loss: (
        # Sums over rows, normalised over the generation batch or the rows of the call.
        'elif self.loss_type in ["cispo", "dapo", "vespo"]:',
        'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
        "* self.current_gradient_accumulation_steps / self.args.steps_per_generation",
        "(per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
    ),
    GRPOTrainer._calculate_rewards: ("return rewards_per_func",),
    GRPOTrainer._generate_and_score_completions: (
        '"advantages": advantages,',
        'self._metrics[mode]["frac_reward_zero_std"].append(',
        "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
        "batch_size=batch_size",
        "if self.mask_truncated_completions:",
        "if self.args.gradient_accumulation_steps % generate_every != 0 or (",
    ),
    GRPOTrainer._get_per_token_logps_and_entropies: (
        "fused_lm_head=True",
        "batch_size=None,",
        "outputs.log_probs[:, -logits_to_keep:]",
    ),
    GRPOTrainer._prepare_inputs: (
        "shuffle_sequence_dict(generation_batch)",
        "self._buffered_inputs[self._step % self.args.steps_per_generation]",
    ),
    GRPOTrainer._generate: (
        "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields,",
        "is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids]",
    ),
    GRPOTrainer._generate_single_turn: (
        "**generate_inputs, generation_config=self.generation_config",
        "completion_ids = prompt_completion_ids[:, prompt_length:]",
        "if self.state.global_step != self._last_loaded_step:",
        "self.vllm_generation.sync_weights()",
        "self._last_loaded_step = self.state.global_step",
    ),
    GRPOTrainer.__init__: (
        "self.vllm_generation = VLLMGeneration(",
        'self.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]',
    ),
    VLLMClient.__init__: ('self.model = self._get(f"{self.base_url}/v1/models")["data"][0]["id"]',),
    VLLMClient.generate: (
        '"model": self.model,',
        'self._post(f"{self.base_url}/v1/completions", json=payload)["choices"]',
    ),
    VLLMGeneration._init_vllm: (
        "self.vllm_client = VLLMClient(",
        "self.vllm_client.init_communicator(device=accelerator.device)",
        "self.llm = LLM(",
        "self.llm.sleep(level=2)",
        "self._llm_weights_sleeping = self.enable_sleep_mode",
    ),
    VLLMGeneration.generate: (
        'if self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping:',
        'self.llm.wake_up(tags=["kv_cache"])',
        "self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False)",
    ),
    GRPOTrainer.log: ('mode = "train" if self.model.training else "eval"',),
    trl_utils: (
        "backbone_outputs = getattr(self, backbone_attr)(*args, **kwargs)",
        "labels = shift_labels",
        "compact = _use_triton(hidden_states.device)",
        "temperature,\n                _CHUNKED_LOGPROB_CHUNK_SIZE,",
    ),
}


def test_trl_is_of_the_tested_series() -> None:
    assert trl.__version__.split(".")[:2] == ["1", "16"], "run the parity tests, then widen"


@pytest.mark.parametrize(
    "holder", RELIED_ON, ids=lambda holder: getattr(holder, "__qualname__", "trl")
)
def test_trl_still_has_the_lines_that_we_rely_on(holder: Any) -> None:
    source = inspect.getsource(holder)
    for line in RELIED_ON[holder]:
        assert line in source, line


class Holder(SimpleNamespace):
    kept = "of the class"


def test_what_is_replaced_comes_back() -> None:
    holder = Holder(own="own")
    for name, inside, after in (("own", "new", "own"), ("kept", "new", "of the class")):
        with suppress(RuntimeError), replaced(holder, name, inside):
            assert getattr(holder, name) == inside
            raise RuntimeError
        assert getattr(holder, name) == after
    assert vars(holder) == {"own": "own"}


def test_the_lm_head_sees_the_given_places_within_only() -> None:
    backbone = torch.nn.Identity()
    output = SimpleNamespace(last_hidden_state=torch.arange(6.0).reshape(1, 3, 2))
    with trl_patches.lm_head_at(SimpleNamespace(base_model=backbone), torch.tensor([2, 0])):
        assert not trl_utils._use_triton(torch.device("cuda"))
        assert backbone(output).last_hidden_state.tolist() == [[[4.0, 5.0], [0.0, 1.0]]]
    assert not backbone._forward_hooks


@pytest.mark.parametrize("values", [[1.0, math.nan, -2.0], [math.nan, math.nan], [3.0, math.inf]])
def test_extremes_are_those_of_trl(values: list[float]) -> None:
    for name in ("nanmin", "nanmax"):
        expected = getattr(trl_utils, name)(torch.tensor(values))
        found = getattr(loss, name)(torch.tensor(values))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
