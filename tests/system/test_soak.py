"""The soak and the load generator: short runs of them, and that what they judge by can fail."""
import collections
import json
import math
import random
import subprocess
import sys

import pytest
from conftest import BINARY, LONG, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from serving import judge  # noqa: E402
from serving.client import Answer  # noqa: E402
from serving.traffic import MIX, Deck, Record, Traffic  # noqa: E402

MB = 1 << 20


def program(name, *args, timeout):
    return subprocess.run([sys.executable, ROOT / "benchmarks" / name, "--metainfer", BINARY, *map(str, args)], capture_output=True, text=True, timeout=timeout)


# ---- the program

@pytest.mark.timeout(7200)
def test_soak(mini_int8, tmp_path):
    """Memory at rest differs by up to 3 MB from round to round while the machine does other things, so the short form sees only leaks of some KB."""
    requests = 20000 if LONG else 1500
    done = program("http_soak", "--engine", mini_int8, "--requests", requests, "--slowdown", 0, "--out", tmp_path / "soak",
                   *([] if LONG else ["--growth", 4096]), timeout=7000)
    assert done.returncode == 0, done.stdout + done.stderr
    out = json.loads((tmp_path / "soak.json").read_text())
    assert out["faults"] == [] and out["requests"] >= requests and set(out["kinds"]) == set(MIX)
    page = (tmp_path / "soak.html").read_text()
    assert page.count("<svg") == 3 and "http://" not in page and "https://" not in page


def test_soak_tells_a_server_that_is_wrong(mini_int8, tmp_path):
    """One whose limit on bodies is smaller than it was told."""
    wrong = tmp_path / "wrong"
    wrong.write_text(f'#!/bin/bash\nexec {BINARY} "${{@/#1048576/1024}}"\n')
    wrong.chmod(0o755)
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "http_soak", "--metainfer", wrong, "--engine", mini_int8, "--requests", "300", "--slowdown", "0", "--growth", "1e9"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "status 413 instead of 200" in done.stdout, done.stdout + done.stderr


