"""Odd surroundings: closed or full standard streams, limits, values of flags, files of others, clients that send without end."""
import http.client
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from conftest import BINARY, EVAL, MODEL, RECIPE, Server, build, run
from test_cli import refused
from test_faults import leftovers, snapshot


def shell(line, *args):
    """Runs metainfer with what bash does around it: "$@" is the command."""
    return subprocess.run(["bash", "-c", line, "bash", BINARY, *map(str, args)], capture_output=True, text=True, timeout=300)


# ---- standard streams

def test_closed_streams_do_not_write_into_the_output(mini_mir, tmp_path):
    """A closed stream's number goes to the next file: progress lines were found inside weights.bin."""
    build(mini_mir, tmp_path / "whole")
    for closed in ("<&- >&- 2>&-", ">&- 2>&-", "2>&-"):
        assert shell(f'exec "$@" {closed}', "build", "--model", mini_mir, "--output", tmp_path / "out", "--force").returncode == 0
        assert {p: b for p, b in snapshot(tmp_path / "out").items() if p.name != "report.html"} == \
               {p: b for p, b in snapshot(tmp_path / "whole").items() if p.name != "report.html"}


@pytest.mark.parametrize("command", ["inspect", "generate", "generate --json", "build --json", "eval"])
def test_report_that_cannot_be_written_is_an_error(command, mini_int8, mini_mir, tmp_path):
    args = {"inspect": ["inspect", mini_int8, "--graph"],
            "generate": ["generate", "--engine", mini_int8, "--prompt", "ab", "--max-tokens", 3],
            "generate --json": ["generate", "--engine", mini_int8, "--prompt", "ab", "--max-tokens", 3, "--json"],
            "build --json": ["build", "--model", mini_mir, "--output", tmp_path / "out", "--json"],
            "eval": ["eval", "--engine", mini_int8, "--data", EVAL / "eval.jsonl", "--limit", 1, "--max-tokens", 2]}[command]
    refused(shell('exec "$@" >/dev/full', *args), 3, "standard output")


def test_full_disk_under_the_error_stream(mini_mir, tmp_path):
    assert shell('exec "$@" 2>/dev/full', "build", "--model", mini_mir, "--output", tmp_path / "out").returncode == 0
    assert shell('exec "$@" 2>/dev/full', "build", "--model", tmp_path / "none", "--output", tmp_path / "e").returncode == 4
    assert shell('exec "$@" 2>/dev/full', "bogus").returncode == 2
    assert leftovers(tmp_path, tmp_path / "out") == []


@pytest.mark.parametrize("log", [">/dev/full 2>&1", ">&- 2>&- <&-"], ids=["full", "closed"])
def test_server_outlives_its_log(log, mini_int8):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = subprocess.Popen(["bash", "-c", f'exec "$@" {log}', "bash", BINARY, "serve", "--engine", mini_int8, "--port", str(port)])
    try:
        for _ in range(600):
            assert process.poll() is None
            try:
                assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).status == 200
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("command", ["build", "convert"])
def test_limit_on_the_size_of_files(command, mini_mir, tmp_path):
    done = shell('ulimit -f 1000; exec "$@"', command, "--model", mini_mir, "--output", tmp_path / "out", "--quiet")
    refused(done, 3, str(tmp_path), "File too large")
    assert list(tmp_path.iterdir()) == []


# ---- too little memory

def limited(kilobytes, *args):
    return shell(f'ulimit -v {kilobytes}; exec "$@"', *args)


