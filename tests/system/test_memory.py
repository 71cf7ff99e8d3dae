"""Memory: planned before an engine is loaded, and never more than planned, whatever comes."""
import json
import random
import re
import subprocess
import threading

import conftest
from conftest import MemoryGroup, Server, run
from test_scheduling import post, prose

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def plan_of(lines):
    number, unit = re.search(r"^plan +([\d.]+) (\w+) at most: weights", "".join(lines), re.M).groups()
    return float(number) * UNITS[unit]


def test_planned_and_measured_agree(mini_int8, mini_float):
    for engine in (mini_int8, mini_float):
        report = json.loads(run("profile", "--engine", engine, "--memory", "--json", "--no-probe", "--rounds", 1, "--quiet").stdout)["memory"]
        parts = {p["name"]: p for p in report["parts"]}
        everything = parts.pop("all")
        assert everything["planned_bytes"] == sum(p["planned_bytes"] for p in parts.values())
        assert everything["resident_bytes"] is not None, report["notes"]
        assert abs(everything["resident_bytes"] / everything["planned_bytes"] - 1) < 0.03, report


def test_a_full_server_stays_within_its_plan(mini_int8, tmp_path, monkeypatch):
    flags = ["--model", "minimax-m3", "--max-batch-size", 16, "--max-seq-len", 2048, "--kv-tokens", 16 * 2048, "--weights", "read"]
    with Server(mini_int8, *flags) as s:
        plan = plan_of(s.lines)
    with MemoryGroup(int(plan * 1.05), tmp_path) as group:
        monkeypatch.setattr(conftest, "BINARY", group.program)
        with Server(mini_int8, *flags) as s:
            bodies = [{"prompt": prose(random.Random(n), 450), "max_tokens": 1200, "temperature": 0, "ignore_eos": True} for n in range(20)]
            answers = []
            threads = [threading.Thread(target=lambda b=b: answers.append(post(s, b))) for b in bodies]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert len(answers) == len(bodies)
            assert all(a["usage"]["completion_tokens"] == 1200 for a in answers)
        assert s.process.returncode == 0
        assert group.most() <= plan * 1.05
        assert group.most() > plan * 0.8, "the test has to fill what was planned"


def test_what_does_not_fit_says_what_to_change(mini_int8, tmp_path):
    with MemoryGroup(60 << 20, tmp_path) as group:
        flags = ["--max-batch-size", 32, "--max-seq-len", 2048, "--kv-tokens", 65536, "--port", 0]
        done = subprocess.run([group.program, "serve", "--engine", mini_int8, *map(str, flags)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "does not fit" in done.stderr, done.stdout + done.stderr
    assert re.search(r"--max-batch-size \d+, or --max-seq-len \d+", done.stderr)