def test_arrivals_beyond_capacity(mini_int8, tmp_path):
    done = program("http_poisson", "--engine", mini_int8, "--batch", 4, "--prompt", 8, "--generate", 8, "--seconds", 4, "--shares", "100,1000", "--max-queue-seconds", 0.2,
                   "--long-prompt", 1000, "--step-ms", "20", "--repeats", 1, "--before", 0.1, "--long-tokens", 900, "--out", tmp_path / "load", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    out = json.loads((tmp_path / "load.json").read_text())
    for row in out["rates"]:
        assert row["offered"] == row["accepted"] + row["refused"] and row["accepted"] > 0
    assert out["rates"][1]["refused"] > 0 and min(out["rates"][1]["retry_after"]) >= 1
    assert out["decode_step_s"] > out["step_gap_s"] > 0
    assert out["long_prompt"][0]["gap_max"] > 0


# ---- memory

def at_rest(bytes_of, rounds=20, size=1000, noise=0.1 * MB, seed=1):
    rng = random.Random(seed)
    return [(n, 40 * MB + bytes_of(n) + rng.gauss(0, noise)) for n in range(size, size * (rounds + 1), size)]


@pytest.mark.parametrize("name,bytes_of", [
    ("flat", lambda n: 0), ("warm-up", lambda n: 20 * MB * (1 - math.exp(-n / 1500))), ("falls", lambda n: -100 * n),
    *((f"one step at {at}", lambda n, at=at: 8 * MB * (n >= at)) for at in range(2000, 20000, 1000)), ("one round's peak", lambda n: 30 * MB * (n == 12000))])
def test_memory_that_is_kept_once_is_no_leak(name, bytes_of):
    for seed in range(20):
        assert judge.is_flat(at_rest(bytes_of, seed=seed), 256), (name, judge.growth(at_rest(bytes_of, seed=seed)))


@pytest.mark.parametrize("name,bytes_of", [
    ("every request", lambda n: 1000 * n), ("a few bytes more than allowed", lambda n: 350 * n), ("every hundredth", lambda n: 1000 * 100 * (n // 100)),
    ("in large pieces", lambda n: 4 * MB * (n // 3000)), ("ever faster", lambda n: n * n / 10), ("behind a warm-up", lambda n: 20 * MB * (1 - math.exp(-n / 1500)) + 1000 * n),
    ("beside a cache that shrinks once", lambda n: 1000 * n - 5 * MB * (n >= 10000))])
def test_memory_that_climbs_is_a_leak(name, bytes_of):
    for seed in range(20):
        assert not judge.is_flat(at_rest(bytes_of, noise=0.05 * MB, seed=seed), 256), (name, judge.growth(at_rest(bytes_of, noise=0.05 * MB, seed=seed)))


def test_too_few_points_are_no_judgement():
    with pytest.raises(ValueError, match="too few"):
        judge.growth(at_rest(lambda n: 0, rounds=10))


# ---- time

def test_slowdown():
    rng = random.Random(1)

    def seconds(factor):
        return {k: [rng.expovariate(1) * factor * (1 + i) for _ in range(200)] for i, k in enumerate("abc")}
    assert judge.slowdown(seconds(1), seconds(1))[0] == pytest.approx(1, abs=0.3)
    assert judge.slowdown(seconds(1), seconds(3))[0] == pytest.approx(3, rel=0.3)
    one_kind = seconds(1)
    one_kind["a"] = [100 * s for s in one_kind["a"]]
    assert judge.slowdown(seconds(1), one_kind)[1]["a"] > 50
    with pytest.raises(ValueError, match="no kind"):
        judge.slowdown({"a": [1] * 100}, {"b": [1] * 100})


def test_counters():
    assert judge.between("x", 5, 5, 5) is None and judge.between("x", 6, 5, 7) is None
    assert "4" in judge.between("x", 4, 5, 7) and judge.between("x", 8, 5, 7)


# ---- the requests

def test_every_round_has_the_same_kinds():
    deck = Deck(random.Random(1))
    rounds = [collections.Counter(deck.round(100)) for _ in range(50)]
    assert set(rounds[0]) == set(MIX), "each kind at once"
    for kind, weight in MIX.items():
        expected = weight / sum(MIX.values()) * 100
        assert all(abs(r[kind] - expected) < 2 for r in rounds) and abs(sum(r[kind] for r in rounds) - 50 * expected) <= 1


def piece(text="", end=None, index=0):
    return json.dumps({"choices": [{"index": index, "text": text, "finish_reason": end}]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 0}}})
WRONG_USAGE = USAGE.replace('"total_tokens": 4', '"total_tokens": 5')
GOOD = [piece("a"), piece("b", "length"), USAGE, "[DONE]"]


def taken(events, n=1):
    record = Record("x", "y")
    return Traffic(None, "m", [], 1).take_stream(record, Answer(events=[(0.0, "data: " + e) for e in events]), n), record


def test_a_stream_with_one_end():
    got, record = taken(GOOD)
    assert got == [("ab", "length")] and not record.problems and record.finished == {"length": 1} and record.completion_tokens == 2
    got, record = taken([piece("a", "stop", 1), piece("b", "length", 0), USAGE, "[DONE]"], 2)
    assert got == [("b", "length"), ("a", "stop")] and not record.problems and record.prompt_tokens == 4


@pytest.mark.parametrize("events", [
    GOOD[:-1], GOOD + ["[DONE]"], GOOD + [piece("c")], GOOD[:2] + ["[DONE]"], [GOOD[0], *GOOD[2:]], [GOOD[1], *GOOD], [*GOOD[:3], piece("c"), "[DONE]"],
    [piece("a", "stop"), piece("", "stop"), USAGE, "[DONE]"], ['{"error": {"message": "x"}}', "[DONE]"], [*GOOD[:2], WRONG_USAGE, "[DONE]"]])
def test_a_stream_that_is_wrong(events):
    assert taken(events)[1].problems