@pytest.mark.parametrize("command", ["bench", "profile", "generate"])
def test_a_limit_on_memory_is_kept_or_named(command, mini_int8):
    args = [command, "--engine", mini_int8, "--quiet", *{"generate": ["--prompt", "ab", "--max-tokens", 3]}.get(
        command, ["--prefill", 16, "--batch", 2, "--rounds", 1])]
    fits = 64 << 10
    while limited(fits, *args).returncode != 0:
        fits *= 2
        assert fits < 4 << 20, limited(fits, *args).stderr
    for share in range(20, 100, 6):
        done = limited(fits * share // 100, *args)
        if done.returncode == 127 or done.returncode == 0:   # too little for the program's libraries; enough for all
            continue
        refused(done, 3)
        assert re.search("memory|allocate", done.stderr), done.stderr


def test_a_server_without_memory_ends_with_a_sentence(mini_int8):
    with Server(mini_int8, "--model", "minimax-m3", "--quiet") as s:
        resource.prlimit(s.process.pid, resource.RLIMIT_DATA, (1 << 20, 1 << 20))   # less than it has: nothing large is to be had
        body = json.dumps({"model": "minimax-m3", "prompt": "abc " * 100_000, "max_tokens": 1}).encode()
        for _ in range(20):
            try:
                urllib.request.urlopen(urllib.request.Request(s.url + "/v1/completions", body, {"Content-Type": "application/json"}), timeout=10)
            except (OSError, http.client.HTTPException):   # the connection is lost, or the time is up
                pass
            if s.process.poll() is not None:
                break
        assert s.process.wait(timeout=60) == 3
        assert "error: out of memory" in s.process.stdout.read()


def test_more_keys_and_values_than_memory_are_refused(mini_int8):
    for tool in ("bench", "profile"):
        refused(run(tool, "--engine", mini_int8, "--no-probe", "--prefill", "", "--batch", 100_000_000, "--quiet", ok=3), 3, "keys and values", "fewer streams")


# ---- values of flags

def test_empty_values_are_refused(mini_int8):
    """An unset variable: '--baseline "$BASE"' would compare with nothing, '--api-key-file "$KEYS"' serve everyone."""
    refused(run("bench", "--engine", mini_int8, "--baseline", "", ok=2), 2, "--baseline", "empty")
    refused(run("serve", "--engine", mini_int8, "--api-key-file", "", ok=2), 2, "--api-key-file", "empty")
    refused(run("eval", "--engine", mini_int8, "--data", EVAL / "eval.jsonl", "--max-drop", "", ok=2), 2, "--max-drop")


@pytest.mark.parametrize("args", [["verify", "--max-kl", "nan"], ["bench", "--threshold", "nan"], ["eval", "--data", "x", "--max-drop", "nan"],
                                  ["eval", "--data", "x", "--max-drop", "-1"], ["eval", "--data", "x", "--max-tokens", "0"],
                                  ["serve", "--drain-seconds", "-1"], ["serve", "--drain-seconds", "inf"],
                                  ["generate", "--prompt", "x", "--seed", "99999999999999999999"], ["generate", "--prompt", "x", "--seed", "-7"]], ids=" ".join)
def test_limits_that_would_never_hold_are_refused(args, mini_int8):
    refused(run(*args, "--engine", mini_int8, ok=2), 2, args[-2])


@pytest.mark.parametrize("args", [["--prompt", "x", "--temperature", "-1"], ["--prompt", "x", "--top-p", "2"], ["--prompt", "x", "--system", "y"],
                                  ["--messages", "none"], ["--messages", "/"], ["--messages", "/dev/null"]], ids=" ".join)
def test_generate_refuses_before_loading(args, damaged):
    done = run("generate", "--engine", damaged, *args, "--quiet", ok=None)
    refused(done, 4 if args[0] == "--messages" else 2, args[-2].strip("-").replace("-", "_") if args[0] == "--prompt" else args[1])


@pytest.mark.parametrize("args,says", [
    (["eval", "--data", "none"], "none"), (["eval", "--data", "EMPTY"], "no items"), (["eval", "--data", "EVAL", "--text", "none"], "none"),
    (["eval", "--data", "EVAL", "--reference", "none"], "none"), (["eval", "--data", "EVAL", "--reference", "OBJECT"], "'greedy'"),
    (["eval", "--data", "EVAL", "--engine", "no-engine"], "no-engine"),
    (["verify", "--reference", "none"], "none"), (["verify", "--reference", "EMPTY"], "EMPTY"), (["verify", "--model", "none"], "none"),
    (["serve", "--port", "0", "--kv-disk", "OTHERS"], "holds other files"), (["serve", "--port", "0", "--kv-disk", "/nonexistent/a/b"], "can't be made")], ids=lambda v: " ".join(v) if isinstance(v, list) else None)
def test_files_are_looked_at_before_loading(args, says, damaged, tmp_path):
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "OBJECT").write_text("{}")
    (tmp_path / "OTHERS").mkdir()
    (tmp_path / "OTHERS" / "letter.txt").write_text("x")
    args = [str(EVAL / "eval.jsonl") if a == "EVAL" else str(tmp_path / a) if a.isupper() else a for a in args]
    done = run(args[0], "--engine", damaged, *args[1:], ok=None)
    refused(done, 3 if "/nonexistent/a/b" in args else 4, says)
    assert "weights.bin" not in done.stderr and "load" not in done.stderr


