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
    "int8 that saturates": {"saturation": {"percentile": 99, "layers": ["re:.*down", "layers.1.attn"]}},
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


@pytest.mark.parametrize("ending,model,last", [("json", "mini", 5), ("html", "qwen3_moe", 3), ("txt", "qwen3_moe", 3)])
def test_sensitivity_writes_a_report(ending, model, last, two_models, tmp_path):
    report = tmp_path / f"report.{ending}"
    config = tmp_path / "recipe.yaml"
    config.write_text(recipe())
    args = ["quantize", "--model", two_models[model], "--config", config, "--sensitivity", report, "--sample-tokens", "64", "--quiet"]
    report.write_text("an older one")
    refused(run(*args, ok=4), 4, report.name, "--force")
    run(*args, "--force")
    text = report.read_text()
    assert f"layers.{last}.moe.experts" in text and "int4_g32" in text
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


@pytest.mark.parametrize("flags,words", [
    ([], ["--output is missing"]),
    (["--output", "o", "--sensitivity", "s.txt"], ["leave out --output"]),
    (["--output", "o", "--search"], ["--search needs a limit"]),
    (["--output", "o", "--max-bits", "5"], ["go with --search"]),
    (["--output", "o", "--save-recipe", "r.yaml"], ["go with --search"]),
    (["--output", "o", "--max-kl", "1", "--no-compare"], ["--no-compare"]),
    (["--output", "o", "--no-compare", "--held-out", "x"], ["--held-out", "--no-compare"]),
    (["--output", "o", "--no-compare", "--compare-tokens", "5"], ["--compare-tokens", "--no-compare"]),
    (["--output", "o", "--sample-tokens", "64"], ["--sample-tokens"]),
    (["--sensitivity", "s.txt", "--search", "--max-bits", "3"], ["--search", "--sensitivity"]),
    (["--sensitivity", "s.txt", "--eval", "x"], ["--eval"]), (["--sensitivity", "s.txt", "--traffic", "x"], ["--traffic"]),
    (["--sensitivity", "s.txt", "--held-out", "x"], ["--held-out"]),
    (["--sensitivity", "s.pdf"], ["s.pdf", ".html, .json or .txt"]), (["--sensitivity", "s"], [".html, .json or .txt"])])
def test_flags_that_do_not_go_together(flags, words, mini_mir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(recipe())
    refused(run("quantize", "--model", mini_mir, "--config", "r.yaml", *flags, ok=2), 2, *words)
    assert [p.name for p in tmp_path.iterdir()] == ["r.yaml"]


def test_what_every_flag_names_is_looked_at_before_the_work(mini_mir, tmp_path):
    """Progress is what tells: nothing was calibrated, rounded or measured."""
    (tmp_path / "r.yaml").write_text(recipe())
    (tmp_path / "auto.yaml").write_text(recipe(sensitive_layers="auto"))
    (tmp_path / "wrong.yaml").write_text(recipe(smooth_quant={"layers": {99: 0.7}}))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "model.mir").write_text("mine")
    search = ["--search", "--max-bits", "6", "--sample-tokens", "16"]
    cases = [(["--eval", name], [str(name)]) for name in (tmp_path / "none", tmp_path, tmp_path / "empty.jsonl", tmp_path / "broken.jsonl")]
    cases += [([*search, "--save-recipe", tmp_path / "nodir" / "x.yaml"], ["nodir"]), ([*search, "--save-recipe", tmp_path / "there.yaml"], ["--force"])]
    cases += [([*search, "--held-out", tmp_path / "none"], ["none"]), ([*search, "--traffic", tmp_path / "none"], ["none"])]
    cases += [(["--config", tmp_path / "wrong.yaml"], ["wrong.yaml: smooth_quant.layers", "no layer 99"])]
    cases += [(["--config", tmp_path / "auto.yaml", "--output", tmp_path / "there"], ["--force"]), ([*search, "--output", tmp_path / "there"], ["--force"])]
    for flags, words in cases:
        given = {"--config": tmp_path / "r.yaml", "--output": tmp_path / "o"}
        more = [x for name, value in given.items() if name not in flags for x in (name, value)]
        done = run("quantize", "--model", mini_mir, *more, *flags, ok=4)
        refused(done, 4, *words)
        assert done.stderr.count("\n") == 1, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["auto.yaml", "broken.jsonl", "empty.jsonl", "r.yaml", "there", "there.yaml", "wrong.yaml"]


