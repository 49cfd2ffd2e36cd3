"""Settings that the libraries refuse after loading are refused before, in one line."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoConfig

from sologrpo.base.console import Terminal
from sologrpo.base.errors import InputError
from sologrpo.config.parsing import parse_config
from sologrpo.model.loading import load_tokenizer
from sologrpo.plan.preflight import try_settings
from sologrpo.training import run
from tiny import rows

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
SMALL = ["--load_in_4bit", "false", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def attempt(model: Path, *arguments: str, recipe: str = "quickstart") -> None:
    named = ["--config", recipe, "--model_name_or_path", str(model), *SMALL, *arguments]
    run, args, model_args = parse_config(named)
    tokenizer = load_tokenizer(str(model), chat_template_kwargs=args.chat_template_kwargs)
    try_settings(run, args, model_args, tokenizer)


def refusal(model: Path, *arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        attempt(model, *arguments)
    assert "\n" not in str(caught.value)
    assert not list(Path().iterdir()), "nothing is written"
    return str(caught.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_shipped_recipes_pass(tiny_llama: Path, recipe: str) -> None:
    attempt(tiny_llama, recipe=recipe)


VALIDATED = "--eval_strategy steps --eval_steps 1 --num_validation_examples 1"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--attn_implementation flash_attention_2", "attn_implementation flash_attention_2"),
        ("--attn_implementation junk", "attn_implementation junk"),
        ("--lora_target_modules q_proj v_prj", "unknown 'v_prj'; did you mean 'v_proj'?"),
        ("--lora_target_modules q_prj", "unknown 'q_prj'; did you mean 'q_proj'?"),
        ("--lora_target_modules q_proj lm_head", "LM head is never trained"),
        ("--lora_target_modules .*[", "lora_target_modules"),
        ("--lora_modules_to_save nothing", "lora_modules_to_save: unknown 'nothing'"),
        ("--lora_target_parameters nothing", "lora_target_parameters: unknown 'nothing'"),
        ("--optim galore_adamw", "optim galore_adamw"),
        ("--optim lomo", "optim lomo"),
        ("--optim_args junk", "optim"),
        ("--adam_beta2 1", "optim adamw_torch_fused: Invalid beta"),
        ("--lr_scheduler_type cosine --lr_scheduler_kwargs {\"a\":1}", "lr_scheduler_kwargs"),
        ("--lr_scheduler_type cosine --lr_scheduler_kwargs {\"num_cycles\":[]}", "lr_scheduler"),
        ("--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {}", "min_lr"),
        ("--generation_kwargs {\"top_kk\":5}", "unknown 'top_kk'; did you mean 'top_k'?"),
        ("--generation_kwargs {\"num_return_sequences\":2}", "number or the form"),
        ("--generation_kwargs {\"top_k\":-5}", "top_k"),
        ("--generation_kwargs {\"repetition_penalty\":0}", "penalty"),
        ("--generation_kwargs {\"num_beams\":\"many\"}", "sampling settings"),
        ("--cache_implementation junk", "cache_implementation"),
        ("--dataloader_persistent_workers true", "persistent_workers"),
        ("--dataloader_multiprocessing_context fork", "multiprocessing"),
        ("--gradient_checkpointing_kwargs {\"junk\":1}", "junk"),
        ("--torch_compile true --torch_compile_backend junk", "junk"),
        ("--chat_template_kwargs {\"tokenize\":true}", "tokenize cannot be set"),
        (f"{VALIDATED} --metric_for_best_model acuracy", "'acuracy' is not reported"),
        (f"{VALIDATED} --trainer stock --metric_for_best_model accuracy", "eval_loss"),
        ("--use_vllm true", "vllm is not installed"),
        ("--use_liger_kernel true", "liger_kernel is not installed"),
        ("--router_aux_loss_coef 0.1", "no experts"),
        ("--sync_ref_model true --beta 0.1", "sync_ref_model"),
        ("--save_strategy best", "set eval_strategy"),
        ("--rewards mine:prompt other:step", "cannot be called 'prompt'"),
        ("--lora_task_type SEQ_CLS", "lora_task_type"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused(tiny_llama: Path, arguments: str, says: str) -> None:
    assert says in refusal(tiny_llama, *arguments.split())


@pytest.mark.parametrize("trainer", ["solo", "stock"])
def test_a_tied_head_cannot_be_cast(tiny_llama: Path, tiny_tied: Path, trainer: str) -> None:
    arguments = ["--trainer", trainer, "--cast_lm_head_to_fp32", "true"]
    assert "tie_word_embeddings" in refusal(tiny_tied, *arguments)
    attempt(tiny_llama, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        "--lora_target_modules q_proj",
        "--lora_target_modules q_proj v_proj",
        "--lora_target_modules layers.0.self_attn.q_proj up_proj",
        "--lora_target_modules .*\\.[qv]_proj",
        "--optim adafactor",
        "--lr_scheduler_type cosine_with_restarts --lr_scheduler_kwargs {\"num_cycles\":2}",
        "--generation_kwargs {\"no_repeat_ngram_size\":3}",
        "--gradient_checkpointing_kwargs {\"use_reentrant\":false}",
        f"{VALIDATED} --metric_for_best_model accuracy_lenient",
        f"{VALIDATED} --trainer stock --metric_for_best_model reward",
        f"{VALIDATED} --save_strategy best",
    ],
)  # fmt: skip
def test_a_setting_that_works_passes(tiny_llama: Path, arguments: str) -> None:
    attempt(tiny_llama, *arguments.split())


@pytest.mark.parametrize(
    ("kind", "architecture", "says"),
    [
        ("t5", "T5ForConditionalGeneration", "T5ForConditionalGeneration"),
        ("clip", "CLIPModel", "CLIPModel"),
        ("bert", "BertForMaskedLM", "BertForMaskedLM"),
        ("llama", "LlamaForSequenceClassification", "LlamaForSequenceClassification"),
        ("whisper", None, "whisper"),
        ("gemma3", "Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, kind: str, architecture: Any,
    says: str,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    load_tokenizer(str(tiny_llama)).save_pretrained(folder)
    config = AutoConfig.for_model(kind).to_dict() | {
        "architectures": [architecture] if architecture else None
    }
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    line = refusal(folder)
    assert str(folder) in line
    assert says in line or "reads more than text" in line


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"model_type": "nothing"}', '{"model_type": "llama", "num_attention_heads": 0}'],
)
def test_a_model_that_cannot_be_built_is_refused(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.mktemp("model")
    load_tokenizer(str(tiny_llama)).save_pretrained(folder)
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert str(folder) in refusal(folder)


def test_what_the_trainer_refuses_is_one_line(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("no such\n  combination")

    monkeypatch.setattr(run, "SoloGRPOTrainer", refuse)
    settings = parse_config(["--config", "quickstart", "--model_name_or_path", str(tiny_llama)])
    data = (Dataset.from_list(rows(1)), None)
    with pytest.raises(InputError, match="the trainer refuses the settings: no such combination"):
        run.build_trainer(settings, None, [], data, None, Terminal())  # type: ignore[arg-type]


def test_only_the_client_gets_the_credentials_of_a_url(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def build(args: Any, **_: object) -> Any:
        given.append(args.vllm_server_base_url)
        trainer = SimpleNamespace(args=copy.copy(args), remove_callback=lambda callback: None)
        trainer.callback_handler = SimpleNamespace(callbacks=[])
        return trainer

    monkeypatch.setattr(run, "SoloGRPOTrainer", build)
    named = ["--config", "quickstart", "--model_name_or_path", str(tiny_llama)]
    settings = parse_config([*named, "--vllm_server_base_url", "http://me:secret@host:1"])
    data = (Dataset.from_list(rows(1)), None)
    trainer = run.build_trainer(settings, None, [], data, None, Terminal())  # type: ignore[arg-type]
    assert given == ["http://me:secret@host:1"]
    assert trainer.args.vllm_server_base_url == "http://***@host:1"
    assert settings[1].vllm_server_base_url == "http://***@host:1"
