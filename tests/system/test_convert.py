"""GGUF files, read back with the `gguf` package: keys, names, shapes and numbers against the MIR and against a file of another writer."""
import json
import shutil
import struct

import gguf
import numpy as np
import pytest
from conftest import DATA, export, quantize, run

FIXTURE = DATA / "gguf"          # a qwen3_moe checkpoint, and its Q8_0 file as written by the gguf package
GOLDENS = DATA / "goldens"
ARCHITECTURES = {
    "dots1": "dots1", "ernie4_5_moe": "ernie4_5-moe", "glm4_moe": "glm4moe", "granitemoe": "granitemoe", "llama": "llama", "minimax_m2": "minimax-m2",
    "minimax_m3_sparse": "minimax-m3", "mixtral": "llama", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
}
# Fixtures with something that llama.cpp's architecture lacks, made fit for it; those whose weights change shape by it get random ones.
CHANGES = {"olmoe": {"clip_qkv": None}, "minimax_m3_sparse": {"shared_intermediate_size": 32}}
RANDOM = {"minimax_m3_sparse"}
TYPES = gguf.GGMLQuantizationType


def tensors_of(mir):
    """Name -> numbers as float32 (int8 as it is)."""
    out = {}
    for path in sorted((mir / "weights").glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, t in json.loads(data[8:8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = t["data_offsets"]
            raw = data[8 + length + begin:8 + length + end]
            kind = {"F32": np.float32, "BF16": np.uint16, "I8": np.int8, "U8": np.uint8}[t["dtype"]]
            a = np.frombuffer(raw, kind).reshape(t["shape"])
            out[name] = (a.astype(np.uint32) << 16).view(np.float32) if t["dtype"] == "BF16" else a
    return out


def convert(mir, out, *flags, **kwargs):
    return run("convert", "--to", "gguf", "--model", mir, "--output", out, "--quiet", *flags, **kwargs)


def keys_of(reader):
    return {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}


def numbers(t):
    """A tensor of the file as float32, outermost dimension first."""
    return np.asarray(gguf.quants.dequantize(t.data, t.tensor_type), np.float32).reshape([int(n) for n in reversed(t.shape)])


def mir_name(name):
    """The MIR's name of a tensor of the file."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "embed.weight", "output_norm.weight": "final_norm.weight", "output.weight": "lm_head.weight"}[name]
    _, layer, rest = name.split(".", 2)
    kind, last = rest.rsplit(".", 1)
    kinds = {"attn_norm": "attn_norm", "ffn_norm": "mlp_norm", "post_attention_norm": "mlp_norm", "attn_q": "attn.q", "attn_k": "attn.k", "attn_v": "attn.v",
             "attn_output": "attn.o", "attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm", "ffn_gate": "mlp.gate", "ffn_up": "mlp.up",
             "ffn_down": "mlp.down", "ffn_gate_inp": "moe.router", "ffn_gate_exps": "moe.experts.gate", "ffn_up_exps": "moe.experts.up",
             "ffn_down_exps": "moe.experts.down", "ffn_gate_shexp": "moe.shared.gate", "ffn_up_shexp": "moe.shared.up",
             "ffn_down_shexp": "moe.shared.down", "ffn_gate_inp_shexp": "moe.shared_gate", "indexer.q_proj": "attn.index_q",
             "indexer.k_proj": "attn.index_k", "indexer.q_norm": "attn.index_q_norm", "indexer.k_norm": "attn.index_k_norm"}
    return f"layers.{layer}." + ("moe.select_bias" if kind == "exp_probs_b" else f"{kinds[kind]}.{last}")


def halves(a, heads):
    """Rows in neighbouring pairs, back to halves."""
    rows = a.reshape(heads, -1, 2, *a.shape[1:])
    return rows.swapaxes(1, 2).reshape(a.shape)


def variant(source, folder, **changes):
    """A copy of a checkpoint with another config."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def mir(tmp_path_factory):
    return export(FIXTURE, tmp_path_factory.mktemp("convert") / "mir")


def test_q8_0_is_what_the_library_writes(mir, tmp_path):
    convert(mir, tmp_path / "q8_0.gguf")
    ours, theirs = gguf.GGUFReader(tmp_path / "q8_0.gguf"), gguf.GGUFReader(FIXTURE / "q8_0.gguf")
    mine, expected = keys_of(ours), keys_of(theirs)
    assert mine.pop("general.name") == "gguf" and expected.pop("general.name")
    assert mine.pop("qwen3moe.rope.dimension_count") == 32                      # left to its default there
    assert mine == expected
    a, b = {t.name: t for t in ours.tensors}, {t.name: t for t in theirs.tensors}
    assert a.keys() == b.keys()
    for name, t in b.items():
        assert (a[name].tensor_type, list(a[name].shape)) == (t.tensor_type, list(t.shape)), name
        assert np.array_equal(a[name].data, t.data), name


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_float_types_hold_the_checkpoint(mir, kind, tmp_path):
    convert(mir, tmp_path / "out.gguf", "--type", kind)
    reader, source = gguf.GGUFReader(tmp_path / "out.gguf"), tensors_of(mir)
    assert keys_of(reader)["general.file_type"] == {"f32": 0, "f16": 1, "bf16": 32}[kind]
    assert {t.tensor_type.name for t in reader.tensors} == {"F32", kind.upper()}
    for t in reader.tensors:
        want = source[mir_name(t.name)]
        if t.tensor_type == TYPES.F16:
            want = want.astype(np.float16).astype(np.float32)
        assert np.array_equal(numbers(t), want), t.name


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_every_family_is_whole(family, tmp_path):
    checkpoint = variant(GOLDENS / family, tmp_path / "checkpoint", **CHANGES.get(family, {}))
    source = export(checkpoint, tmp_path / "mir", *(["--dummy-weights"] if family in RANDOM else []))
    config = json.loads((checkpoint / "config.json").read_text())
    config = config.get("text_config", config)
    convert(source, tmp_path / "out.gguf", "--type", "f32")
    reader, left = gguf.GGUFReader(tmp_path / "out.gguf"), tensors_of(source)
    keys, arch = keys_of(reader), ARCHITECTURES[family]
    assert keys["general.architecture"] == arch and keys["tokenizer.ggml.model"] == "none"
    assert keys[f"{arch}.block_count"] == config["num_hidden_layers"] and keys[f"{arch}.vocab_size"] == config["vocab_size"]
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    assert keys[f"{arch}.rope.freq_base"] == pytest.approx(theta, rel=1e-6)
    pairs = family in ("llama", "mixtral", "granitemoe")
    for t in reader.tensors:
        name = mir_name(t.name)
        if name == "lm_head.weight" and name not in left:
            assert np.array_equal(numbers(t), numbers(reader.tensors[0]))       # a tied head that has to be written out
            continue
        want, got = left.pop(name), numbers(t)
        for part, heads in ("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads"):
            if pairs and f".{part}." in t.name:
                got = halves(got, config[heads])
        if family.startswith("minimax_m3") and t.name.endswith("norm.weight"):
            want = want + np.float32(1)
        assert np.array_equal(got.reshape(want.shape), want), t.name
    assert {n.split(".")[-1] for n in left} <= {"inv_freq"}                       # nothing was forgotten


def test_what_has_no_counterpart_is_refused(tmp_path):
    done = convert(export(GOLDENS / "gpt_oss", tmp_path / "a"), tmp_path / "out.gguf", ok=4)
    assert "gpt_oss" in done.stderr and "qwen3_moe" in done.stderr
    done = convert(export(GOLDENS / "qwen3_moe_nonorm", tmp_path / "b"), tmp_path / "out.gguf", ok=4)
    assert "not divided by their sum" in done.stderr
    done = convert(export(GOLDENS / "olmoe", tmp_path / "c"), tmp_path / "out.gguf", ok=4)
    assert "clamped to 1.5" in done.stderr
    done = convert(export(GOLDENS / "minimax_m3", tmp_path / "d"), tmp_path / "out.gguf", ok=4)
    assert "a shared expert of 48" in done.stderr
    plain = variant(GOLDENS / "glm4_moe", tmp_path / "plain", n_shared_experts=0)      # there, a missing shared expert passes its input through
    done = convert(export(plain, tmp_path / "e", "--dummy-weights"), tmp_path / "out.gguf", ok=4)
    assert "no shared expert" in done.stderr
    assert not (tmp_path / "out.gguf").exists()


def test_int8_weights_keep_their_integers(tmp_path):
    source = export(DATA / "ct_w8a8", tmp_path / "mir")
    weights = tensors_of(source)
    convert(source, tmp_path / "q8_0.gguf")
    convert(source, tmp_path / "f32.gguf", "--type", "f32")
    seen = 0
    for t in gguf.GGUFReader(tmp_path / "q8_0.gguf").tensors:
        q = weights.get(mir_name(t.name))
        if q is None or q.dtype != np.int8:
            continue
        scale = weights[mir_name(t.name) + "_scale"]
        blocks = np.ascontiguousarray(t.data).reshape(*q.shape[:-1], -1, 34)
        assert np.array_equal(blocks[..., 2:].view(np.int8).reshape(q.shape), q), t.name
        d = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        assert np.array_equal(d, np.broadcast_to(scale[..., None], d.shape).astype(np.float16)), t.name
        seen += 1
    assert seen == 2 * 7
    for t in gguf.GGUFReader(tmp_path / "f32.gguf").tensors:
        w = weights[mir_name(t.name)]
        want = w.astype(np.float32) * weights[mir_name(t.name) + "_scale"][..., None] if w.dtype == np.int8 else w
        assert np.array_equal(numbers(t), want), t.name


def test_q4_0_is_what_the_library_writes(mir, tmp_path):
    convert(mir, tmp_path / "q4_0.gguf", "--type", "q4_0")
    reader, weights = gguf.GGUFReader(tmp_path / "q4_0.gguf"), tensors_of(mir)
    assert keys_of(reader)["general.file_type"] == 2
    kinds = {t.name: t.tensor_type for t in reader.tensors}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == TYPES.Q8_0 and kinds["blk.0.ffn_down_exps.weight"] == TYPES.Q4_0
    assert set(kinds.values()) == {TYPES.F32, TYPES.Q8_0, TYPES.Q4_0}
    for t in reader.tensors:
        if t.tensor_type == TYPES.Q4_0:
            want = gguf.quants.quantize(weights[mir_name(t.name)], TYPES.Q4_0)
            assert np.array_equal(np.asarray(t.data).reshape(want.shape), want), t.name


def int4_products(weights, name):
    u, scale = weights[name], weights[name + "_scale"]
    q = np.stack([u & 15, u >> 4], -1).reshape(*u.shape[:-1], -1).astype(np.float32) - 8
    return q, np.repeat(scale, q.shape[-1] // scale.shape[-1], -1)


@pytest.mark.parametrize("group", [32, 64])
def test_int4_weights_keep_their_integers(mir, group, tmp_path):
    quantize(mir, tmp_path / "int4", f"quant: {{weight_bits: 4, group_size: {group}, smooth_quant: {{enable: false}}, layers: {{'re:.*attn.q': int8, 're:.*attn.k': float}}}}\n",
             "--no-compare")
    weights = tensors_of(tmp_path / "int4")
    readers = {}
    for kind in "q4_0", "q8_0", "f32":
        convert(tmp_path / "int4", tmp_path / f"{kind}.gguf", "--type", kind)
        readers[kind] = {t.name: t for t in gguf.GGUFReader(tmp_path / f"{kind}.gguf").tensors}
    seen = 0
    for name, t in readers["f32"].items():
        w = weights.get(mir_name(name))
        if w is None or w.dtype != np.uint8:
            continue
        q, scale = int4_products(weights, mir_name(name))
        assert np.array_equal(numbers(t), q * scale), name
        for kind in "q4_0", "q8_0":
            stored = readers[kind][name]
            assert stored.tensor_type == {"q4_0": TYPES.Q4_0, "q8_0": TYPES.Q8_0}[kind]
            # Numbers as they were, the scale as fp16: what bfloat16 holds in fp16's normal range stays.
            assert np.array_equal(numbers(stored), q * scale.astype(np.float16).astype(np.float32)), (kind, name)
        seen += 1
    assert seen and {readers["q4_0"][f"blk.0.attn_{x}.weight"].tensor_type for x in "qk"} == {TYPES.Q8_0}


def test_int8_weights_are_not_rounded_again(tmp_path):
    done = convert(export(DATA / "ct_w8a8", tmp_path / "mir"), tmp_path / "x.gguf", "--type", "q4_0", ok=4)
    assert "--type q8_0" in done.stderr and not (tmp_path / "x.gguf").exists()


def test_bent_rotations(tmp_path):
    llama3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 256}
    source = export(variant(GOLDENS / "llama", tmp_path / "a", rope_parameters=llama3), tmp_path / "mir-a")
    convert(source, tmp_path / "a.gguf", "--type", "f32")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    base = keys_of(reader)["llama.rope.freq_base"]
    divisors = next(numbers(t) for t in reader.tensors if t.name == "rope_freqs.weight")
    plain = base ** (-np.arange(len(divisors)) / len(divisors))
    want = tensors_of(source)["layers.0.rope.inv_freq"]
    assert base == 500000 and divisors[0] == 1 and divisors[-1] == pytest.approx(8, rel=1e-5)
    assert plain / divisors == pytest.approx(want, rel=1e-6)

    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    source = export(variant(GOLDENS / "qwen3", tmp_path / "b", rope_parameters=linear), tmp_path / "mir-b")
    convert(source, tmp_path / "b.gguf", "--type", "f32")
    keys = keys_of(gguf.GGUFReader(tmp_path / "b.gguf"))
    assert (keys["qwen3.rope.scaling.type"], keys["qwen3.rope.scaling.factor"], keys["qwen3.rope.freq_base"]) == ("linear", 4, 10000)

    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    source = export(variant(GOLDENS / "qwen3", tmp_path / "c", rope_parameters=yarn), tmp_path / "mir-c")
    assert "yarn" in convert(source, tmp_path / "c.gguf", ok=4).stderr


def test_tokenizers(mir, tmp_path):
    plain = tmp_path / "mir"
    shutil.copytree(mir, plain)
    path = plain / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())

    def refused(change):
        t = json.loads(json.dumps(tokenizer))
        change(t)
        path.write_text(json.dumps(t))
        return convert(plain, tmp_path / "x.gguf", ok=4).stderr

    def split(t):
        t["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False},
                                                                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]}
    assert "--pre-tokenizer" in refused(split)
    convert(plain, tmp_path / "named.gguf", "--pre-tokenizer", "qwen2")
    assert keys_of(gguf.GGUFReader(tmp_path / "named.gguf"))["tokenizer.ggml.pre"] == "qwen2"
    words = refused(lambda t: t.update(model={"type": "WordLevel", "vocab": t["model"]["vocab"], "unk_token": "!"}))
    assert "WordLevel" in words and "--no-tokenizer" in words
    convert(plain, tmp_path / "none.gguf", "--no-tokenizer")
    assert keys_of(gguf.GGUFReader(tmp_path / "none.gguf"))["tokenizer.ggml.model"] == "none"
    assert "id 320" in refused(lambda t: t["added_tokens"].append({"id": 320, "content": "<|more|>", "special": True}))

    # Merges as pairs, an unused row, another special form, a bos that the template prepends.
    t = json.loads(json.dumps(tokenizer))
    t["model"]["merges"] = [m.split(" ") if isinstance(m, str) else m for m in t["model"]["merges"]]
    gone = t["model"]["vocab"].pop(next(k for k, i in t["model"]["vocab"].items() if i == 319))
    t["added_tokens"][0]["special"] = False
    t["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [], "special_tokens": {}}
    path.write_text(json.dumps(t))
    config = plain / "tokenizer" / "tokenizer_config.json"
    settings = {k: v for k, v in json.loads(config.read_text()).items() if k != "add_bos_token"}
    config.write_text(json.dumps(settings))
    convert(plain, tmp_path / "other.gguf")
    keys = keys_of(gguf.GGUFReader(tmp_path / "other.gguf"))
    want = keys_of(gguf.GGUFReader(FIXTURE / "q8_0.gguf"))
    assert keys["tokenizer.ggml.merges"] == want["tokenizer.ggml.merges"]
    assert keys["tokenizer.ggml.tokens"][gone] == "[PAD319]" and keys["tokenizer.ggml.token_type"][gone] == 5
    assert keys["tokenizer.ggml.token_type"][:3] == [4, 3, 3] and keys["tokenizer.ggml.add_bos_token"] is True


def test_an_output_is_not_overwritten_unasked(mir, tmp_path):
    out = tmp_path / "x.gguf"
    out.write_text("mine")
    assert "--force" in convert(mir, out, ok=4).stderr
    assert out.read_text() == "mine"
    report = json.loads(convert(mir, out, "--force", "--json").stdout)
    assert out.stat().st_size == report["bytes"] and report["architecture"] == "qwen3moe" and report["types"] == {"F32": 11, "Q8_0": 16}
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    run("convert", "--to", "onnx", "--model", mir, "--output", out, ok=2)
    run("convert", "--model", mir, "--output", out, "--type", "q4_k", ok=2)


def test_rows_of_no_whole_blocks_stay_float(tmp_path):
    source = export(GOLDENS / "qwen3", tmp_path / "mir")
    widths = {n: a.shape[-1] for n, a in tensors_of(source).items() if a.ndim == 2}
    odd = {n for n, w in widths.items() if w % 32}
    report = json.loads(convert(source, tmp_path / "x.gguf", "--json").stdout)
    for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors:
        if mir_name(t.name) in widths:
            assert t.tensor_type == (TYPES.F32 if mir_name(t.name) in odd else TYPES.Q8_0), t.name
    assert bool(odd) == any("multiple of 32" in n for n in report["notes"])
