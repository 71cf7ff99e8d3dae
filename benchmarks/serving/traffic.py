"""The soak's requests: each kind makes one, sends it, and says what it saw in a Record. Greedy questions have one right answer: the one that the
server gave when it was alone."""
import asyncio
import collections
import dataclasses
import json
import random
import time
import zlib

from serving.client import Broken, Leave, data_of
from serving.server import parse_metrics

WORDS = "sum of river stone light seven blue garden 12 45 9 the and then what is next to it 3 + 4 7 * 8 red box".split()
CONTEXT = 1024          # --max-seq-len
BODY_LIMIT = 1 << 20    # --max-body-bytes
UNREAD_LIMIT = 1 << 16  # --slow-reader-bytes
MOST_SEQUENCES = 8      # of one request


@dataclasses.dataclass
class Record:
    """What the client knows of one request. `sure` numbers must be in the server's counters, `maybe` ones can be: of answers that the client left."""
    id: str
    kind: str
    endpoint: str = ""           # as metainfer:api_requests_total calls it; "": not counted there
    status: int = 0              # 0: none was seen
    left: bool = False           # before the end
    seconds: float = 0.0
    first: float = 0.0
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)   # ended sequences by reason
    prompt_tokens: int = 0       # of all sequences
    completion_tokens: int = 0
    maybe_sequences: int = 0
    maybe_prompt: int = 0
    maybe_completion: int = 0
    problems: list = dataclasses.field(default_factory=list)


