"""The server as an operator runs it: keys, TLS, logs, limits, signals, the watchdog, what deploy/ holds."""
import base64
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import resource
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest
from conftest import ROOT, Server, run

KEY = "a-key-that-nobody-guesses"


def address(server):
    host, port = server.url.split("://")[1].split(":")
    return host, int(port)


def request(server, path, body=None, headers=None, method=None, context=None, timeout=60):
    """(status, headers, body); the body of a POST is JSON or bytes."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {**({"Content-Type": "application/json"} if data is not None else {}), **(headers or {})}
    asked = urllib.request.Request(server.url + path, data, headers, method=method)
    try:
        r = urllib.request.urlopen(asked, timeout=timeout, context=context)
    except urllib.error.HTTPError as e:
        r = e
    return r.status, r.headers, r.read()


def question(**more):
    return {"model": "m", "messages": [{"role": "user", "content": "What is 23 + 45?"}], "temperature": 0, **more}


def long_answer(**more):
    return {"model": "m", "prompt": "x", "temperature": 0, "max_tokens": 900, "logit_bias": {"300": 100}, **more}


def metrics(server, **kw):
    return {m.group(1): float(m.group(2)) for m in
            re.finditer(r"^([a-zA-Z_:]+)\{[^}\n]*\} (\S+)$", request(server, "/metrics", **kw)[2].decode(), re.M)}


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("never came true")


@pytest.fixture(scope="module")
def plain(mini_int8, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "access.log"
    with Server(mini_int8, "--model", "m", "--max-seq-len", 1024, "--access-log", log, "--max-body-bytes", 1 << 20) as s:
        s.log = log
        yield s


def entries(log, count=1):
    until(lambda: log.exists() and len(log.read_text().splitlines()) >= count)
    return [json.loads(line) for line in log.read_text().splitlines()]


# ---- attacks: an error or a closed connection, and others notice nothing

@pytest.fixture
def stream(plain):
    """A neighbour whose stream runs all the while and must be the same as alone."""
    def read():
        return request(plain, "/v1/completions", long_answer(stream=True, max_tokens=400))[2]

    def texts(raw):
        return [json.loads(line[6:])["choices"][0]["text"] for line in raw.decode().splitlines() if line.startswith("data: {")]
    alone = texts(read())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(read)
        yield
        assert texts(running.result(60)) == alone


def raw(server, data, timeout=30):
    """What comes back until the server closes."""
    answer = b""
    with socket.create_connection(address(server), timeout=timeout) as s:
        try:
            for piece in (data if isinstance(data, list) else [data]):
                s.sendall(piece)
        except ConnectionError:
            pass
        try:
            while got := s.recv(65536):
                answer += got
        except ConnectionError:
            pass
    return answer


def post_head(length, more=""):
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}Content-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("depth", [100, 10000, 100000])
@pytest.mark.parametrize("where", ["whole", "unknown field", "tool parameters", "arguments"])
def test_nested_brackets(depth, where, plain, stream):
    deep = b"[" * depth + b"]" * depth
    objects = b'{"a":' * depth + b"1" + b"}" * depth
    body = {"whole": deep, "unknown field": b'{"model":"m","x":' + objects + b"}",
            "tool parameters": b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"f","parameters":' + objects + b"}}]}",
            "arguments": json.dumps({"model": "m", "max_tokens": 1, "messages": [
                {"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": objects.decode()}}]},
                {"role": "tool", "tool_call_id": "c", "content": "1"}]}).encode()}[where]
    status, _, answer = request(plain, "/v1/chat/completions", body)
    if where == "whole" or depth > 1000:
        assert 400 <= status < 500, answer
        assert json.loads(answer)["error"]["message"]
    else:
        assert status < 500, answer


def test_body_beyond_the_limit(plain, stream):
    size = 64 << 20
    announced = raw(plain, [post_head(size), b"x" * (1 << 20)])
    assert announced.startswith(b"HTTP/1.1 413 ")
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    unannounced = raw(plain, [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", *[chunk] * 8])
    assert unannounced.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("bad", [b'{"model":"m","prompt":"\xff\xfe"}', b'{"model":"\xc3","prompt":"a"}', b'{"\xed\xa0\x80":1}', b"\xff\xfe{\x00}\x00", b"\x00" * 100,
                                 b'{"model":"m","prompt":"\xf4\x90\x80\x80"}', b'{"model":"m","prompt":"\\ud800"}', b"", b"null", b"[]", b'"x"', b"{",
                                 b'{"model":"m","prompt":"a","max_tokens":1e999}', b'{"model":"m","prompt":"a",}', b'{"a":1,"a":2}'])
def test_bodies_that_are_no_request(bad, plain, stream):
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, headers, answer = request(plain, path, bad)
        assert 400 <= status < 500, (status, answer)
        assert json.loads(answer)["error"]["message"] and headers["X-Request-Id"]


def test_invalid_utf8_outside_the_body(plain, stream):
    for data in (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\r\nConnection: close\r\n\r\n",
                 b"GET /v1/models/\xc3\x28 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"\xff\xff\xff\xff\r\n\r\n"):
        answer = raw(plain, data)
        assert answer[9:12] in (b"200", b"400", b"404"), answer
        answer.decode()


@pytest.mark.parametrize("head", ["Host: a\r\nHost: b\r\n", "", "Host: a\r\nX: y\r\n z\r\n", "Host: a b\r\n", "Host: a\r\nTransfer-Encoding: gzip, chunked\r\n",
                                  "Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "Host: a\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n"])
def test_heads_that_two_programs_may_read_differently(head, plain, stream):
    """Refused from the head alone, and closed: what comes behind is nobody's next request."""
    answer = raw(plain, f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"X-Request-Id") == 1, answer
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]