def test_an_output_may_end_with_a_slash(mini_mir, tmp_path):
    (tmp_path / "r.yaml").write_text(recipe(activation_scheme="auto"))
    for flags in ([], ["--force"]):
        run("quantize", "--model", mini_mir, "--config", tmp_path / "r.yaml", "--output", f"{tmp_path}/o/", "--quiet", *flags)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["o", "r.yaml"]


def test_calibration_text_is_not_held_out(mini_mir, tmp_path):
    def report(*flags):
        return json.loads(quantize(mini_mir, tmp_path / "a", recipe(), "--json", *flags).stdout)
    lines = (EVAL / "calib.jsonl").read_text().splitlines(True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:24]))
    (tmp_path / "b.jsonl").write_text("".join(lines[30:54]))
    r = report("--calib", tmp_path / "a.jsonl", "--held-out", tmp_path / "a.jsonl")
    assert not r["held_out"] and any("--held-out are calibration text too" in w for w in r["warnings"]), r["warnings"]
    r = report("--calib", tmp_path / "a.jsonl", "--held-out", tmp_path / "b.jsonl")
    assert r["held_out"] and not any("--held-out" in w for w in r["warnings"]), r["warnings"]


def test_calibration_files_are_what_their_names_say(mini_mir, tmp_path):
    line = json.dumps({"text": "a captain looked at the sea and said that it would rain"}) + "\n"
    (tmp_path / "r.yaml").write_text(recipe())
    args = ["quantize", "--model", mini_mir, "--config", tmp_path / "r.yaml", "--output", tmp_path / "o", "--force", "--quiet", "--no-compare"]
    (tmp_path / "c.JSONL").write_text(line * 9)
    assert json.loads(run(*args, "--json", "--calib", tmp_path / "c.JSONL").stdout)["calibration"]["sequences"] == 8
    (tmp_path / "c.json").write_text(line * 9)
    refused(run(*args, "--calib", tmp_path / "c.json", ok=4), 4, "c.json", ".jsonl")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "a", "ids": [1]}) + "\n")
    refused(run(*args, "--calib", tmp_path / "c.jsonl", ok=4), 4, "c.jsonl line 1", "more than one")
    (tmp_path / "c.txt").write_text("\n")
    assert any("1 tokens to calibrate" in w for w in json.loads(run(*args, "--json", "--calib", tmp_path / "c.txt").stdout)["warnings"])


@pytest.mark.parametrize("settings", [{"layers": {"re:(": "int8"}}, {"layers": {"re:(l)\\1": "int8"}}, {"sensitive_layers": ["nobody"]},
                                      {"activations": {"nobody": "per_tensor"}}, {"saturation": {"layers": ["nobody"]}}], ids=json.dumps)
def test_patterns_are_named_with_their_file(settings, mini_mir, tmp_path):
    (tmp_path / "my.yaml").write_text(recipe(**settings))
    done = run("quantize", "--model", mini_mir, "--config", tmp_path / "my.yaml", "--output", tmp_path / "o", "--quiet", ok=4)
    refused(done, 4, "my.yaml: " + ("saturation.layers" if "saturation" in settings else next(iter(settings))))
    assert "polynomial" not in done.stderr and "regex" not in done.stderr


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
    if not down or name in CLAMPED:
        return
    # Down's inputs are smoothed, too, with factors of each expert's own.
    before, after = tensors.folder(mir / "weights"), tensors.folder(tmp_path / "smooth" / "weights")
    ups = [n for n in before if n.endswith(("experts.up.weight", "shared.up.weight", "mlp.up.weight"))]
    assert ups
    for n in ups:
        f = factors(before[n], after[n])
        assert np.abs(np.log(f)).max() > 0.1, n
        if f.ndim == 2:
            assert all(np.abs(np.log(f[e] / f[0])).max() > 0.01 for e in range(1, len(f))), n


