"""The bundled model: float equals the recorded reference, int8 keeps quality."""
import json
import math

from conftest import EVAL, RECIPE, RECIPE_INT4, build, quantize, read_json, run

REFERENCE = read_json(EVAL / "results_reference.json")


def evaluate(engine):
    done = run("eval", "--engine", engine, "--data", EVAL / "eval.jsonl", "--reference", EVAL / "results_reference.json", "--json", "--quiet", timeout=1200)
    return json.loads(done.stdout)


_results = {}


def result(name, engine):
    if name not in _results:
        _results[name] = evaluate(engine)
    return _results[name]


def test_float_accuracy_equals_the_reference(mini_float):
    found = result("float", mini_float)
    assert found["accuracy"] == REFERENCE["accuracy"]
    assert found["items"] == REFERENCE["items"]
    assert found["text_tokens"] == REFERENCE["text"]["tokens"]
    assert math.isclose(found["text_nll_per_token"], REFERENCE["text"]["nll_per_token"], abs_tol=2e-5)


def test_float_greedy_answers_equal_the_reference(mini_float):
    found = result("float", mini_float)
    assert found["greedy_compared"] == len(REFERENCE["greedy"]) == 64
    for d in found["greedy_divergences"]:
        assert abs(d["margin"]) < 1e-3, f"answer {d['item']} differs at token {d['token']} and it is no near tie: {d}"


def test_int8_loses_less_than_two_points_and_three_permille(mini_float, mini_int8):
    a, b = result("float", mini_float), result("int8", mini_int8)
    for group, accuracy in a["accuracy"].items():
        assert accuracy - b["accuracy"][group] < 0.02, group
    assert b["text_perplexity"] / a["text_perplexity"] < 1.003


def show(columns, capsys):
    with capsys.disabled():
        print()
        print(f"{'':<14}" + "".join(f"{c:>19}" for c in columns))
        for group in REFERENCE["accuracy"]:
            print(f"{group:<14}" + "".join(f"{100 * r['accuracy'][group]:>17.1f} %" for r in columns.values()))
        print(f"{'perplexity':<14}" + "".join(f"{r['text_perplexity']:>19.4f}" for r in columns.values()))
        print(f"{'greedy equal':<14}" + "".join(f"{r['greedy_equal']:>19}" for r in columns.values()))


def test_table_of_schemes(mini_mir, mini_float, mini_int8, tmp_path, capsys):
    """Per token without smoothing and per tensor, shown beside; the smoothed one must be the best of them in perplexity."""
    columns = {"float": result("float", mini_float), "int8 smooth": result("int8", mini_int8)}
    for name, scheme, smooth in (("per token", "per_token", "false"), ("per tensor", "per_tensor", "false"), ("per tensor smooth", "per_tensor", "true")):
        mir = tmp_path / name.replace(" ", "-")
        quantize(mini_mir, mir, RECIPE % (scheme, smooth), "--calib", EVAL / "calib.jsonl", "--no-compare")
        columns[name] = result(name, build(mir, tmp_path / (mir.name + "-engine")))
    show(columns, capsys)
    ppl = {name: r["text_perplexity"] for name, r in columns.items()}
    assert ppl["int8 smooth"] < ppl["per token"] < ppl["per tensor"]


