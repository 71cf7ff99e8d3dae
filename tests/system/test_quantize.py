"""quantize as a command: the same bytes on any machine, recipes that repeat a run, reports, damaged numbers."""
import json
import os
import platform
import shutil

import numpy as np
import pytest
import tensors
from conftest import DATA, EVAL, build, export, quantize, run
from test_cli import refused
from test_goldens import FIXTURES, GOLDENS

SMALL = {"calibration_samples": 24, "calibration_length": 64}


def files(folder):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def recipe(**settings):
    return json.dumps({"quant": {**SMALL, **settings}})


def isas():
    if platform.machine() != "x86_64":
        return ["scalar"]
    flags = open("/proc/cpuinfo").read()
    return ["scalar"] + (["avx2"] if " avx2 " in flags else []) + (["avx512"] if " avx512bw " in flags else [])


RECIPES = {
    "int8": {},
    "int8 static": {"activation_scheme": "per_tensor", "observer": "mse", "smooth_quant": {"alpha": "search", "down": True}},
    "int4 gptq": {"weight_bits": 4, "group_size": 32, "smooth_quant": {"alpha": 0.4, "down": True}},
    "mixed": {"layers": {"re:.*experts": "int4_g64", "lm_head": "int8"}, "rounding": "gptq", "sensitive_layers": ["layers.1.attn"]},
}


@pytest.fixture(scope="module")
def two_models(mini_mir, tmp_path_factory):
    return {"mini": mini_mir, "qwen3_moe": export(GOLDENS / "qwen3_moe", tmp_path_factory.mktemp("quantize") / "mir")}