# swiglu_oai adds to up before it multiplies.
CLAMPED = {"gpt_oss", "minimax_m3", "minimax_m3_sparse"}


def factors(before, after):
    """What rows were divided by, beside what all columns were multiplied by (from the norm)."""
    a, b = (tensors.from_bf16(x) if x.dtype == np.uint16 else x for x in (before, after))
    ratio = np.median(a / b, axis=-1)
    return ratio / np.median(ratio)


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

# The norm behind attn.q and attn.k takes the factor out again, and moe.shared.up at int4 is below what int4 itself does: there
# only the weights tell.
DAMAGES = [(bits, layer, matrix) for bits in (8, 4) for layer, matrix in
           [(0, "attn.o"), (0, "mlp.down"), (1, "moe.experts.down"), (2, "attn.v"), (3, "moe.shared.up"), (4, "attn.o"), (5, "moe.experts.up"),
            (0, "attn.q"), (4, "attn.k")]]


def hidden(bits, matrix):
    return matrix in ("attn.q", "attn.k") or (bits, matrix) == (4, "moe.shared.up")


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
    assert done.returncode == 1 and f"{report['first_difference']} ".startswith(f"layer {layer} {matrix}.weight "), report["first_difference"]
    weights = [r for r in report["rows"] if ".weight" in r["what"]]
    assert [r["what"] for r in weights if not r["ok"]] == [report["first_difference"]] and len(weights) > 50
    # The layers behind it, fed what the float model feeds them, are as good as before.
    alone = [r for r in report["rows"] if r["what"].endswith("alone")]
    assert len(alone) >= 6
    assert {r["what"].split("layer ")[1].split()[0] for r in alone if not r["ok"]} == (set() if hidden(bits, matrix) else {str(layer)})


@pytest.mark.parametrize("down", [False, True], ids=["norms", "down too"])
@pytest.mark.parametrize("name", ["qwen3_moe", "llama", "granitemoe", "minimax_m3_sparse"])
def test_verify_looks_behind_smoothing(name, down, tmp_path):
    """What smoothing moved between norms, ups and downs is no difference; a wrong scale under it is."""
    mir = export(GOLDENS / name, tmp_path / "mir")
    quantize(mir, tmp_path / "w8a8", recipe(smooth_quant={"alpha": 0.7, "down": down}), "--no-compare")

    def rows(model):
        done = run("verify", "--engine", build(model, tmp_path / "engine"), "--model", mir, "--json", "--quiet", ok=None)
        return {r["what"]: r for r in json.loads(done.stdout)["rows"] if ".weight" in r["what"]}

    good = rows(tmp_path / "w8a8")
    assert all(r["ok"] and (r["found"] < 0.05) for r in good.values()), [r for r in good.values() if r["found"] > 0.05]
    for matrix in [w for w in good if w.startswith("layer 1 ") and "embed" not in w and good[w]["limit"] == 0.25]:
        damaged = tmp_path / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(tmp_path / "w8a8", damaged)
        wanted = "layers.1." + matrix.split()[2] + "_scale"
        assert tensors.change(damaged / "weights", lambda n, x: 4 * x if n == wanted else None) == [wanted]
        named = [w for w, r in rows(damaged).items() if not r["ok"]]
        # Of an up and a down that smoothing tied together the factor can be either's.
        either = {matrix.split()[2], matrix.split()[2].replace(".up.", ".down.") if down else ""}
        assert len(named) == 1 and named[0].startswith("layer 1 ") and named[0].split()[2] in either, (matrix, named)


