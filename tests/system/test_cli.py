"""Help, refusals and exit codes: 2 usage, 3 environment, 4 bad input; one sentence, never a crash."""
import json
import shutil
import struct

import pytest
from conftest import DATA, MODEL, RECIPE, build, export, run

COMMANDS = ["export", "quantize", "build", "serve", "generate", "verify", "eval", "bench", "profile", "inspect"]
BROKEN = sorted(p.name for p in (DATA / "broken").iterdir() if p.is_dir()) if (DATA / "broken").exists() else []


def refused(done, code, *words):
    lines = [l for l in done.stderr.strip().splitlines() if l.startswith("error: ")]
    assert done.returncode == code and len(lines) == 1, f"{done.returncode}\n{done.stderr}"
    for word in words:
        assert word in lines[0], f"{word!r} not in {lines[0]!r}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command):
    assert "metainfer " + command in run(command, "--help").stdout


def test_version_and_overview():
    assert run("--version").stdout.startswith("metainfer ")
    assert "Exit codes" in run("--help").stdout


def test_unknown_flag_names_the_nearest():
    refused(run("build", "--modle", "x", ok=2), 2, "--modle", "--model")


def test_unknown_command_names_the_nearest():
    refused(run("exprot", ok=2), 2, "exprot", "export")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(name, tmp_path):
    expect = json.loads((DATA / "broken" / name / "expect.json").read_text())
    done = run("export", "--model-dir", DATA / "broken" / name / expect["open"], "--output", tmp_path / "out", "--quiet", ok=None)
    if expect["must"] == "load":
        assert done.returncode == 0, done.stderr
    else:
        refused(done, 4, *expect["mention"])
        assert any(way in done.stderr for way in ("fetch", "correct", "remove", "known are", "--model-dir")), done.stderr
        assert not (tmp_path / "out").exists() and not list(tmp_path.iterdir())


def test_missing_folder(tmp_path):
    refused(run("export", "--model-dir", tmp_path / "none", "--output", tmp_path / "out", ok=4), 4, str(tmp_path / "none"))


def test_unsupported_family_lists_known_ones(tmp_path):
    refused(run("export", "--model-type", "mixtrall", "--model-dir", MODEL, "--output", tmp_path / "out", ok=4), 4, "mixtral")


def test_known_later_family_is_refused_by_name(tmp_path):
    shutil.copytree(DATA / "goldens" / "mixtral", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["model_type"] = "deepseek_v3"
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    refused(run("export", "--model-dir", tmp_path / "m", "--output", tmp_path / "out", ok=4), 4, "deepseek_v3")


def test_model_type_spellings(tmp_path):
    for i, spelling in enumerate(("minimax-m3", "minimax_m3", "minmax-m3")):
        run("export", "--model-type", spelling, "--model-dir", MODEL, "--output", tmp_path / str(i), "--quiet")


def patch_tensor(path, suffix, payload):
    raw = bytearray(path.read_bytes())
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + size])
    name = next(n for n in sorted(header) if n.endswith(suffix))
    begin = 8 + size + header[name]["data_offsets"][0]
    raw[begin:begin + len(payload)] = payload
    path.write_bytes(raw)
    return name


@pytest.mark.parametrize("bits", [0x7FC0, 0xFF80, 0x7F80], ids=["nan", "-inf", "inf"])
def test_nan_and_inf_weights_are_named(bits, tmp_path):
    shutil.copytree(DATA / "goldens" / "qwen3_moe", tmp_path / "m")
    name = patch_tensor(tmp_path / "m" / "model.safetensors", "experts.5.up_proj.weight", struct.pack("<H", bits))
    refused(run("export", "--model-dir", tmp_path / "m", "--output", tmp_path / "out", ok=4), 4, name)


def test_recipe_with_unknown_key(mini_mir, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("quant: {smooth_quant: {enable: true, alhpa: 0.6}}\n")
    refused(run("quantize", "--model", mini_mir, "--config", recipe, "--output", tmp_path / "out", ok=4), 4, "alhpa", "alpha")


@pytest.mark.parametrize("pattern,words", [("lm_head", ["lm_head"]), ("layers.1.attn.qq", ["layers.1.attn.qq"]), ("re:[", ["re:["])])
def test_sensitive_layer_that_matches_nothing(mini_mir, tmp_path, pattern, words):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"quant": {"sensitive_layers": [pattern]}}))
    refused(run("quantize", "--model", mini_mir, "--config", recipe, "--output", tmp_path / "out", ok=4), 4, *words)


def recipe_file(path, **settings):
    path.write_text(json.dumps({"quant": settings}))
    return path