@pytest.mark.parametrize("model", ["mini", "qwen3_moe"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_same_bytes_for_any_threads_and_instructions(name, model, two_models, tmp_path):
    text = recipe(**RECIPES[name])
    made = []
    for i, (threads, env) in enumerate([(1, {}), (2, {})] + [(2, {"MI_FORCE_ISA": isa}) for isa in isas()]):
        out = tmp_path / f"out{i}"
        config = tmp_path / "recipe.yaml"
        config.write_text(text)
        run("quantize", "--model", two_models[model], "--config", config, "--output", out, "--threads", threads, "--quiet", "--no-compare", env=env)
        made.append(files(out))
        assert made[-1] == made[0], (threads, env)
    # The recipe in the output, and a comparison, change nothing.
    run("quantize", "--model", two_models[model], "--config", tmp_path / "out0" / "recipe.yaml", "--output", tmp_path / "again", "--quiet")
    assert files(tmp_path / "again") == made[0]


def test_a_recipe_from_an_output_needs_no_flags(mini_mir, tmp_path, monkeypatch):
    """--calib given relative to one folder; the written recipe is used in another."""
    shutil.copy(EVAL / "calib.jsonl", tmp_path / "text.jsonl")
    monkeypatch.chdir(tmp_path)
    quantize(mini_mir, tmp_path / "a", recipe(weight_bits=4), "--calib", "text.jsonl", "--no-compare")
    monkeypatch.chdir("/")
    run("quantize", "--model", mini_mir, "--config", tmp_path / "a" / "recipe.yaml", "--output", tmp_path / "b", "--quiet", "--no-compare")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_automatic_recipes_are_closed(mini_mir, tmp_path):
    done = quantize(mini_mir, tmp_path / "a", recipe(activation_scheme="auto", sensitive_layers="auto", bound=0.002))
    assert "stays float" in done.stdout or "scale per token" in done.stdout
    written = (tmp_path / "a" / "recipe.yaml").read_text()
    assert "auto" not in written.replace("rounding: auto", "")
    run("quantize", "--model", mini_mir, "--config", tmp_path / "a" / "recipe.yaml", "--output", tmp_path / "b", "--quiet", "--no-compare")
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("ending", ["html", "json", "txt"])
def test_sensitivity_writes_a_report(ending, mini_mir, tmp_path):
    report = tmp_path / f"report.{ending}"
    config = tmp_path / "recipe.yaml"
    config.write_text(recipe())
    args = ["quantize", "--model", mini_mir, "--config", config, "--sensitivity", report, "--sample-tokens", "64", "--quiet"]
    run(*args)
    text = report.read_text()
    assert "layers.5.moe.experts" in text and "int4_g32" in text
    if ending == "json":
        j = json.loads(text)
        assert sorted(j["order"]) == list(range(6))
        parts = {c["part"] for c in j["candidates"]}
        assert {"layers.0.attn", "layers.0.mlp", "layers.3.moe.experts", "layers.3.moe.shared"} <= parts
        assert all(c["kl"] >= 0 and 0 <= c["error"] < 1 for c in j["candidates"])
        assert j["front"][0]["kl"] == 0 and set(j["front"][0]["formats"].values()) == {"float"}
    if ending == "html":
        assert text.lstrip().lower().startswith("<!doctype html") and "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.yaml", report.name]
    refused(run(*args, ok=4), 4, report.name, "--force")
    run(*args, "--force")


@pytest.mark.parametrize("flags,words", [
    ([], ["--output is missing"]),
    (["--output", "o", "--sensitivity", "s.txt"], ["leave out --output"]),
    (["--output", "o", "--search"], ["--search needs a limit"]),
    (["--output", "o", "--max-bits", "5"], ["go with --search"]),
    (["--output", "o", "--save-recipe", "r.yaml"], ["go with --search"]),
    (["--output", "o", "--max-kl", "1", "--no-compare"], ["--no-compare"])])
def test_flags_that_do_not_go_together(flags, words, mini_mir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(recipe())
    refused(run("quantize", "--model", mini_mir, "--config", "r.yaml", *flags, ok=2), 2, *words)
    assert [p.name for p in tmp_path.iterdir()] == ["r.yaml"]


def test_limits_are_judged(mini_mir, tmp_path):
    done = quantize(mini_mir, tmp_path / "a", recipe(), "--max-kl", "10", "--max-drop", "100")
    assert "written" in done.stdout
    config = tmp_path / "r.yaml"
    config.write_text(recipe())
    done = run("quantize", "--model", mini_mir, "--config", config, "--output", tmp_path / "b", "--quiet", "--max-kl", "0", ok=1)
    assert "above the limit" in done.stderr and (tmp_path / "b").exists()


def test_a_search_is_repeated_by_its_recipe(mini_mir, tmp_path):
    config = tmp_path / "r.yaml"
    config.write_text(recipe())
    done = run("quantize", "--model", mini_mir, "--config", config, "--output", tmp_path / "a", "--search", "--max-bits", "6", "--sample-tokens", "64",
               "--save-recipe", tmp_path / "found.yaml", "--json", "--quiet")
    report = json.loads(done.stdout)
    assert report["picked"]["expert_bits"] <= 6 and report["picked"]["formats"] in [c["formats"] for c in report["front"]]
    for i, found in enumerate((tmp_path / "found.yaml", tmp_path / "a" / "recipe.yaml")):
        run("quantize", "--model", mini_mir, "--config", found, "--output", tmp_path / str(i), "--quiet", "--no-compare")
        assert files(tmp_path / str(i)) == files(tmp_path / "a")
    # Within its own limits nothing is possible: said before anything is written.
    done = run("quantize", "--model", mini_mir, "--config", config, "--output", tmp_path / "b", "--search", "--max-bits", "3", "--sample-tokens", "16", "--quiet", ok=None)
    assert done.returncode == 1 and "--max-bits 3" in done.stderr and not (tmp_path / "b").exists()


# ---- smoothing is no approximation

@pytest.mark.parametrize("down", [False, True], ids=["norms", "down too"])
@pytest.mark.parametrize("name", FIXTURES)
def test_smoothing_alone_keeps_the_function(name, down, tmp_path):
    mir = export(GOLDENS / name, tmp_path / "mir")
    quantize(mir, tmp_path / "smooth", recipe(rounding="none", smooth_quant={"alpha": 0.6, "down": down}), "--no-compare")
    engine = build(tmp_path / "smooth", tmp_path / "engine", "--precision", "fp32")
    done = run("verify", "--engine", engine, "--model", mir, "--logits-max-abs", "1e-4", "--hidden-max-abs", "1e-3", "--json", "--quiet", ok=None)
    report = json.loads(done.stdout)
    rows = report["rows"]
    assert report["ok"], [r for r in rows if not r["ok"]][:3]
    assert any(r["what"].endswith("logits") and 0 < r["found"] < 1e-4 for r in rows)   # above 0: something was smoothed
    assert all(r["found"] == 0 for r in rows if r["what"].endswith("experts"))


# ---- massive activations

BOS, CHANNEL, LAYER, LAYERS = 1, 5, 2, 4


@pytest.fixture(scope="module")
def massive(tmp_path_factory):
    """One residual channel that only the first token's embedding has, 2000 times as large as usual; one layer's norm brings it out.
    (Of a model with random weights: those of a trained one have peaks of their own.)"""
    mir = export(GOLDENS / "qwen3_moe", tmp_path_factory.mktemp("massive") / "mir")

    def change(name, stored):
        x = tensors.from_bf16(stored) if stored.dtype == np.uint16 else stored
        if name == "embed.weight":
            usual = np.sqrt((x ** 2).mean())
            x[:, CHANNEL] = 0
            x[BOS, CHANNEL] = 2000 * usual
        elif name.endswith("attn.o.weight"):
            x[CHANNEL] = 0
        elif name.endswith("experts.down.weight"):
            x[:, CHANNEL] = 0
        elif name == f"layers.{LAYER}.attn_norm.weight":
            x[CHANNEL] = 500
        else:
            return None
        return tensors.bf16(x) if stored.dtype == np.uint16 else x

    assert len(tensors.change(mir / "weights", change)) == 1 + LAYERS + LAYERS + 1
    return mir


def sensitivity(mir, tmp_path, first):
    rng = np.random.default_rng(1)
    lines = [{"ids": [first] + rng.integers(10, 500, 511).tolist()} for _ in range(4)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = tmp_path / "r.yaml"
    config.write_text(json.dumps({"quant": {"calibration_length": 512}}))
    run("quantize", "--model", mir, "--config", config, "--calib", tmp_path / "text.jsonl", "--sensitivity", tmp_path / "s.json", "--quiet", "--force")
    report = json.loads((tmp_path / "s.json").read_text())
    run("quantize", "--model", mir, "--config", config, "--calib", tmp_path / "text.jsonl", "--sensitivity", tmp_path / "s.txt", "--quiet", "--force")
    return report, (tmp_path / "s.txt").read_text()


def test_a_massive_activation_is_named_first(massive, tmp_path):
    report, text = sensitivity(massive, tmp_path, BOS)
    assert report["order"][0] == LAYER and report["peaks"][0]["layer"] == LAYER and report["peaks"][0]["massive"]
    assert f"massive activations: layer {LAYER} " in text
    assert text.index(f"layers.{LAYER}.attn") < min(text.index(f"layers.{l}.attn") for l in range(LAYERS) if l != LAYER)


def test_without_its_token_nothing_is_massive(massive, tmp_path):
    report, text = sensitivity(massive, tmp_path, BOS + 1)
    assert not any(p["massive"] for p in report["peaks"]) and "massive" not in text


def test_a_gated_activation_is_not_massive(mini_mir, tmp_path):
    """Of the bundled model: outlier channels in every token, and products of gates that are zero nearly everywhere."""
    config = tmp_path / "r.yaml"
    config.write_text(recipe())
    run("quantize", "--model", mini_mir, "--config", config, "--sensitivity", tmp_path / "s.json", "--sample-tokens", "64", "--quiet")
    peaks = json.loads((tmp_path / "s.json").read_text())["peaks"]
    assert max(p["largest"] / p["median"] for p in peaks) > 500
    assert not any(p["massive"] for p in peaks)


# ---- damaged numbers

@pytest.mark.parametrize("bits", [0x7FC0, 0xFF80], ids=["nan", "-inf"])
def test_a_damaged_expert_is_named_by_layer_and_expert(bits, mini_mir, tmp_path):
    mir = tmp_path / "mir"
    shutil.copytree(mini_mir, mir)

    def change(name, x):
        if name != "layers.4.moe.experts.gate.weight":
            return None
        x[11, 2, 3] = bits
        return x

    assert tensors.change(mir / "weights", change)
    words = ["layers.4.moe.experts.gate.weight", "expert 11, row 2, column 3", "NaN" if bits == 0x7FC0 else "infinity"]
    for i, settings in enumerate(({}, {"smooth_quant": {"enable": False}}, {"weight_bits": 4})):
        config = tmp_path / f"{i}.yaml"
        config.write_text(recipe(**settings))
        refused(run("quantize", "--model", mir, "--config", config, "--output", tmp_path / "out", "--quiet", ok=4), 4, *words)
    refused(run("quantize", "--model", mir, "--config", config, "--sensitivity", tmp_path / "s.txt", "--quiet", ok=4), 4, *words)
    refused(run("build", "--model", mir, "--output", tmp_path / "engine", "--quiet", ok=4), 4, *words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.yaml", "1.yaml", "2.yaml", "mir"]


def test_a_damaged_expert_of_a_checkpoint_is_named(tmp_path):
    shutil.copytree(DATA / "goldens" / "qwen3_moe", tmp_path / "m")

    def change(name, x):
        if not name.endswith("layers.1.mlp.experts.5.down_proj.weight"):
            return None
        x.flat[7] = 0x7FC0 if x.dtype == np.uint16 else np.nan
        return x

    assert tensors.change(tmp_path / "m", change)
    refused(run("export", "--model-dir", tmp_path / "m", "--output", tmp_path / "out", "--quiet", ok=4), 4, "layers.1.moe.experts.down.weight", "expert 5")


# ---- verify names the layer that is wrong

# attn.q and attn.k are not here: the norm behind them takes the factor out again. moe.shared.up, at int4, is below what int4 itself does.
DAMAGES = [(bits, layer, matrix) for bits in (8, 4) for layer, matrix in
           [(0, "attn.o"), (0, "mlp.down"), (1, "moe.experts.down"), (2, "attn.v"), (3, "moe.shared.up"), (4, "attn.o"), (5, "moe.experts.up")]
           if (bits, matrix) != (4, "moe.shared.up")]


@pytest.mark.parametrize("bits,layer,matrix", DAMAGES)
def test_verify_names_the_layer_with_wrong_scales(bits, layer, matrix, mini_w8a8, mini_w4a8, mini_mir, tmp_path):
    """One matrix's scales times four, in an engine that is otherwise good."""
    damaged = tmp_path / "mir"
    shutil.copytree(mini_w8a8 if bits == 8 else mini_w4a8, damaged)
    wanted = f"layers.{layer}.{matrix}.weight_scale"
    assert tensors.change(damaged / "weights", lambda name, x: 4 * x if name == wanted else None) == [wanted]
    engine = build(damaged, tmp_path / "engine")
    done = run("verify", "--engine", engine, "--model", mini_mir, "--json", "--quiet", ok=None)
    report = json.loads(done.stdout)
    assert done.returncode == 1 and f"layer {layer} " in report["first_difference"] + " ", report["first_difference"]
    # The layers behind it, fed what the float model feeds them, are as good as before.
    alone = [r for r in report["rows"] if r["what"].endswith("alone")]
    assert len(alone) >= 6
    assert {r["what"].split("layer ")[1].split()[0] for r in alone if not r["ok"]} == {str(layer)}