def test_header_floods(plain, stream):
    assert raw(plain, b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 1000 + b"\r\n").startswith(b"HTTP/1.1 431 ")
    assert raw(plain, b"GET /health HTTP/1.1\r\nA: " + b"b" * (1 << 20)).startswith(b"HTTP/1.1 431 ")
    assert raw(plain, [b"GET /health HTTP/1.1\r\n"] + [b"A%d: bbbbbbbbbbbbbbbbb\r\n" % i for i in range(20000)]).startswith(b"HTTP/1.1 431 ")
    assert raw(plain, b"GET /" + b"a" * (1 << 20)).startswith(b"HTTP/1.1 431 ")


def test_nobody_waits_for_a_schema_that_takes_long(plain, stream):
    slow = {"anyOf": [{"type": "integer", "minimum": i * 7, "maximum": i * 11 + 123456} for i in range(7000)]}
    body = question(max_tokens=1, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": slow}})
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(request, plain, "/v1/chat/completions", body) for _ in range(4)]
        until(lambda: metrics(plain)["metainfer:http_open_answers"] >= 5)  # the stream's and this question's, too
        for _ in range(3):
            assert request(plain, "/tokenize", {"prompt": "a"})[0] == 200
        assert not any(a.done() for a in asked), "the test needs a schema that takes longer"
        assert all(a.result()[0] in (200, 400) for a in asked)