def test_a_subcommand_of_a_command_is_suggested():
    assert "did you mean history?" in run("bench", "histroy", "x", ok=2).stderr


def test_seed_is_not_bent_into_range(tmp_path):
    for seed in ("-1", "99999999999999999999"):
        refused(run("export", "--model-dir", tmp_path, "--output", tmp_path / "out", "--seed", seed, ok=2), 2, "--seed", seed)


def test_quantize_limit_of_zero_is_a_limit(mini_mir, tmp_path):
    config = tmp_path / "q.yaml"
    config.write_text(RECIPE % ("per_token", "false"))
    text = tmp_path / "calib.txt"
    text.write_text("hello world this is text for calibration")
    args = ["quantize", "--model", mini_mir, "--config", config, "--calib", text, "--output", tmp_path / "out", "--quiet", "--force"]
    assert "above the limit" in run(*args, "--max-kl", "0", ok=1).stderr
    refused(run(*args, "--max-kl", "-1", ok=2), 2, "--max-kl")
    refused(run(*args, "--max-kl", "1", "--no-compare", ok=2), 2, "--no-compare")


# ---- files

@pytest.mark.parametrize("command", ["quantize", "build", "export"])
def test_output_is_outside_of_its_input(command, mini_mir, tmp_path):
    model = tmp_path / "model"
    if command == "export":      # a checkpoint that convert wrote may be replaced, as any output
        run("convert", "--to", "hf", "--model", mini_mir, "--output", model, "--quiet")
    else:
        subprocess.run(["cp", "-r", mini_mir, model], check=True)
    (tmp_path / "q.yaml").write_text("quant: {}\n")
    (tmp_path / "link").symlink_to(model)
    before = snapshot(model)
    flags = {"quantize": ["--config", tmp_path / "q.yaml", "--model"], "build": ["--model"], "export": ["--model-dir"]}[command]
    for name in ("model", "model/", "link", "model/new", "link/new", "model/weights/new"):
        refused(run(command, *flags, model, "--output", f"{tmp_path}/{name}", "--force", ok=2), 2, name, "choose another")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metainfer.json").write_text("{}")
    model.rename(tmp_path / "out" / "model")
    refused(run(command, *flags, tmp_path / "out" / "model", "--output", tmp_path / "out", "--force", ok=2), 2, "inside the output")
    assert len(snapshot(tmp_path / "out" / "model")) == len(before)


@pytest.mark.parametrize("text", ["[]", "5", '"x"', "null", "{"])
def test_broken_provenance_is_named(text, mini_mir, tmp_path):
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", mini_mir, model], check=True)
    (model / "provenance.json").write_text(text)
    (tmp_path / "q.yaml").write_text("quant: {}\n")
    refused(run("quantize", "--model", model, "--config", tmp_path / "q.yaml", "--output", tmp_path / "out", ok=4), 4,
            "provenance.json", "export or quantize the model again")


def test_cut_weights_of_a_mir_are_not_fetched(mini_mir, tmp_path):
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", mini_mir, model], check=True)
    first = model / "weights" / "00001.safetensors"
    os.truncate(first, first.stat().st_size - 100)
    done = run("build", "--model", model, "--output", tmp_path / "out", ok=4)
    refused(done, 4, str(first), "export or quantize the model again")
    assert "fetch" not in done.stderr


