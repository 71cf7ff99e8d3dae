"""The breadth of the API against its own description: /openapi.json is fetched, and answers and refusals are held against it."""
import base64
import concurrent.futures
import json
import math
import re
import shlex
import struct
import subprocess
import urllib.error
import urllib.request

import jsonschema
import pytest
from conftest import ROOT, Server

QUESTION = [{"role": "user", "content": "What is 23 + 45?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}
M = {"model": "minimax-m3"}


def call(server, path, body=None, headers=None, method=None):
    """(status, text of the answer)"""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def ask(server, path, body, ok=200):
    status, text = call(server, path, body)
    assert status == ok, text
    return json.loads(text)


def events(server, path, body):
    """(name, data) of each event but [DONE]"""
    status, text = call(server, path, {**body, "stream": True})
    assert status == 200, text
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if fields.get("data", "[DONE]") != "[DONE]":
            found.append((fields.get("event"), json.loads(fields["data"])))
    return found


@pytest.fixture(scope="module")
def doc(server):
    return ask(server, "/openapi.json", None)


def check(doc, name, value):
    jsonschema.validate(value, {"$ref": f"#/components/schemas/{name}", "components": doc["components"]})


BODIES = {
    "/v1/chat/completions": {**M, "messages": QUESTION, "max_tokens": 8, "temperature": 0},
    "/v1/completions": {**M, "prompt": "There was a tired frog", "max_tokens": 8, "temperature": 0},
    "/v1/responses": {**M, "input": "What is 23 + 45?", "max_output_tokens": 8, "temperature": 0},
    "/v1/messages": {**M, "messages": QUESTION, "max_tokens": 8, "temperature": 0},
    "/v1/messages/count_tokens": {**M, "messages": QUESTION},
    "/v1/embeddings": {**M, "input": "one"},
    "/tokenize": {**M, "prompt": "one", "with_pieces": True, "return_token_strs": True},
    "/detokenize": {**M, "tokens": [300, 301]},
    "/apply-template": {**M, "messages": QUESTION},
}


def test_every_route_answers_as_described(server, doc):
    for path, operations in doc["paths"].items():
        for method, operation in operations.items():
            status, text = call(server, path.replace("{model}", "minimax-m3"), BODIES.get(path) if method == "post" else None, method=method.upper())
            assert status == 200, (path, method, text)
            content = operation["responses"]["200"].get("content", {})
            if method != "head" and "application/json" in content:
                jsonschema.validate(json.loads(text), {**content["application/json"]["schema"], "components": doc["components"]})
            if method == "post":
                jsonschema.validate(BODIES[path], {**operation["requestBody"]["content"]["application/json"]["schema"], "components": doc["components"]})
                status, text = call(server, path, {**BODIES[path], "no_such_field": 1})
                assert status == 400 and "no_such_field" in text
                jsonschema.validate(json.loads(text), {**operation["responses"]["400"]["content"]["application/json"]["schema"], "components": doc["components"]})


def test_streamed_events_are_as_described(server, doc):
    for path, operations in doc["paths"].items():
        stream = operations.get("post", {}).get("responses", {}).get("200", {}).get("content", {}).get("text/event-stream")
        if stream is None:
            continue
        seen = events(server, path, BODIES[path])
        assert len(seen) > 2
        for _, data in seen:
            jsonschema.validate(data, {**stream["x-event"], "components": doc["components"]})


def test_routes_outside_of_the_description_are_404(server, doc):
    for path in ("/v1", "/v1/chat", "/v2/models", "/openapi.yaml", "/v1/messages/", "/tokenize/x"):
        status, text = call(server, path)
        assert (path in doc["paths"]) or status == 404, path


def test_every_route_refuses_without_a_key(mini_int8, tmp_path):
    (tmp_path / "keys").write_text("a-key\n")
    with Server(mini_int8, "--model", "minimax-m3", "--api-key-file", tmp_path / "keys") as s:
        status, text = call(s, "/openapi.json", headers={"Authorization": "Bearer a-key"})
        doc = json.loads(text)
        for path, operations in doc["paths"].items():
            for method, operation in operations.items():
                status, _ = call(s, path.replace("{model}", "minimax-m3"), BODIES.get(path) if method == "post" else None, method=method.upper())
                assert status == (200 if operation.get("security") == [] else 401), (path, method)
        status, text = call(s, "/v1/messages", BODIES["/v1/messages"])
        assert json.loads(text)["error"]["type"] == "authentication_error"


def test_ready_version_and_model_details(server):
    assert ask(server, "/ready", None) == {"status": "ready"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", ask(server, "/version", None)["version"])
    model = ask(server, "/v1/models", None)["data"][0]
    assert model["details"]["tool_calls"] == "mini" and model["details"]["layers"] > 0 and model["max_model_len"] == 2048


def test_dialects_agree(server):
    """One question, three dialects, streamed and whole: the same words and the same counts."""
    chat = ask(server, "/v1/chat/completions", {**M, "messages": QUESTION, "temperature": 0})
    text, used = chat["choices"][0]["message"]["content"], chat["usage"]
    response = ask(server, "/v1/responses", {**M, "input": QUESTION, "temperature": 0})
    assert response["status"] == "completed" and response["output"][0]["content"][0]["text"] == text == "68"
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (used["prompt_tokens"], used["completion_tokens"])
    message = ask(server, "/v1/messages", {**M, "messages": QUESTION, "temperature": 0, "max_tokens": 99})
    assert message["content"] == [{"type": "text", "text": text}] and message["stop_reason"] == "end_turn"
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (used["prompt_tokens"], used["completion_tokens"])
    assert ask(server, "/v1/messages/count_tokens", {**M, "messages": QUESTION})["input_tokens"] == used["prompt_tokens"]
    assert ask(server, "/tokenize", {"messages": QUESTION})["count"] == used["prompt_tokens"]
    prompt = ask(server, "/apply-template", {"messages": QUESTION})["prompt"]
    assert ask(server, "/v1/completions", {**M, "prompt": prompt, "temperature": 0, "max_tokens": 9})["choices"][0]["text"] == text


TOOL = {"name": "weather", "description": "Weather of a city.", "parameters": CITY}


def test_forced_calls_in_every_dialect(server):
    chat = ask(server, "/v1/chat/completions", {**M, "messages": QUESTION, "temperature": 0, "max_tokens": 99, "tool_choice": "required",
                                                "parallel_tool_calls": False, "tools": [{"type": "function", "function": TOOL}]})
    calls = [c["function"] for c in chat["choices"][0]["message"]["tool_calls"]]
    assert len(calls) == 1 and calls[0]["name"] == "weather"
    arguments = json.loads(calls[0]["arguments"])
    jsonschema.validate(arguments, CITY)

    body = {**M, "input": QUESTION, "temperature": 0, "max_output_tokens": 99, "tool_choice": "required", "parallel_tool_calls": False,
            "tools": [{"type": "function", **TOOL}]}
    items = ask(server, "/v1/responses", body)["output"]
    assert [(i["type"], i["name"], json.loads(i["arguments"])) for i in items] == [("function_call", "weather", arguments)]
    seen = events(server, "/v1/responses", body)
    assert [n for n, _ in seen] == [d["type"] for _, d in seen]
    assert [d["sequence_number"] for _, d in seen] == list(range(len(seen)))
    assert json.loads("".join(d["delta"] for n, d in seen if n == "response.function_call_arguments.delta")) == arguments
    assert seen[-1][0] == "response.completed" and json.loads(seen[-1][1]["response"]["output"][0]["arguments"]) == arguments

    body = {**M, "messages": QUESTION, "temperature": 0, "max_tokens": 99, "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "tools": [{"name": "weather", "description": "Weather of a city.", "input_schema": CITY}]}
    message = ask(server, "/v1/messages", body)
    assert message["stop_reason"] == "tool_use"
    assert [(b["type"], b["name"], b["input"]) for b in message["content"]] == [("tool_use", "weather", arguments)]
    seen = events(server, "/v1/messages", body)
    assert [n for n, _ in seen][:2] == ["message_start", "content_block_start"] and seen[-1][0] == "message_stop"
    assert json.loads("".join(d["delta"]["partial_json"] for n, d in seen if n == "content_block_delta")) == arguments


def test_free_calls_go_round(server):
    """The model calls by itself, gets the result, and answers: in the form of each dialect."""
    tool = {"name": "get_weather", "description": "Weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    same = {**M, "temperature": 0}
    chat = ask(server, "/v1/chat/completions", {**same, "messages": question, "max_tokens": 99, "tools": [{"type": "function", "function": tool}]})
    calls = chat["choices"][0]["message"]["tool_calls"]
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [("get_weather", {"city": "Oslo"})]
    tools = [{"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}]
    message = ask(server, "/v1/messages", {**same, "messages": question, "max_tokens": 99, "tools": tools})
    use = [b for b in message["content"] if b["type"] == "tool_use"]
    assert [(u["name"], u["input"]) for u in use] == [("get_weather", {"city": "Oslo"})]
    functions = [{"type": "function", **tool}]
    items = ask(server, "/v1/responses", {**same, "input": question, "tools": functions})["output"]
    assert [(i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"] == [("get_weather", {"city": "Oslo"})]

    result = json.dumps({"sky": "sunny", "degrees": 21})
    words = "It is sunny and 21 degrees in Oslo."
    again = ask(server, "/v1/chat/completions", {**same, "max_tokens": 99, "tools": [{"type": "function", "function": tool}], "messages": question + [
        chat["choices"][0]["message"], {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}]})
    assert again["choices"][0]["message"]["content"] == words
    after = ask(server, "/v1/messages", {**same, "max_tokens": 99, "tools": tools, "messages": question + [
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use[0]["id"], "content": result}]}]})
    assert after["content"] == [{"type": "text", "text": words}]
    last = ask(server, "/v1/responses", {**same, "tools": functions, "input": question + items + [
        {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": result}]})
    assert last["output"][0]["content"][0]["text"] == words


def test_strict_tools_are_obeyed_where_the_model_is_free(server):
    """The model wants to say Paris; the schema has no Paris."""
    tool = {"name": "get_weather", "description": "Weather in a city", "parameters": CITY}
    question = [{"role": "user", "content": "What is the weather in Paris?"}]

    def arguments(strict, **more):
        body = {**M, "messages": question, "max_tokens": 60, "temperature": 0, "tools": [{"type": "function", "function": {**tool, "strict": strict}}], **more}
        return [json.loads(c["function"]["arguments"]) for c in ask(server, "/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"]]
    assert arguments(False) == [{"city": "Paris"}]
    for found in (arguments(True), arguments(True, parallel_tool_calls=False)):
        for value in found:
            jsonschema.validate(value, CITY)
    # Text stays free.
    free = {**M, "messages": QUESTION, "temperature": 0, "tools": [{"type": "function", "function": {**tool, "strict": True}}]}
    assert ask(server, "/v1/chat/completions", free)["choices"][0]["message"]["content"] == "68"
    message = ask(server, "/v1/messages", {**M, "messages": question, "max_tokens": 60, "temperature": 0, "tools": [
        {"name": "get_weather", "description": "Weather in a city", "input_schema": CITY, "strict": True}]})
    jsonschema.validate([b for b in message["content"] if b["type"] == "tool_use"][0]["input"], CITY)


def test_stop_sequences_in_messages(server):
    body = {**M, "messages": [{"role": "user", "content": "Tell me a story about a frog."}], "max_tokens": 40, "temperature": 0}
    text = ask(server, "/v1/messages", body)["content"][0]["text"]
    assert len(text) > 20
    stop = text[10:14]
    cut = ask(server, "/v1/messages", {**body, "stop_sequences": ["nowhere to be seen", stop]})
    assert (cut["stop_reason"], cut["stop_sequence"], cut["content"][0]["text"]) == ("stop_sequence", stop, text[:text.find(stop)])
    seen = events(server, "/v1/messages", {**body, "stop_sequences": [stop]})
    assert seen[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


@pytest.mark.parametrize("path,field", [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")])
def test_grammars(server, path, field):
    base = {**M, field: QUESTION if field == "messages" else "What is 23 + 45?", "temperature": 1.5, "seed": 3, "max_tokens": 60}
    text = lambda choice: choice.get("text") or choice["message"]["content"]
    for form, pattern in (({"type": "regex", "regex": "the sum is [0-9]{1,3}"}, "the sum is [0-9]{1,3}"),
                          ({"type": "grammar", "grammar": 'start: ("yes" | "no") " " /[a-c]{3}/'}, "(yes|no) [a-c]{3}")):
        assert re.fullmatch(pattern, text(ask(server, path, {**base, "response_format": form})["choices"][0]))
    answer = text(ask(server, path, {**base, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": CITY}}})["choices"][0])
    jsonschema.validate(json.loads(answer), CITY)
    for bad in ({"type": "regex", "regex": "("}, {"type": "grammar", "grammar": "start: nowhere"}):
        assert "response_format" == ask(server, path, {**base, "response_format": bad}, ok=400)["error"]["param"]


def test_embeddings(server):
    both = ask(server, "/v1/embeddings", {**M, "input": ["one two three", "a frog", [300, 301]]})["data"]
    for e in both:
        assert math.isclose(sum(x * x for x in e["embedding"]), 1, abs_tol=1e-5)
    alone = ask(server, "/v1/embeddings", {**M, "input": "a frog", "encoding_format": "base64"})["data"][0]["embedding"]
    raw = base64.b64decode(alone)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == [struct.unpack("<f", struct.pack("<f", x))[0] for x in both[1]["embedding"]]
    last = ask(server, "/v1/embeddings", {**M, "input": "a frog", "pooling": "last"})["data"][0]["embedding"]
    assert last != both[1]["embedding"]
    assert "values" in ask(server, "/v1/embeddings", {**M, "input": "x", "dimensions": 3}, ok=400)["error"]["message"]

    def while_others_run(i):
        return ask(server, "/v1/embeddings", {**M, "input": "a frog" if i % 2 else "some other text " * (i + 1)})["data"][0]["embedding"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(e == both[1]["embedding"] for e in list(pool.map(while_others_run, range(16)))[1::2])


def test_errors_have_the_dialect_of_their_route(server, doc):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for body in ({**BODIES[path], "model": "nobody"}, {**BODIES[path], "messages": []}):
            status, text = call(server, path, body)
            check(doc, "AnthropicError", json.loads(text))
        assert json.loads(call(server, path, method="GET")[1])["type"] == "error"
    status, text = call(server, "/v1/responses", {**BODIES["/v1/responses"], "model": "nobody"})
    assert status == 404
    check(doc, "Error", json.loads(text))


def test_the_examples_of_the_documentation_run(mini_int8):
    text = (ROOT / "docs" / "api.md").read_text()
    commands = re.findall(r"curl -s localhost:8000.*?(?=\n\n|\n    curl|\Z)", text, re.S)
    assert len(commands) >= 8
    with Server(mini_int8, "--model", "mini-m3") as s:
        for command in commands:
            words = shlex.split(command.replace("http://localhost:8000", s.url).replace("localhost:8000", s.url))
            done = subprocess.run(words + ["--fail-with-body"], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, (command, done.stdout)
            assert done.stdout.startswith(("{", "event: ")), command