def test_int8_head_by_request(mini_mir, tmp_path):
    """lm_head: int8 in the recipe, in one run and added to a model that was rounded before: the same weights."""
    plain = {"smooth_quant": {"enable": False}, "calibration_samples": 8}
    head = {"layers": {"lm_head": "int8"}}
    both = recipe_file(tmp_path / "both.yaml", **plain, **head)
    done = run("quantize", "--model", mini_mir, "--config", both, "--output", tmp_path / "both", "--json", "--quiet", "--no-compare")
    assert json.loads(done.stdout)["patterns"] == [{"pattern": "lm_head", "format": "int8", "matches": 1}]
    first = run("quantize", "--model", mini_mir, "--config", recipe_file(tmp_path / "a.yaml", **plain), "--output", tmp_path / "first",
                "--quiet", "--no-compare")
    assert "not needed" in first.stdout
    again = recipe_file(tmp_path / "b.yaml", **head)
    report = json.loads(run("quantize", "--model", tmp_path / "first", "--config", again, "--output", tmp_path / "second", "--quiet", "--json").stdout)
    assert report["patterns"][0]["matches"] == 1 and report["compared_tokens"] > 0 and 0 < report["mean_kl"] < 0.01
    for f in sorted((tmp_path / "both" / "weights").iterdir()):
        assert f.read_bytes() == (tmp_path / "second" / "weights" / f.name).read_bytes(), f.name
    build(tmp_path / "second", tmp_path / "engine")
    assert run("generate", "--engine", tmp_path / "engine", "--chat", "What is 23 + 45?", "--quiet").stdout.strip()
    refused(run("quantize", "--model", tmp_path / "first", "--config", tmp_path / "a.yaml", "--output", tmp_path / "no", ok=4), 4, "quantized already", "lm_head")


def test_sensitive_layers_stay_float(mini_mir, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"quant": {"calibration_samples": 4, "sensitive_layers": ["layers.1", "re:.*\\.down$"]}}))
    done = run("quantize", "--model", mini_mir, "--config", recipe, "--output", tmp_path / "out", "--json", "--quiet", "--no-compare")
    report = json.loads(done.stdout)
    counts = {c["pattern"]: c["matches"] for c in report["patterns"]}
    assert counts["layers.1"] == 10 and counts["re:.*\\.down$"] == 11
    build(tmp_path / "out", tmp_path / "engine")
    strict = run("build", "--model", tmp_path / "out", "--output", tmp_path / "engine2", "--strict", "--quiet", ok=1)
    assert "layers" in strict.stderr or "layer" in strict.stderr


def test_existing_output_needs_force(mini_mir, tmp_path):
    build(mini_mir, tmp_path / "e")
    refused(run("build", "--model", mini_mir, "--output", tmp_path / "e", ok=4), 4, "--force")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    refused(run("build", "--model", mini_mir, "--output", tmp_path / "precious", "--force", ok=4), 4, "precious")
    assert (tmp_path / "precious" / "file").read_text() == "x"


def test_damaged_engine_is_refused(mini_int8, tmp_path):
    shutil.copytree(mini_int8, tmp_path / "e")
    raw = bytearray((tmp_path / "e" / "weights.bin").read_bytes())
    raw[len(raw) // 2] ^= 0x40
    (tmp_path / "e" / "weights.bin").write_bytes(raw)
    refused(run("generate", "--engine", tmp_path / "e", "--chat", "Hello", ok=4), 4, "weights.bin")
    manifest = json.loads((mini_int8 / "engine.json").read_text())
    manifest["format_version"] = 99
    (tmp_path / "e" / "engine.json").write_text(json.dumps(manifest))
    refused(run("generate", "--engine", tmp_path / "e", "--chat", "Hello", ok=4), 4, "newer")


def test_force_isa_is_checked():
    refused(run("bench", "--engine", "x", env={"MI_FORCE_ISA": "avx9"}, ok=2), 2, "avx9")


def test_unknown_target(mini_mir, tmp_path):
    refused(run("build", "--model", mini_mir, "--target", "tpu", "--output", tmp_path / "e", ok=None), 2, "tpu", "cpu")


def test_tokenizer_absent(tmp_path):
    mir = export(DATA / "goldens" / "mixtral", tmp_path / "mir")
    engine = build(mir, tmp_path / "e")
    refused(run("generate", "--engine", engine, "--prompt", "x", ok=4), 4, "tokenizer")


def test_dummy_weights(tmp_path):
    (tmp_path / "m").mkdir()
    shutil.copy(DATA / "goldens" / "qwen3_moe" / "config.json", tmp_path / "m")
    for name in ("a", "b"):
        export(tmp_path / "m", tmp_path / name, "--dummy-weights", "--seed", "7")
    for file in sorted((tmp_path / "a" / "weights").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / "weights" / file.name).read_bytes()
    engine = build(tmp_path / "a", tmp_path / "e")
    rows = [json.loads(l) for l in run("bench", "--engine", engine, "--prefill", "32", "--decode", "4", "--batch", "2", "--rounds", "1", "--json").stdout.splitlines()]
    assert {r.get("metric") for r in rows} == {None, "prefill", "decode", "batch"} and all(r["tok_s"] > 0 for r in rows if "metric" in r)


def test_generate_answers(mini_int8):
    done = run("generate", "--engine", mini_int8, "--chat", "What is 23 + 45?", "--quiet")
    assert done.stdout.strip() == "68"


def test_inspect(mini_mir, mini_int8):
    assert "minimax_m3" in run("inspect", mini_mir, "--graph").stdout
    assert "w8a8" in run("inspect", mini_int8).stdout


def test_kv_plan_is_printed(mini_mir, tmp_path):
    done = run("build", "--model", mini_mir, "--output", tmp_path / "e")
    assert "2 x 6 layers x 2 KV heads x 32 x 2048 tokens x 32 sequences x 2 bytes = 100.66 MB" in done.stdout
