#!/usr/bin/env python3
"""Prints quickstart's closing table from the files it left: quickstart_table.py OUT_DIR MODEL_DIR"""
import json
import math
import pathlib
import sys

out, model = map(pathlib.Path, sys.argv[1:3])


def size(path):
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return f"{sum(f.stat().st_size for f in files) / 1e6:.1f} MB"


def bench(name):
    rows = [json.loads(line) for line in (out / name).read_text().splitlines() if line.startswith("{")]
    return {(r["metric"], r["n"]): r for r in rows if "metric" in r}


speed = {"float": bench("bench-float.jsonl"), "int8": bench("bench-int8.jsonl")}
accuracy = json.loads((out / "eval.json").read_text())
rows = [("", "float", "int8"),
        ("checkpoint", size(model / "model.safetensors"), ""),
        ("engine weights", size(out / "engine-float" / "weights.bin"), size(out / "engine" / "weights.bin"))]
for (metric, n), label in ((("prefill", 512), "prompt of 512, tok/s"), (("decode", 128), "one stream, tok/s"), (("batch", 8), "8 streams, tok/s")):
    rows.append((label, *(f"{speed[c][metric, n]['tok_s']:.0f}" for c in ("float", "int8"))))
rows.append(("first token after 512", *(f"{1000 * speed[c]['prefill', 512]['ttft_s']:.1f} ms" for c in ("float", "int8"))))
for group in accuracy["float"]["accuracy"]:
    rows.append((f"accuracy {group}", *(f"{100 * accuracy[c]['accuracy'][group]:.1f} %" for c in ("float", "int8"))))
rows.append(("text perplexity", *(f"{math.exp(accuracy[c]['text_nll_per_token']):.4f}" for c in ("float", "int8"))))
for label, a, b in rows:
    print(f"{label:<24}{a:>12}{b:>12}")
