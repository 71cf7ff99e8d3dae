"""Quantized checkpoints: what export makes of them are the recorded numbers, and the model computes the recorded logits."""
import json
import shutil

import pytest
from conftest import DATA, export, run

FORMATS = DATA / "formats"
NAMES = sorted(p.name for p in FORMATS.iterdir())
# Int8 with int8 activations stays int8; the recorded logits are those of float activations, and experts of a random model
# change with little.
INT8 = {"ct_w8a8_static", "ct_mixed"}


def verify(mir, source, *flags, ok=0):
    done = run("verify", "--model", mir, "--reference", source / "expected.safetensors", "--json", "--quiet", *flags, ok=ok)
    return json.loads(done.stdout)


def check(report, logits):
    weights = [r for r in report["rows"] if r["unit"] == "differ"]
    assert len(weights) >= 2 and all(r["found"] == 0 for r in weights), weights
    seen = [r for r in report["rows"] if r["what"].endswith("logits")]
    assert len(seen) == 2 and all(r["unit"] == logits for r in seen), seen
    assert report["ok"], report["rows"]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_logits_are_the_recorded_ones(name, tmp_path):
    source = FORMATS / name
    mir = export(source, tmp_path / "mir")
    if name in INT8:
        check(verify(mir, source, "--max-kl", 0.25), "mean KL")
    else:
        check(verify(mir, source), "max abs")


@pytest.mark.parametrize("name", sorted(INT8))
def test_int8_for_float_activations_is_widened(name, tmp_path):
    source = tmp_path / "checkpoint"
    shutil.copytree(FORMATS / name, source)
    config = json.loads((source / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (source / "config.json").write_text(json.dumps(config))
    mir = export(source, tmp_path / "mir")
    assert "w8a8" not in (mir / "model.mir").read_text()
    check(verify(mir, source), "max abs")


def test_report_says_what_was_dequantized(tmp_path):
    done = run("export", "--model-dir", FORMATS / "ct_mixed", "--output", tmp_path / "mir", "--explain", "--quiet")
    assert "48 expert tensors: packed int4 in groups of 32 to F16" in done.stdout
    assert "dequantized from packed int4 in groups of 32" in done.stdout
    assert "attention tensors" not in done.stdout      # int8 is kept
    text = (tmp_path / "mir" / "model.mir").read_text()
    assert "w8a8" in text and "f16" in text


def test_a_dequantized_model_can_be_quantized(tmp_path):
    mir = export(FORMATS / "gptq_v1_sym", tmp_path / "mir")
    (tmp_path / "recipe.yaml").write_text("quant: {smooth_quant: {enable: true, alpha: 0.5}}\n")
    run("quantize", "--model", mir, "--config", tmp_path / "recipe.yaml", "--output", tmp_path / "int8", "--quiet")
    run("build", "--model", tmp_path / "int8", "--output", tmp_path / "engine", "--quiet")
    done = run("verify", "--engine", tmp_path / "engine", "--model", mir, "--json", "--quiet", "--max-kl", 0.25)
    assert json.loads(done.stdout)["mean_kl"] < 0.25
