"""Keys and values on disk: found again after kill -9, never wrong, and no condition of the disk ends the service."""
import random
import resource
import shutil
import signal
import time

import pytest
from conftest import Server, mounted, run
from test_scheduling import metric, post, prose

BODY = {"prompt": prose(random.Random(3), 300), "max_tokens": 80, "temperature": 0, "ignore_eos": True, "logprobs": 2}


def serve(engine, folder, *flags):
    return Server(engine, "--model", "minimax-m3", "--max-seq-len", 2048, "--kv-disk", folder, *flags)


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def said(answer):
    return answer["choices"][0]["text"], answer["choices"][0]["logprobs"]


def whole_pages(answer):
    return (answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1) // 64


def until(done):
    for _ in range(600):
        if done():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to be in 30 s")


@pytest.fixture(scope="module")
def plain(mini_int8):
    """Without a disk."""
    with Server(mini_int8, "--model", "minimax-m3", "--max-seq-len", 2048) as s:
        answer = post(s, BODY)
    assert cached(answer) == 0 and whole_pages(answer) >= 6
    return answer


@pytest.fixture(scope="module")
def kept(mini_int8, plain, tmp_path_factory):
    """A store that a server left which was killed."""
    folder = tmp_path_factory.mktemp("kv") / "store"
    s = serve(mini_int8, folder)
    answer = post(s, BODY)
    assert cached(answer) == 0 and said(answer) == said(plain)
    until(lambda: metric(s, "metainfer:kv_disk_written_total") == whole_pages(answer))
    assert s.stop(signal.SIGKILL) == -signal.SIGKILL
    return folder


@pytest.fixture
def store(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "store")


def test_killed_and_started_again(mini_int8, plain, store):
    with serve(mini_int8, store) as s:
        assert any(f"{whole_pages(plain)} are there" in line for line in s.lines)
        again = post(s, BODY)
        assert said(again) == said(plain)
        assert 0 < again["usage"]["prompt_tokens"] - cached(again) <= 64
        assert metric(s, "metainfer:kv_disk_hits_total") == cached(again) // 64
        assert metric(s, "vllm:prefix_cache_hits_total") == cached(again)
        salted = post(s, {**BODY, "cache_salt": "another"})
        assert cached(salted) == 0 and said(salted) == said(plain)


def test_killed_while_it_works(mini_int8, plain, tmp_path):
    """At any moment, several times on the same store: what is found is right."""
    rnd = random.Random(5)
    others = [{**BODY, "prompt": prose(random.Random(i), 120), "max_tokens": 40} for i in range(4)]
    want = []
    for round in range(5):
        s = serve(mini_int8, tmp_path / "store", "--kv-disk-bytes", "4mb")
        try:
            answers = [post(s, b) for b in others]
            want = want or [said(a) for a in answers]
            assert [said(a) for a in answers] == want
            assert said(post(s, BODY)) == said(plain)
            time.sleep(rnd.random() * 0.1)
        finally:
            s.stop(signal.SIGKILL)


def test_ended_gracefully(mini_int8, plain, tmp_path):
    with serve(mini_int8, tmp_path / "store") as s:
        post(s, BODY)
        assert s.stop() == 0
    with serve(mini_int8, tmp_path / "store") as s:
        again = post(s, BODY)
        assert cached(again) > 0 and said(again) == said(plain)


@pytest.mark.parametrize("file", ["pages", "index"])
def test_damaged_files(mini_int8, plain, store, file):
    data = bytearray((store / file).read_bytes())
    rnd = random.Random(file)
    for at in range(64 if file == "pages" else 4096, len(data), 997 if file == "pages" else 512):
        if rnd.random() < 0.5:
            data[at] ^= 1 << rnd.randrange(8)
    (store / file).write_bytes(data)
    with serve(mini_int8, store) as s:
        again = post(s, BODY)
        assert said(again) == said(plain)
        assert cached(again) < cached(post(s, BODY)), "what is damaged is computed, and found from then on"


def test_another_engine(mini_int8, mini_int4, store):
    with Server(mini_int4, "--model", "minimax-m3", "--max-seq-len", 2048) as s:
        want = post(s, BODY)
    with serve(mini_int4, store) as s:
        assert any("another engine" in line for line in s.lines)
        got = post(s, BODY)
        assert cached(got) == 0 and said(got) == said(want)


def test_another_kv_type(mini_int8, store):
    with serve(mini_int8, store, "--kv-type", "f32") as s:
        assert any("another engine" in line for line in s.lines)
        assert cached(post(s, BODY)) == 0


def test_another_attention_order(mini_int8, store):
    other = "pairs" if " amx_bf16" in open("/proc/cpuinfo").read() else "tiles"
    with serve(mini_int8, store, "--attention-order", other) as s:
        assert any("another engine" in line for line in s.lines)
        assert cached(post(s, BODY)) == 0


@pytest.fixture
def small_disk(tmp_path):
    yield from mounted(tmp_path / "disk", "1m")


def use_a_full_disk(s, plain):
    answers = [post(s, {**BODY, "prompt": prose(random.Random(i), 300)}) for i in range(6)]
    until(lambda: metric(s, "metainfer:kv_disk_errors_total") > 0)
    assert metric(s, "metainfer:kv_disk_quiet") == 1
    assert [said(post(s, {**BODY, "prompt": prose(random.Random(i), 300)})) for i in range(6)] == [said(a) for a in answers]
    assert said(post(s, BODY)) == said(plain)
    assert s.stop() == 0
    assert "".join(s.lines).count("could not be written") == 1


def test_full_disk(mini_int8, plain, small_disk):
    with serve(mini_int8, small_disk / "store") as s:
        use_a_full_disk(s, plain)
    with serve(mini_int8, small_disk / "store") as s:
        assert said(post(s, BODY)) == said(plain)


def test_files_that_may_not_grow(mini_int8, plain, tmp_path):
    with serve(mini_int8, tmp_path / "store") as s:
        resource.prlimit(s.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        use_a_full_disk(s, plain)


def test_folders_and_flags_that_cannot_be_used(mini_int8, tmp_path):
    with serve(mini_int8, tmp_path / "store"):
        done = run("serve", "--engine", mini_int8, "--port", 0, "--kv-disk", tmp_path / "store", ok=3)
        assert "in use by another process" in done.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index").write_text("of my books")
    assert "no store" in run("serve", "--engine", mini_int8, "--port", 0, "--kv-disk", tmp_path / "mine", ok=4).stderr
    assert (tmp_path / "mine" / "index").read_text() == "of my books"
    assert str(tmp_path / "a") in run("serve", "--engine", mini_int8, "--port", 0, "--kv-disk", tmp_path / "a" / "b", ok=3).stderr
    for flags in (["--no-prefix-cache"], ["--memory-pool", "false"]):
        assert flags[0] in run("serve", "--engine", mini_int8, "--kv-disk", tmp_path / "x", *flags, ok=2).stderr
    for flags in (["--kv-disk-bytes", "1gb"], ["--kv-disk", "x", "--kv-disk-bytes", "many"], ["--kv-disk", "x", "--kv-disk-bytes", "-5gb"], ["--kv-disk", ""]):
        assert "--kv-disk" in run("serve", "--engine", mini_int8, *flags, ok=2).stderr
