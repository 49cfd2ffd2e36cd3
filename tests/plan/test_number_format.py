"""The number format on a CPU: chosen by measurement unless it is given, recorded, and kept."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import Printed, load_script, printed_by, train_without_report
from sologrpo.base import device
from sologrpo.base.environment import RunEnvironment, read_environment
from sologrpo.config.parsing import parse_config
from sologrpo.plan.number_format import choose_number_format
from sologrpo.plan.preflight import build_policy
from tiny import short_recipe, write_rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is measured on a GPU")

BF16_IS_FAST = {"float32": 160, "bfloat16": 600}
BF16_IS_SLOW = {"float32": 160, "bfloat16": 95}
CLOSE = {"float32": 160, "bfloat16": 180}
RATES = "sologrpo.plan.number_format.gemm_rates"
Train = Callable[..., Printed]


def refuse_to_measure(*_: int) -> dict[str, int]:
    raise AssertionError("measured")


def choose(model: Path, *given: str) -> tuple[dict[str, int], Any, Any, Any]:
    """Do what `train.py` does with the quickstart; the rates, the settings and the policy."""
    arguments = ["--config", "quickstart", "--model_name_or_path", str(model), *given]
    run, args, model_args = parse_config(arguments)
    policy = build_policy(model_args)
    return choose_number_format(run, args, model_args, policy), args, model_args, policy


# -- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rates", "dtype", "mixed"),
    [(BF16_IS_FAST, "bfloat16", "bf16"), (BF16_IS_SLOW, "float32", "no"), (CLOSE, "float32", "no")],
)
def test_the_faster_format_is_chosen(
    rates: dict[str, int], dtype: str, mixed: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(*sizes: int) -> dict[str, int]:
        measured.append(sizes)
        return rates

    monkeypatch.setattr(RATES, measure)
    gflops, args, model_args, policy = choose(tiny_llama)
    assert measured == [(64, 128)]  # of the tiny model
    assert gflops == rates
    assert (model_args.dtype, args.mixed_precision, args.bf16) == (dtype, mixed, mixed == "bf16")
    assert {p.dtype for p in policy.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("given", "dtype", "mixed"),
    [
        ("--dtype float32", "float32", "no"),
        ("--dtype bfloat16", "bfloat16", "bf16"),
        ("--bf16 true", "bfloat16", "bf16"),
        ("--bf16 false", "float32", "no"),
        ("--fp16 true", "float16", "fp16"),
        ("--dtype float32 --bf16 true", "float32", "bf16"),
        ("--dtype bfloat16 --bf16 false", "bfloat16", "no"),
    ],
)
def test_what_is_given_is_taken_without_measuring(
    given: str, dtype: str, mixed: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RATES, refuse_to_measure)
    gflops, args, model_args, policy = choose(tiny_llama, *given.split())
    assert gflops == {}
    assert (model_args.dtype, args.mixed_precision) == (dtype, mixed)
    assert {p.dtype for p in policy.parameters()} == {getattr(torch, dtype)}


def test_the_products_are_measured_once_and_draw_no_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "MEASURED_SECONDS", 0)
    device.gemm_rates.cache_clear()
    before = torch.random.get_rng_state()
    rates = device.gemm_rates(256, 512)
    assert rates.keys() == {"float32", "bfloat16"}
    assert min(rates.values()) > 0
    assert device.gemm_rates(256, 512) is rates
    assert torch.equal(torch.random.get_rng_state(), before)


def test_rates_count_the_operations_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_seconds_of_a_step", lambda layer: 1e-3)
    monkeypatch.setattr(device, "MEASURED_SECONDS", 0)
    device.gemm_rates.cache_clear()
    rows, weights = device.TRAINED_ROWS, 2 * 256 * 512 + 256 * 256
    # Forward, backward and decoding: a multiplication and an addition per weight and token.
    expected = round(3 * 2 * rows * weights / 1e-3 / 1e9)
    assert device.gemm_rates(256, 512) == {"float32": expected, "bfloat16": expected}
    device.gemm_rates.cache_clear()


# -- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> list[str]:
    """Arguments of the shipped quickstart in small; nothing in it names a number format."""
    import yaml

    settings = short_recipe("quickstart") | {"model_name_or_path": str(tiny_llama)}
    settings |= {"rewards": ["digits:digit_share"], "reward_weights": None, "max_steps": 3}
    del settings["dtype"]
    path = tmp_path_factory.mktemp("config") / "quickstart.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return ["--config", str(path)]


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str], recipe: list[str]) -> Train:
    return lambda output, *more: printed_by(
        train_without_report(), capfd, *recipe, "--output_dir", output, *more
    )


def recorded(run: Path) -> RunEnvironment:
    environment = read_environment(run)
    assert environment is not None
    return environment


def weights_of(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def test_a_run_keeps_its_format(
    train: Train,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RATES, lambda *_: BF16_IS_FAST)
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    printed = train(run)
    assert printed.code == 0, printed
    device_line = printed.stdout.splitlines()[0]
    assert device_line.endswith("bfloat16 (GFLOP/s: float32 160, bfloat16 600)")
    assert (recorded(run).dtype, recorded(run).gflops) == ("bfloat16", BF16_IS_FAST)

    shutil.copytree(run, resumed, ignore=shutil.ignore_patterns("adapter", "checkpoint-3"))
    monkeypatch.setattr(RATES, lambda *_: BF16_IS_SLOW)
    printed = train(resumed, "--resume")
    assert printed.code == 0, printed
    assert "settings changed" not in printed
    assert printed.stdout.splitlines()[0] == device_line
    assert (recorded(resumed).dtype, recorded(resumed).gflops) == ("bfloat16", BF16_IS_FAST)
    assert weights_of(resumed) == weights_of(run)

    monkeypatch.setattr(RATES, refuse_to_measure)
    shutil.rmtree(resumed / "adapter")
    assert train(resumed, "--resume", "--dtype", "bfloat16").code == 0
    assert recorded(resumed).gflops == BF16_IS_FAST
    test = write_rows(tmp_path / "test.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}] * 2)
    evaluate = load_script("evaluate")
    printed = printed_by(evaluate, capfd, "--run", run, "--dataset_name", test)
    assert printed.code == 0, printed
    for label in ("baseline-test.jsonl", "trained-test.jsonl"):
        results = json.loads((run / "eval" / label / "results.json").read_text())
        assert results["settings"]["dtype"] == "bfloat16"


def test_a_record_that_a_cpu_did_not_make_is_not_taken(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setattr(RATES, lambda *_: BF16_IS_SLOW)
    assert train(run).code == 0
    environment = run / "environment.json"
    facts = json.loads(environment.read_text())
    environment.write_text(json.dumps(facts | {"dtype": "float16"}))
    printed = train(run, "--resume")
    assert printed.code == 2
    assert "add --dtype float16" in printed
    environment.write_text("{")
    printed = train(run, "--resume")
    assert printed.code == 2
    assert "--accept_changes" in printed


def test_in_bf16_the_adapter_the_loss_and_the_log_softmax_are_in_fp32(
    train: Train, recipe: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, set[Any]] = {}
    script = train_without_report()
    build = script.build_trainer  # type: ignore[attr-defined]

    def note(name: str, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            # Whether any value would be changed by rounding it to bf16.
            is_fine = bool((tensor != tensor.bfloat16()).any())
            seen.setdefault(name, set()).add((tensor.dtype, is_fine))

    def watched(holder: Any, name: str, key: str, pick: Callable[[Any], torch.Tensor]) -> None:
        original = getattr(holder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            note(key, pick(result))
            return result

        setattr(holder, name, call)

    def build_watched(*args: Any) -> Any:
        trainer = build(*args)
        watched(trainer._scorer, "score", "log-probs", lambda scores: scores[0])
        watched(trainer._loss, "_forward", "loss", lambda loss_and_metrics: loss_and_metrics[0])
        watched(trainer._rollout.sampler, "sample", "sampled", lambda s: s.log_probs)
        trainers.append(trainer)
        return trainer

    trainers: list[Any] = []
    script.build_trainer = build_watched  # type: ignore[attr-defined]
    printed = printed_by(
        script, capfd, *recipe, "--output_dir", tmp_path / "run", "--dtype", "bfloat16",
        "--sampling_engine", "merged",
    )  # fmt: skip
    assert printed.code == 0, printed
    (trainer,) = trainers
    parameters = list(trainer.model.parameters())
    assert {p.dtype for p in parameters if not p.requires_grad} == {torch.bfloat16}
    trained = [p for p in parameters if p.requires_grad]
    note("adapter", torch.cat([p.detach().flatten() for p in trained]))
    for state in trainer.optimizer.state.values():
        note("optimizer", state["exp_avg"], state["exp_avg_sq"])
    expected = {"log-probs", "loss", "sampled", "adapter", "optimizer"}
    assert seen.keys() == expected
    for name in expected - {"loss", "optimizer"}:
        assert seen[name] == {(torch.float32, True)}, name
    for name in ("loss", "optimizer"):  # some are zero
        assert {dtype for dtype, _ in seen[name]} == {torch.float32}
        assert any(is_fine for _, is_fine in seen[name])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(abs(row["sampling/kl"]) < 0.02 for row in rows if "reward" in row)
