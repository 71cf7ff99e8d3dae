"""build: options in a file, what is fused and grouped, what falls back and what that costs, the report's page."""
import json
import re
import urllib.request

import pytest
from browser import CHROMIUM, Browser, Page
from conftest import Server, build, run
from test_cli import refused

INT8_KERNELS = ["gemm_i8_amx", "gemm_i8_avx512vnni", "gemm_i8_avxvnni", "gemm_i8_avx2"]
WITHOUT = {"MI_WITHOUT_KERNEL": ",".join(INT8_KERNELS)}
GENERATE = ("--prompt", "Once upon a time", "--max-tokens", 24, "--temperature", 0)


def with_config(mir, out, text, *flags, ok=0, **kwargs):
    config = out.parent / (out.name + ".yaml")
    config.write_text(text)
    return run("build", "--model", mir, "--output", out, "--config", config, "--force", "--quiet", *flags, ok=ok, **kwargs)


def program(engine):
    return json.loads((engine / "engine.json").read_text())["program"]


def answer(engine):
    return run("generate", "--engine", engine, *GENERATE).stdout


def test_a_config_decides_what_is_fused_and_how_experts_are_grouped(mini_w8a8, mini_int8, tmp_path):
    out = tmp_path / "engine"
    with_config(mini_w8a8, out, r"""
build:
  fusion:
    ignore: ["re:layers\\.2\\.attn\\.q\\.", "layers.3.moe.experts.down"]
  expert_groups:
    - {layers: [4], size: 4}
""")
    calls = lambda engine, layer: [i["op"] for i in program(engine) if i.get("layer") == layer]
    assert calls(out, 1) == calls(mini_int8, 1) and len(calls(out, 2)) == len(calls(mini_int8, 2)) + 1
    assert "grouped_experts" in calls(out, 1) and "grouped_experts" not in calls(out, 3)
    grouped = {i["layer"]: i.get("groups") for i in program(out) if i["op"] == "grouped_experts"}
    assert grouped[1] is None and grouped[4][0] == [0, 1, 2, 3] and sorted(sum(grouped[4], [])) == list(range(4 * len(grouped[4])))
    options = json.loads((out / "engine.json").read_text())["options"]
    assert "layers.3.moe.experts.down" in options["fusion.ignore"] and json.loads(options["expert_groups"]) == [{"layers": [4], "size": 4}]
    assert answer(out) == answer(mini_int8)


def test_flags_have_the_last_word_and_lists_add_up(mini_w8a8, tmp_path):
    out = tmp_path / "engine"
    with_config(mini_w8a8, out, "build: {opt_level: O0, disable_passes: [fuse_qkv]}", "--opt-level", "O2", "--disable-pass", "group_experts")
    manifest = json.loads((out / "engine.json").read_text())
    assert [p["name"] for p in manifest["passes"] if p["skipped"]] == ["fuse_qkv", "group_experts"]
    with_config(mini_w8a8, out, "build: {opt_level: O0}")
    assert [p["name"] for p in json.loads((out / "engine.json").read_text())["passes"] if not p["skipped"]] == ["share_buffers"]


def test_debug_shapes_prints_every_intermediate(mini_w8a8, tmp_path):
    done = with_config(mini_w8a8, tmp_path / "engine", "build: {fusion: {debug_shapes: true}}", "--json")
    json.loads(done.stdout)
    parts = re.findall(r"^shapes (?:before|after) .*$", done.stderr, re.M)
    assert parts[0] == "shapes before the passes" and len(parts) == 1 + len(program_passes(tmp_path / "engine"))
    assert re.search(r"^  \+ qkv +f32\[T, \d+\] +linear$", done.stderr, re.M)


def program_passes(engine):
    return json.loads((engine / "engine.json").read_text())["passes"]


@pytest.mark.parametrize("text,words", [
    ("build: {fusion: {ignored: []}}", ["unknown key 'ignored'", "ignore"]), ("build: {fusion: {ignore: [layers.77.attn]}}", ["layers.77.attn"]),
    ("build: {expert_group: []}", ["unknown key 'expert_group'"]), ("fusion: {}", ["unknown key 'fusion'"]), ("build: {disable_passes: 3}", ["disable_passes"])])
def test_what_is_wrong_in_a_config_is_named(mini_w8a8, tmp_path, text, words):
    refused(with_config(mini_w8a8, tmp_path / "e", text, ok=4), 4, "e.yaml", *words)
    assert not (tmp_path / "e").exists()


def test_groups_that_do_not_fit_the_model_are_named(mini_w8a8, tmp_path):
    for groups, words in (("[{layers: [0], size: 2}]", "layer 0"), ("[{members: [[0, 1]]}]", "in no group"), ("[{layers: [1], size: 2}, {layers: [1], size: 4}]", "twice")):
        refused(with_config(mini_w8a8, tmp_path / "e", f"build: {{expert_groups: {groups}}}", ok=4), 4, "expert_groups", words)


