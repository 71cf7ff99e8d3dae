"""benchmarks/compare with engines that print what the test says; and the checkpoint that vLLM would read. No speed is judged here."""
import json
import pathlib
import subprocess
import sys

import pytest
from conftest import BINARY, DATA, ROOT, export, read_json

FAKE = """
import json, sys
speed, prefill, decode, batch = float(sys.argv[1]), *sys.argv[2:5]
print("noise")
print(json.dumps({"version": "fake 1", "load_s": 0.5}))
print(json.dumps({"machine": {"cpu": "x", "limits": {"read_gbs": {"kernel": "k", "one": 1, "all": 2}, "int8_gops": {"kernel": "k", "one": 2, "all": 3}}}}))
for metric, sizes in ("prefill", prefill), ("decode", decode), ("batch", batch):
    for n in filter(None, sizes.split(",")):
        print(json.dumps({"metric": metric, "n": int(n), "tok_s": speed, "ttft_s": 1.0}))
sys.exit(speed == 13)
"""


@pytest.fixture(scope="module")
def mir(tmp_path_factory):
    return export(DATA / "ct_w8a8", tmp_path_factory.mktemp("compare") / "mir")


def compare(mir, tmp_path, *flags, ok=0):
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "compare", "--model", mir, "--metainfer", BINARY, "--work", tmp_path / "work", "--results",
                           tmp_path / "results", "--threads", "1", *map(str, flags)], capture_output=True, text=True, timeout=600)
    assert done.returncode == ok, done.stdout + done.stderr
    files = sorted((tmp_path / "results").glob("*.jsonl"))
    return done.stdout, [json.loads(x) for x in files[-1].read_text().splitlines()], files[-1]


def command(tmp_path, name, speed):
    return ["--command", f"{name}={sys.executable} {tmp_path / 'fake.py'} {speed} {{prefill}} {{decode}} {{batch}}"]


@pytest.mark.parametrize("interleave", ["round", "measurement"])
def test_engines_side_by_side(interleave, mir, tmp_path):
    out, records, path = compare(mir, tmp_path, *command(tmp_path, "slow", 10), *command(tmp_path, "quick", 20), "--prefill", "16", "--decode", "4",
                                 "--batch", "2", "--rounds", 2, "--interleave", interleave)
    figures = [r for r in records if "metric" in r]
    assert {(r["engine"], r["metric"], r["n"], r["round"]) for r in figures} == {
        (e, m, n, i) for e in ("metainfer", "slow", "quick") for m, n in (("prefill", 16), ("decode", 4), ("batch", 2)) for i in (1, 2)}
    assert all(r["tok_s"] > 0 for r in figures)
    text = path.with_suffix(".md").read_text()
    assert text.strip() in out and "fake 1" in text and "Incomplete" not in text
    # The fastest of the others is the quick one, in every round.
    ratios = text[text.index("divided by"):].splitlines()
    row = next(line for line in ratios if line.startswith("| prefill 16"))
    cells = [c.strip() for c in row.strip("|").split("|")]
    assert cells[2] == cells[3] and cells[1] != cells[2]
    again = subprocess.run([sys.executable, ROOT / "benchmarks" / "compare", "--report", path], capture_output=True, text=True, check=True)
    assert text.strip() == again.stdout.strip()


def test_shares_are_what_the_readme_says(mir, tmp_path):
    _, records, path = compare(mir, tmp_path, *command(tmp_path, "fake", 1e6), "--without-ours", "--prefill", "16", "--decode", "4", "--batch", "", "--rounds", 1)
    config = read_json(DATA / "ct_w8a8" / "config.json")
    hidden, width, experts, k = config["hidden_size"], config["moe_intermediate_size"], config["num_local_experts"], config["num_experts_per_tok"]
    attention = hidden * config["head_dim"] * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    body = config["num_hidden_layers"] * (attention + 3 * hidden * width * k)
    router, head = config["num_hidden_layers"] * hidden * experts, hidden * config["vocab_size"]
    prefill = 1e6 * 2 * (body + router) / 3e9
    decode = max(1e6 * (body + 2 * router + 2 * head) / 2e9, 1e6 * 2 * (body + router + head) / 3e9)
    text = path.with_suffix(".md").read_text()
    assert f"| prefill 16 | 1000000.0 ({prefill:.0%}) |" in text and f"| decode 4 | 1000000.0 ({decode:.0%}) |" in text
    assert records[-1] == {"limits": {"read_gbs": 2, "int8_gops": 3}}

    # A file decides over what a program measures.
    given = tmp_path / "limits.json"
    given.write_text(json.dumps({"read_gbs": 4, "int8_gops": {"all": 6}}))
    _, records, path = compare(mir, tmp_path, *command(tmp_path, "fake", 1e6), "--without-ours", "--prefill", "16", "--decode", "", "--batch", "", "--rounds", 1,
                               "--limits", given)
    assert records[-1] == {"limits": {"read_gbs": 4, "int8_gops": 6}}
    assert f"| prefill 16 | 1000000.0 ({prefill / 2:.0%}) |" in path.with_suffix(".md").read_text()


def test_an_engine_that_fails_is_named(mir, tmp_path):
    out, records, path = compare(mir, tmp_path, *command(tmp_path, "bad", 13), *command(tmp_path, "good", 14), "--without-ours", "--prefill", "16", "--decode", "",
                                 "--batch", "", "--rounds", 1, ok=1)
    assert "Incomplete: bad" in path.with_suffix(".md").read_text()
    assert [r["engine"] for r in records if "metric" in r] == ["good"]


def test_a_peer_that_wants_a_checkpoint_gets_the_same_numbers(mir, tmp_path):
    """The engine itself cannot start here; what it would read can."""
    out, records, _ = compare(mir, tmp_path, "--peer", f"vllm={sys.executable}", "--without-ours", "--prefill", "16", "--decode", "", "--batch", "", "--rounds", 1, ok=1)
    checkpoint = next((tmp_path / "work").glob("*/compressed-tensors"))
    assert read_json(checkpoint / "config.json")["quantization_config"]["format"] == "int-quantized"
    again = export(checkpoint, tmp_path / "again")
    ours, theirs = (sorted((pathlib.Path(d) / "weights").glob("*.safetensors")) for d in (mir, again))
    assert [p.read_bytes() for p in ours] == [p.read_bytes() for p in theirs]
