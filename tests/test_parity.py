"""``duohead-parity``: agreement, a mismatch with its reason, and bad usage, by exit status and message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import duohead_jax
from duohead import CrossEntropy, Distillation, HeadSpec, parity, parity_runs
from duohead.parity import main
from duohead.parity_compare import compare
from duohead.parity_inputs import draw_inputs, load_inputs, round_to
from duohead.parity_runs import Outcome

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
QUICK = ("--only", "torch eager", "--only", "jax xla")
EVERY_FAMILY = """
head:
  final_logit_softcap: 30.0
  metrics: [entropy, accuracy, perplexity]
  losses:
    ce: {type: label, label_smoothing: 0.1}
    z: {type: z_loss, weight: 1.0e-4}
    kd: {type: distillation, loss_type: forward_kl, temperature: 2.0, weight: 0.5}
    jsd: {type: distillation, loss_type: jsd, reference_model: other, student_temperature: 2.0}
    rl: {type: grpo, epsilon_high: 0.28, beta: 0.04, reference_model: ref}
    seq: {type: gspo, reference_model: ref}
    dpo: {type: dpo, reference_model: ref}
    orpo: {type: orpo}
    kto: {type: kto, reference_model: ref}
"""


@pytest.fixture
def every_family(tmp_path: Path) -> str:
    path = tmp_path / "head.yaml"
    path.write_text(EVERY_FAMILY)
    return str(path)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    path = tmp_path / "plain.yaml"
    path.write_text("losses: {ce: {type: label}, z: {type: z_loss, weight: 0.001}}\n")
    return str(path)


# ------------------------------------------------------------------------------------------------------ agreement


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_family_agrees(every_family: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main([every_family, "--dtype", dtype, "--shape", "24,97", *QUICK, "--only", "torch per_loss"])
    printed = capsys.readouterr().out
    assert status == parity.AGREE, printed
    for word in ("kd ", "orpo ", "total ", "metrics ", "torch eager – jax xla", "AGREE: 3 implementations"):
        assert word in printed
    assert ("beyond 1 last place(s)" in printed) == (dtype in ("bfloat16", "float16"))


def test_everything_on_this_machine_runs(plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([plain, "--shape", "2,6,33", "--json"]) == parity.AGREE
    report = json.loads(capsys.readouterr().out)
    assert report["agree"]
    assert report["shape"] == [2, 6, 33]
    run = set(report["implementations"])
    assert {"torch eager", "torch compiled", "torch per_loss", "jax xla", "jax per_loss"} <= run
    assert {"torch triton", "jax triton"} <= run | set(report["not_run"])
    assert len(report["between"]) == len(run) * (len(run) - 1) // 2
    assert set(report["reference"]["losses"]) == {"ce", "z"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_configurations_agree(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path), *QUICK]) == parity.AGREE, capsys.readouterr().out


def test_inputs_from_a_file(tmp_path: Path, every_family: str, capsys: pytest.CaptureFixture[str]) -> None:
    head = HeadSpec.from_yaml(Path(every_family))
    inputs = draw_inputs(head, (16, 41), "bfloat16", 3)
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    for name in ("teacher_logits", "ref_logprobs"):
        arrays |= {f"{name}/{model}": array for model, array in inputs[name].items()}
    arrays["logits"] = arrays["logits"].astype(ml_dtypes.bfloat16)
    arrays["num_tokens"] = np.array(40)
    file = tmp_path / "batch.npz"
    np.savez(file, **arrays)

    loaded, dtype = load_inputs(file, None)
    assert dtype == "bfloat16"
    assert loaded["num_tokens"] == 40
    np.testing.assert_array_equal(loaded["logits"], inputs["logits"])
    assert loaded["teacher_logits"].keys() == {"teacher", "other"}
    assert main([every_family, str(file), *QUICK]) == parity.AGREE, capsys.readouterr().out


def test_one_unnamed_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, file = tmp_path / "head.yaml", tmp_path / "batch.npz"
    config.write_text("losses: {kd: {type: distillation}}\n")
    random = np.random.default_rng(0)
    np.savez(file, logits=random.normal(size=(4, 9)).astype(np.float32), teacher_logits=random.normal(size=(4, 9)))
    assert main([str(config), str(file), *QUICK]) == parity.AGREE, capsys.readouterr().out


OWN_LOSS = '''
from dataclasses import dataclass
from duohead.fields import number
from duohead.loss import Loss, Part, register
from duohead.term import Term


def focal(logprob, gamma):
    """No derivatives: the frameworks' own differentiation gives them."""
    return -gamma * logprob * logprob


FOCAL = Term(focal)


