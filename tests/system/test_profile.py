"""metainfer profile: every instruction is timed, the sums add up, pages load nothing. No test judges how fast the machine is."""
import json
import os
import re

import pytest
from conftest import run

QUICK = ["--prefill", "40", "--decode", "4", "--batch", "1,3", "--rounds", "1", "--quiet", "--no-checksums"]


@pytest.fixture(scope="module")
def profile(mini_int8, tmp_path_factory):
    out = tmp_path_factory.mktemp("profile")
    done = run("profile", "--engine", mini_int8, *QUICK, "--json", "--memory", "--html", out / "p.html", "--chrome-trace", out / "t.json")
    return json.loads(done.stdout), (out / "p.html").read_text(), json.loads((out / "t.json").read_text())


def test_times_cover_the_program(profile, mini_int8):
    report = profile[0]
    program = json.loads((mini_int8 / "engine.json").read_text())["program"]
    assert [s["name"] for s in report["scenarios"]] == ["prefill 40", "decode, batch 1", "decode, batch 3"]
    for s in report["scenarios"]:
        assert len(s["instructions"]) == len(program)
        assert all(i["calls"] == s["steps"] and i["seconds"] > 0 for i in s["instructions"])
        inside = sum(i["seconds"] for i in s["instructions"])
        assert inside + s["outside_seconds"] == pytest.approx(s["seconds"])
        for groups in (s["ops"], s["layers"]):
            assert sum(g["seconds"] for g in groups) == pytest.approx(inside)
        times = [g["seconds"] for g in s["ops"]]
        assert times == sorted(times, reverse=True)
        assert s["calls_per_step"] == len(program)


def test_experts_are_counted(profile, mini_int8):
    for s in profile[0]["scenarios"]:
        assert s["experts"]
        for e in s["experts"]:
            assert sum(e["tokens"]) == s["tokens"] * e["k"]
            assert e["k"] <= e["distinct_per_step"] <= e["experts"]
            assert e["skew"] >= 1
    assert all(e["distinct_per_step"] == e["k"] for e in profile[0]["scenarios"][1]["experts"])


def test_limits_kernels_and_memory(profile, mini_int8):
    report = profile[0]
    limits = report["machine"]["limits"]
    for s in report["scenarios"]:
        linear = next(o for o in s["ops"] if o["name"] == "linear")
        assert linear["bound"] in ("memory", "arithmetic") and linear["of_limit"] > 0
        needed = max((linear["weight_bytes"] + linear["kv_bytes"]) / limits["read_gbs"]["all"],
                     linear["int8_ops"] / limits["int8_gops"]["all"] + linear["float_ops"] / limits["f32_gflops"]["all"]) / 1e9
        assert linear["of_limit"] == pytest.approx(needed / linear["seconds"])
    assert all(k["why"] for k in report["kernels"]) and any("gemm_i8" in k["kernel"] for k in report["kernels"])
    parts = {p["name"]: p for p in report["memory"]["parts"]}
    assert parts["weights"]["planned_bytes"] == os.path.getsize(mini_int8 / "weights.bin")
    for name in ("weights", "KV cache", "activations"):
        resident = parts[name]["resident_bytes"]
        assert resident <= parts[name]["planned_bytes"] if resident is not None else report["memory"]["notes"]


def test_page_is_self_contained(profile):
    page = profile[1]
    assert page.count("<svg") >= 3 * 4 and page.rstrip().endswith("</html>")
    assert "<script" not in page and not re.search(r"(src|href)=", page)


def test_trace_is_one_step_of_each_scenario(profile):
    events = profile[2]["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in complete} == {1, 2, 3} and all(e["dur"] >= 0 for e in complete)
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert names[1].startswith("decode, batch 1: step 3 of 4")
    for pid in (1, 2, 3):
        step = next(e for e in complete if e["pid"] == pid and e["cat"] == "step")
        inside = sorted((e for e in complete if e["pid"] == pid and "args" in e), key=lambda e: e["ts"])
        assert len(inside) == len(profile[0]["scenarios"][0]["instructions"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in zip(inside, inside[1:]))
        assert inside[-1]["ts"] + inside[-1]["dur"] <= step["dur"] + 0.01


def test_text_has_the_longest_first(mini_int8):
    text = run("profile", "--engine", mini_int8, *QUICK, "--no-probe").stdout
    for words in ("by operation", "by layer", "outside instructions", "tokens per expert", "why:", "not measured"):
        assert words in text
    assert text.index("by operation") < text.index("by layer")


def test_existing_files_are_kept(mini_int8, tmp_path):
    (tmp_path / "p.html").write_text("precious")
    done = run("profile", "--engine", mini_int8, *QUICK, "--html", tmp_path / "p.html", ok=4)
    assert "--force" in done.stderr and (tmp_path / "p.html").read_text() == "precious"