@pytest.mark.parametrize("schema,says", [
    ({"enum": ["x" * (600 << 10)]}, "bytes; up to 524288 are accepted"),
    ({"type": "object", "properties": {f"a{i}": {} for i in range(10000)}}, "up to 500 may be"),
    ({"type": "object", "patternProperties": {f"^a{i}$": {} for i in range(2000)}}, "more than 64 patternProperties"),
    ({"type": "object", "properties": {"a": {"not": {}}}}, "not cannot be followed (at properties.a)"),
])
def test_schemas_that_cannot_be_followed_are_refused_with_the_reason(schema, says, plain, stream):
    for path, field, body in (("/v1/chat/completions", "response_format", question(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})),
                              ("/v1/responses", "text", {"model": "m", "input": "a", "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}}})):
        status, _, answer = request(plain, path, body)
        error = json.loads(answer)["error"]
        assert status == 400 and error["param"] == field and error["message"].startswith(field + ": ") and says in error["message"], answer


def test_thousands_of_idle_connections_shut_nobody_out(mini_int8):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--max-connections", 200) as s:
        idle = []
        try:
            for i in range(1700):
                idle.append(socket.create_connection(address(s), timeout=20))
                if i % 3 == 0:
                    idle[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
            assert request(s, "/v1/chat/completions", question())[0] == 200
            assert metrics(s)["metainfer:http_evicted_connections_total"] >= 400
        finally:
            for c in idle:
                c.close()


def test_burst_beyond_the_connections_is_told_so(mini_int8):
    with Server(mini_int8, "--model", "m", "--max-seq-len", 1024, "--max-connections", 8) as s:
        body = json.dumps(long_answer(max_tokens=300)).encode()
        burst = [socket.create_connection(address(s), timeout=60) for _ in range(80)]
        for c in burst:                 # all are there before the first speaks
            c.sendall(post_head(len(body)).replace(b"chat/completions", b"completions") + body)
        answers = [b"".join(iter(lambda c=c: c.recv(65536), b"")) for c in burst]
        for c in burst:
            c.close()
        served = [a for a in answers if a.startswith(b"HTTP/1.1 200 ")]
        refused = [a for a in answers if a.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in a and b'"error"' in a]
        assert len(served) + len(refused) == 80 and len(served) >= 8 and len(refused) >= 1
        now = metrics(s)
        assert now["metainfer:http_crowded_total"] == len(refused)
        assert now["metainfer:http_turned_away_total"] == 0 == now["metainfer:http_evicted_connections_total"]


def test_one_byte_a_second(mini_int8):
    with Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--request-seconds", 3) as s:
        body = json.dumps(question()).encode()
        slow = [socket.create_connection(address(s), timeout=30) for _ in range(20)]
        data = post_head(len(body)) + body
        for at in range(3):
            for c in slow:
                c.sendall(data[at:at + 1])
            assert json.loads(request(s, "/v1/chat/completions", question())[2])["choices"][0]["message"]["content"] == "68"
            time.sleep(1)
        for c in slow:
            assert c.recv(65536).startswith(b"HTTP/1.1 408 ")
            c.close()
        assert metrics(s)["metainfer:http_timeouts_total"] == 20


def test_client_that_closes_its_side_gets_its_answer(plain):
    for stream in (False, True):
        body = json.dumps(question(stream=stream)).encode()
        with socket.create_connection(address(plain), timeout=30) as s:
            s.sendall(post_head(len(body)) + body)
            s.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: s.recv(65536), b""))
        assert b"HTTP/1.1 200 OK" in answer
        if stream:
            assert answer.rstrip().endswith(b"0") and b"data: [DONE]" in answer
        else:
            assert json.loads(answer.rsplit(b"\r\n\r\n", 1)[1])["choices"][0]["message"]["content"] == "68"


def test_slow_reader_is_cut_off(mini_int8):
    with Server(mini_int8, "--model", "m", "--max-seq-len", 2048, "--slow-reader-bytes", 16384) as s:
        body = json.dumps(long_answer(stream=True, max_tokens=1900, n=8, temperature=1, logprobs=5)).encode()
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(address(s))
        slow.sendall(post_head(len(body)).replace(b"/v1/chat/completions", b"/v1/completions") + body)
        until(lambda: metrics(s)["metainfer:http_slow_readers_total"] == 1)
        until(lambda: metrics(s)["vllm:num_requests_running"] == 0)
        slow.close()


def test_prompt_reader_of_large_events_is_no_slow_reader(mini_int8):
    with Server(mini_int8, "--model", "m", "--max-seq-len", 1024, "--slow-reader-bytes", 4096) as s:
        # Every step brings more than the limit at once.
        answer = request(s, "/v1/completions", {"model": "m", "prompt": ["x"] * 4, "max_tokens": 60, "n": 4, "temperature": 1, "logprobs": 20, "stream": True,
                                                "ignore_eos": True, "stream_options": {"include_usage": True}})[2]
        assert answer.rstrip().endswith(b"data: [DONE]")
        assert max(map(len, answer.split(b"\n\n"))) > 1000
        whole = request(s, "/v1/responses", {"model": "m", "input": "x", "max_output_tokens": 400, "stream": True, "instructions": "y" * 300})[2]
        assert b"response.completed" in whole or b"response.incomplete" in whole
        assert metrics(s)["metainfer:http_slow_readers_total"] == 0


# ---- the access log

def test_access_log_names_requests(plain):
    trace, span = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    _, headers, body = request(plain, "/v1/chat/completions?secret=1", question(), {"X-Request-Id": "mine-1", "traceparent": f"00-{trace}-{span}-01", "User-Agent": "t/1"})
    assert headers["X-Request-Id"] == "mine-1"
    until(lambda: '"mine-1"' in plain.log.read_text())
    mine = [e for e in entries(plain.log) if e["request_id"] == "mine-1"][0]
    usage = json.loads(body)["usage"]
    assert mine["status"] == 200 and mine["end"] == "complete" and mine["method"] == "POST" and mine["path"] == "/v1/chat/completions"
    assert (mine["trace_id"], mine["parent_span_id"]) == (trace, span) and re.fullmatch("[0-9a-f]{16}", mine["span_id"])
    assert (mine["prompt_tokens"], mine["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert mine["client"] == "127.0.0.1" and mine["user_agent"] == "t/1" and 0 < mine["first_byte_ms"] <= mine["duration_ms"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", mine["time"])
    assert "secret" not in plain.log.read_text()


def test_access_log_tells_what_went_wrong(plain):
    request(plain, "/nothing", headers={"X-Request-Id": "no-such-path", "traceparent": "junk"})
    with socket.create_connection(address(plain), timeout=30) as s:
        body = json.dumps(long_answer(stream=True)).encode()
        s.sendall(post_head(len(body), "X-Request-Id: left-early\r\n").replace(b"chat/completions", b"completions") + body)
        s.recv(100)
    raw(plain, b"NONSENSE\r\n\r\n")
    until(lambda: '"left-early"' in plain.log.read_text())
    by_id = {e["request_id"]: e for e in entries(plain.log)}
    assert by_id["no-such-path"]["status"] == 404 and "trace_id" not in by_id["no-such-path"]
    assert by_id["left-early"]["end"] == "client_gone"
    assert any(e["status"] == 400 and e["method"] == "" for e in by_id.values())


def test_client_that_left_before_its_answer_is_counted_as_such(plain):
    def counted():
        text = request(plain, "/metrics")[2].decode()
        return {m.group(1): float(m.group(2)) for m in re.finditer(r'api_requests_total\{endpoint="completions",status="(\d+)"[^}]*\} (\S+)', text)}
    before = counted()
    with socket.create_connection(address(plain), timeout=30) as s:
        body = json.dumps(long_answer()).encode()
        s.sendall(post_head(len(body), "X-Request-Id: gone-before\r\n").replace(b"chat/completions", b"completions") + body)
        until(lambda: metrics(plain)["vllm:num_requests_running"] == 1)
    until(lambda: '"gone-before"' in plain.log.read_text())
    mine = [e for e in entries(plain.log) if e["request_id"] == "gone-before"][0]
    assert (mine["status"], mine["end"]) == (499, "client_gone")
    until(lambda: counted().get("499", 0) == before.get("499", 0) + 1)
    until(lambda: metrics(plain)["vllm:num_requests_running"] == 0)
    assert counted().get("200", 0) == before.get("200", 0)


def test_access_log_is_moved_away(mini_int8, tmp_path):
    log = tmp_path / "a.log"
    with Server(mini_int8, "--max-seq-len", 512, "--access-log", log) as s:
        request(s, "/health")
        entries(log)
        log.rename(tmp_path / "old.log")
        s.process.send_signal(signal.SIGHUP)
        until(log.exists)
        request(s, "/health", headers={"X-Request-Id": "after"})
        assert entries(log)[-1]["request_id"] == "after"
        assert len((tmp_path / "old.log").read_text().splitlines()) == 1


def test_recorded_traffic_is_what_profile_reads(mini_int8, tmp_path):
    traffic = tmp_path / "traffic.jsonl"
    with Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--record-traffic", traffic) as s:
        ids = json.loads(request(s, "/tokenize", {"model": "m", "prompt": "tell me about the sea"})[2])["tokens"]
        for n in (1, 2):
            assert request(s, "/v1/completions", {"model": "m", "prompt": ids, "max_tokens": 5, "n": n, "ignore_eos": True})[0] == 200
        request(s, "/v1/completions", {"model": "m", "prompt": ids, "max_tokens": -5})     # refused: nothing of it is computed
        until(lambda: len(traffic.read_text().splitlines()) == 3)
    lines = [json.loads(line)["ids"] for line in traffic.read_text().splitlines()]
    assert all(line[:len(ids)] == ids and len(line) == len(ids) + 5 for line in lines)
    done = run("profile", "--engine", mini_int8, "--experts", tmp_path / "e.json", "--data", traffic)
    assert done.returncode == 0, done.stderr
    assert traffic.stat().st_mode & 0o7 == 0


def test_log_that_nobody_reads_holds_up_nobody(mini_int8):
    with Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--access-log", "-") as s:     # conftest stops reading once it listens
        c = http.client.HTTPConnection(*address(s), timeout=20)
        for _ in range(1500):
            c.request("GET", "/health", headers={"User-Agent": "x" * 150})
            assert c.getresponse().read()
        until(lambda: metrics(s)["metainfer:access_log_dropped_total"] > 0)
        assert request(s, "/v1/chat/completions", question())[0] == 200


# ---- keys

OPEN = {"/health", "/ready"}


def all_routes(server, headers):
    """What the server says of itself, and what it is known to have."""
    routes = {"/metrics", "/v1/models", "/v1/models/m", "/v1/chat/completions", "/v1/completions", "/", "/dashboard", "/nothing",
              *(f"/ui/{p.name}" for p in (ROOT / "src" / "server" / "ui").iterdir())}
    status, _, body = request(server, "/openapi.json", headers=headers)
    if status == 200:
        routes |= {re.sub(r"\{[^}]*\}", "m", p) for p in json.loads(body)["paths"]}
    source = (ROOT / "src" / "server" / "server.cc").read_text()
    routes |= {p for p in re.findall(r'"(/[a-z0-9_/.-]*)"', source)}
    return sorted(routes)


@pytest.fixture(scope="module")
def locked(mini_int8, tmp_path_factory):
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys").write_text(f"# the team's\n{KEY}\n")
    with Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--api-key-file", folder / "keys", "--access-log", folder / "log") as s:
        s.folder = folder
        yield s


def test_every_route_refuses_without_a_key(locked):
    bearer = {"Authorization": f"Bearer {KEY}"}
    routes = all_routes(locked, bearer)
    assert len(routes) > 8
    wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": ""}, {"Authorization": KEY}, {"X-Api-Key": "wrong"}, {"X-Api-Key": ""},
             {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY}, {"Authorization": "Basic " + base64.b64encode(b"me:wrong").decode()},
             {"Authorization": "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode(), "Origin": "https://elsewhere.example"}]
    for path in routes:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
            for headers in wrong:
                status, _, body = request(locked, path, b"{}" if method == "POST" else None, headers, method)
                if path in OPEN:
                    assert status in (200, 405)
                else:
                    assert status == 401, (method, path, headers)
                assert KEY.encode() not in body
    for path in ("//v1/models", "/v1//models", "/health/../v1/models", "/health%2f..%2fv1/models", "/v1/models/.", "/HEALTH", "/health/", "/health;x", "/v1%2fmodels",
                 "/healthz", "/ready/", "/./health"):
        assert request(locked, path)[0] == 401, path
    for headers in (bearer, {"authorization": f"bearer {KEY}"}, {"X-Api-Key": KEY}, {"Authorization": "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()}):
        assert request(locked, "/v1/models", headers=headers)[0] == 200
    assert KEY not in (locked.folder / "log").read_text()
    with open(f"/proc/{locked.process.pid}/cmdline") as f:
        assert KEY not in f.read()


def test_keys_are_read_again(locked):
    keys = locked.folder / "keys"
    try:
        keys.write_text("another-key\n")
        locked.process.send_signal(signal.SIGHUP)
        until(lambda: request(locked, "/v1/models", headers={"Authorization": "Bearer another-key"})[0] == 200)
        assert request(locked, "/v1/models", headers={"Authorization": f"Bearer {KEY}"})[0] == 401
        keys.write_text("# none\n")                      # a slip of the editor opens nothing and locks nobody out
        locked.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert request(locked, "/v1/models", headers={"Authorization": "Bearer another-key"})[0] == 200
        assert request(locked, "/v1/models")[0] == 401
    finally:
        keys.write_text(KEY + "\n")
        locked.process.send_signal(signal.SIGHUP)
        until(lambda: request(locked, "/v1/models", headers={"Authorization": f"Bearer {KEY}"})[0] == 200)


def test_hang_up_without_anything_to_reload_ends_the_server(mini_int8):
    s = Server(mini_int8, "--max-seq-len", 512)
    assert s.stop(signal.SIGHUP) in (0, -signal.SIGHUP, 128 + signal.SIGHUP)


# ---- pages of other sites

PAGE = "https://chat.example.org"


def cors(headers):
    return {k.lower(): v for k, v in headers.items() if k.lower().startswith("access-control-")}


def test_other_sites_are_not_mentioned_unless_asked(plain):
    for method, path in (("GET", "/v1/models"), ("OPTIONS", "/v1/chat/completions")):
        status, headers, _ = request(plain, path, headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"}, method=method)
        assert cors(headers) == {} and status == (200 if method == "GET" else 405)


def test_pages_of_other_sites(mini_int8, tmp_path):
    (tmp_path / "keys").write_text(KEY + "\n")
    with Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--api-key-file", tmp_path / "keys", "--cors-origin", PAGE, "--cors-origin", "http://localhost:3000",
                "--max-body-bytes", 2048) as s:
        origin = {"Origin": PAGE}
        bearer = {"Authorization": f"Bearer {KEY}", **origin}
        # The question comes without a key, for any path; what follows needs one.
        status, headers, body = request(s, "/v1/chat/completions", method="OPTIONS", headers={
            **origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"})
        told = cors(headers)
        assert (status, body) == (204, b"") and "Content-Length" not in headers
        assert told["access-control-allow-origin"] == PAGE and "POST" in told["access-control-allow-methods"]
        for name in ("authorization", "content-type", "x-api-key", "anthropic-version", "x-stainless-os"):
            assert name in told["access-control-allow-headers"].lower()
        for path, body, sent, expected in (
                ("/v1/chat/completions", question(), bearer, 200), ("/v1/chat/completions", question(stream=True), bearer, 200),
                ("/v1/chat/completions", question(), origin, 401), ("/v1/chat/completions", {"model": "m", "x": 1}, bearer, 400), ("/nothing", None, bearer, 404),
                ("/v1/completions", b" " * 4000, bearer, 413), ("/health", None, origin, 200)):
            status, headers, answer = request(s, path, body, sent)
            assert status == expected, answer
            assert headers["Access-Control-Allow-Origin"] == PAGE and headers["Vary"] == "Origin", (path, status)
            assert "X-Request-Id" in headers["Access-Control-Expose-Headers"]
        assert request(s, "/health", headers={"Origin": "http://localhost:3000"})[1]["Access-Control-Allow-Origin"] == "http://localhost:3000"
        # Others learn nothing, and are told apart in caches.
        for other in ("https://evil.example", PAGE + ".evil", "null"):
            status, headers, _ = request(s, "/v1/models", headers={**bearer, "Origin": other})
            assert cors(headers) == {} and headers["Vary"] == "Origin"
            assert request(s, "/v1/models", headers={"Origin": other, "Access-Control-Request-Method": "GET"}, method="OPTIONS")[0] == 401
        # A browser's remembered password works for no other site's page, named or not.
        basic = "Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()
        assert request(s, "/v1/models", headers={"Authorization": basic, **origin})[0] == 401


# ---- what is wrong shows before the model is loaded

@pytest.mark.parametrize("flags,code,says", [
    (["--host", "nowhere"], 2, "--host nowhere"), (["--host", "203.0.113.7"], 3, "203.0.113.7"), (["--port", "TAKEN"], 3, "in use"),
    (["--access-log", "/nonexistent/a.log"], 3, "--access-log /nonexistent/a.log"), (["--api-key-file", "/nonexistent/keys"], 4, "/nonexistent/keys"),
    (["--tls-cert", "/nonexistent/c.pem", "--tls-key", "/nonexistent/k.pem"], 4, "--tls-cert"), (["--tls-cert", "c.pem"], 2, "--tls-key"),
    (["--cors-origin", "https://a.example/page"], 2, "--cors-origin https://a.example/page")],
    ids=lambda v: v[0] if isinstance(v, list) else None)
def test_flags_are_checked_before_the_model_is_loaded(flags, code, says, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = [str(taken.getsockname()[1]) if f == "TAKEN" else f for f in flags]
        port = [] if "--port" in flags else ["--port", "0"]
        done = run("serve", "--engine", tmp_path / "no-engine", *port, *flags, ok=code, timeout=60)
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert "no-engine" not in done.stderr and done.stdout == ""


# ---- TLS

def certificate(folder, name):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", folder / "key.pem", "-out",
                    folder / "cert.pem", "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)


@pytest.fixture(scope="module")
def secure(mini_int8, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    certificate(folder, "first")
    with Server(mini_int8, "--model", "m", "--max-seq-len", 1024, "--tls-cert", folder / "cert.pem", "--tls-key", folder / "key.pem") as s:
        s.folder = folder
        yield s


def trusting(server):
    return ssl.create_default_context(cafile=server.folder / "cert.pem")


def test_tls_serves_answers_and_streams(secure):
    assert secure.url.startswith("https://")
    assert json.loads(request(secure, "/v1/chat/completions", question(), context=trusting(secure))[2])["choices"][0]["message"]["content"] == "68"
    stream = request(secure, "/v1/chat/completions", question(stream=True), context=trusting(secure))[2]
    assert b"data: [DONE]" in stream
    connection = http.client.HTTPSConnection(*address(secure), timeout=20, context=trusting(secure))
    for _ in range(3):                                          # kept open
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(secure.url + "/health", timeout=20)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_tls_in_pieces_and_plain_text(secure):
    assert not raw(secure, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 200")
    raw(secure, b"\x16\x03\x01" + b"\xff" * 1000)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        with socket.create_connection(address(secure), timeout=20) as s:
            old.wrap_socket(s)
    assert request(secure, "/health", context=trusting(secure))[0] == 200


def test_tls_client_that_leaves_frees_its_place(secure):
    body = json.dumps(long_answer()).encode()
    for farewell in (True, False):
        s = trusting(secure).wrap_socket(socket.create_connection(address(secure), timeout=20), server_hostname="127.0.0.1")
        s.sendall(post_head(len(body)).replace(b"chat/completions", b"completions") + body)
        until(lambda: metrics(secure, context=trusting(secure))["vllm:num_requests_running"] == 1)
        if farewell:
            s.settimeout(0.2)
            try:
                s.unwrap()
            except (OSError, ssl.SSLError):
                pass
        s.close()
        until(lambda: metrics(secure, context=trusting(secure))["vllm:num_requests_running"] == 0)
    assert metrics(secure, context=trusting(secure))["metainfer:http_clients_gone_total"] == 2


def test_tls_slow_handshakes_block_nobody(secure):
    silent = [socket.create_connection(address(secure), timeout=20) for _ in range(50)]
    assert request(secure, "/health", context=trusting(secure))[0] == 200
    for s in silent:
        s.close()


def test_tls_certificate_is_read_again(secure):
    def name():
        with trusting(secure).wrap_socket(socket.create_connection(address(secure), timeout=20), server_hostname="127.0.0.1") as s:
            return dict(x[0] for x in s.getpeercert()["subject"])["commonName"]
    assert name() == "first"
    certificate(secure.folder, "second")
    secure.process.send_signal(signal.SIGHUP)

    def renewed():
        try:
            return name() == "second"
        except ssl.SSLError:
            return False
    until(renewed)


@pytest.mark.parametrize("case", ["missing", "no pair", "other key", "garbage", "half"])
def test_tls_files_that_do_not_fit(case, mini_int8, tmp_path):
    certificate(tmp_path, "x")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    flags = ["--tls-cert", cert, "--tls-key", key]
    if case == "missing":
        key.unlink()
    elif case == "no pair":
        flags = flags[:2]
    elif case == "other key":
        (tmp_path / "o").mkdir()
        certificate(tmp_path / "o", "y")
        flags[3] = tmp_path / "o" / "key.pem"
    elif case == "garbage":
        cert.write_text("hello")
    else:
        key.write_text(key.read_text()[:60])
    done = run("serve", "--engine", mini_int8, "--port", 0, *flags, ok=None, timeout=60)
    assert done.returncode in (2, 4) and "--tls-" in done.stderr and done.stderr.count("\n") == 1


# ---- the end

def test_drain_lets_answers_finish_and_says_so(mini_int8):
    s = Server(mini_int8, "--model", "m", "--max-seq-len", 2048)
    got = {}

    def read():
        got["stream"] = request(s, "/v1/completions", long_answer(stream=True, max_tokens=1500))[2]
    t = threading.Thread(target=read)
    t.start()
    until(lambda: metrics(s)["vllm:num_requests_running"] == 1)
    kept = http.client.HTTPConnection(*address(s), timeout=20)      # idle: closed at once
    kept.request("GET", "/health")
    kept.getresponse().read()
    s.process.send_signal(signal.SIGTERM)
    assert kept.sock.recv(1) == b""
    kept.close()
    t.join(60)
    assert b"data: [DONE]" in got["stream"] and b'"finish_reason":"length"' in got["stream"]
    assert s.process.wait(30) == 0
    s.stop()


def test_drain_has_a_deadline(mini_int8):
    s = Server(mini_int8, "--model", "m", "--max-seq-len", 2048, "--drain-seconds", 0.3)
    streams = []

    def read():
        try:
            streams.append(request(s, "/v1/completions", long_answer(stream=True, max_tokens=1900, n=8, temperature=1))[2])
        except (OSError, http.client.HTTPException) as e:
            streams.append(e)
    t = threading.Thread(target=read)
    t.start()
    until(lambda: metrics(s)["vllm:num_requests_running"] >= 1)
    assert s.stop(timeout=20) == 0
    t.join(20)
    assert len(streams) == 1


def test_sigterm_while_it_starts(mini_int8):
    """It stands still before it serves, because nobody reads what it prints, and ends all the same."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(write, True)
    from conftest import BINARY
    for sig in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen([BINARY, "serve", "--engine", str(mini_int8), "--port", "0"], stdout=write, stderr=subprocess.PIPE)
        try:
            until(lambda: len(os.listdir(f"/proc/{process.pid}/task")) > 1)     # the thread for signals is the first one
            process.send_signal(sig)
            assert process.wait(30) == 0
            assert [x for x in process.stderr.read().splitlines() if not x.startswith(b"load ")] == []    # the signal may come behind that line
        finally:
            process.kill()
            process.stderr.close()
    os.close(read)
    os.close(write)


def test_sigterm_right_after_ready(mini_int8, tmp_path):
    """Who is told that it is ready may end it at once, and it ends as it should."""
    from conftest import BINARY
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(60)
        for _ in range(10):
            process = subprocess.Popen([BINARY, "serve", "--engine", str(mini_int8), "--max-seq-len", "512", "--port", "0"], stdout=subprocess.DEVNULL,
                                       env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")})
            try:
                while notified.recv(100) != b"READY=1":
                    pass
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            finally:
                process.kill()


# ---- the watchdog

def worker_of(server):
    """The child of the process that was started."""
    children = pathlib.Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return int(children[0]) if children else None


@pytest.fixture
def watched(mini_int8, tmp_path):
    with Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--watchdog", "--watchdog-seconds", 2) as s:
        threading.Thread(target=s.process.stdout.read, daemon=True).start()
        yield s


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP], ids=["kill", "crash", "stuck"])
def test_watchdog_replaces_the_worker(how, watched):
    first = worker_of(watched)
    assert request(watched, "/v1/chat/completions", question())[0] == 200
    os.kill(first, how)
    # Until it is gone, or all its threads stand still, it may still take a connection with it.
    until(lambda: worker_of(watched) != first or all(b") T " in t.read_bytes() for t in pathlib.Path(f"/proc/{first}/task").glob("*/stat")))
    # Nobody is refused meanwhile: who comes now waits in the socket's queue for the next worker.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: request(watched, "/v1/chat/completions", question()), range(8)))
    assert [json.loads(a[2])["choices"][0]["message"]["content"] for a in answers] == ["68"] * 8
    assert worker_of(watched) not in (first, None) and not pathlib.Path(f"/proc/{first}").exists()
    assert metrics(watched)["metainfer:worker_restarts"] == 1


def test_watchdog_ends_with_its_worker(mini_int8):
    s = Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--watchdog")
    worker = worker_of(s)
    assert s.stop() == 0
    assert not pathlib.Path(f"/proc/{worker}").exists()
    s = Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--watchdog")
    worker = worker_of(s)
    s.stop(signal.SIGKILL)
    until(lambda: not pathlib.Path(f"/proc/{worker}").exists())       # and the port with it


def test_watchdog_passes_on_what_it_is_told(mini_int8, tmp_path):
    (tmp_path / "keys").write_text("one\n")
    with Server(mini_int8, "--max-seq-len", 512, "--watchdog", "--api-key-file", tmp_path / "keys") as s:
        (tmp_path / "keys").write_text("two\n")
        s.process.send_signal(signal.SIGHUP)
        until(lambda: request(s, "/v1/models", headers={"X-Api-Key": "two"})[0] == 200)


def test_watchdog_does_not_repeat_what_cannot_work(mini_int8, tmp_path):
    assert run("serve", "--engine", tmp_path / "none", "--port", 0, "--watchdog", ok=4, timeout=60).stderr.startswith("error: ")
    done = run("serve", "--engine", mini_int8, "--port", 0, "--watchdog", "--api-key-file", tmp_path / "none", ok=None, timeout=60)
    assert done.returncode == 4 and str(tmp_path / "none") in done.stderr


def test_socket_from_outside_and_signs_of_life(mini_int8, tmp_path):
    """What systemd does for a service with a socket, Type=notify and WatchdogSec."""
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(tmp_path / "notify"))
    notified.settimeout(60)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    # What LISTEN_PID has to be is known only in the process itself.
    script = f'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@" 3<&{listener.fileno()}'
    from conftest import BINARY
    process = subprocess.Popen(["bash", "-c", script, "bash", BINARY, "serve", "--engine", str(mini_int8), "--max-seq-len", "512"],
                               pass_fds=[listener.fileno()], stdout=subprocess.DEVNULL,
                               env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000"})
    try:
        assert notified.recv(100) == b"READY=1"
        assert [notified.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        assert urllib.request.urlopen(f"http://127.0.0.1:{listener.getsockname()[1]}/ready", timeout=20).status == 200
        process.send_signal(signal.SIGTERM)
        while (message := notified.recv(100)) == b"WATCHDOG=1":
            pass
        assert message == b"STOPPING=1"
        assert process.wait(30) == 0
    finally:
        process.kill()