@register("own_square")
@dataclass(frozen=True, kw_only=True)
class OwnSquare(Loss):
    gamma: float = number(2.0, "factor", minimum=0.0)

    def parts(self, given):
        return (Part(FOCAL, {"gamma": self.gamma}),)
'''


def test_own_loss_types_are_imported(tmp_path: Path) -> None:
    (tmp_path / "own_losses.py").write_text(OWN_LOSS)
    (tmp_path / "head.yaml").write_text("losses: {own: {type: own_square, gamma: 0.5}, ce: {type: label}}\n")
    command = [sys.executable, "-m", "duohead.parity", "head.yaml", "--shape", "8,33", "--import", "own_losses", *QUICK]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == parity.AGREE, done.stdout + done.stderr
    assert "the reference does not know own_square" in done.stdout


# ------------------------------------------------------------------------------------------------------- mismatch


def test_a_wrong_value_is_found(
    plain: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = duohead_jax.monolithic_loss

    def wrong(*arguments: Any, **inputs: Any) -> Any:
        loss, aux = right(*arguments, **inputs)
        return loss, aux._replace(losses={**aux.losses, "z": aux.losses["z"] * 1.0001})

    monkeypatch.setattr(duohead_jax, "monolithic_loss", wrong)
    assert main([plain, *QUICK]) == parity.MISMATCH
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MISMATCH")]
    assert len(lines) == 2
    assert "jax xla and duohead.reference in float64: the value of z differs by 1.0e-04" in lines[0]
    assert "torch eager and jax xla: the value of z differs by 1.0e-04" in lines[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_gradient_is_found(
    plain: str, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = duohead_jax.monolithic_loss

    def wrong(*arguments: Any, **inputs: Any) -> Any:
        loss, aux = right(*arguments, **inputs)
        return loss + 0.02 * (loss - jax.lax.stop_gradient(loss)), aux

    monkeypatch.setattr(duohead_jax, "monolithic_loss", wrong)
    assert main([plain, *QUICK, "--dtype", dtype]) == parity.MISMATCH
    printed = capsys.readouterr().out
    assert "the value of" not in printed
    expected = "gradient entries are more than 1 last place(s)" if dtype == "bfloat16" else "relative rms of 2.0e-02"
    assert "MISMATCH: jax xla and duohead.reference in float64: " in printed
    assert expected in printed


def test_a_tolerance_of_zero_is_a_tolerance(plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([plain, *QUICK, "--tolerance", "0", "--json"]) == parity.MISMATCH
    report = json.loads(capsys.readouterr().out)
    assert not report["agree"]
    assert any("duohead.reference" in fault for fault in report["faults"])
    assert main([plain, *QUICK, "--tolerance-between", "0"]) == parity.MISMATCH
    assert "torch eager and jax xla" in capsys.readouterr().out


def outcome(gradient: list[float], loss: float = 1.0, **metrics: float) -> Outcome:
    return Outcome("it", loss, {"ce": loss}, metrics, np.array([gradient]))


def test_last_places() -> None:
    step = 2.0**-7  # of bfloat16 between 1 and 2
    reference = outcome([1.0, 1.0, 1.0])
    apart = compare(outcome([1.0, 1.0 + step, 1.0 + 2 * step]), reference, reference, "bfloat16", 1)
    assert (apart.differing, apart.beyond) == (2, 1)
    assert compare(outcome([1.0, 1.0 + step, 1.0 + 2 * step]), reference, reference, "bfloat16", 2).beyond == 0
    # An entry whose parts cancel is only as good as the row's float32 rounding.
    small = outcome([1.0, 1e-8, 0.0])
    assert compare(outcome([1.0, 3e-8, 0.0]), small, small, "bfloat16", 1).beyond == 0
    assert compare(outcome([1.0, 3e-5, 0.0]), small, small, "bfloat16", 1).beyond == 1


def test_what_is_not_finite() -> None:
    infinite = outcome([0.0, float("nan")], float("inf"))
    assert compare(infinite, infinite, infinite, "float32", 0).worst_scalar == 0.0
    wrong = compare(outcome([0.0, 0.0], float("nan")), outcome([0.0, 1.0]), outcome([0.0, 1.0]), "float32", 0)
    assert wrong.worst_scalar == float("inf")
    finite = outcome([0.0, 1.0])
    assert compare(outcome([0.0, float("nan")]), finite, finite, "float32", 0).gradient_rms == float("inf")
    no_gradient = outcome([0.0, 0.0])
    assert compare(outcome([0.0, 1e-30]), no_gradient, no_gradient, "float32", 0).gradient_rms == float("inf")


def test_a_metric_that_only_one_reports() -> None:
    reference = outcome([1.0], entropy=2.0, more=1.0)
    assert compare(outcome([1.0], entropy=2.0), reference, reference, "float32", 0).metrics == {"entropy": 0.0}
    pair = compare(outcome([1.0], entropy=2.0), outcome([1.0]), reference, "float32", 0)
    assert pair.metrics == {"entropy": float("inf")}


# ------------------------------------------------------------------------------------------------------ bad usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "missing.yaml"),
        (["HEAD", "missing.npz"], "missing.npz"),
        (["HEAD", "--only", "torch fast"], "--only: got 'torch fast'; on this machine: torch eager"),
        (["HEAD", "--last-places", "2"], "--last-places: is for bfloat16 and float16, the logits are float32"),
        (["HEAD", "--import", "no_such_module"], "No module named 'no_such_module'"),
        (["HEAD", "--device", "cuda"], "nothing to run: at least one framework must be present (torch"),
        (["HEAD", "--only", "jax triton"], "nothing to run"),
    ],
)
def test_bad_usage(arguments: list[str], message: str, plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([plain if item == "HEAD" else item for item in arguments]) == parity.BAD_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "8"], "needs at least T,V"),
        (["--shape", "0,8"], "all of them 1 or more"),
        (["--tolerance", "-1"], "must be a number >= 0"),
        (["--tolerance", "nan"], "must be a number >= 0"),
        (["--seed", "-1"], "must be a whole number >= 0"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_bad_options(arguments: list[str], message: str, plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([plain, *arguments])
    assert stopped.value.code == parity.BAD_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": np.zeros(2, np.int64)}, "logits: missing"),
        ({"logits": np.zeros((2, 3)), "label": np.zeros(2)}, "label: no input of that name; did you mean 'labels'?"),
        ({"logits": np.zeros((2, 3)), "labels": np.zeros(2)}, "labels: must be integer, got float64"),
        ({"logits": np.zeros((2, 3), np.int32)}, "logits: must be one of float32"),
        ({"logits": np.zeros((2, 3)), "labels": np.zeros(3, np.int64)}, "labels"),
        ({"logits": np.zeros((2, 3))}, "labels"),
    ],
    ids=["no_logits", "unknown", "float_labels", "integer_logits", "shape", "no_labels"],
)
def test_bad_files(
    arrays: dict[str, Any], message: str, plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "batch.npz"
    np.savez(file, **arrays)
    assert main([plain, str(file), *QUICK]) == parity.BAD_USAGE
    assert message in capsys.readouterr().err


def test_drawn_and_read_do_not_mix(plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "batch.npz"
    np.savez(file, logits=np.zeros((2, 3), np.float32), labels=np.zeros(2, np.int64))
    assert main([plain, str(file), "--seed", "1"]) == parity.BAD_USAGE
    assert "--seed: is for drawn inputs" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- missing frameworks


@pytest.mark.parametrize("missing", ["torch", "jax"])
def test_a_missing_framework_is_said(
    missing: str, plain: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity_runs, "installed", lambda name: name != missing)
    only = "jax xla" if missing == "torch" else "torch eager"
    assert main([plain, "--only", only]) == parity.AGREE
    printed = capsys.readouterr().out
    assert f"{missing} not installed" in printed
    assert "AGREE: 1 implementation" in printed


def test_no_framework_is_an_error(
    plain: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity_runs, "installed", lambda name: False)
    assert main([plain]) == parity.BAD_USAGE
    assert "torch not installed, jax not installed" in capsys.readouterr().err


def test_importing_it_brings_in_no_framework() -> None:
    program = "import sys, duohead.parity; print(sorted({'torch', 'jax', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------------------- inputs


def test_bfloat16_rounding_is_ml_dtypes() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate(
        [random.normal(size=1000) * 10.0 ** random.integers(-40, 39, 1000), [0.0, -0.0, np.inf, -np.inf, np.nan, 1e39]]
    )
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_array_equal(round_to(values, "bfloat16"), expected)


def test_drawn_inputs_hold_the_hard_cases() -> None:
    head = HeadSpec(losses={"ce": CrossEntropy(), "kd": Distillation()}, vocab_size=30)
    inputs = draw_inputs(head, (50, 32), "float32", 0)
    again = draw_inputs(head, (50, 32), "float32", 0)
    np.testing.assert_array_equal(inputs["logits"], again["logits"])
    assert np.isnan(inputs["logits"][1]).all()
    assert not inputs["mask"][1]
    assert (inputs["labels"] == -100).any()
    assert inputs["labels"].max() < 30
    assert (inputs["segment_ids"] == -1).any()
    assert np.isnan(inputs["teacher_logits"]["teacher"][1]).all()