@pytest.mark.parametrize("value", ["-1", "inf", "nan", "x"])
@pytest.mark.parametrize("command,flags", [("verify", ["--max-kl", "--max-layer-deviation", "--logits-max-abs", "--hidden-max-abs"]),
                                           ("quantize", ["--max-kl", "--max-drop", "--memory", "--max-bits"]), ("eval", ["--max-drop"])])
def test_limits_are_numbers_from_0_on(command, flags, value):
    for flag in flags:
        done = run(command, flag, value, ok=2)
        assert flag in done.stderr and len(done.stderr) < 300, done.stderr


def test_largest_memory_is_no_overflow():
    refused(run("quantize", "--model", "m", "--config", "c", "--output", "o", "--search", "--memory", "1e300", ok=2), 2, "--memory", "at most")


def test_convert_leaves_its_model_alone(mini_mir, tmp_path):
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", mini_mir, model], check=True)
    (tmp_path / "link").symlink_to(model)
    before = snapshot(model)
    for name in ("model/model.mir", "link/model.mir", "model/new.gguf"):
        refused(run("convert", "--model", model, "--output", tmp_path / name, "--force", ok=2), 2, name)
    assert snapshot(model) == before


@pytest.mark.parametrize("line", [{"messages": "x"}, {"messages": [{"role": 5, "content": "hi"}]}, {"messages": [{"role": "user"}]},
                                  {"messages": [{"role": "nobody", "content": "hi"}]}], ids=json.dumps)
def test_messages_in_files_are_named(line, mini_mir, mini_int8, tmp_path):
    good = {"group": "g", "answer": "a", "messages": [{"role": "user", "content": "hi"}]}
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(good) + "\n" + json.dumps({**good, **line}) + "\n")
    config = tmp_path / "q.yaml"
    config.write_text("quant: {}\n")
    refused(run("quantize", "--model", mini_mir, "--config", config, "--calib", data, "--output", tmp_path / "out", "--quiet", ok=4), 4,
            f"{data} line 2")
    refused(run("eval", "--engine", mini_int8, "--data", data, "--quiet", ok=4), 4, f"{data} line 2")
    data.write_text(json.dumps(line["messages"]))
    refused(run("generate", "--engine", mini_int8, "--messages", data, "--quiet", ok=4), 4, str(data))


@pytest.mark.parametrize("line,words", [({"messages": [{"role": "user"}]}, ["messages[0]", "content is missing"]), ({"messages": [{"content": "x"}]}, ["role"]),
                                        ({"messages": []}, ["messages"]), ({"tools": 5}, ["tools: expected a list"])], ids=json.dumps)
def test_what_is_wrong_with_messages_is_said(line, words, mini_mir, mini_int8, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"group": "g", "answer": "a", "messages": [{"role": "user", "content": "hi"}], **line}) + "\n")
    (tmp_path / "q.yaml").write_text("quant: {}\n")
    refused(run("quantize", "--model", mini_mir, "--config", tmp_path / "q.yaml", "--calib", data, "--output", tmp_path / "out", "--quiet", ok=4), 4,
            f"{data} line 1", *words)
    refused(run("eval", "--engine", mini_int8, "--data", data, "--quiet", ok=4), 4, f"{data} line 1", *words)


@pytest.mark.parametrize("text,words", [(b"", ["too few"]), (b"hello", ["too few"]), (b"hello \xff world", ["UTF-8"])], ids=repr)
def test_text_for_perplexity_is_checked(text, words, mini_int8, tmp_path):
    (tmp_path / "t.txt").write_bytes(text)
    refused(run("eval", "--engine", mini_int8, "--data", EVAL / "eval.jsonl", "--limit", 1, "--text", tmp_path / "t.txt", "--quiet", ok=4), 4,
            str(tmp_path / "t.txt"), *words)