def test_verify_names_the_expert(mini_w8a8, mini_mir, tmp_path):
    def change(name, x):
        if name != "layers.4.moe.experts.gate.weight_scale":
            return None
        x = x.copy()
        x[13] *= 4
        return x

    shutil.copytree(mini_w8a8, tmp_path / "mir")
    assert tensors.change(tmp_path / "mir" / "weights", change)
    done = run("verify", "--engine", build(tmp_path / "mir", tmp_path / "engine"), "--model", mini_mir, "--json", "--quiet", ok=None)
    assert json.loads(done.stdout)["first_difference"] == "layer 4 moe.experts.gate.weight expert 13"


@pytest.mark.parametrize("tensor,named", [("layers.3.attn.q_norm.weight", "layer 3 attn.q_norm.weight element"), ("layers.1.attn.k_norm.weight", "layer 1 attn.k_norm.weight element"),
                                          ("layers.5.moe.select_bias", "layer 5 moe.select_bias element"), ("final_norm.weight", "lm_head.weight"),
                                          ("layers.2.attn.index_q.weight", "layer 2 attn.index_q.weight row 0"), ("embed.weight", "embed.weight row 0")])
def test_verify_names_numbers_that_changed_places(tensor, named, mini_w8a8, mini_mir, tmp_path):
    """Of what is not rounded two numbers swapped: outputs hardly show it, the function is another."""
    def change(name, x):
        if name != tensor:
            return None
        x = x.copy()
        low, high = np.argmin(x.flat[:64]), np.argmax(x.flat[:64])
        assert x.flat[low] != x.flat[high]
        x.flat[low], x.flat[high] = x.flat[high], x.flat[low]
        return x

    shutil.copytree(mini_w8a8, tmp_path / "mir")
    assert tensors.change(tmp_path / "mir" / "weights", change) == [tensor]
    done = run("verify", "--engine", build(tmp_path / "mir", tmp_path / "engine"), "--model", mini_mir, "--json", "--quiet", ok=None)
    assert done.returncode == 1 and json.loads(done.stdout)["first_difference"].startswith(named)


def one_row(wanted, row, factor=4):
    """Changes the scales of one row (of a stacked tensor: of the expert row[0])."""
    def change(name, x):
        if name != wanted:
            return None
        x = x.copy()
        x[row] *= factor
        return x
    return change


def named_weights(engine, mir):
    done = run("verify", "--engine", engine, "--model", mir, "--json", "--quiet", ok=None)
    return [r["what"] for r in json.loads(done.stdout)["rows"] if ".weight" in r["what"] and not r["ok"]], done.returncode


@pytest.mark.parametrize("factor", [4, 0.25])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layer,matrix,row", [(0, "attn.q", (5,)), (3, "moe.shared.up", (9,)), (4, "attn.o", (127,)), (0, "mlp.down", (0,)),
                                              (5, "moe.experts.up", (3, 17))])
def test_verify_names_the_row_with_a_wrong_scale(factor, bits, layer, matrix, row, mini_w8a8, mini_w4a8, mini_mir, tmp_path):
    """One output of one matrix: too little for any sum over the matrix."""
    shutil.copytree(mini_w8a8 if bits == 8 else mini_w4a8, tmp_path / "mir")
    wanted = f"layers.{layer}.{matrix}.weight_scale"
    assert tensors.change(tmp_path / "mir" / "weights", one_row(wanted, row, factor)) == [wanted]
    expert = f" expert {row[0]}" if len(row) == 2 else ""
    assert named_weights(build(tmp_path / "mir", tmp_path / "engine"), mini_mir) == ([f"layer {layer} {matrix}.weight{expert} row {row[-1]}"], 1)


