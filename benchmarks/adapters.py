"""Other engines, one class each. Runs inside the engine's own Python environment as a child of `compare`:

    python adapters.py KIND MODEL THREADS VOCABULARY

Requests come on stdin and answers go to stdout, one JSON object a line. Apart from the engine itself only numpy is used.

Every request starts from an empty cache and from new random token ids; a random id also follows each generated token, because a random
model would otherwise fall into a loop and touch few experts. An engine pays for looking at the logits all the same.
"""
import ctypes
import json
import os
import resource
import sys
import time

CONTEXT = 8192        # tokens over all sequences
PIECE = 2048          # prompt tokens given to an engine at once


class Clock:
    """When every sequence had its first token, and when the last token of all was out."""

    def __init__(self):
        self.start = time.perf_counter()
        self.first = self.end = None

    def lap(self):
        now = time.perf_counter() - self.start
        if self.first is None:
            self.first = now
        self.end = now


class LlamaCpp:
    """llama.cpp through the low-level part of llama-cpp-python."""
    settings = "flash attention, repacked and AMX buffers"

    def __init__(self, threads, vocab):
        import numpy
        self.threads, self.vocab, self.numpy = threads, vocab, numpy
        self.random = numpy.random.default_rng(1)

    def library(self):
        import importlib.metadata
        import llama_cpp.llama_cpp as api
        self.api, self.version = api, "llama-cpp-python " + importlib.metadata.version("llama-cpp-python")

    def model_settings(self, p):
        p.use_extra_bufts = True

    def context_settings(self, p):
        p.flash_attn_type = 1
        p.kv_unified = True
        p.n_outputs_max = 64      # of a step: one for every sequence

    def forget(self):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), False)

    def load(self, path):
        self.library()
        a = self.api
        a.llama_backend_init()
        p = a.llama_model_default_params()
        self.model_settings(p)
        self.model = a.llama_model_load_from_file(path.encode(), p)
        if not self.model:
            raise RuntimeError(f"{path} was refused; its log says why")
        self.context = self.new_context()
        self.batch = a.llama_batch_init(PIECE, 0, 1)

    def new_context(self):
        p = self.api.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = CONTEXT, PIECE, int(os.environ.get("BENCH_UBATCH", "512")), 64
        p.n_threads = p.n_threads_batch = self.threads
        self.context_settings(p)
        context = self.api.llama_init_from_model(self.model, p)
        if not context:
            raise RuntimeError("no context could be made; its log says why")
        return context

    def step(self, entries):
        """entries: (id, position, sequence, are its logits wanted)"""
        b = self.batch
        b.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, wanted
            b.seq_id[i][0] = sequence
        code = self.api.llama_decode(self.context, b)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        for i, e in enumerate(entries):
            if e[3]:
                row = self.api.llama_get_logits_ith(self.context, i)
                int(self.numpy.ctypeslib.as_array(row, (self.vocab,)).argmax())

    def run(self, sequences, prompt, generate):
        self.forget()
        ids = self.random.integers(0, self.vocab, (sequences, prompt + generate)).tolist()
        entries = [(ids[s][i], i, s, i == prompt - 1) for s in range(sequences) for i in range(prompt)]
        clock = Clock()
        for at in range(0, len(entries), PIECE):
            self.step(entries[at:at + PIECE])
        clock.lap()
        for g in range(generate - 1):
            self.step([(ids[s][prompt + g], prompt + g, s, True) for s in range(sequences)])
        clock.lap()
        return clock.first, clock.end


