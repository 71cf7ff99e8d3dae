"""The official clients against a running server."""
import json
import shutil
import subprocess
import concurrent.futures
import urllib.request

import pytest
from conftest import ROOT, Server
from openai import NotFoundError, OpenAI

CLIENTS = ROOT / "tests" / "clients"
QUESTION = [{"role": "user", "content": "What is 23 + 45?"}]


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def test_chat(client):
    answer = client.chat.completions.create(model="minimax-m3", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "68"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_equals_whole(client):
    pieces = client.chat.completions.create(model="minimax-m3", messages=QUESTION, temperature=0, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == "68"


def test_completion_with_stop_and_logprobs(client):
    answer = client.completions.create(model="minimax-m3", prompt="There was a tired frog", max_tokens=20, temperature=0, stop=["."], logprobs=2)
    assert "." not in answer.choices[0].text
    assert len(answer.choices[0].logprobs.tokens) >= 1


def test_unknown_model(client):
    with pytest.raises(NotFoundError):
        client.chat.completions.create(model="nobody", messages=QUESTION)


def test_thirty_two_at_once_equal_alone(client):
    questions = [[{"role": "user", "content": f"What is {i * 7} + {i * 3 + 1}?"}] for i in range(32)]

    def ask(messages):
        return client.chat.completions.create(model="minimax-m3", messages=messages, temperature=0).choices[0].message.content

    alone = [ask(q) for q in questions]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, questions)) == alone


def test_node_client(server):
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    if not (CLIENTS / "node_modules" / "openai").exists():
        pytest.skip("the npm package openai is not installed: scripts/setup test does that")
    done = subprocess.run(["node", "chat.mjs", server.url + "/v1"], cwd=CLIENTS, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got.pop("tokens") >= 1
    assert got == {"whole": "68", "streamed": "68", "runner": ["68", "68", "stop"], "call": ["function", "add", ["a", "b"]], "streamed_call": [["add", "object"]],
                   "shaped": ["n"], "completion": [5, 5], "response": "68", "response_events": "68", "embedding": True, "models": ["minimax-m3"],
                   "retrieved": "minimax-m3", "unknown_model": ["NotFoundError", 404, "model"], "bad_field": ["BadRequestError", 400, "temperature"],
                   "after_leaving": "68", "at_once": ["68"]}


def test_health_and_metrics(server):
    assert urllib.request.urlopen(server.url + "/health", timeout=5).status == 200
    assert b"# TYPE" in urllib.request.urlopen(server.url + "/metrics", timeout=5).read()


def test_sigterm_ends_with_zero(mini_int8):
    server = Server(mini_int8)
    assert server.stop() == 0


def test_port_in_use(server, mini_int8):
    from conftest import run
    port = server.url.rsplit(":", 1)[1]
    done = run("serve", "--engine", mini_int8, "--port", port, "--host", "127.0.0.1", ok=3)
    assert port in done.stderr
