"""GGUF, with llama.cpp itself: converted, loaded, compared with the trained model, prompted."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from scripts import exit_code, printed_by, train_without_report
from sologrpo.base.console import Terminal
from sologrpo.base.errors import InputError
from sologrpo.base.manifest import MANIFEST
from sologrpo.config.evaluation import parse_evaluation
from sologrpo.data.dataset import load_test_prompts, prompt_token_ids
from sologrpo.export import export as export_module
from sologrpo.export.export import _load_problems
from sologrpo.export.gguf import MODELFILE, convert
from sologrpo.export.llama import running_llama
from sologrpo.export.parity import Gap, ParityCheck, parity_failure
from sologrpo.model.loading import load_base_model, load_tokenizer
from sologrpo.model.merging import save_merged
from tiny import CHAT_TEMPLATE, ROOT, SPECIAL_TOKENS, build_model, tiny_config

SMOLLM = ROOT / "models/SmolLM2-135M-Instruct"


@dataclass
class Checked:
    """A run whose trained model has answered, and its merged model."""

    run: Path
    merged: Path
    check: ParityCheck

    def gap(self, file: Path) -> Gap:
        return self.check.measure_gguf(file.stem, file)[0]


# The converter knows tokenizers by what they do, so these are real ones.
def smollm() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(SMOLLM)


def qwen() -> PreTrainedTokenizerFast:
    """Qwen2.5's, from the vocabulary that dashscope ships."""
    vocabulary = resources.files("dashscope") / "resources/qwen.tiktoken"
    converter = TikTokenConverter(
        str(vocabulary), PRETOKENIZE_REGEX, extra_special_tokens=SPECIAL_TOKENS
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


# A reward with a signal for the random text of a random model.
LETTERS = """
def letter_share(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c.isascii() for c in text) / max(len(text), 1) for text in texts]
"""


@pytest.fixture(scope="module")
def checked(
    request: pytest.FixtureRequest, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Checked:
    """Three steps of a tiny model, merged."""
    folder = tmp_path_factory.mktemp(str(request.param))
    tokenizer = {"llama": smollm, "qwen2": qwen}[request.param]()
    model = build_model(request.param, tokenizer)
    model.lm_head.weight.data *= 5  # some tokens are much likelier than others, as in a real model
    model.save_pretrained(str(folder / "model"))
    tokenizer.save_pretrained(str(folder / "model"))
    run, merged = folder / "run", folder / "merged"
    changes = {"rewards": ["letters:letter_share"], "max_steps": 3, "learning_rate": 0.02}
    settings = tiny_config(folder / "model", tiny_data, run) | changes
    (folder / "letters.py").write_text(LETTERS, encoding="utf-8")
    (folder / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert exit_code(train_without_report(), "--config", folder / "run.yaml") == 0
    assert exit_code(export_module, "--run", run, "--save_merged", merged) == 0
    settings = parse_evaluation(["--run", str(run)])
    return Checked(run, merged, ParityCheck(settings, _load_problems(settings), Terminal()))


FAMILIES = pytest.mark.parametrize("checked", ["llama", "qwen2"], indirect=True)
LLAMA = pytest.mark.parametrize("checked", ["llama"], indirect=True)


@pytest.fixture(scope="module")
def f16(checked: Checked) -> Path:
    file = checked.merged.parent / "f16.gguf"
    convert(checked.merged, file, "f16")
    return file


@FAMILIES
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_file_of_the_trained_model_passes(
    checked: Checked, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gguf"
    flags = ("--save_merged", checked.merged, "--save_gguf", folder, "--gguf", kind)
    printed = printed_by(export_module, capfd, "--run", checked.run, *flags)
    assert printed.code == 0, printed
    assert f"gguf {kind}" in printed.stdout
    assert {file.name for file in folder.iterdir()} == {
        f"model-{kind}.gguf", MODELFILE, "README.md", MANIFEST
    }  # fmt: skip
    gap = Gap.model_validate(json.loads((folder / MANIFEST).read_text())["gap"])
    assert parity_failure(gap) is None
    assert gap.kl < {"f16": 1e-4, "q8_0": 1e-2}[kind]


@FAMILIES
def test_a_file_without_the_adapter_does_not_pass(checked: Checked, tmp_path: Path) -> None:
    settings = parse_evaluation(["--run", str(checked.run)])
    name = str(settings.model.model_name_or_path)
    save_merged(load_base_model(settings.model), load_tokenizer(name), tmp_path / "base")
    convert(tmp_path / "base", tmp_path / "base.gguf", "f32")
    gap = checked.gap(tmp_path / "base.gguf")
    assert parity_failure(gap) is not None
    assert gap.kl > 0.3 * gap.training_kl  # a lower bound of the same distance


Damage = Callable[[bytearray, Any], None]


def flip(data: bytearray, tensor: Any) -> None:
    """Flip a bit of the exponent in every hundredth weight: 16 times as large, or as small."""
    start = tensor.data_offset
    for i in range(start + 1, start + int(tensor.n_bytes), 200):
        data[i] ^= 0x10


def zero(data: bytearray, tensor: Any) -> None:
    start, size = tensor.data_offset, int(tensor.n_bytes)
    data[start : start + size] = bytes(size)


def overflow(data: bytearray, tensor: Any) -> None:
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16("inf").tobytes()


def truncate(data: bytearray, tensor: Any) -> None:
    del data[len(data) // 2 :]


def empty(data: bytearray, tensor: Any) -> None:
    data.clear()


@FAMILIES
@pytest.mark.parametrize("damage", [flip, zero])
def test_damaged_weights_do_not_pass(
    checked: Checked, f16: Path, tmp_path: Path, damage: Damage
) -> None:
    gap = checked.gap(damaged(f16, tmp_path, damage))
    assert parity_failure(gap) is not None


@LLAMA
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "data is not within the file bounds"),
        (overflow, "tensor 'blk.1.ffn_down.weight' has invalid data"),
        (empty, ""),
    ],
)
def test_a_damaged_file_is_one_line(
    checked: Checked, f16: Path, tmp_path: Path, damage: Damage, message: str
) -> None:
    file = damaged(f16, tmp_path, damage)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        checked.gap(file)
    assert str(caught.value).startswith(f"llama.cpp cannot run {file}: ")
    assert "\n" not in str(caught.value)


def damaged(file: Path, folder: Path, damage: Damage) -> Path:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    data = bytearray(file.read_bytes())
    damage(data, tensors["blk.1.ffn_down.weight"])
    (folder / "damaged.gguf").write_bytes(data)
    return folder / "damaged.gguf"


def template_of(modelfile: Path) -> str:
    (template,) = re.findall(r'^TEMPLATE """(.*?)"""$', modelfile.read_text(), re.M | re.S)
    return str(template)


@LLAMA
@pytest.mark.parametrize("prompt_format", ["xml", "boxed", "r1_zero"])
def test_modelfile_prompts_as_in_training(
    checked: Checked, tmp_path: Path, prompt_format: str
) -> None:
    folder, flags = tmp_path / "gguf", ["--run", str(checked.run), "--prompt_format", prompt_format]
    saved = ("--save_merged", tmp_path / "merged", "--save_gguf", folder, "--gguf", "f16")
    assert exit_code(export_module, *flags, *saved) == 0
    settings = parse_evaluation(flags)
    tokenizer = load_tokenizer(str(settings.model.model_name_or_path))
    problems = load_test_prompts(settings.data, tokenizer=tokenizer)
    template = template_of(folder / MODELFILE)
    with running_llama(folder / "model-f16.gguf", 1024) as llama:
        asked = [template.replace("{{ .Prompt }}", question) for question in problems["question"]]
        assert [llama.tokenize(text) for text in asked] == prompt_token_ids(
            problems["prompt"], tokenizer
        )
    stops = re.findall(r'^PARAMETER stop "(.*?)"$', (folder / MODELFILE).read_text(), re.M | re.S)
    plain = ["</answer>", "\n\n\n"] if prompt_format == "r1_zero" else []
    assert stops == ["<|im_end|>", *plain]


def test_a_tokenizer_that_the_converter_does_not_know_is_one_line(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"cannot convert .* to GGUF: .*not recognized") as caught:
        convert(tiny_llama, tmp_path / "x.gguf", "f16")
    assert "\n" not in str(caught.value)


@LLAMA
def test_no_code_of_a_model_runs(checked: Checked, tmp_path: Path) -> None:
    model = shutil.copytree(checked.merged, tmp_path / "model")
    path = model / "tokenizer_config.json"
    content = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["code.Mine", None]}}
    path.write_text(json.dumps(content))
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="add --trust_remote_code if you trust it"):
        convert(model, tmp_path / "x.gguf", "f16")
    assert not (tmp_path / "ran").exists()
