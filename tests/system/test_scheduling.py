"""What the scheduler does, seen through HTTP: reuse, priorities, time limits, guesses, and that none of it changes an answer."""
import concurrent.futures
import json
import random
import time
import urllib.error
import urllib.request

import pytest
from conftest import Server

WORDS = "sum of river stone light seven blue garden 12 45 9 the and then what is next to it".split()


def post(server, body, path="/v1/completions", ok=200):
    request = urllib.request.Request(server.url + path, json.dumps({"model": "minimax-m3", **body}).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as e:
        status, text = e.code, e.read()
    assert status == ok, text
    return json.loads(text)


def metric(server, name):
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def prose(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def serve(engine, *flags):
    return Server(engine, "--model", "minimax-m3", "--max-seq-len", 2048, *flags)


def test_prompts_that_begin_alike_are_read_once(mini_int8):
    text = prose(random.Random(1), 200)
    body = {"prompt": text, "max_tokens": 20, "temperature": 0}
    with serve(mini_int8) as s, serve(mini_int8, "--no-prefix-cache") as none:
        first, again = post(s, body), post(s, body)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert 0 < again["usage"]["prompt_tokens"] - cached <= 64
        assert metric(s, "vllm:prefix_cache_hits_total") == cached
        salted = post(s, {**body, "cache_salt": "mine"})
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        scored = post(s, {**body, "echo": True, "logprobs": 1})
        assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "every token has a score to be computed"
        without = [post(none, body) for _ in range(2)][1]
        assert without["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert {a["choices"][0]["text"] for a in (first, again, salted, without)} == {first["choices"][0]["text"]}


def test_answers_that_take_too_long_end(mini_int8):
    with serve(mini_int8, "--timeout-seconds", 0.7) as s:
        start = time.monotonic()
        late = post(s, {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "n": 32}, ok=504)
        assert time.monotonic() - start < 30
        assert late["error"]["type"] == "timeout_error" and "--timeout-seconds" in late["error"]["message"]
        assert post(s, {"prompt": "x", "max_tokens": 2})["choices"]


def test_urgent_requests_take_the_place_of_others(mini_int8):
    with serve(mini_int8, "--max-batch-size", 1) as s, concurrent.futures.ThreadPoolExecutor() as pool:
        long = {"prompt": "once", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
        alone = post(s, {**long, "max_tokens": 300})["choices"][0]["text"]
        slow = pool.submit(post, s, long)
        while metric(s, "vllm:num_requests_running") == 0:
            time.sleep(0.01)
        urgent = pool.submit(post, s, {"prompt": "twice", "max_tokens": 3, "priority": -1})
        urgent.result()
        assert not slow.done(), "it came later and ends earlier"
        assert slow.result()["choices"][0]["text"].startswith(alone)
        assert metric(s, "vllm:num_preemptions_total") >= 1


def requests(n):
    rng = random.Random(7)
    shared = prose(rng, 120)
    all = []
    for i in range(n):
        body = {"prompt": (shared + " " if i % 3 == 0 else "") + prose(rng, rng.randint(1, 60)), "max_tokens": rng.randint(1, 40), "temperature": 0,
                "priority": rng.randint(-1, 1)}
        if i % 5 == 0:
            body["repetition_penalty"] = 1.2
        if i % 7 == 0:
            body["logprobs"] = 2
        if i % 11 == 0:
            body.update(temperature=1.0, seed=i)
        if i % 13 == 0:
            body["cache_salt"] = "s"
        all.append(body)
    return all


def answers(server, bodies, clients, seed=0):
    order, got = list(range(len(bodies))), [None] * len(bodies)
    random.Random(seed).shuffle(order)

    def one(i):
        if clients > 1:
            time.sleep(random.Random(seed * 1000 + i).random() * 0.05)
        choice = post(server, bodies[i])["choices"][0]
        got[i] = json.dumps([choice["text"], choice["finish_reason"], choice["logprobs"]])

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, order))
    return got


@pytest.fixture(scope="module")
def each_alone(mini_int8):
    with serve(mini_int8, "--no-prefix-cache", "--max-batch-size", 1) as s:
        return answers(s, requests(200), 1)


SMALL = ("--kv-tokens", 2048, "--kv-growth-tokens", 1, "--kv-floor-tokens", 1)
DISK = ("--kv-disk", "FOLDER")


@pytest.mark.parametrize("flags", [
    ("--prefill-beside-decodes", 1), ("--prefill-beside-decodes", 7), ("--prefill-beside-decodes", 64), ("--no-prefix-cache",), ("--draft-tokens", 4),
    SMALL, (*SMALL, "--no-prefix-cache"), DISK, (*SMALL, *DISK), (*SMALL, *DISK, "--kv-disk-bytes", "4mb", "--draft-tokens", 4), (*SMALL, "--draft-tokens", 4, "--prefill-beside-decodes", 7)], ids=lambda f: " ".join(map(str, f)))
def test_no_answer_depends_on_its_neighbours(mini_int8, each_alone, flags, tmp_path):
    flags = [tmp_path / "kv" if f == "FOLDER" else f for f in flags]
    with serve(mini_int8, "--step-ms", 0, *flags) as s:
        assert answers(s, requests(200), 32, seed=len(flags)) == each_alone
        if SMALL[0] in flags:
            assert metric(s, "vllm:num_preemptions_total") > 0
        if "--draft-tokens" in flags:
            assert metric(s, "vllm:spec_decode_num_accepted_tokens_total") > 0
        if "--kv-disk" in flags:
            assert metric(s, "metainfer:kv_disk_written_total") > 0
            if SMALL[0] not in flags:
                assert metric(s, "metainfer:kv_disk_hits_total") == 0
            elif "--kv-disk-bytes" not in flags:   # with room for a few pages only it depends on who comes when whether one is found again
                assert metric(s, "metainfer:kv_disk_hits_total") > 0
            assert metric(s, "metainfer:kv_disk_errors_total") == 0
        assert (metric(s, "vllm:prefix_cache_hits_total") > 0) == ("--no-prefix-cache" not in flags)
        assert metric(s, "vllm:kv_cache_usage_perc") == 0, "all pages are back"
