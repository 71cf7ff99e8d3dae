"""Engines larger than memory: experts are read from disk as they are chosen. The tokens are those of the engine in memory, for a cache of any size."""
import json
import os
import pathlib
import random
import re
import subprocess
import threading

import pytest
from conftest import BINARY, EVAL, MemoryGroup, Server, build, export, run
from test_scheduling import metric, post, prose

PROMPT = ["--prompt", "Once upon a time", "--max-tokens", 40, "--json"]
SIZES = ["100gb", "4mb", "400kb"]  # all experts, some, a few


def generated(engine, *flags):
    done = run("generate", "--engine", engine, *PROMPT, *flags)
    return json.loads(done.stdout)["tokens"]


@pytest.fixture(scope="module", params=["int8", "int4", "float", "O0"])
def engine(request, mini_w8a8, mini_int8, mini_int4, mini_float, work):
    if request.param == "O0":
        return build(mini_w8a8, work / "mini-o0", "--opt-level", "O0")
    return {"int8": mini_int8, "int4": mini_int4, "float": mini_float}[request.param]


def test_the_same_tokens_from_a_cache_of_any_size(engine):
    want = generated(engine)
    assert len(want) > 30
    for size in SIZES if "float" not in engine.name else ["100gb", "4mb"]:
        for threads in (1, 2):
            assert generated(engine, "--expert-cache", size, "--threads", threads) == want, size


def test_many_streams_and_the_counters(mini_int8):
    bodies = [{"prompt": prose(random.Random(n), 150), "max_tokens": 30, "temperature": 0, "ignore_eos": True, "logprobs": 2} for n in range(8)]

    def answers(*flags):
        with Server(mini_int8, "--model", "minimax-m3", "--max-seq-len", 1024, *flags) as s:
            found = [None] * len(bodies)
            threads = [threading.Thread(target=lambda i=i: found.__setitem__(i, post(s, bodies[i])["choices"][0])) for i in range(len(bodies))]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            counts = {name: metric(s, f"metainfer:{name}") for name in
                      ("experts_held", "expert_cache_hits_total", "expert_cache_misses_total", "expert_read_bytes_total", "expert_prefetches_total")}
            start = "".join(s.lines)
        return [(a["text"], a["logprobs"]) for a in found], counts, start

    whole, none, _ = answers()
    assert set(none.values()) == {0}
    streamed, counts, start = answers("--expert-cache", "2mb")
    assert streamed == whole
    assert "experts read from disk" in start and re.search(r"in memory for \d+ of \d+", start)
    assert counts["experts_held"] > 0 and counts["expert_cache_hits_total"] > 0 and counts["expert_cache_misses_total"] > 0
    assert counts["expert_read_bytes_total"] > 0 and counts["expert_prefetches_total"] > 0


def test_bench_and_generate_say_what_the_cache_was_worth(mini_int8):
    done = run("generate", "--engine", mini_int8, *PROMPT[:-1], "--stats", "--expert-cache", "2mb")
    assert re.search(r"[\d.]+ % of \d+ wanted were in memory \(room for \d+ of \d+\)", done.stderr)
    done = run("bench", "--engine", mini_int8, "--prefill", 16, "--decode", 8, "--batch", 2, "--rounds", 1, "--no-probe", "--expert-cache", "2mb")
    assert "wanted were in memory" in done.stdout + done.stderr


def test_what_cannot_be(mini_int8, tmp_path):
    assert "are the least that works" in run("generate", "--engine", mini_int8, *PROMPT, "--expert-cache", "1kb", ok=2).stderr
    assert "--weights" in run("generate", "--engine", mini_int8, *PROMPT, "--expert-cache", "2mb", "--weights", "read", ok=2).stderr
    assert "--expert-cache" in run("generate", "--engine", mini_int8, *PROMPT, "--expert-cache", "much", ok=2).stderr
    assert "leave --expert-cache out" in run("bench", "--engine", mini_int8, "--expert-cache", "2mb", "--against", BINARY, "--rounds", 5, ok=2).stderr


@pytest.fixture(scope="module")
def large(work):
    """Experts of 101 MB in an engine of float, random weights."""
    source = work / "large-config"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 1000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False}))
    mir = export(source, work / "large-mir", "--model-type", "qwen3_moe", "--dummy-weights")
    return build(mir, work / "large", "--precision", "fp32")


def test_an_engine_larger_than_its_memory(large, tmp_path):
    weights = os.path.getsize(large / "weights.bin")
    limit = 80 << 20
    assert weights > limit
    bench = ["bench", "--engine", large, "--prefill", 64, "--decode", 24, "--batch", 3, "--rounds", 1, "--no-probe", "--expert-cache", "20mb", "--json"]
    with MemoryGroup(limit, tmp_path) as group:
        done = subprocess.run([group.program, *map(str, bench)], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert group.most() <= limit
        done = subprocess.run([group.program, *map(str, bench[:-3]), "--expert-cache", "90mb"], capture_output=True, text=True, timeout=600)
        assert done.returncode == 3 and "does not fit" in done.stderr, done.stdout + done.stderr


def test_a_profile_of_real_traffic(mini_int8, tmp_path):
    profile = tmp_path / "experts.json"
    done = run("profile", "--engine", mini_int8, "--experts", profile, "--data", EVAL / "calib.jsonl", "--tokens", 3000, "--quiet")
    assert "learnt from the first half, judged on the second" in done.stdout and "calib.jsonl" in done.stdout
    hits = [tuple(map(float, m)) for m in re.findall(r"of the experts +([\d.]+) % +([\d.]+) %", done.stdout)]
    assert len(hits) == 4 and hits == sorted(hits), "more room, more hits"
    recorded = json.loads(profile.read_text())
    assert recorded["tokens"] == 3000
    for layer in recorded["layers"]:
        assert len(layer["ids"]) == 3000 * layer["k"] and 0 <= min(layer["ids"]) and max(layer["ids"]) < layer["experts"]
    assert "--force" in run("profile", "--engine", mini_int8, "--experts", profile, ok=4).stderr
    assert generated(mini_int8, "--expert-cache", "2mb", "--expert-profile", profile) == generated(mini_int8)
    assert generated(mini_int8, "--expert-profile", profile) == generated(mini_int8)
    if len(list(pathlib.Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        with Server(mini_int8, "--expert-profile", profile) as s:
            assert "nothing for --expert-profile to decide" in "".join(s.lines)
    profile.write_text("{}")
    assert "no expert profile" in run("generate", "--engine", mini_int8, *PROMPT, "--expert-cache", "2mb", "--expert-profile", profile, ok=4).stderr
    assert "--experts" in run("profile", "--engine", mini_int8, "--data", EVAL / "calib.jsonl", ok=2).stderr
