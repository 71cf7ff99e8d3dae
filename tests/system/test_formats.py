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


# Families that convert writes and export reads; those whose graph llama.cpp lacks a part of, without it.
FAMILIES = ["dots1", "ernie4_5_moe", "glm4_moe", "granitemoe", "llama", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3", "qwen3_moe"]
WITHOUT = {"olmoe": {"clip_qkv": None}}


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_of_every_family_comes_back(family, tmp_path):
    golden = DATA / "goldens" / family
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(golden, checkpoint)
    if family in WITHOUT:
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps({**config, **WITHOUT[family]}))
    source = export(checkpoint, tmp_path / "source")
    run("convert", "--to", "gguf", "--model", source, "--output", tmp_path / "m.gguf", "--type", "f32", "--quiet")
    back = export(tmp_path / "m.gguf", tmp_path / "back")
    if family in WITHOUT:        # the recorded outputs are those of the whole graph: compare with its own without the part
        engine = tmp_path / "engine"
        run("build", "--model", back, "--output", engine, "--precision", "fp32", "--quiet")
        done = run("verify", "--engine", engine, "--model", source, "--json", "--quiet")
    else:
        done = run("verify", "--model", back, "--reference", golden / "golden.safetensors", "--json", "--quiet")
    assert json.loads(done.stdout)["ok"]


def test_gguf_tokenizer_and_template_are_rebuilt(tmp_path):
    mir = export(FORMATS / "gguf_q4_0", tmp_path / "mir")
    rebuilt = json.loads((mir / "tokenizer" / "tokenizer.json").read_text())
    released = json.loads((DATA / "ct_w8a8" / "tokenizer.json").read_text())
    assert rebuilt["model"]["vocab"] == released["model"]["vocab"]
    assert [m if isinstance(m, str) else " ".join(m) for m in released["model"]["merges"]] == rebuilt["model"]["merges"]
    assert rebuilt["added_tokens"] == released["added_tokens"]
    assert "im_start" in (mir / "tokenizer" / "chat_template.jinja").read_text()
    engine = tmp_path / "engine"
    run("build", "--model", mir, "--output", engine, "--quiet")
    run("generate", "--engine", engine, "--chat", "the chat", "--max-tokens", 4, "--quiet")


def test_gguf_refusals_name_tensor_and_type(tmp_path):
    raw = bytearray((FORMATS / "gguf_kmix" / "model.gguf").read_bytes())
    name = b"blk.0.attn_k.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    assert raw[at] == 11                                   # Q3_K
    raw[at] = 21                                           # IQ3_S, of the same size
    (tmp_path / "m.gguf").write_bytes(raw)
    done = run("export", "--model-dir", tmp_path / "m.gguf", "--output", tmp_path / "out", "--quiet", ok=4)
    assert "blk.0.attn_k.weight" in done.stderr and "IQ3_S" in done.stderr and "Q4_K" in done.stderr
    assert not (tmp_path / "out").exists()
