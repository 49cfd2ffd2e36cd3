"""`make doctor` tells what is wrong with a machine, and how to fix it."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import psutil
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError

from server import Server
from sologrpo.base import hub
from sologrpo.plan import doctor
from sologrpo.plan.doctor import Finding

ROOT = Path(__file__).resolve().parents[2]


def test_this_machine_can_train(server: Server) -> None:
    done = server.run_command("doctor", cwd=ROOT)
    assert done.code == 0, done
    names = [line.split()[0] for line in done.out.splitlines() if not line.startswith(" ")]
    assert names == list(doctor.CHECKS)


def test_an_error_is_shown_with_its_fix_and_hides_no_other_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks_off() -> Finding:
        raise OSError("libcudart.so:\ncannot open")

    checks = {"first": breaks_off, "second": lambda: Finding("warning", "little", "get more")}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    with pytest.raises(SystemExit, match="1"):
        doctor.main([])
    shown = capsys.readouterr().out
    assert "error   OSError: libcudart.so: cannot open" in shown
    assert "-> get more" in shown


def test_only_errors_make_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: Finding("warning", "little", "more")})
    doctor.main([])


def test_versions_out_of_range_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["trl<1.17,>=1.16", "no-such-package>=1", "vllm; extra == 'vllm'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: wanted)
    installed = doctor.metadata.version
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: "1.17.0" if name == "trl" else installed(name)
    )
    found = doctor.check_packages()
    assert found.status == "error"
    assert "trl 1.17.0 is not <1.17,>=1.16" in found.text
    assert "no-such-package is missing" in found.text
    assert "vllm" not in found.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines where torch sees no GPU")
def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    found = doctor.check_torch()
    assert (found.status, "CUDA build" in found.fix) == ("error", True)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.check_torch().status == "warning"


@pytest.mark.parametrize(
    ("total", "free", "status", "fix"),
    [
        (80, 79, "ok", ""),
        (80, 40, "warning", "nvidia-smi"),
        (8, 8, "warning", "3B or less"),
    ],
)
def test_graphics_memory(
    monkeypatch: pytest.MonkeyPatch, total: int, free: int, status: str, fix: str
) -> None:
    card = SimpleNamespace(name="a card", total_memory=total * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * 2**30, total * 2**30))
    found = doctor.check_torch()
    assert (found.status, fix in found.fix) == (status, True)


def test_little_memory_and_little_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = SimpleNamespace(available=2**30, total=2**34)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert doctor.check_memory().status == "warning"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    assert doctor.check_disk(tmp_path).status == "warning"


def test_nf4_that_computes_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes.nn import Linear4bit

    monkeypatch.setattr(Linear4bit, "forward", lambda self, x: torch.zeros_like(x))
    found = doctor.check_bitsandbytes()
    assert (found.status, "load_in_4bit: false" in found.fix) == ("error", True)


def test_a_token_is_checked_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token = "hf_planted" + "x" * 24
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)

    def answer(status: int) -> HfHubHTTPError:
        response = SimpleNamespace(status_code=status, headers={}, request=None)
        return HfHubHTTPError(f"said {token}", response=response)  # type: ignore[arg-type]

    outcomes: list[Exception | dict[str, str]] = [answer(401), {"name": "ana"}]

    def whoami() -> dict[str, str]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    problems = ["HF_HUB_OFFLINE is set", "", ""]
    monkeypatch.setattr(hub, "unreachable", lambda: problems.pop(0))
    monkeypatch.setattr(huggingface_hub, "whoami", whoami)
    monkeypatch.setattr(doctor, "CHECKS", dict.fromkeys("abc", doctor.check_hub))
    with pytest.raises(SystemExit, match="1"):
        doctor.main([])
    shown = capsys.readouterr().out
    for words in ("does not accept the token (401)", "HF_HUB_OFFLINE is set", "logged in as ana"):
        assert words in shown
    assert token not in shown