def test_int4_by_size_of_group(mini_mir, mini_float, mini_int8, mini_int4, tmp_path, capsys):
    """W4A8, shown beside float and int8. Measured with smoothing: no task group loses more than 1.0 points, perplexity
    grows by at most 0.6 permille at every size of groups; without smoothing (128) by 5.5 permille. The bounds leave room for
    a choice of scales that is otherwise as good."""
    columns = {"float": result("float", mini_float), "int8": result("int8", mini_int8), "int4 g128": result("int4 g128", mini_int4)}
    for name, group, smooth in (("int4 g64", 64, "true"), ("int4 g32", 32, "true"), ("int4 g128 plain", 128, "false")):
        mir = tmp_path / name.replace(" ", "-")
        quantize(mini_mir, mir, RECIPE_INT4 % (group, smooth), "--calib", EVAL / "calib.jsonl", "--no-compare")
        columns[name] = result(name, build(mir, tmp_path / (mir.name + "-engine")))
    show(columns, capsys)
    plain = columns.pop("int4 g128 plain")
    for name in ("int4 g128", "int4 g64", "int4 g32"):
        for group, accuracy in columns["float"]["accuracy"].items():
            assert accuracy - columns[name]["accuracy"][group] < 0.03, (name, group)
        assert columns[name]["text_perplexity"] / columns["float"]["text_perplexity"] < 1.003, name
        assert columns[name]["text_perplexity"] < plain["text_perplexity"], name


def test_int4_engine_says_what_it_is(mini_int4, mini_int8):
    int4, int8 = (read_json(e / "engine.json") for e in (mini_int4, mini_int8))
    assert int4["format_version"] == 4 and int4["model"]["precision"] == "w4a8"
    assert int8["format_version"] == 4 and int8["model"]["precision"] == "w8a8"
    packed = {name: [w for w in m["weights"] if w["packing"] == name] for name, m in (("packed_i4", int4), ("packed_i8", int8))}
    assert len(packed["packed_i4"]) == len(packed["packed_i8"]) > 0
    assert all(w["group"] == 128 and w["scale_dtype"] == "BF16" for w in packed["packed_i4"])
    assert 2 * sum(w["bytes"] for w in packed["packed_i4"]) == sum(w["bytes"] for w in packed["packed_i8"])


def test_int4_verifies_within_its_own_limits(mini_int4, mini_mir):
    report = json.loads(run("verify", "--engine", mini_int4, "--model", mini_mir, "--json", "--quiet").stdout)
    assert report["ok"] and 0.02 < report["mean_kl"] < 0.25
    run("verify", "--engine", mini_int4, "--model", mini_mir, "--max-kl", "0.02", "--json", "--quiet", ok=1)


def test_verify_against_the_float_graph(mini_int8, mini_mir):
    report = json.loads(run("verify", "--engine", mini_int8, "--model", mini_mir, "--json", "--quiet").stdout)
    assert report["ok"] and report["mean_kl"] < 0.02


def test_verify_points_at_a_damaged_layer(mini_w8a8, mini_mir, tmp_path):
    """One layer's scales times four in the int8 model: verify must name that layer, not a later one."""
    import shutil
    import struct

    damaged = tmp_path / "damaged"
    shutil.copytree(mini_w8a8, damaged)
    for shard in sorted((damaged / "weights").glob("*.safetensors")):
        raw = bytearray(shard.read_bytes())
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8:8 + size])
        for name, entry in header.items():
            if name.startswith("layers.3.") and name.endswith("_scale"):
                begin, end = (8 + size + o for o in entry["data_offsets"])
                values = struct.unpack(f"<{(end - begin) // 4}f", raw[begin:end])
                raw[begin:end] = struct.pack(f"<{len(values)}f", *(4 * v for v in values))
        shard.write_bytes(raw)
    engine = build(damaged, tmp_path / "damaged-engine")
    done = run("verify", "--engine", engine, "--model", mini_mir, "--json", "--quiet", ok=1)
    assert "layer 3" in json.loads(done.stdout)["first_difference"]


def test_same_input_same_bytes(mini_mir, mini_w8a8, mini_w4a8, tmp_path):
    for first, recipe in ((mini_w8a8, RECIPE % ("per_token", "true")), (mini_w4a8, RECIPE_INT4 % (128, "true"))):
        again = tmp_path / (first.name + "-again")
        quantize(mini_mir, again, recipe, "--calib", EVAL / "calib.jsonl", "--threads", "1", "--no-compare")
        for file in sorted(first.rglob("*")):
            if file.is_file():
                assert file.read_bytes() == (again / file.relative_to(first)).read_bytes(), file