class IkLlama(LlamaCpp):
    """ik_llama.cpp through ik-llama-cpp-python: -fa -fmoe -rtr. With BENCH_BATCH_FA=0, batches go through a second context without flash
    attention, for builds whose flash attention aborts on steps that mix sequences."""
    settings = "flash attention, fused experts, run-time repacking"
    flash = True

    def load(self, path):
        super().load(path)
        self.contexts = [self.context, self.context]
        if os.environ.get("BENCH_BATCH_FA", "1") == "0":
            self.settings += ", batches without flash attention"
            self.flash = False
            self.contexts[1] = self.new_context()

    def run(self, sequences, prompt, generate):
        self.context = self.contexts[sequences > 1]
        return super().run(sequences, prompt, generate)

    def library(self):
        import importlib.metadata
        import ik_llama_cpp._ctypes_api as api
        self.api, self.version = api, "ik-llama-cpp-python " + importlib.metadata.version("ik-llama-cpp-python")

    def model_settings(self, p):
        p.use_mmap, p.repack_tensors = False, True

    def context_settings(self, p):
        p.fused_moe_up_gate = p.fused_up_gate = True
        p.flash_attn = self.flash

    def forget(self):
        self.api.llama_kv_cache_clear(self.context)


class Vllm:
    """vLLM's CPU backend, in this process."""
    settings = "int8 weights and activations, no prefix cache"

    def __init__(self, threads, vocab):
        import random
        self.threads, self.vocab, self.random, self.made = threads, vocab, random.Random(1), 0

    def load(self, path):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm
        self.version, self.api = "vllm " + vllm.__version__, vllm
        eager = os.environ.get("BENCH_EAGER", "0") == "1"
        self.settings += ", eager" if eager else ", compiled"
        self.engine = vllm.LLM(model=path, dtype="bfloat16", max_model_len=4096, max_num_batched_tokens=4096, max_num_seqs=64,
                               enable_prefix_caching=False, skip_tokenizer_init=True, disable_log_stats=True, enforce_eager=eager).llm_engine

    def run(self, sequences, prompt, generate):
        settings = self.api.SamplingParams(temperature=1.0, max_tokens=generate, ignore_eos=True, detokenize=False)
        ids = [[self.random.randrange(self.vocab) for _ in range(prompt)] for _ in range(sequences)]
        clock, lengths = Clock(), {}
        for tokens in ids:
            self.made += 1
            self.engine.add_request(str(self.made), {"prompt_token_ids": tokens}, settings)
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                lengths[out.request_id] = len(out.outputs[0].token_ids)
            if clock.first is None and len(lengths) == sequences:
                clock.lap()
                # Tokens that early sequences have already beyond their first one are not counted in the rate.
                self.early = sum(lengths.values()) - sequences
        clock.lap()
        if sum(lengths.values()) != sequences * generate:
            raise RuntimeError(f"{sum(lengths.values())} tokens came instead of {sequences * generate}")
        return clock.first, clock.end

    early = 0


KINDS = {"llama.cpp": LlamaCpp, "ik_llama": IkLlama, "vllm": Vllm}


warm = set()


def figures(engine, metric, n, prompt, generate):
    """The numbers of one measurement; docs in README.md."""
    if metric == "batch" and n not in warm:
        engine.run(n, 32, 2)
        warm.add(n)
    if metric == "prefill":
        first, _ = engine.run(1, n, 1)
        return {"tok_s": n / first, "ttft_s": first}
    sequences, tokens = (1, n) if metric == "decode" else (n, generate)
    first, end = engine.run(sequences, prompt, tokens)
    later = sequences * (tokens - 1) - getattr(engine, "early", 0)
    return {"tok_s": later / (end - first), "ttft_s": first, "total_tok_s": sequences * tokens / end}


def main():
    kind, path, threads, vocab = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)             # what libraries print belongs into the log

    def answer(**fields):
        answers.write(json.dumps(fields) + "\n")

    def attempt(work):
        try:
            answer(**work())
        except Exception as e:      # noqa: BLE001 - an engine may fail in any way, and the others go on
            answer(error=f"{type(e).__name__}: {e}"[:1000])

    def start():
        nonlocal engine
        engine = KINDS[kind](threads, vocab)
        began = time.perf_counter()
        engine.load(path)
        seconds = time.perf_counter() - began
        engine.run(1, 64, 4)          # the first run pays for buffers
        return {"version": engine.version, "settings": engine.settings, "load_s": seconds}

    engine = None
    attempt(start)
    for line in sys.stdin:
        request = json.loads(line)
        attempt(lambda: {**figures(engine, **request), "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9})


if __name__ == "__main__":
    main()
