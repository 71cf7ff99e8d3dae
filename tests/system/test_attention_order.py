"""The order in which attention adds over a bfloat16 cache: one for an engine, the same bits for it on every CPU and in every batch."""
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import BINARY, Server, run
from test_quantize import isas
from test_scheduling import post, prose

BODIES = [{"prompt": prose(random.Random(i), 20 + 60 * i), "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 2}
          for i in range(5)]


def said(answer):
    return answer["choices"][0]["text"], answer["choices"][0]["logprobs"]


def answers(engine, order, together, env=None):
    with Server(engine, "--model", "minimax-m3", "--max-seq-len", 1024, "--no-prefix-cache", "--attention-order", order, env=env) as s:
        with ThreadPoolExecutor(len(BODIES) if together else 1) as pool:
            return [said(a) for a in pool.map(lambda body: post(s, body), BODIES)], "".join(s.lines)


@pytest.mark.parametrize("order", ["pairs", "tiles"])
def test_an_order_gives_the_same_bits_alone_together_and_on_other_instructions(order, mini_int8):
    alone, lines = answers(mini_int8, order, together=False)
    assert ("bf16 cache, amx_bf16" in lines) == (order == "tiles" and " amx_bf16" in open("/proc/cpuinfo").read())
    assert answers(mini_int8, order, together=True)[0] == alone
    assert answers(mini_int8, order, together=True, env={"MI_FORCE_ISA": isas()[-1]})[0] == alone


def test_the_orders_differ(mini_int8):
    assert answers(mini_int8, "pairs", together=False)[0] != answers(mini_int8, "tiles", together=False)[0]


def test_an_order_of_a_cache_that_has_one_is_refused(mini_int8, mini_float):
    generate = ["generate", "--prompt", "x"]
    for command, engine, flags in ((generate, mini_int8, ["--kv-type", "int8"]), (generate, mini_int8, ["--kv-type", "f32"]), (generate, mini_float, []),
                                   (["serve", "--port", 0], mini_float, []), (["bench"], mini_float, []), (["bench", "--against", BINARY], mini_float, [])):
        said = run(*command, "--engine", engine, *flags, "--attention-order", "tiles", "--quiet", ok=2).stderr
        assert "one order" in said and "bf16" in said, (command, said)


def test_an_unknown_order_is_refused(mini_int8):
    for command in (["generate", "--prompt", "x"], ["serve", "--port", 0], ["bench"], ["profile"], ["verify"], ["eval", "--data", "x"]):
        assert "--attention-order" in run(*command, "--engine", mini_int8, "--attention-order", "falling", ok=2).stderr, command
