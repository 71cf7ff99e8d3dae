#!/usr/bin/env python3
"""Writes the small tokenizers of this folder and what the Python libraries make of them, of the bundled model's tokenizer,
and of chat templates: *_cases.json, which the text tests compare with. Needs: pip install tokenizers==0.23.3 transformers==5.24.0 jinja2==3.1.6
Run it again only when a case is added; the results are checked in."""
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MINI = ROOT / "models/mini-m3"


def byte_level(merges, added, normalizer=None):
    """A byte-level BPE with the given merges; added: [(content, flags)]."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    if normalizer:
        t.normalizer = normalizer
    t.add_tokens([AddedToken(content, **flags) for content, flags in added])
    return t


def spelled(text):
    """The letters of the byte alphabet for the bytes of a text."""
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return t.encode(text).tokens


FLAGGED = [
    ("<|left|>", dict(lstrip=True, normalized=False)),
    ("<|right|>", dict(rstrip=True, normalized=False, special=True)),
    ("word", dict(single_word=True)),
    ("caf\u00e9", dict(normalized=True)),
    ("<|a|>", dict(special=True, normalized=False)),
    ("<|a|>b", dict(normalized=False)),
    ("\ufb01x", dict(normalized=True)),
]
FLAG_TEXTS = [
    "a<|left|>b", "a <|left|> b", "a \n <|left|> <|left|>b", "a<|right|>b", "a <|right|>  b", "<|right|>\n\n<|left|>",
    "word", "words", "a word.", "sword word_ word-", "caf\u00e9 caf\u00e9s", "cafe\u0301", "<|a|>b <|a|>c <|a|>", "<|a|><|a|>b<|a|>bb",
    "\u00bd \ufb01x \ufb01n fix", "", " ", "<|a|", "<|left|", "\u1e9b\u0323 <|right|> x",
]


def small_tokenizers():
    emoji, cjk = spelled("\U0001f600"), spelled("\u4f60")
    yield "split_emoji", byte_level(
        [(emoji[0], emoji[1]), (emoji[2], emoji[3]), (cjk[1], cjk[2]), ("\u0120", emoji[0] + emoji[1])], [("<|end|>", dict(special=True, normalized=False))]
    ), ["\U0001f600", " \U0001f600\u4f60!", "\u4f60\u4f60 a", "x\U0001f600<|end|>\U0001f600", "\u00e9\u20ac"]
    yield "flagged", byte_level([], FLAGGED), FLAG_TEXTS
    yield "flagged_nfkc", byte_level([], FLAGGED, normalizers.NFKC()), FLAG_TEXTS

    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces += list("\u2581abcdefghijklmnopqrstuvwxyzHT,.!<>/") + ["he", "ll", "llo", "hello", "\u2581hello", "\u2581w", "or", "ld", "orld", "\u2581world", "\u2581\u2581"]
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("\u2581", "hello"), ("\u2581", "w"), ("o", "r"), ("l", "d"), ("or", "ld"), ("\u2581w", "orld"), ("\u2581", "\u2581")]
    t = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.add_special_tokens([AddedToken(s, normalized=False) for s in ("<unk>", "<s>", "</s>")])
    t.add_tokens([AddedToken("<tool>", normalized=True)])
    yield "byte_fallback", t, ["hello world", " hello  world", "h\u00e9llo \u4f60\U0001f600!", "<s>hello</s> world", "</s>", "hello <tool> world", "<tool>", "\n\n", "", "  "]

    scored = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -2.0)] + [(c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz<>/!"] + [("\u2581hello", -3.0), ("llo", -3.5)]
    t = Tokenizer(models.Unigram(scored, unk_id=0))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Metaspace()
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    yield "unigram", t, ["hello world", "<s>hello</s>", "a </s> b", " hello", "x y!"]


def texts_at_random(seed, words, count=120):
    rng = random.Random(seed)
    return ["".join(rng.choice(words) for _ in range(rng.randint(1, 12))) for _ in range(count)]


ODDS = ["a", "Word", " the", "  ", "\n", "\r\n", "\t", "7", "2024", ".", "...", "'s", "\u00e9", "\u4f60\u597d", "\U0001f600", "\U0001f468\u200d\U0001f469", "\u0627\u0644", "\u00a0", "\u3000", "\u200b", "<", "|", ">", "<|", "|>", "{", "\"", "\\", "\ud55c", "e\u0301", "\u017f", "\u0130", "<|end|", "http://x.y/z?q=1"]


def record(t, texts):
    cases = []
    for text in texts:
        ids = t.encode(text, add_special_tokens=False).ids
        cases.append(dict(text=text, ids=ids, decoded=t.decode(ids, skip_special_tokens=False), visible=t.decode(ids, skip_special_tokens=True)))
    return cases


def write(name, value):
    (HERE / name).write_text(json.dumps(value, indent=None, separators=(",", ":"), ensure_ascii=True).replace('},{"', '},\n{"') + "\n")


def tokenizer_cases():
    all_cases = []
    for name, t, texts in small_tokenizers():
        (HERE / f"{name}.json").write_text(json.dumps(json.loads(t.to_str()), separators=(",", ":"), ensure_ascii=True) + "\n")
        added = [a.content for a in t.get_added_tokens_decoder().values()]
        # A broken run of byte tokens is decoded otherwise here, on purpose; no text encodes to one.
        all_cases.append(dict(file=f"tests/data/text/{name}.json", cases=record(t, texts + texts_at_random(1, ODDS + added, 60))))
    for path, markers in ((HERE / "base.json", ["<|im_end|>", "<|im_start|>"]), (MINI / "tokenizer.json", ["<|end|>", "<|call|>", "<|user|>"])):
        t = Tokenizer.from_file(str(path))
        all_cases.append(dict(file=str(path.relative_to(ROOT)), cases=record(t, ["", "Hello, world!", *texts_at_random(2, ODDS + markers)])))
    write("tokenizer_cases.json", all_cases)


TALK = [dict(role="system", content="Be brief. "), dict(role="user", content="Hi <b>\u00e9</b> \"q\""), dict(role="assistant", content="Hello"), dict(role="user", content=" 2+2? ")]
TOOLS = [dict(type="function", function=dict(name="get_weather", description="Weather <of> a \u2019city\u2019", parameters=dict(type="object", properties=dict(city=dict(type="string", description="its name"), items=dict(type="array", items=dict(type="integer"))), required=["city"])))]
CALLS = [dict(role="user", content="Weather?"), dict(role="assistant", content=None, tool_calls=[dict(id="call_1", type="function", function=dict(name="get_weather", arguments=dict(city="K\u00f6ln", n=[1, 2.0, 1e-7, 1e22, None, True], deep={"a b": {}})))]), dict(role="tool", tool_call_id="call_1", content="{\"t\": 7}")]
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template_sources():
    yield "chatml", CHATML, {}
    yield "reversed slice", "{% for m in messages[::-1] %}{{ loop.index }}{{ m.role }};{% endfor %}{{ messages[1:]|length }}{{ messages[-1].content[::-1] }}{{ 'abc'[1:] }}", {}
    yield "break and continue", "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{% if loop.index > 3 %}{% break %}{% endif %}[{{ m.content }}]{% endfor %}", {}
    yield "tojson", "{{ tools|tojson }}|{{ tools|tojson(indent=2) }}|{{ tools|tojson(ensure_ascii=True) }}|{{ tools|tojson(separators=(',', ':')) }}|{{ tools|tojson(indent=1, sort_keys=true) }}|{{ {}|tojson(indent=4) }}{{ []|tojson(indent=4) }}{{ '\\x7f/'|tojson }}", dict(tools=TOOLS)
    yield "tojson of arguments", "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments|tojson }}{{ c.function.arguments }}{% endfor %}{% endfor %}", dict(messages=CALLS)
    yield "nested macros", "{%- macro inner(x, y='!') -%}<{{ x }}{{ y }}>{%- endmacro -%}{%- macro outer(m) -%}{{ inner(m.role) }}{{ inner(m.content, y='?') }}{%- endmacro -%}{%- for m in messages -%}{{ outer(m) }}{%- endfor -%}", {}
    yield "recursive macro", "{%- macro show(s, d) -%}{{ '  ' * d }}{{ s.type }}{% for k, v in (s.properties or {}).items() %}\n{{ k }}:{{ show(v, d + 1) }}{% endfor %}{%- endmacro -%}{{ show(tools[0].function.parameters, 0) }}", dict(tools=TOOLS)
    yield "namespace in a loop", "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% set ns.last = m.content %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.last }}", {}
    yield "generation block", "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}\n  {%- generation -%} {{ m.content }} {%- endgeneration %}\n{{ '{% generation %}' }}{# {% generation %} #}{% endif %}{% endfor %}", {}
    yield "raise_exception", "{% for m in messages %}{% if loop.index > 1 %}{{ raise_exception('roles must alternate, found ' ~ m.role) }}{% endif %}{% endfor %}", {}
    yield "whitespace", "  {% if true %}\n  a\n  {% endif %}\n\tb {%- if true +%}\n c {% endif -%}  \n\n  d\n{# note #}\n  {# note #} e\n{{ 'x' }}\n\n", {}
    yield "string methods", "{% for m in messages %}{{ m.content.strip() }}|{{ m.content.split(' ') }}|{{ m.content.split() }}|{{ m.content.split(' ', 1)[-1] }}|{{ m.content.rsplit(' ', 1)[0] }}|{{ m.content.startswith('Hi') }}|{{ m.content.upper() }}|{{ m.content.replace('e', '<e>') }}|{{ m.content.lstrip('B ') }}|{{ m.content.rstrip('? ') }}|{{ m.content.partition(' ') }}|{{ m.content.find('e') }}|{{ 'e' in m.content }}|{{ m.content.title() }}|{{ m.content.removeprefix('Hi').removesuffix(' ') }}|{{ m.content.splitlines() }}|{{ m.content.count('e') }}|{{ m.content.capitalize() }}\n{% endfor %}", {}
    yield "splits", "{% for t in ['a b  c ', ' a', '', '  ', ' a b c', 'a,b,,c,'] %}{% for n in [0, 1, 2, -1] %}{{ t.split(none, n) }}{{ t.rsplit(none, n) }}{{ t.split(',', n) }}{{ t.rsplit(',', maxsplit=n) }}{% endfor %}{{ t.partition(',') }}{{ t.rpartition(',') }}{% endfor %}{{ 'a\\nb\\r\\nc\\n\\nd'.splitlines() }}{{ 'a\\nb\\r\\nc'.splitlines(true) }}{{ 'xxAxx'.strip('x') }}{{ 'aXbXc'.replace('X', '--', 1) }}{{ 'abc'.index('c') }}{{ 'abc'.rfind('z') }}{{ \"it's o'clock ab_c1d\".title() }}", {}
    yield "string filters", "{% for m in messages %}{{ m.content|trim }}|{{ m.content|length }}|{{ m.content|upper }}|{{ m.content|lower }}|{{ m.content|title }}|{{ m.content|capitalize }}|{{ m.content|replace('e', 'E') }}|{{ m.content|first }}{{ m.content|last }}|{{ m.content|list|length }}|{{ m.content|default('x') }}|{{ m.missing|default('none given') }}|{{ m.content|indent(2) }}|{{ m.content|string }}\n{% endfor %}{{ messages|map(attribute='role')|join(', ') }}|{{ messages|selectattr('role', 'equalto', 'user')|list|length }}|{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='content')|list }}", {}
    yield "python texts", "{{ true }} {{ none }} {{ 1.0 }} {{ 1e-7 }} {{ 1e16 }} {{ 12 }} {{ ['a', 1, none, true, \"it's\", 2.5] }} {{ {'b': 1, 'a': [1, 'x']} }} {{ (1,) }} {{ 7 // 2 }} {{ 7 / 2 }} {{ -7 % 3 }} {{ 2 ** 8 }} {{ 'a' ~ 1 ~ true }} {{ undefined_thing }}.", {}
    yield "tests", "{% for v in ['s', 1, 1.5, none, true, [1], {'a': 1}] %}{{ v is string }}{{ v is number }}{{ v is mapping }}{{ v is iterable }}{{ v is sequence }}{{ v is none }}{{ v is boolean }}{{ v is defined }}{{ v is integer }};{% endfor %}{{ missing is defined }}{{ missing is none }}", {}
    yield "dict access", "{% for t in tools %}{% for name, p in t.function.parameters.properties.items() %}{{ name }}={{ p.get('description', 'no') }}/{{ p['type'] }};{% endfor %}{{ t.function.parameters.properties.keys()|list }}{{ t.function.parameters.properties|length }}{{ 'city' in t.function.parameters.properties }}{% for k, v in t.function|dictsort %}{{ k }} {% endfor %}{% endfor %}", dict(tools=TOOLS)
    yield "loop facts", "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.length }}{% if loop.previtem is defined %}{{ loop.previtem.role }}{% endif %}{% if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %}{{ loop.cycle('x', 'y') }} {% else %}none{% endfor %}{% for k in [] %}{% else %}empty{% endfor %}", {}
    yield "content parts", "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image_url' %}<image>{% endif %}{% endfor %}{% endif %};{% endfor %}", dict(messages=[dict(role="user", content=[dict(type="text", text="see "), dict(type="image_url", image_url=dict(url="http://x")), dict(type="text", text="this")])])
    yield "reasoning", "{% for m in messages %}{% set content = m.content %}{% set reasoning = '' %}{% if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}{% elif '</think>' in content %}{% set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}[{{ reasoning }}]({{ content }}){% endfor %}", dict(messages=[dict(role="assistant", content="<think>\nhm\n</think>\n\nyes"), dict(role="assistant", content="no", reasoning="because"), dict(role="user", content="x")])
    yield "set block and filters", "{% set x %}  {{ messages[0].content }} {% endset %}[{{ x|trim }}]{% filter upper %}abc{{ messages[0].role }}{% endfilter %}{{ 'a,b'.split(',')|join('-') }}{{ [3,1,2]|sort|join }}{{ 'yes' if tools else 'no' }}{{ bos_token }}{{ eos_token is defined }}", {}
    yield "variables", "{{ enable_thinking }}{{ style }}{{ documents }}{{ add_generation_prompt }}{{ tools }}", dict(extra=dict(enable_thinking=False, style="short <|x|>"))
    yield "call block", "{% macro box(t) %}[{{ t }}:{{ caller() }}]{% endmacro %}{% call box('T') %}{{ messages[0].content }}{% endcall %}", {}
    yield "empty", "", {}


def template_cases():
    fixed = dict(bos_token="<s>", pad_token="<pad>")
    cases = []
    for name, source, given in template_sources():
        messages, tools, extra = given.get("messages", TALK), given.get("tools"), given.get("extra", {})
        for add_generation_prompt in (False, True) if "add_generation_prompt" in source else (True,):
            case = dict(name=name, template=source, messages=messages, tools=tools, extra=extra, add_generation_prompt=add_generation_prompt)
            try:
                texts, _ = render_jinja_template([_normalize_chat_messages(messages)], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, **fixed, **extra)
                case["text"] = texts[0]
            except Exception as error:  # what a template raises
                case["error"] = str(error)
            cases.append(case)
    # Conversations of the bundled model, with tools and calls among them.
    source = (MINI / "chat_template.jinja").read_text()
    seen = set()
    for line in (ROOT / "models/mini-m3-eval/eval.jsonl").read_text().splitlines():
        row = json.loads(line)
        if sum(1 for group in seen if group[0] == row["group"]) < 3:
            seen.add((row["group"], line))
            texts, _ = render_jinja_template([_normalize_chat_messages(row["messages"])], tools=row.get("tools"), chat_template=source, add_generation_prompt=True, bos_token="<|begin|>")
            cases.append(dict(name="mini-m3 " + row["group"], file="models/mini-m3/chat_template.jinja", messages=row["messages"], tools=row.get("tools"), extra=dict(bos_token="<|begin|>"), add_generation_prompt=True, text=texts[0]))
    for messages, tools in ((CALLS, TOOLS), ([dict(role="system", content="S")] + CALLS, TOOLS), (TALK, None)):
        texts, _ = render_jinja_template([_normalize_chat_messages(messages)], tools=tools, chat_template=source, add_generation_prompt=False, bos_token="<|begin|>")
        cases.append(dict(name="mini-m3 talk", file="models/mini-m3/chat_template.jinja", messages=messages, tools=tools, extra=dict(bos_token="<|begin|>"), add_generation_prompt=False, text=texts[0]))
    write("template_cases.json", cases)


if __name__ == "__main__":
    tokenizer_cases()
    template_cases()
