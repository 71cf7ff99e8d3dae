"""The official clients against a running server."""
import json
import shutil
import subprocess
import concurrent.futures
import urllib.request

import anthropic
import pytest
from conftest import ROOT, Server
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import NotFoundError, OpenAI
from pydantic import BaseModel

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


# ---- Anthropic's SDK

TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "additionalProperties": False,
                                                                 "required": ["a", "b"]}}]


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def messages(**more):
    return {"model": "minimax-m3", "max_tokens": 80, "messages": QUESTION, "extra_body": {"temperature": 0}, **more}


def test_anthropic_whole_streamed_and_counted(claude):
    whole = claude.messages.create(**messages())
    assert (whole.content[0].text, whole.stop_reason) == ("68", "end_turn")
    with claude.messages.stream(**messages()) as stream:
        assert "".join(stream.text_stream) == "68"
        assert stream.get_final_message().usage == whole.usage
    assert claude.messages.count_tokens(model="minimax-m3", messages=QUESTION).input_tokens == whole.usage.input_tokens
    assert claude.messages.create(**messages(stop_sequences=["8"])).stop_sequence == "8"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**messages(model="nobody"))


def test_anthropic_tools_there_and_back(claude):
    asked = claude.messages.create(**messages(tools=TOOLS, tool_choice={"type": "tool", "name": "add"}))
    call = next(b for b in asked.content if b.type == "tool_use")
    assert (call.name, asked.stop_reason) == ("add", "tool_use")
    history = [*QUESTION, {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in asked.content]},
               {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "68"}]}]
    assert claude.messages.create(**messages(tools=TOOLS, messages=history)).content
    with claude.messages.stream(**messages(tools=TOOLS, tool_choice={"type": "any"})) as stream:
        assert any(e.type == "content_block_delta" for e in stream)
        assert stream.get_final_message().content[0].type == "tool_use"


# ---- LangChain

def langchain(server, **more):
    return ChatOpenAI(base_url=server.url + "/v1", api_key="none", model="minimax-m3", temperature=0, max_tokens=400, max_retries=0, **more)


def test_langchain_whole_streamed_and_in_batches(server):
    chat = langchain(server)
    whole = chat.invoke("What is 23 + 45?")
    assert whole.content == "68" and whole.usage_metadata["output_tokens"] > 0
    assert "".join(piece.content for piece in chat.stream("What is 23 + 45?")) == "68"
    assert [a.content for a in chat.batch(["What is 23 + 45?"] * 3)] == ["68"] * 3
    assert chat.bind(logprobs=True, top_logprobs=2).invoke("What is 23 + 45?").response_metadata["logprobs"]["content"]
    assert langchain(server, use_responses_api=True).invoke("What is 23 + 45?").content


def test_langchain_schema_and_embeddings(server):
    class Sum(BaseModel):
        n: int
        ok: bool

    assert isinstance(langchain(server).with_structured_output(Sum, method="json_schema").invoke("What is 23 + 45?"), Sum)
    embeddings = OpenAIEmbeddings(base_url=server.url + "/v1", api_key="none", model="minimax-m3", check_embedding_ctx_length=False)
    assert len({len(e) for e in embeddings.embed_documents(["a frog", "a house"])}) == 1