def test_a_drop_needs_two_engines(mini_int8, tmp_path):
    refused(run("eval", "--engine", mini_int8, "--data", EVAL / "eval.jsonl", "--max-drop", "1", ok=2), 2, "--max-drop", "--engine twice")
    refused(run("eval", "--engine", mini_int8, "--engine", tmp_path / "none", "--data", EVAL / "eval.jsonl", "--quiet", ok=4), 4, str(tmp_path / "none"))


def test_damaged_tokenizer_of_a_model_has_a_way_out(mini_mir, tmp_path):
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", mini_mir, model], check=True)
    os.truncate(model / "tokenizer" / "tokenizer.json", 100)
    (tmp_path / "q.yaml").write_text("quant: {}\n")
    refused(run("quantize", "--model", model, "--config", tmp_path / "q.yaml", "--output", tmp_path / "out", "--quiet", ok=4), 4, "tokenizer.json",
            "make this folder again")


def test_calibration_text_of_other_bytes_is_named(mini_mir, tmp_path):
    (tmp_path / "calib.txt").write_bytes(b"hello \xff\xfe text")
    (tmp_path / "q.yaml").write_text("quant: {}\n")
    refused(run("quantize", "--model", mini_mir, "--config", tmp_path / "q.yaml", "--calib", tmp_path / "calib.txt", "--output",
                tmp_path / "out", "--quiet", ok=4), 4, "calib.txt", "UTF-8")


@pytest.mark.parametrize("pattern", ["(" * 60000 + ")" * 60000, "(a*)*" * 2000, "((([a-z0-9._]*)*)*)*#"], ids=["deep", "long", "exponential"])
def test_hostile_patterns_end(pattern, mini_mir, tmp_path):
    (tmp_path / "q.yaml").write_text(f"quant: {{sensitive_layers: ['re:{pattern}']}}\n")
    refused(run("quantize", "--model", mini_mir, "--config", tmp_path / "q.yaml", "--output", tmp_path / "out", ok=4, timeout=120), 4,
            "sensitive_layers")


@pytest.mark.parametrize("name,size", [("tokenizer.json", 60000), ("chat_template.jinja", 1100)])
def test_damaged_text_files_are_found_before_the_work(name, size, mini_mir, tmp_path):
    """Not when the engine is opened."""
    for source, where, command in ((MODEL, "", "export --model-dir"), (mini_mir, "tokenizer", "build --model")):
        model = tmp_path / command.split()[0]
        shutil.copytree(source, model)
        os.truncate(model / where / name, size)
        refused(run(*command.split(), model, "--output", tmp_path / "out", "--quiet", ok=4), 4, str(model / where))
        assert not (tmp_path / "out").exists()


# ---- clients

@pytest.fixture(scope="module")
def own_server(mini_int8):
    with Server(mini_int8, "--max-batch-size", 4, "--max-seq-len", 1024, "--model", "m") as s:
        yield s


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("first,more", [(b"5;a=", b"x" * 65536), (b"", b"0" * 65536), (b"2\r\n{}\r\n0\r\n", (b"X-a: " + b"y" * 8000 + b"\r\n") * 8)],
                         ids=["chunk extension", "chunk size", "trailer"])
def test_framing_without_end_is_cut_off(first, more, own_server):
    """It is no part of the body, whose limit does not bound it."""
    port = int(own_server.url.rsplit(":", 1)[1])
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as s:
        try:
            s.sendall(HEAD + first)
            for _ in range(32):
                s.sendall(more)
            answer = s.recv(4096)
        except ConnectionError:
            return
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_memory_of_a_large_request_is_given_back(own_server):
    def resident():
        with open(f"/proc/{own_server.process.pid}/status") as f:
            return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1)) / 1024

    def ask(messages):
        body = json.dumps({"model": "m", "messages": messages, "max_tokens": 4}).encode()
        request = urllib.request.Request(own_server.url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=120).status
        except urllib.error.HTTPError as e:
            return e.code
    one = {"role": "user", "content": "a"}
    assert ask([one]) == 200
    before = resident()
    for _ in range(3):
        assert ask([one] * 300000) == 400
    for _ in range(100):
        if resident() < before + 150:
            break
        time.sleep(0.1)
    assert resident() < before + 150
    assert ask([one]) == 200