def prose(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


class Traffic:
    def __init__(self, client, model, questions, seed):
        """questions: chats, each a list of messages."""
        self.client, self.model, self.questions, self.seed = client, model, questions, seed
        self.right = {}
        self.malformed = self.unread = 0

    async def learn(self):
        """The questions' answers, one after the other."""
        for i, messages in enumerate(self.questions):
            a = await self.client.request("POST", "/v1/chat/completions", self.chat(messages, max_tokens=60))
            if a.status != 200:
                raise Broken(f"alone, a question was answered with {a.status}: {a.body[:200]!r}")
            choice = a.json()["choices"][0]
            self.right[i] = (choice["message"]["content"], choice["finish_reason"])

    # ---- bodies

    def chat(self, messages=None, rng=None, **more):
        if messages is None:
            messages = [{"role": "user", "content": prose(rng, rng.randint(3, 40))}]
        return {"model": self.model, "messages": messages, "temperature": 0, **more}

    def text(self, rng, words=None, **more):
        return {"model": self.model, "prompt": prose(rng, words or rng.randint(1, 60)), "temperature": 0, "ignore_eos": True, **more}

    # ---- sending

    async def send(self, r, endpoint, path, body, method="POST", expect=200, **how):
        """One request whose whole answer is taken, and whose status must be `expect` (or too many at the time)."""
        r.endpoint = endpoint
        if how.get("close") is None:
            how["close"] = zlib.crc32(r.id.encode()) % 3 == 0
        begin = time.perf_counter()
        a = await self.client.request(method, path, body, headers=[("X-Request-Id", r.id)], **how)
        r.seconds, r.first, r.status = time.perf_counter() - begin, a.first, a.status
        if a.headers.get("x-request-id") != r.id.lower() and a.status:
            r.problems.append(f"X-Request-Id came back as {a.headers.get('x-request-id')}")
        if a.status == 429 and expect == 200:
            if int(a.headers.get("retry-after", 0)) < 1:
                r.problems.append("429 without Retry-After")
            r.maybe_sequences = MOST_SEQUENCES      # the first of several may have been taken before the last was refused
            return None
        if a.status != expect:
            r.problems.append(f"status {a.status} instead of {expect}: {a.body[:200]!r}")
            return None
        if not a.whole:
            r.problems.append("the answer has no end")
            return None
        if expect >= 400:
            try:
                if not a.json()["error"]["message"]:
                    raise KeyError("message")
            except (ValueError, KeyError, TypeError):
                r.problems.append(f"an error without a message: {a.body[:200]!r}")
            return None
        return a

    def add_usage(self, r, usage, prompts_times=1):
        r.prompt_tokens += usage["prompt_tokens"] * prompts_times
        r.completion_tokens += usage["completion_tokens"]
        if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
            r.problems.append(f"usage does not add up: {usage}")
        if not 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]:
            r.problems.append(f"cached tokens out of range: {usage}")

    @staticmethod
    def reason(finish):
        return "stop" if finish == "tool_calls" else finish

    def take_whole(self, r, a, n=1, prompts=1):
        """A whole chat or text answer; its choices in order."""
        answer = a.json()
        choices = answer["choices"]
        if [c["index"] for c in choices] != list(range(n * prompts)):
            r.problems.append(f"choices {[c['index'] for c in choices]}, expected {n * prompts}")
        for c in choices:
            r.finished[self.reason(c["finish_reason"])] += 1
        self.add_usage(r, answer["usage"], n)
        return choices

    def take_stream(self, r, a, n=1):
        """(text, finish reason) of each choice of a stream of chat or text events: exactly one end of each choice, one usage, one [DONE], in this order."""
        texts, ends, usage, done = [""] * n, [None] * n, None, 0
        for _, event in a.events:
            _, data = data_of(event)
            if done:
                r.problems.append("an event behind [DONE]")
                break
            if data is None:
                done += 1
                continue
            if data.get("error"):
                r.problems.append(f"an error event: {data['error']}")
                return None
            if usage is not None:
                r.problems.append("an event behind the usage")
            if not data["choices"]:
                usage = data["usage"]
            for c in data["choices"]:
                if ends[c["index"]] is not None:
                    r.problems.append(f"choice {c['index']} goes on behind its end")
                texts[c["index"]] += c.get("text") or (c.get("delta") or {}).get("content") or ""
                ends[c["index"]] = c["finish_reason"]
        if done != 1 or usage is None or None in ends:
            r.problems.append(f"a stream with {done} times [DONE], {'no' if usage is None else 'a'} usage, ends {ends}")
            return None
        for e in ends:
            r.finished[self.reason(e)] += 1
        self.add_usage(r, usage, n)
        return list(zip(texts, ends))

    # ---- kinds whose answer is taken

    async def question(self, r, rng):
        i = rng.randrange(len(self.questions))
        a = await self.send(r, "chat_completions", "/v1/chat/completions", self.chat(self.questions[i], max_tokens=60))
        if a:
            c = self.take_whole(r, a)[0]
            if (c["message"]["content"], c["finish_reason"]) != self.right[i]:
                r.problems.append(f"another answer than alone: {c['message']['content']!r} instead of {self.right[i]!r}")

    async def question_streamed(self, r, rng):
        i = rng.randrange(len(self.questions))
        a = await self.send(r, "chat_completions", "/v1/chat/completions",
                            self.chat(self.questions[i], max_tokens=60, stream=True, stream_options={"include_usage": True}))
        if a and (got := self.take_stream(r, a)) and got[0] != self.right[i]:
            r.problems.append(f"another answer than alone: {got[0]!r} instead of {self.right[i]!r}")

    async def long_text(self, r, rng):
        tokens = rng.randint(40, 120)
        a = await self.send(r, "completions", "/v1/completions", self.text(rng, max_tokens=tokens, stream=True, stream_options={"include_usage": True}))
        if a and self.take_stream(r, a) and (r.completion_tokens, r.finished["length"]) != (tokens, 1):
            r.problems.append(f"{r.completion_tokens} tokens instead of {tokens}")

    async def long_prompt(self, r, rng):
        a = await self.send(r, "completions", "/v1/completions", self.text(rng, rng.randint(300, 600), max_tokens=4))
        if a:
            self.take_whole(r, a)

    async def schema(self, r, rng):
        names = rng.sample("abcdefghij", rng.randint(1, 4))
        types = {n: rng.choice(["integer", "boolean", "string"]) for n in names}
        properties = {n: {"type": t, **({"maxLength": 12} if t == "string" else {"minimum": 0, "maximum": 9999} if t == "integer" else {})} for n, t in types.items()}
        form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {
            "type": "object", "properties": properties, "required": names, "additionalProperties": False}}}
        stream = rng.random() < 0.5
        a = await self.send(r, "chat_completions", "/v1/chat/completions", self.chat(
            rng=rng, response_format=form, max_tokens=150, **({"stream": True, "stream_options": {"include_usage": True}} if stream else {})))
        if not a:
            return
        if stream:
            got = self.take_stream(r, a)
            text, end = got[0] if got else ("", "length")
        else:
            c = self.take_whole(r, a)[0]
            text, end = c["message"]["content"], c["finish_reason"]
        if end == "stop":
            value = json.loads(text)
            fits = {"integer": lambda v: type(v) is int and 0 <= v <= 9999, "boolean": lambda v: type(v) is bool, "string": lambda v: type(v) is str and len(v) <= 12}
            if set(value) != set(names) or not all(fits[types[n]](v) for n, v in value.items()):
                r.problems.append(f"not of its schema {types}: {text!r}")

    async def tools(self, r, rng):
        tool = {"type": "function", "function": {"name": "look_up", "parameters": {
            "type": "object", "properties": {"place": {"enum": ["here", "there"]}}, "required": ["place"], "additionalProperties": False}}}
        a = await self.send(r, "chat_completions", "/v1/chat/completions", self.chat(rng=rng, tools=[tool], tool_choice="required", max_tokens=100))
        if not a:
            return
        c = self.take_whole(r, a)[0]
        if c["finish_reason"] == "tool_calls":
            for call in c["message"]["tool_calls"]:
                if call["function"]["name"] != "look_up" or json.loads(call["function"]["arguments"]).get("place") not in ("here", "there"):
                    r.problems.append(f"not the tool's call: {call}")

    async def several(self, r, rng):
        n = rng.randint(2, 4)
        a = await self.send(r, "completions", "/v1/completions", self.text(rng, n=n, temperature=1, seed=rng.randrange(1 << 30), max_tokens=rng.randint(5, 40), top_p=0.9))
        if a:
            self.take_whole(r, a, n)

    async def several_prompts(self, r, rng):
        prompts = [prose(rng, rng.randint(1, 20)) for _ in range(3)]
        a = await self.send(r, "completions", "/v1/completions", self.text(rng, max_tokens=5, echo=True, logprobs=1) | {"prompt": prompts})
        if a:
            for p, c in zip(prompts, self.take_whole(r, a, 1, 3)):
                if not c["text"].startswith(p) or len(c["logprobs"]["tokens"]) != len(c["logprobs"]["token_logprobs"]):
                    r.problems.append("echo without its prompt")

    async def logprobs(self, r, rng):
        a = await self.send(r, "chat_completions", "/v1/chat/completions", self.chat(rng=rng, logprobs=True, top_logprobs=5, max_tokens=20))
        if a:
            c = self.take_whole(r, a)[0]
            scored = c["logprobs"]["content"]
            if not all(len(t["top_logprobs"]) == 5 and t["logprob"] <= 0 for t in scored):
                r.problems.append("log-probabilities out of form")

    async def stop_strings(self, r, rng):
        stop = [rng.choice([" the", "a", ".", "1"]), "zzz"]
        a = await self.send(r, "completions", "/v1/completions", self.text(rng, max_tokens=60, stop=stop, temperature=1, seed=rng.randrange(1 << 30)))
        if a:
            text = self.take_whole(r, a)[0]["text"]
            if any(s in text for s in stop):
                r.problems.append(f"a stop string in {text!r}")

    async def messages(self, r, rng):
        body = {"model": self.model, "max_tokens": 40, "temperature": 0, "messages": [{"role": "user", "content": prose(rng, 10)}]}
        if rng.random() < 0.5:
            a = await self.send(r, "messages", "/v1/messages", body)
            if a:
                answer = a.json()
                self.take_anthropic(r, answer["stop_reason"], answer["usage"])
            return
        a = await self.send(r, "messages", "/v1/messages", {**body, "stream": True})
        if not a:
            return
        events = [data_of(e)[1] for _, e in a.events]
        kinds = [e["type"] for e in events]
        if kinds[0] != "message_start" or kinds[-2:] != ["message_delta", "message_stop"] or kinds.count("message_stop") != 1 or \
                kinds.count("message_delta") != 1 or kinds.count("content_block_start") != kinds.count("content_block_stop"):
            r.problems.append(f"events out of order: {kinds}")
        else:
            self.take_anthropic(r, events[-2]["delta"]["stop_reason"], events[-2]["usage"])

    def take_anthropic(self, r, reason, usage):
        r.finished["length" if reason == "max_tokens" else "stop"] += 1
        r.prompt_tokens += usage["input_tokens"] + usage["cache_read_input_tokens"]
        r.completion_tokens += usage["output_tokens"]

    async def responses(self, r, rng):
        body = {"model": self.model, "max_output_tokens": 40, "temperature": 0, "input": prose(rng, 10)}
        if rng.random() < 0.5:
            a = await self.send(r, "responses", "/v1/responses", body)
            answer = a and a.json()
        else:
            a = await self.send(r, "responses", "/v1/responses", {**body, "stream": True})
            if not a:
                return
            events = [data_of(e)[1] for _, e in a.events]
            ends = [e for e in events if e["type"] in ("response.completed", "response.incomplete", "response.failed")]
            if len(ends) != 1 or events[-1] is not ends[0] or [e["sequence_number"] for e in events] != list(range(len(events))):
                r.problems.append(f"events out of order: {[e['type'] for e in events]}")
                return
            answer = ends[0]["response"]
        if answer:
            usage = answer["usage"]
            r.finished["length" if answer["status"] == "incomplete" else "stop"] += 1
            r.prompt_tokens += usage["input_tokens"]
            r.completion_tokens += usage["output_tokens"]

    async def embeddings(self, r, rng):
        texts = [prose(rng, rng.randint(1, 40)) for _ in range(rng.randint(1, 3))]
        a = await self.send(r, "embeddings", "/v1/embeddings", {"model": self.model, "input": texts})
        if a:
            answer = a.json()
            r.prompt_tokens += answer["usage"]["prompt_tokens"]
            r.finished["length"] += len(texts)
            if any(abs(sum(x * x for x in d["embedding"]) - 1) > 1e-3 for d in answer["data"]) or len(answer["data"]) != len(texts):
                r.problems.append("embeddings that are not of length 1")

    async def tokens(self, r, rng):
        text = prose(rng, 30)
        which = rng.randrange(4)
        if which == 0:
            a = await self.send(r, "tokenize", "/tokenize", {"prompt": text})
            if a and a.json()["count"] != len(a.json()["tokens"]):
                r.problems.append("count and tokens differ")
        elif which == 1:
            await self.send(r, "detokenize", "/detokenize", {"tokens": [rng.randrange(300, 1000) for _ in range(20)]})
        elif which == 2:
            await self.send(r, "count_tokens", "/v1/messages/count_tokens", {"model": self.model, "messages": [{"role": "user", "content": text}]})
        else:
            await self.send(r, "apply_template", "/apply-template", {"messages": [{"role": "user", "content": text}]})

    async def pages(self, r, rng):
        path = rng.choice(["/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{self.model}", "/version", "/openapi.json", "/tokenizer_info"])
        await self.send(r, "", path, None, "GET")

    # ---- kinds that must be refused

    async def bad_input(self, r, rng):
        chat, text = ("chat_completions", "/v1/chat/completions"), ("completions", "/v1/completions")
        m = json.dumps(self.model)
        deep = rng.choice([100, 5000])
        bodies = [
            (*rng.choice([chat, text]), b'{"model": %s, "mess' % m.encode()),
            (*rng.choice([chat, text]), b""),
            (*text, b'{"model": %s, "prompt": "\xff\xfe"}' % m.encode()),
            (*chat, b"[" * deep + b"]" * deep),
            (*chat, json.dumps({**self.chat(rng=rng), "temprature": 1}).encode()),
            (*chat, json.dumps({**self.chat(rng=rng), "temperature": -1}).encode()),
            (*chat, json.dumps({**self.chat(rng=rng), "messages": rng.choice([[], "x", None, [{"role": "nobody", "content": "x"}]])}).encode()),
            (*text, json.dumps(self.text(rng, max_tokens=CONTEXT + 1)).encode()),
            (*text, json.dumps(self.text(rng, 3 * CONTEXT, max_tokens=4)).encode()),
            (*chat, json.dumps(self.chat(rng=rng, response_format={"type": "regex", "regex": "("})).encode()),
            ("embeddings", "/v1/embeddings", json.dumps({"model": self.model, "input": []}).encode()),
            ("messages", "/v1/messages", json.dumps({"model": self.model, "messages": [{"role": "user", "content": "x"}]}).encode()),
            ("responses", "/v1/responses", json.dumps({"model": self.model, "input": "x", "previous_response_id": "y"}).encode())]
        endpoint, path, body = rng.choice(bodies)
        await self.send(r, endpoint, path, body, expect=400)

    async def bad_place(self, r, rng):
        which = rng.randrange(4)
        if which == 0:
            await self.send(r, "chat_completions", "/v1/chat/completions", {**self.chat(rng=rng), "model": "another"}, expect=404)
        elif which == 1:
            await self.send(r, "", "/v1/nothing", self.chat(rng=rng), expect=404, close=True)
        elif which == 2:
            await self.send(r, "chat_completions", "/v1/chat/completions", None, "GET", expect=405)
        else:
            await self.send(r, "completions", "/v1/completions", b" " * (BODY_LIMIT + 1), expect=413, close=True)

    async def bad_http(self, r, rng):
        data = rng.choice([b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 400 + b"\r\n",
                           b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"])
        self.malformed += 1
        begin = time.perf_counter()
        connection = await self.client.connect()
        try:
            connection[1].write(data)
            answer = b""
            try:
                answer = await connection[0].read(1 << 16)
            except ConnectionError:
                pass
            if answer and not answer.startswith(b"HTTP/1.1 4"):
                r.problems.append(f"nonsense was answered {answer[:60]!r}")
        finally:
            self.client.drop(connection)
        r.id, r.seconds = "", time.perf_counter() - begin       # no line of the access log can have its name

    # ---- clients that leave, or take long

    def may_have(self, r, sequences, prompt_words, tokens):
        r.left = True
        r.maybe_sequences, r.maybe_prompt, r.maybe_completion = sequences, sequences * (prompt_words * 6 + 40), sequences * tokens

    async def abort_early(self, r, rng):
        """Gone before anything came, or whenever: neither an answer nor a part of one is waited for."""
        r.endpoint, tokens, n, words = "completions", rng.randint(50, 300), rng.randint(1, 3), rng.randint(5, 200)
        a = await self.client.request("POST", "/v1/completions", self.text(rng, words, max_tokens=tokens, n=n, stream=rng.random() < 0.5, temperature=1),
                                      headers=[("X-Request-Id", r.id)], leave_after=rng.random() ** 2 * 0.3, reset=rng.random() < 0.5)
        r.status = a.status
        self.may_have(r, n, words, tokens)

    async def abort_stream(self, r, rng):
        """Gone after some events."""
        r.endpoint, tokens, at = "completions", rng.randint(100, 300), rng.randint(1, 40)

        def leave(events):
            if events >= at:
                raise Leave
        a = await self.client.request("POST", "/v1/completions", self.text(rng, 20, max_tokens=tokens, stream=True), headers=[("X-Request-Id", r.id)],
                                      on_event=leave, close=True, reset=rng.random() < 0.5)
        r.status = a.status
        self.may_have(r, 1, 20, tokens)

    async def abort_sending(self, r, rng):
        """Gone in the middle of its own request: there is no request."""
        connection = await self.client.connect()
        connection[1].write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"[:rng.randint(1, 70)])
        await asyncio.sleep(rng.random() * 0.05)
        self.client.drop(connection, rng.random() < 0.5)
        r.id = ""

    async def slow_reader(self, r, rng):
        """Takes its stream in small pieces, and gets all of it."""
        async def pace(_):
            await asyncio.sleep(0.01)
        a = await self.send(r, "completions", "/v1/completions", self.text(rng, max_tokens=60, stream=True, stream_options={"include_usage": True}, logprobs=3),
                            receive_buffer=4096, pace=pace)
        if a:
            self.take_stream(r, a)

    async def no_reader(self, r, rng):
        """Takes nothing of much, until the server cuts it off, which only others see: its counter of slow readers goes up."""
        r.endpoint, n, tokens = "completions", MOST_SEQUENCES, 900
        self.unread += 1

        async def pace(events):
            if events >= 1:
                await asyncio.sleep(3600)
        begin = time.perf_counter()
        work = asyncio.ensure_future(self.client.request("POST", "/v1/completions", self.text(
            rng, 5, max_tokens=tokens, n=n, temperature=1, logprobs=20, stream=True), headers=[("X-Request-Id", r.id)], receive_buffer=2048, pace=pace))
        self.may_have(r, n, 5, tokens)
        while (await self.counter("metainfer:http_slow_readers_total")) < self.unread and not work.done():
            await asyncio.sleep(0.2)
        r.seconds = time.perf_counter() - begin
        if work.done():
            r.problems.append("an answer that nobody read has ended")
        work.cancel()
        r.status = 200

    async def counter(self, name):
        a = await self.client.request("GET", "/metrics")
        return parse_metrics(a.body.decode())[name, ()]


# Of 1000 requests.
MIX = {
    "question": 170, "question_streamed": 170, "long_text": 60, "long_prompt": 30, "schema": 80, "tools": 30, "several": 40, "several_prompts": 20,
    "logprobs": 30, "stop_strings": 30, "messages": 50, "responses": 50, "embeddings": 30, "tokens": 40, "pages": 40, "bad_input": 50, "bad_place": 16,
    "bad_http": 8, "abort_early": 24, "abort_stream": 20, "abort_sending": 3, "slow_reader": 8, "no_reader": 1,
}


class Deck:
    """Kinds in shuffled rounds: every round has the same kinds, as far as whole numbers let it, so that rounds can be compared."""

    def __init__(self, rng, mix=MIX):
        self.rng, self.mix = rng, mix
        self.due = {k: 0.999 for k in mix}        # every kind comes in the first round

    def round(self, size):
        total, cards = sum(self.mix.values()), []
        for kind, weight in self.mix.items():
            self.due[kind] += size * weight / total
            cards += [kind] * int(self.due[kind])
            self.due[kind] -= int(self.due[kind])
        self.rng.shuffle(cards)
        return cards


async def one(traffic, index, kind, patience=180):
    """The Record of request `index`; whatever goes wrong is one of its problems."""
    r = Record(f"soak-{index}", kind)
    try:
        await asyncio.wait_for(getattr(traffic, kind)(r, random.Random(f"{traffic.seed}/{index}")), patience)
    except (asyncio.TimeoutError, TimeoutError):
        r.problems.append(f"no end after {patience} s")
    except Broken as e:
        r.problems.append(str(e))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError) as e:
        r.problems.append(f"out of form: {e!r}")
    return r