def has_fast_kernels(report):
    return any("gemm_i8_scalar instead of" in f["what"] for f in report["kernel_fallbacks"])


def test_a_kernel_that_is_left_out_is_reported_with_its_cost(mini_w8a8, mini_int8, tmp_path):
    out = tmp_path / "engine"
    plain = json.loads(run("build", "--model", mini_w8a8, "--output", out, "--json", "--quiet").stdout)
    assert plain["fallbacks"] == []
    report = json.loads(run("build", "--model", mini_w8a8, "--output", out, "--json", "--quiet", "--force", env=WITHOUT).stdout)
    if not has_fast_kernels(report):
        pytest.skip("this machine has no int8 kernel but the reference")
    assert plain["kernel_fallbacks"] == []
    where = [f["where"] for f in report["kernel_fallbacks"]]
    assert len(where) == len(set(where)) and any(w.endswith("moe.experts.down.weight") for w in where) and all(w.startswith("layer") for w in where)
    for f in report["kernel_fallbacks"]:
        assert "times as long" in f["what"] and "MI_WITHOUT_KERNEL" in f["why"] and f["fix"]
    assert report["kernel_fallback_seconds"]["prompt"] > 0
    text = run("build", "--model", mini_w8a8, "--output", out, "--quiet", "--force", env=WITHOUT).stdout
    assert re.search(rf"^fallbacks +{len(where)} operations outside the fast path: 0 in float, {len(where)} on a slower kernel", text, re.M)
    # The engine is the same: kernels are chosen when it is loaded.
    assert (out / "engine.json").read_bytes() == (mini_int8 / "engine.json").read_bytes()


def test_strict_refuses_a_left_out_kernel(mini_w8a8, tmp_path):
    args = ("build", "--model", mini_w8a8, "--output", tmp_path / "e", "--quiet", "--strict")
    done = run(*args, env=WITHOUT, ok=None)
    if done.returncode == 0:
        pytest.skip("this machine has no int8 kernel but the reference")
    assert done.returncode == 1 and "--strict" in done.stderr and "moe.experts.gate.weight" in done.stderr and not (tmp_path / "e").exists()
    run(*args, "--allow-fallback", "*", env=WITHOUT)
    run(*args, "--force")
    refused(run(*args, env={"MI_WITHOUT_KERNEL": "gemm_i8_amxx"}, ok=2), 2, "MI_WITHOUT_KERNEL", "gemm_i8_amx")
    refused(run(*args, env={"MI_WITHOUT_KERNEL": "gemm_i8_scalar"}, ok=2), 2, "gemm_i8_scalar")


def test_fallbacks_at_the_start_of_the_server_and_in_its_metrics(mini_int8):
    def metrics(engine, env=None):
        with Server(engine, "--max-seq-len", 256, "--max-batch-size", 1, env=env) as s:
            text = urllib.request.urlopen(s.url + "/metrics", timeout=20).read().decode()
            return s.lines, {kind: int(float(n)) for kind, n in re.findall(r'^metainfer:fallbacks\{kind="(\w+)".*\} (\S+)$', text, re.M)}, text

    lines, counts, text = metrics(mini_int8)
    assert counts == {"float": 0, "kernel": 0} and "fallback_info" not in text and not any(line.startswith("fallback") for line in lines)
    lines, counts, text = metrics(mini_int8, WITHOUT)
    if counts["kernel"] == 0:
        pytest.skip("this machine has no int8 kernel but the reference")
    told = [line for line in lines if line.startswith("fallback ")]
    assert len(told) == counts["kernel"] == len(re.findall(r'^metainfer:fallback_info\{kind="kernel",where="layers? .*reason="MI_WITHOUT_KERNEL', text, re.M))
    assert any(line.startswith("fallbacks ") and "more for one token" in line for line in lines)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_fits_a_phone_and_paper(mini_w8a8, tmp_path):
    build(mini_w8a8, tmp_path / "engine", "--verify-passes")
    browser = Browser()
    try:
        for width in (360, 1200):
            page = Page(browser, (tmp_path / "engine" / "report.html").as_uri(), width, 800)
            assert page.js("document.documentElement.scrollWidth <= innerWidth"), width
            assert page.js("[...document.querySelectorAll('h2')].map(h => h.innerText).join()").split(",") == [
                "Sizes", "KV cache", "Passes", "Memory plan", "Conversions", "Fallbacks", "Graph after the passes", "Options", "Equivalence"]
            assert not page.complaints() and len(page.requested()) == 1
            page.close()
        page = Page(browser, (tmp_path / "engine" / "report.html").as_uri(), 700, 1000)
        page.call("Emulation.setEmulatedMedia", media="print")
        assert page.js("[...document.querySelectorAll('table, pre, svg')].every(e => e.getBoundingClientRect().right <= innerWidth + 1)")
        page.close()
    finally:
        browser.close()