def test_verify_names_a_channel_that_smoothing_hides(tmp_path):
    """Of an up and a down that smoothing tied together, a row of up is a column of down."""
    mir = export(GOLDENS / "llama", tmp_path / "mir")
    quantize(mir, tmp_path / "w8a8", recipe(smooth_quant={"alpha": 0.7, "down": True}), "--no-compare")
    for matrix, line in ("up", "column"), ("down", "row"):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(tmp_path / "w8a8", tmp_path / "damaged")
        assert tensors.change(tmp_path / "damaged" / "weights", one_row(f"layers.1.mlp.{matrix}.weight_scale", (7,)))
        assert named_weights(build(tmp_path / "damaged", tmp_path / "engine"), mir) == ([f"layer 1 mlp.down.weight {line} 7"], 1)


def test_verify_looks_at_both_forms_of_a_tied_table(tmp_path):
    """A table that is the head too stands in the engine twice, and apart where the head is rounded: each of them counts."""
    def row_of_table(name, x):
        if name != "embed.weight":
            return None
        x = x.copy()
        x[11] = tensors.bf16(4 * tensors.from_bf16(x[11])) if x.dtype == np.uint16 else 4 * x[11]
        return x

    mir = export(GOLDENS / "llama", tmp_path / "mir")
    table, head = "embed.weight row 11", "lm_head.weight row 11"
    for form, damages in (("float", [(row_of_table, [table, head])]),
                          ("int8", [(row_of_table, [table]), (one_row("lm_head.weight_scale", (11,)), [head])])):
        quantize(mir, tmp_path / form, recipe(layers={"lm_head": form}), "--no-compare")
        engine = build(tmp_path / form, tmp_path / "engine")
        assert named_weights(engine, mir) == ([], 0)
        whole = run("verify", "--engine", engine, "--model", mir, "--json", "--quiet").stdout
        assert {"embed.weight", "lm_head.weight"} <= {r["what"] for r in json.loads(whole)["rows"]}
        for damage, named in damages:
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            shutil.copytree(tmp_path / form, tmp_path / "damaged")
            assert tensors.change(tmp_path / "damaged" / "weights", damage)
            assert named_weights(build(tmp_path / "damaged", tmp_path / "engine"), mir) == (named, 1)


# ---- scales that saturate

def test_saturation_from_recipe_to_engine(mini_mir, tmp_path):
    settings = {"percentile": 99, "layers": ["re:.*experts.down", "layers.2.attn"]}
    quantize(mini_mir, tmp_path / "a", recipe(saturation=settings), "--calib", EVAL / "calib.jsonl", "--no-compare")
    quantize(mini_mir, tmp_path / "plain", recipe(), "--calib", EVAL / "calib.jsonl", "--no-compare")
    names = set(tensors.folder(tmp_path / "a" / "weights")) - set(tensors.folder(tmp_path / "plain" / "weights"))
    assert {n for n in names if n.startswith("layers.2.")} == {"layers.2.act.a.scale", "layers.2.act.h.scale", "layers.2.act.o.scale"}
    line = "inputs with scales per token that saturate"
    count = len(names)
    assert f"{count} {line}" in run("inspect", tmp_path / "a").stdout
    assert line not in run("inspect", tmp_path / "plain").stdout
    engine, plain = build(tmp_path / "a", tmp_path / "ea"), build(tmp_path / "plain", tmp_path / "ep")
    assert f"{count} {line}" in run("inspect", engine).stdout
    manifest = json.loads((engine / "engine.json").read_text())
    assert manifest["format_version"] == json.loads((plain / "engine.json").read_text())["format_version"] == 4
    ops = [i["op"] for i in manifest["program"]]
    assert ops.count("grouped_experts") == [i["op"] for i in json.loads((plain / "engine.json").read_text())["program"]].count("grouped_experts") > 0
    # Fused or not, on any instructions: one engine.
    said = set()
    for level in ("O0", "O2"):
        for isa in isas():
            e = build(tmp_path / "a", tmp_path / "e", "--opt-level", level)
            said.add(run("generate", "--engine", e, "--prompt", "What is 12 + 30?", "--max-tokens", "12", "--quiet", env={"MI_FORCE_ISA": isa}).stdout)
    assert len(said) == 1
    # Formats that have no place for it leave it out and say so.
    assert "do not saturate there" in run("convert", "--model", tmp_path / "a", "--to", "compressed-tensors", "--output", tmp_path / "ct").stdout
    other = export(GOLDENS / "qwen3_moe", tmp_path / "other")
    quantize(other, tmp_path / "b", recipe(saturation=settings), "--no-compare")
    assert "saturate are left out" in run("convert", "--model", tmp_path / "b", "--output", tmp_path / "m.gguf").stdout


