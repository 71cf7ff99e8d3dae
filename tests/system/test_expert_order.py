"""build --expert-profile: experts stored by how text chooses them, where that promises something. Answers stay the same, bit by bit."""
import json
import re
import shutil

import pytest
from conftest import EVAL, MODEL, RECIPE, RECIPE_INT4, build, export, quantize, run

PROMPT = ["--prompt", "Once upon a time", "--max-tokens", 40, "--json"]
LAYERS, EXPERTS, K, TOKENS = range(1, 6), 16, 4, 600


def choices(path, together=True, **changes):
    """Tokens that choose experts which are no neighbours, always the same four together; or ones that choose evenly."""
    def token(t):
        if together:
            return [t * 7 % 4 + 4 * i for i in range(K)]
        return sorted({(t * 5 + i * (1 + 2 * (t // 16 % 3))) % EXPERTS for i in range(K)})
    layers = [{"layer": n, "experts": EXPERTS, "k": K, "ids": sum((token(t + n) for t in range(TOKENS)), [])} for n in LAYERS]
    path.write_text(json.dumps({"format": "metainfer expert profile 1", "model": "mini", "source": "a test", "tokens": TOKENS, "layers": layers} | changes))
    return path


@pytest.fixture(scope="module")
def small_mir(work):
    """mini-m3 with random weights, so narrow that reading two neighbours together pays in any format."""
    source = work / "small"
    shutil.copytree(MODEL, source, ignore=shutil.ignore_patterns("*.safetensors", "train"))
    config = json.loads((source / "config.json").read_text())
    config["text_config"].update(hidden_size=64, intermediate_size=64, shared_intermediate_size=64, dense_intermediate_size=64)
    (source / "config.json").write_text(json.dumps(config))
    return export(source, work / "small-mir", "--model-type", "minimax-m3", "--dummy-weights")


@pytest.fixture(scope="module", params=["int4", "small-int8", "small-int4", "small-float", "small-O0"])
def pair(request, mini_w4a8, mini_mir, small_mir, work):
    """The engine, the same with experts in another order, what build said, and the float model."""
    form = request.param.removeprefix("small-")
    source, mir, flags = (small_mir if form != request.param else mini_mir), mini_w4a8, []
    if form != request.param:
        mir = work / f"mir-{request.param}"
        if form == "float":
            mir, flags = small_mir, ["--precision", "fp32"]
        else:
            quantize(small_mir, mir, RECIPE_INT4 % (32, "false") if form == "int4" else RECIPE % ("per_token", "false"), "--no-compare")
            flags = ["--opt-level", "O0"] if form == "O0" else []
    profile = choices(work / f"choices-{request.param}.json")
    plain = build(mir, work / f"plain-{request.param}", *flags)
    other = work / f"reordered-{request.param}"
    done = run("build", "--model", mir, "--output", other, "--quiet", "--expert-profile", profile, *flags)
    return plain, other, done.stdout, source


def slots(engine):
    weights = json.loads((engine / "engine.json").read_text())["weights"]
    return {w["name"]: w["expert_slots"] for w in weights if "expert_slots" in w}


def test_the_order_in_the_file_is_another_one(pair):
    plain, other, said, _ = pair
    assert slots(plain) == {}
    assert len(slots(other)) == 3 * len(LAYERS)
    for places in slots(other).values():
        assert sorted(places) == list(range(EXPERTS)) and places != sorted(places)
        assert sorted(places[e] // K for e in (0, 4, 8, 12)) in [[n] * K for n in range(4)], "those chosen together are neighbours"
    assert json.loads((other / "engine.json").read_text())["format_version"] == 5
    assert "layers 1-5 by how 600 tokens of a test choose" in said and "skew" in said and "expected" in said
    assert re.search(r"measured +[\d.]+ of the time: .* for the experts of \d+ tokens", said) or "not measured" in said
    page = (other / "report.html").read_text()
    assert "Order of experts" in page and "measured" in page
    assert "experts of 5 of 6 layers" in run("inspect", other).stdout and "stored by how tokens choose" not in run("inspect", plain).stdout
    diff = run("inspect", "--diff", plain, other, ok=1).stdout
    assert ", 0 not" in diff, "the same numbers for each expert"


def test_the_answers_are_the_same_to_the_bit(pair):
    plain, other, *_ = pair
    want = run("generate", "--engine", plain, *PROMPT).stdout
    assert len(json.loads(want)["tokens"]) > 30
    text = lambda engine, *flags: json.loads(run("generate", "--engine", engine, *PROMPT, *flags).stdout)["tokens"]
    for flags in ([], ["--threads", 1], ["--weights", "map"], ["--expert-cache", "100gb"], ["--expert-cache", "2mb"], ["--expert-cache", "400kb"]):
        assert text(other, *flags) == json.loads(want)["tokens"], flags
    scores = lambda engine: json.loads(run("eval", "--engine", engine, "--data", EVAL / "eval.jsonl", "--limit", 1, "--max-tokens", 4, "--json", "--quiet").stdout)
    found, wanted = scores(other), scores(plain)
    assert found["text_nll_per_token"] == wanted["text_nll_per_token"] > 0 and found["accuracy"] == wanted["accuracy"]


def test_verify_and_profile_know_it(pair, tmp_path):
    plain, other, _, source = pair
    verified = lambda engine, ok=None: run("verify", "--engine", engine, "--model", source, "--quiet", ok=ok).stdout
    assert "experts.gate.weight" in verified(other) and verified(other) == verified(plain), "random weights may round worse than verify allows, equally"
    if "small" not in other.name:
        verified(other, ok=0)
    profiles = []
    for engine in (plain, other):
        profiles.append(tmp_path / f"{engine.name}.json")
        run("profile", "--engine", engine, "--experts", profiles[-1], "--data", EVAL / "calib.jsonl", "--tokens", 300, "--quiet")
    assert profiles[0].read_text() == profiles[1].read_text(), "experts have the same numbers"


def test_a_real_profile_is_used_or_refused_with_numbers(mini_w4a8, mini_int4, tmp_path):
    profile = tmp_path / "experts.json"
    run("profile", "--engine", mini_int4, "--experts", profile, "--data", EVAL / "calib.jsonl", "--tokens", 3000, "--quiet")
    done = run("build", "--model", mini_w4a8, "--output", tmp_path / "engine", "--expert-profile", profile, "--json", "--quiet")
    order = json.loads(done.stdout)["expert_order"]
    assert order["tokens"] == 3000 and len(order["layers"]) == 5
    for layer in order["layers"]:
        assert layer["reordered"] == (layer["gain"] >= 0.02 and layer["gain"] > 3 * layer["standard_error"]) == ("why_not" not in layer)
    assert order["reordered_layers"] == len(slots(tmp_path / "engine")) / 3
    answer = lambda engine: run("generate", "--engine", engine, *PROMPT[:-1]).stdout
    assert answer(tmp_path / "engine") == answer(mini_int4)


def test_where_nothing_is_promised_the_order_stays(mini_w4a8, mini_int4, mini_w8a8, tmp_path):
    out = tmp_path / "engine"
    for profile, words in ((choices(tmp_path / "even.json", together=False), "evenly|chance"),
                           (choices(tmp_path / "short.json", tokens=40, layers=[{"layer": n, "experts": EXPERTS, "k": K, "ids": [0, 4, 8, 12] * 40} for n in LAYERS]),
                            "20 tokens to judge by are too few")):
        done = run("build", "--model", mini_w4a8, "--output", out, "--force", "--quiet", "--expert-profile", profile)
        assert "expert order  kept: by" in done.stdout and re.search(words, done.stdout), done.stdout
        assert "pages of 4 KB" in done.stdout
        for file in ("engine.json", "weights.bin"):
            assert (out / file).read_bytes() == (mini_int4 / file).read_bytes()
    some = choices(tmp_path / "some.json")
    whole = json.loads(some.read_text())
    some.write_text(json.dumps(whole | {"layers": whole["layers"][:2]}))
    large = run("build", "--model", mini_w8a8, "--output", out, "--force", "--quiet", "--expert-profile", some).stdout
    assert "expert order  kept" in large and "up to 8 pages, and reading such neighbours together is no faster" in large
    assert "3 layers not in the profile stay" in run("build", "--model", mini_w4a8, "--output", out, "--force", "--quiet", "--expert-profile", some).stdout


def test_profiles_that_are_none_of_this_model(mini_w8a8, tmp_path):
    out = tmp_path / "engine"
    def refused(profile, words, code=4):
        done = run("build", "--model", mini_w8a8, "--output", out, "--quiet", "--expert-profile", profile, ok=code)
        assert words in done.stderr and done.stderr.count("\n") <= 2, done.stderr
        assert not out.exists()
    bad = tmp_path / "bad.json"
    good = json.loads(choices(bad).read_text())
    refused(tmp_path / "none.json", "none.json")
    for change, words in (({"experts": 8}, "belongs to another model"), ({"layer": 0}, "belongs to another model"), ({"k": 2}, "belongs to another model"),
                          ({"ids": [0, 4, 8, 16] * TOKENS}, "expert 16 of 16"), ({"ids": [0, 8, 4, 12] * TOKENS}, "ascend"), ({"ids": [1]}, "1 ids")):
        bad.write_text(json.dumps(good | {"layers": [good["layers"][0] | change]}))
        refused(bad, words)
    for text, words in (("{", "bad.json"), ("[]", "no expert profile"), ('{"format": 7}', "no expert profile"), (json.dumps(good | {"layers": []}), "nothing to learn")):
        bad.write_text(text)
        refused(bad, words)
