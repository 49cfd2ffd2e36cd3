"""Sample from a vLLM server on the same machine, which loads the adapter after every update.

The server keeps the base weights that it was started with: nothing is merged, and nothing is sent
but the path of the adapter. TRL broadcasts merged weights with NCCL instead, which rounds them and
takes two GPUs (docs/scaling.md).
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from peft import PeftModel
from trl.generation.vllm_client import VLLMClient

from sologrpo.base.errors import InputError, RunError, first_line
from sologrpo.base.redact import redact_text
from sologrpo.sampling.vllm_engine import lora_settings, save_adapter_files

logger = logging.getLogger(__name__)

RETRIES = 2  # of a request that finds no server: 4 seconds
SEE = 'docs/scaling.md, "A vLLM server"'


class AdapterServer(VLLMClient):  # type: ignore[misc]
    """Client of `vllm serve` whose requests go to the adapter that was loaded last.

    Overrides of TRL 1.16.0, trl/generation/vllm_client.py: `_get` (250) and `_post` (256) fail in
    one line, `check_server` (262) says that it waits, `get_server_info` (303) and
    `init_communicator` (729) need no NCCL and no development endpoints. Requests name `self.model`
    (434), which `__init__` takes from the server (248).

    Args:
        base_url: of the server, with credentials if it asks for them.
        group_port: is not used; TRL passes it on.
        connection_timeout: seconds to wait until the server is up.

    Raises:
        InputError: if no vLLM server answers.

    Example:
        >>> server = AdapterServer("http://localhost:8000")
        >>> server.load(model)  # after every update
        >>> server.generate(prompts, n=8, max_tokens=512)
    """

    def __init__(self, base_url: str, group_port: int = 0, connection_timeout: float = 0.0) -> None:
        self._name = f"the vLLM server at {redact_text(base_url)}"
        try:
            super().__init__(base_url=base_url, connection_timeout=connection_timeout)
        except (OSError, ValueError, LookupError, RunError) as error:
            raise InputError(
                f"{self._name} did not answer within {connection_timeout:g} seconds "
                f"(vllm_server_timeout): start it ({SEE}), or correct vllm_server_base_url"
            ) from error
        for adapter in self.session.adapters.values():
            # TRL waits a minute for a server that is gone, and does not show why one refuses (500).
            adapter.max_retries = adapter.max_retries.new(total=RETRIES, status_forcelist=())
        self.base: str = self.model

    # -- checks at the start ---------------------------------------------------------------------

    def check(self, policy: PeftModel, name: str, in_4bit: bool) -> None:
        """Ask for what training will ask for, with an adapter of zeros; the policy has no weights.

        Raises:
            InputError: if the server has another base model, takes no such adapter, or gives
                log-probs of another distribution.
        """
        self._check_base(name, in_4bit)
        named = policy.named_parameters()
        self.load(policy, {key: torch.zeros(p.shape) for key, p in named if "lora_" in key})
        self.check_log_probs()
        self.unload()

    def check_log_probs(self) -> None:
        """Check that log-probs are those of the distribution that is sampled from.

        Raises:
            InputError: if they are not: temperature and top-p would bias the loss.
        """
        # Where one token is allowed its log-prob is 0, and before that restriction it is less.
        if self.generate([[0]], top_k=1, max_tokens=1)["logprobs"][0][0][0] != 0:
            raise InputError(
                f"{self._name} gives log-probs from before temperature and top-p: start it with "
                "--logprobs-mode processed_logprobs"
            )

    def _check_base(self, name: str, in_4bit: bool) -> None:
        root = self._get(f"{self.base_url}/v1/models")["data"][0]["root"]
        if in_4bit and Path(root).resolve() == Path(name).resolve():
            raise InputError(
                f"{self._name} serves {root} unquantised, and its weights in 4 bits are trained "
                f"on: serve those, unpacked ({SEE}), or set load_in_4bit: false"
            )
        if not in_4bit and Path(root).name != Path(name).name:
            raise InputError(
                f"{self._name} serves {root}, and {name} is trained: start it with "
                f"`vllm serve {name}` ({SEE})"
            )

    # -- the adapter -----------------------------------------------------------------------------

    def load(self, model: PeftModel, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Load the adapter as it is now, under a new name, and unload the one before.

        The server keeps its own copy, so the files are removed at once. Its prefix cache
        distinguishes adapters by their name.

        Raises:
            InputError: if the server does not take it.
        """
        name = f"sologrpo-{uuid4().hex}"
        with save_adapter_files(model, weights) as folder:
            response = self._change("load", lora_name=name, lora_path=str(folder))
        if response.status_code != 200:
            reason = response.text
            with suppress(ValueError, KeyError):  # what vLLM itself answers is JSON like this
                reason = response.json()["error"]["message"]
            rank = lora_settings(model.active_peft_config)["max_lora_rank"]
            raise InputError(
                f"{self._name} does not take the adapter: {reason}: start it on this machine, with "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank {rank} "
                f"({SEE})"
            )
        self.unload()
        self.model = name

    def unload(self) -> None:
        """Unload the adapter; a server that was started again has none, which is as well."""
        if self.model != self.base:
            self._change("unload", lora_name=self.model)
            self.model = self.base

    def _change(self, action: str, **body: str) -> Any:
        return self._answer(
            self.session.post, f"{self.base_url}/v1/{action}_lora_adapter", json=body
        )

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait for the server as TRL does (262), but say so."""
        try:
            super().check_server()
        except OSError:  # requests.ConnectionError
            if not total_timeout:
                raise
            logger.warning("waiting up to %g seconds for %s", total_timeout, self._name)
            super().check_server(total_timeout, retry_interval)

    # -- requests --------------------------------------------------------------------------------

    def _get(self, url: str, **kwargs: Any) -> Any:
        return self._answer(super()._get, url, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> Any:
        return self._answer(super()._post, url, **kwargs)

    def _answer(self, method: Callable[..., Any], url: str, **kwargs: Any) -> Any:
        try:
            return method(url, **kwargs)
        except OSError as error:
            raise RunError(
                f"{self._name} no longer answers: start it again, and continue with --resume"
            ) from error
        except Exception as error:  # what TRL raises for any status but 200
            raise RunError(f"{self._name}: {first_line(error)}") from error

    def get_server_info(self) -> dict[str, Any]:
        """Return what the trainer reads (grpo_trainer.py:1147), and `check_log_probs` finds out."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def init_communicator(self, device: Any = 0) -> None:
        """Do nothing: no weights are sent."""