def test_automatic_saturation_is_closed(mini_mir, tmp_path):
    done = quantize(mini_mir, tmp_path / "a", recipe(saturation={"layers": "auto", "percentile": 99.9}), "--calib", EVAL / "calib.jsonl", "--no-compare")
    assert "saturation at the 99.9th percentile helps" in done.stdout
    assert "layers: auto" not in (tmp_path / "a" / "recipe.yaml").read_text()
    run("quantize", "--model", mini_mir, "--config", tmp_path / "a" / "recipe.yaml", "--output", tmp_path / "b", "--quiet", "--no-compare")
    assert files(tmp_path / "a") == files(tmp_path / "b")


# ---- the verdict on tasks

def test_the_limit_on_exact_answers(mini_mir, tmp_path):
    """A recipe that loses answers: with its limits out of the way it passes, with either of them it does not."""
    few = tmp_path / "eval.jsonl"
    few.write_text("".join((EVAL / "eval.jsonl").read_text().splitlines(True)[::70]))
    config = tmp_path / "r.yaml"
    config.write_text(recipe(activation_scheme="per_tensor", observer="percentile", percentile=90, smooth_quant={"enable": False}))
    args = ["quantize", "--model", mini_mir, "--config", config, "--output", tmp_path / "a", "--force", "--no-compare", "--quiet", "--eval", few]
    done = run(*args, "--max-points", "100", ok=1)
    assert "of the greedy answers are the same" in done.stderr and "the limit is 97.00 %" in done.stderr and "loses" not in done.stderr
    report = json.loads(run(*args, "--max-points", "100", "--min-exact", "0", "--json").stdout)
    assert report["quality"]["exceeded"] == [] and report["quality"]["same_answers"] < report["quality"]["answers"] == 20
    refused(run(*args, "--min-exact", "101", ok=2), 2, "--min-exact")


# ---- calibration text and real prompts

def test_a_calibration_set_is_compared_with_traffic(mini_mir, tmp_path):
    prose = "The captain looked at the sea and said that the weather would be better tomorrow.\n" * 60
    code = "for (int i = 0; i < n; ++i) { sum += values[i] * weights[i]; }\n" * 60
    (tmp_path / "prose.txt").write_text(prose)
    (tmp_path / "code.txt").write_text(code)
    (tmp_path / "both.txt").write_text(prose + code)
    config = tmp_path / "r.yaml"
    config.write_text(json.dumps({"quant": {}}))

    def warnings(*flags):
        done = run("quantize", "--model", mini_mir, "--config", config, "--output", tmp_path / "a", "--force", "--quiet", "--no-compare", "--json", *flags)
        report = json.loads(done.stdout)
        assert report["calibration"]["mix"]
        return report["warnings"]

    assert ["one-sided" in w for w in warnings("--calib", tmp_path / "prose.txt")] == [True]
    assert warnings("--calib", tmp_path / "both.txt") == []
    assert warnings("--calib", tmp_path / "prose.txt", "--traffic", tmp_path / "prose.txt") == []
    differs = warnings("--calib", tmp_path / "prose.txt", "--traffic", tmp_path / "code.txt")
    assert len(differs) == 2 and "differs from the traffic" in differs[0] and "% code, the calibration set only 0.0 %" in differs[1]
