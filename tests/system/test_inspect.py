"""inspect: checkpoints, MIRs, engines on one page each, and two of them side by side."""
import json
import re

from conftest import DATA, MODEL, build, export, run

MIXTRAL = DATA / "goldens" / "mixtral"


def card(directory):
    return json.loads(run("inspect", directory, "--json").stdout)


def test_one_model_in_three_forms(tmp_path):
    mir = export(MIXTRAL, tmp_path / "mir")
    engine = build(mir, tmp_path / "engine")
    forms = [card(d) for d in (MIXTRAL, mir, engine)]
    for key in ("parameters", "active_parameters", "kv_bytes_per_token"):
        assert forms[0][key] == forms[1][key] == forms[2][key]
    config = json.loads((MIXTRAL / "config.json").read_text())
    facts = {f["what"]: f["value"] for f in forms[0]["facts"]}
    assert facts["shape"].startswith(f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, vocabulary {config['vocab_size']},")
    assert facts["experts"] == f"{config['num_local_experts']}, {config['num_experts_per_tok']} of them for each token"
    experts = sum(c["parameters"] for c in forms[0]["classes"] if c["class"] == "expert")
    assert experts == 3 * config["num_local_experts"] * config["num_hidden_layers"] * config["hidden_size"] * config["intermediate_size"]
    assert sum(c["parameters"] for c in forms[0]["classes"]) >= forms[0]["parameters"]


def test_a_page_with_foldable_layers(mini_int8, tmp_path):
    run("inspect", mini_int8, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<details") == page.count("</details>") == len(re.findall("<summary>", page)) >= 4
    assert "experts in one kernel" in page and "<script" not in page and "http" not in page
    again = run("inspect", mini_int8, "--html", tmp_path / "page.html", ok=None)
    assert again.returncode == 4 and "page.html" in again.stderr
    run("inspect", mini_int8, "--html", tmp_path / "page.html", "--force")


def test_the_report_of_a_build_with_verified_passes(mini_w8a8, tmp_path):
    build(mini_w8a8, tmp_path / "engine", "--verify-passes")
    page = (tmp_path / "engine" / "report.html").read_text()
    rows = re.findall(r"<tr><td>((?:all but )?\w+)</td><td>\d+</td><td>\d+</td><td>100.00 %</td><td>0</td><td>none</td></tr>", page)
    assert len(rows) >= 8 and "all but group_experts" in rows


def test_the_graph_for_graphviz(mini_int8):
    dot = run("inspect", mini_int8, "--dot").stdout
    assert dot.startswith("digraph ") and dot.count("{") == dot.count("}") and "grouped_experts" in dot


def test_two_side_by_side(mini_mir, mini_int8, tmp_path):
    same = run("inspect", "--diff", mini_mir, mini_mir)
    assert same.stdout.endswith("the same\n")
    other = export(MODEL, tmp_path / "mir", "--model-type", "minimax-m3")
    assert json.loads(run("inspect", "--diff", mini_mir, other, "--json").stdout)["same"]
    weights = next((other / "weights").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x40    # the last tensor's last number
    weights.write_bytes(data)
    done = run("inspect", "--diff", mini_mir, other, "--json", ok=1)
    assert len(json.loads(done.stdout)["other_bytes"]) == 1
    done = run("inspect", "--diff", mini_mir, mini_int8, ok=1)
    assert "moe.experts.up.weight  (layers 1-5)" in done.stdout and "numbers       not compared" in done.stdout


def test_what_cannot_be_inspected_is_said(mini_mir, tmp_path):
    for args, words in (([tmp_path], "config.json"), ([tmp_path / "none"], "none"), ([mini_mir, mini_mir], "--diff"),
                        (["--diff", mini_mir], "two directories")):
        done = run("inspect", *args, ok=None)
        assert done.returncode in (2, 4) and words in done.stderr and done.stderr.count("\n") <= 2
