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
