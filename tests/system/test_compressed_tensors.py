"""A W8A8 checkpoint in compressed-tensors form is taken as it is: same int8 weights, no quantize step."""
import json

from conftest import DATA, build, export, run


def test_int8_checkpoint_builds_without_quantize(tmp_path):
    source = DATA / "ct_w8a8"
    mir = export(source, tmp_path / "mir")
    assert "w8a8" in (mir / "model.mir").read_text()
    engine = build(mir, tmp_path / "engine")
    done = run("verify", "--engine", engine, "--reference", source / "expected.safetensors", "--json", "--quiet")
    assert json.loads(done.stdout)["mean_kl"] < 0.02
    refused = run("quantize", "--model", mir, "--config", write_recipe(tmp_path), "--output", tmp_path / "x", ok=4)
    assert "already" in refused.stderr


def write_recipe(folder):
    path = folder / "recipe.yaml"
    path.write_text("quant: {}\n")
    return path


def test_weights_equal_the_recorded_ones(tmp_path):
    source = DATA / "ct_w8a8"
    mir = export(source, tmp_path / "mir")
    report = json.loads(run("verify", "--model", mir, "--reference", source / "expected.safetensors", "--json", "--quiet").stdout)
    names = [row["what"] for row in report["rows"]]
    assert report["ok"] and "layers.1.moe.experts.up.weight[3]" in names and "seq1 logits" in names

    changed = bytearray((source / "expected.safetensors").read_bytes())
    length = int.from_bytes(changed[:8], "little")
    entry = json.loads(changed[8:8 + length])["dequant.model.layers.0.self_attn.k_proj.weight"]
    changed[8 + length + entry["data_offsets"][0] + 3] ^= 0x40          # the exponent of one number
    (tmp_path / "expected.safetensors").write_bytes(changed)
    done = run("verify", "--model", mir, "--reference", tmp_path / "expected.safetensors", "--quiet", ok=1)
    assert "first difference is layers.0.attn.k.weight" in done.stdout
