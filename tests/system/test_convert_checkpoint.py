"""Checkpoint folders that convert writes: the released tensors again, byte by byte; int8 and int4 numbers as they were; and, where a Python with
transformers, torch and compressed-tensors is named in METAINFER_CHECKPOINT_PYTHON, what these make of them."""
import json
import os
import pathlib
import shutil
import struct
import subprocess

import numpy as np
import pytest
from conftest import DATA, export, quantize, read_json, run

GOLDENS = DATA / "goldens"
FAMILIES = sorted(p.name for p in GOLDENS.iterdir())
PACKED = {"gpt_oss", "granitemoe"}           # experts in one tensor
CONSUMER = os.environ.get("METAINFER_CHECKPOINT_PYTHON")
needs_consumer = pytest.mark.skipif(not CONSUMER, reason="METAINFER_CHECKPOINT_PYTHON names no Python with transformers, torch and compressed-tensors")
NOT_IN_A_MIR = ("vision_tower", "multi_modal", "patch_merge", "model.layers.4.e")      # the last: glm4_moe's layer for further tokens
KINDS = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64}


def raw_tensors(folder):
    """Name -> (dtype, shape, bytes), of all files of a folder."""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in ("golden.safetensors", "expected.safetensors"):
            continue
        data = path.read_bytes()
        (n,) = struct.unpack("<Q", data[:8])
        for name, t in json.loads(data[8:8 + n]).items():
            if name != "__metadata__":
                begin, end = t["data_offsets"]
                assert name not in out
                out[name] = (t["dtype"], t["shape"], data[8 + n + begin:8 + n + end])
    return out


def array(t):
    """Floats as float32, integers as they are."""
    dtype, shape, data = t
    a = np.frombuffer(data, KINDS[dtype]).reshape(shape)
    return (a.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else a.astype(np.float32) if dtype == "F16" else a


def weights(mir):
    return raw_tensors(mir / "weights")


def convert(mir, out, *flags, **kwargs):
    return run("convert", "--model", mir, "--output", out, "--quiet", *flags, **kwargs)


def same_model(a, b):
    assert weights(a) == weights(b)
    assert (a / "model.mir").read_text() == (b / "model.mir").read_text()


def recipe(bits=8, group=32, **layers):
    named = ", ".join(f'"{k}": {v}' for k, v in layers.items())
    return f"quant: {{weight_bits: {bits}, group_size: {group}, smooth_quant: {{enable: false}}, layers: {{{named}}}}}\n" if bits == 4 else \
        f"quant: {{weight_bits: 8, smooth_quant: {{enable: false}}, layers: {{{named}}}}}\n"


def changed(source, folder, **values):
    """A copy of a checkpoint with another config."""
    shutil.copytree(source, folder)
    config = read_json(folder / "config.json")
    config.get("text_config", config).update(values)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tensors(path, tensors):
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


# ---------------------------------------------------------------- float

@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_the_released_checkpoint(family, tmp_path):
    source = GOLDENS / family
    mir = export(source, tmp_path / "mir", "--name", "m")
    report = json.loads(convert(mir, tmp_path / "out", "--to", "hf", "--json").stdout)
    released, ours = raw_tensors(source), raw_tensors(tmp_path / "out")
    left_out = released.keys() - ours.keys()
    assert all(n.startswith(NOT_IN_A_MIR) for n in left_out), left_out
    assert ours == {n: t for n, t in released.items() if n not in left_out}
    assert report["format"] == "hf" and report["tensors"] == len(ours)
    assert bool(left_out) == any("not in a MIR" in n for n in report["notes"])
    config, original = read_json(tmp_path / "out" / "config.json"), read_json(source / "config.json")
    for place in (original, original.get("text_config", {})):
        place.pop("tie_word_embeddings", None)
    for place in (config, config.get("text_config", {})):
        place.pop("tie_word_embeddings", None)
    config.pop("torch_dtype", None), original.pop("torch_dtype", None)
    assert config == original
    same_model(mir, export(tmp_path / "out", tmp_path / "back", "--name", "m"))


def test_tokenizer_and_settings_come_along(tmp_path):
    source = DATA / "gguf"
    mir = export(source, tmp_path / "mir")
    convert(mir, tmp_path / "out", "--to", "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).exists() == (source / name).exists(), name
        if (source / name).exists():
            assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    made = read_json(tmp_path / "out" / "metainfer.json")
    assert made["tool"] == "metainfer convert" and "config.json" in made["source"]["files"]


def test_packed_experts_become_single_ones(tmp_path):
    """The form that newer transformers save, into the form of the releases."""
    source = tmp_path / "packed"
    shutil.copytree(GOLDENS / "qwen3_moe_nonorm", source)
    released = raw_tensors(source)
    packed = {n: t for n, t in released.items() if ".experts." not in n}
    for layer in range(read_json(source / "config.json")["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        if prefix + "0.up_proj.weight" not in released:
            continue
        experts = range(sum(n.startswith(prefix) and n.endswith("up_proj.weight") for n in released))
        out, hidden = released[prefix + "0.up_proj.weight"][1]
        packed[prefix + "gate_up_proj"] = ("BF16", [len(experts), 2 * out, hidden], b"".join(
            released[f"{prefix}{e}.{part}_proj.weight"][2] for e in experts for part in ("gate", "up")))
        down = [array(("BF16", [hidden, out], released[f"{prefix}{e}.down_proj.weight"][2])) for e in experts]
        assert out != hidden
        packed[prefix + "down_proj"] = ("BF16", [len(experts), out, hidden], b"".join(
            np.ascontiguousarray(np.frombuffer(released[f"{prefix}{e}.down_proj.weight"][2], np.uint16).reshape(hidden, out).T).tobytes() for e in experts))
        assert down
    (source / "model.safetensors").unlink()
    write_tensors(source / "model.safetensors", packed)
    convert(export(source, tmp_path / "mir"), tmp_path / "out", "--to", "hf")
    assert raw_tensors(tmp_path / "out") == released


def test_dequantized_weights_get_the_float_layout(tmp_path):
    source = DATA / "formats" / "gpt_oss_mxfp4"
    mir = export(source, tmp_path / "mir", "--name", "m")
    convert(mir, tmp_path / "out", "--to", "hf", "--type", "keep")
    assert "quantization_config" not in read_json(tmp_path / "out" / "config.json")
    same_model(mir, export(tmp_path / "out", tmp_path / "back", "--name", "m"))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"ernie4_5_moe"}))
def test_random_weights_have_names_too(family, tmp_path):
    mir = export(GOLDENS / family, tmp_path / "mir", "--dummy-weights", "--name", "m")
    convert(mir, tmp_path / "out", "--to", "hf", "--type", "keep")
    ours = raw_tensors(tmp_path / "out")
    wrapper = "language_model." if family.startswith("minimax_m3") else ""      # nothing tells that there is one
    assert {wrapper + n for n in ours} == {n for n in raw_tensors(GOLDENS / family) if not n.startswith(NOT_IN_A_MIR)}
    same_model(mir, export(tmp_path / "out", tmp_path / "back", "--name", "m"))


def test_a_shape_that_nothing_tells_is_refused(tmp_path):
    mir = export(GOLDENS / "ernie4_5_moe", tmp_path / "mir", "--dummy-weights")
    done = convert(mir, tmp_path / "out", "--to", "hf", ok=4)
    assert "e_score_correction_bias" in done.stderr and "which shape" in done.stderr and not (tmp_path / "out").exists()


def test_gguf_files_become_checkpoints(tmp_path):
    mir = export(DATA / "formats" / "gguf_q8_0" / "model.gguf", tmp_path / "mir", "--name", "m")
    report = json.loads(convert(mir, tmp_path / "out", "--to", "hf", "--type", "keep", "--json").stdout)
    assert any("architectures" in n for n in report["notes"])
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in raw_tensors(tmp_path / "out")
    same_model(mir, export(tmp_path / "out", tmp_path / "back", "--name", "m"))
    # llama's q and k lie in another order there.
    plain = export(GOLDENS / "llama", tmp_path / "llama")
    run("convert", "--model", plain, "--output", tmp_path / "llama.gguf", "--type", "f32", "--quiet")
    paired = export(tmp_path / "llama.gguf", tmp_path / "paired")
    assert "neighbouring pairs" in convert(paired, tmp_path / "x", "--to", "hf", ok=4).stderr


def test_files_are_cut_and_listed(tmp_path):
    mir = export(GOLDENS / "mixtral", tmp_path / "mir", "--name", "m")
    convert(mir, tmp_path / "out", "--to", "hf", "--shard-gb", "0.0002")
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values())) and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    tensors = raw_tensors(tmp_path / "out")
    assert tensors == raw_tensors(GOLDENS / "mixtral") and tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(len(t[2]) for t in tensors.values())
    same_model(mir, export(tmp_path / "out", tmp_path / "back", "--name", "m"))


def test_types_of_floats(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDENS / "qwen3", source)
    tensors = raw_tensors(source)
    random = np.random.default_rng(1)
    wide = {n: ("F32", s, (random.standard_normal(s) * 0.1).astype(np.float32).tobytes()) for n, (_, s, _) in tensors.items()}
    write_tensors(source / "model.safetensors", wide)
    mir = export(source, tmp_path / "mir")
    for kind, dtype in ("bf16", "BF16"), ("f16", "F16"), ("f32", "F32"), ("keep", "F32"):
        report = json.loads(convert(mir, tmp_path / kind, "--to", "hf", "--type", kind, "--json").stdout)
        got = raw_tensors(tmp_path / kind)
        assert {t[0] for t in got.values()} == {dtype} and report["types"] == {dtype: len(wide)}
        assert read_json(tmp_path / kind / "config.json").get("dtype") in (None, {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype])
        assert any("rounds" in n for n in report["notes"]) == (dtype != "F32")
        for n, t in wide.items():
            x = array(t)
            u = x.view(np.uint32)
            want = {"F32": x, "F16": x.astype(np.float16).astype(np.float32), "BF16": ((u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000).view(np.float32)}[dtype]
            assert np.array_equal(array(got[n]), want), n
    big = {**wide, "model.norm.weight": ("F32", [64], np.full(64, 1e5, np.float32).tobytes())}
    write_tensors(source / "model.safetensors", big)
    done = convert(export(source, tmp_path / "big"), tmp_path / "overflow", "--to", "hf", "--type", "f16", ok=4)
    assert "final_norm.weight" in done.stderr and "--type" in done.stderr and not (tmp_path / "overflow").exists()


# ---------------------------------------------------------------- compressed-tensors

def test_int8_comes_back_as_it_was(tmp_path):
    mir = export(DATA / "ct_w8a8", tmp_path / "mir", "--name", "m")
    convert(mir, tmp_path / "out", "--to", "compressed-tensors")
    theirs, ours = raw_tensors(DATA / "ct_w8a8"), raw_tensors(tmp_path / "out")
    assert theirs.keys() == ours.keys()
    for n, t in theirs.items():
        assert ours[n][1] == t[1] and np.array_equal(array(ours[n]), array(t)), n
    q, original = (read_json(p / "config.json")["quantization_config"] for p in (tmp_path / "out", DATA / "ct_w8a8"))
    assert q["format"] == original["format"] == "int-quantized" and set(q["ignore"]) >= set(original["ignore"]) - {"re:.*mlp.gate$"}
    same_model(mir, export(tmp_path / "out", tmp_path / "back", "--name", "m"))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - PACKED))
def test_int8_of_every_family(family, tmp_path):
    mir = export(GOLDENS / family, tmp_path / "mir", "--name", "m")
    quantize(mir, tmp_path / "int8", recipe(), "--no-compare")
    convert(tmp_path / "int8", tmp_path / "out", "--to", "compressed-tensors")
    ours, original = raw_tensors(tmp_path / "out"), raw_tensors(GOLDENS / family)
    int8 = {n for n, t in ours.items() if t[0] == "I8"}
    assert int8 and int8 <= original.keys()
    for n, t in ours.items():
        if n in original and n not in int8:
            assert t == original[n], n
        if n in int8:
            assert t[1] == original[n][1] and ours[n + "_scale"][:2] == ("F32", [t[1][0], 1])
            assert np.abs(array(t) * array(ours[n + "_scale"]) - array(original[n])).max() <= array(ours[n + "_scale"]).max()
    ignored = set(read_json(tmp_path / "out" / "config.json")["quantization_config"]["ignore"])
    modules = {n.removesuffix(".weight") for n in ours if n.endswith("proj.weight") or "lm_head" in n}
    assert {m for m in modules if m + ".weight" not in int8} <= ignored
    assert not ignored & {n.removesuffix(".weight") for n in int8}
    done = run("export", "--model-dir", tmp_path / "out", "--output", tmp_path / "back", "--name", "m", "--quiet")
    assert done.returncode == 0
    same_model(tmp_path / "int8", tmp_path / "back")


def products(mir, name):
    """q * s of an int4 weight, group by group."""
    t = weights(mir)
    u = array(t[name])
    q = np.stack([u & 15, u >> 4], -1).reshape(*u.shape[:-1], -1).astype(np.float32) - 8
    scale = array(t[name + "_scale"])
    group = q.shape[-1] // scale.shape[-1]
    return q * np.repeat(scale, group, -1), scale


@pytest.mark.parametrize("family,group", [("qwen3_moe", 32), ("mixtral", 32), ("minimax_m3_sparse", 32), ("dots1", 32), ("llama", 32), ("qwen2_moe", 32), ("qwen3", 64)])
def test_int4_is_exactly_q_times_s(family, group, tmp_path):
    mir = export(GOLDENS / family, tmp_path / "mir", "--name", "m")
    odd = {"minimax_m3_sparse": {"re:.*(shared|mlp).down": "int8"}, "qwen2_moe": {"re:.*shared.down": "int8"}, "qwen3": {"re:.*mlp.down": "float"}}.get(family, {})
    quantize(mir, tmp_path / "int4", recipe(4, group, **odd), "--no-compare")
    report = json.loads(convert(tmp_path / "int4", tmp_path / "out", "--to", "compressed-tensors", "--json").stdout)
    back = export(tmp_path / "out", tmp_path / "back", "--name", "m")
    before, after = weights(tmp_path / "int4"), weights(back)
    seen, groups, negative = 0, 0, 0
    for name, t in before.items():
        if t[0] == "U8":
            want, scale = products(tmp_path / "int4", name)
            assert np.array_equal(array(after[name]), want), name
            seen, groups, negative = seen + 1, groups + scale.size, negative + (scale < 0).sum()
        elif not name.endswith("_scale") or t[0] != "F32" or name.removesuffix("_scale") in after and after[name.removesuffix("_scale")][0] == "I8":
            assert after[name] == t, name
    ours = raw_tensors(tmp_path / "out")
    packed = [n for n in ours if n.endswith("_packed")]
    assert seen and packed
    kept = 0
    for n in packed:
        module = n.removesuffix("_packed")
        out, columns = array(ours[module + "_shape"])
        assert ours[module + "_shape"][0] == "I64" and ours[n][:2] == ("I32", [out, columns // 8])
        assert ours[module + "_scale"][:2] == ("BF16", [out, columns // group])     # what quantize chooses
        kept += (array(ours[module + "_scale"]) < 0).sum()
    assert any(f"{kept} of {groups} int4 groups" in x for x in report["notes"]) == (kept > 0)
    assert 0 < kept <= negative
    q = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert q["format"] == ("mixed-precision" if "int8" in odd.values() else "pack-quantized")
    first = next(g for g in q["config_groups"].values() if g["weights"]["num_bits"] == 4)
    assert first["weights"]["group_size"] == group and first["input_activations"] is None


def test_each_form_has_its_group(tmp_path):
    mir = export(GOLDENS / "qwen3_moe", tmp_path / "mir", "--name", "m")
    last = read_json(GOLDENS / "qwen3_moe" / "config.json")["num_hidden_layers"] - 1
    layers = {"re:.*attn.q": "int8", f"layers.{last}.attn.k": "float", f"layers.{last}.attn.v": "int8"}
    quantize(mir, tmp_path / "mixed", recipe(4, 32, **layers), "--no-compare")
    convert(tmp_path / "mixed", tmp_path / "out", "--to", "compressed-tensors")
    q = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert q["format"] == "mixed-precision" and {g["format"] for g in q["config_groups"].values()} == {"int-quantized", "pack-quantized"}
    int8 = next(g for g in q["config_groups"].values() if g["format"] == "int-quantized")
    assert sorted(int8["targets"]) == [r"re:^model\.layers\.(?:%d)\.self_attn\.v_proj$" % last, r"re:^model\.layers\.\d+\.self_attn\.q_proj$"]
    assert f"model.layers.{last}.self_attn.k_proj" in q["ignore"] and "lm_head" in q["ignore"]
    before, after = weights(tmp_path / "mixed"), weights(export(tmp_path / "out", tmp_path / "back", "--name", "m"))
    for name, t in before.items():
        if t[0] == "I8":
            assert after[name] == t and after[name + "_scale"] == before[name + "_scale"], name
        elif t[0] == "U8":
            assert np.array_equal(array(after[name]), products(tmp_path / "mixed", name)[0]), name


def test_a_rounded_tied_head_is_untied(tmp_path):
    mir = export(GOLDENS / "llama", tmp_path / "mir", "--name", "m")
    assert not any("lm_head" in n for n in weights(mir))
    quantize(mir, tmp_path / "float_head", recipe(), "--no-compare")
    quantize(mir, tmp_path / "int8_head", recipe(lm_head="int8"), "--no-compare")
    for name, tied in ("float_head", True), ("int8_head", False):
        convert(tmp_path / name, tmp_path / f"{name}-out", "--to", "compressed-tensors")
        config = read_json(tmp_path / f"{name}-out" / "config.json")
        assert config["tie_word_embeddings"] is tied and ("lm_head" in config["quantization_config"]["ignore"]) is tied
        same_model(tmp_path / name, export(tmp_path / f"{name}-out", tmp_path / f"{name}-back", "--name", "m"))


# ---------------------------------------------------------------- refusals

def test_what_cannot_be_is_refused_by_name(tmp_path):
    mir = export(GOLDENS / "qwen3_moe_nonorm", tmp_path / "mir")
    out = tmp_path / "out"
    assert "quantize first" in convert(mir, out, "--to", "compressed-tensors", ok=4).stderr
    quantize(mir, tmp_path / "int4", recipe(4, 32), "--no-compare")
    done = convert(tmp_path / "int4", out, "--to", "compressed-tensors", ok=4).stderr
    assert "40 columns in groups of 32" in done and "layers.0.moe.experts.down.weight" in done
    done = convert(tmp_path / "int4", out, "--to", "hf", ok=4).stderr
    assert "w4a8_g32" in done and "--to compressed-tensors" in done
    packed = export(GOLDENS / "gpt_oss", tmp_path / "gpt_oss")
    quantize(packed, tmp_path / "packed8", recipe(), "--no-compare")
    done = convert(tmp_path / "packed8", out, "--to", "compressed-tensors", ok=4).stderr
    assert "gpt_oss" in done and "packed with others" in done
    quantize(packed, tmp_path / "attention8", recipe(**{"re:.*experts.*": "float"}), "--no-compare")      # what is left can be written
    convert(tmp_path / "attention8", tmp_path / "attention", "--to", "compressed-tensors")
    for flags, word in ((("--to", "hf", "--type", "q8_0"), "q8_0 is not for --to hf"), (("--to", "gguf", "--type", "keep"), "keep is not for --to gguf"),
                        (("--to", "hf", "--no-tokenizer"), "--no-tokenizer is for --to gguf"), (("--to", "gguf", "--shard-gb", "1"), "--shard-gb")):
        assert word in convert(mir, out, *flags, ok=2).stderr
    assert "own folder" in convert(mir, mir / "x", "--to", "hf", ok=2).stderr
    assert not out.exists()


def test_an_output_is_replaced_only_when_asked_and_ours(tmp_path):
    mir = export(GOLDENS / "qwen3", tmp_path / "mir")
    out = tmp_path / "out"
    convert(mir, out, "--to", "hf")
    assert "--force" in convert(mir, out, "--to", "hf", ok=4).stderr
    convert(mir, out, "--to", "hf", "--force", "--type", "f32")
    assert {t[0] for t in raw_tensors(out).values()} == {"F32"}
    (out / "metainfer.json").unlink()
    assert "not written by metainfer" in convert(mir, out, "--to", "hf", "--force", ok=4).stderr


# ---------------------------------------------------------------- the real consumers

def consume(folder, *flags, timeout=900):
    done = subprocess.run([CONSUMER, pathlib.Path(__file__).with_name("checkpoint_consumer.py"), str(folder), *map(str, flags)], capture_output=True, text=True,
                          timeout=timeout, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_consumer
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_recorded_logits(family, tmp_path):
    convert(export(GOLDENS / family, tmp_path / "mir"), tmp_path / "out", "--to", "hf")
    seen = consume(tmp_path / "out", "--golden", GOLDENS / family / "golden.safetensors")
    assert seen["missing"] == [] and seen["unexpected"] == [] and seen["difference"] < 1e-3, seen


@needs_consumer
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_tensors_reads_the_same_numbers(family, bits, tmp_path):
    mir = export(GOLDENS / family, tmp_path / "mir")
    quantize(mir, tmp_path / "q", recipe(bits, 32), "--no-compare")
    convert(tmp_path / "q", tmp_path / "out", "--to", "compressed-tensors")
    # The same numbers as a plain checkpoint: through our own reading of the folder, in float.
    if bits == 8:
        config = read_json(tmp_path / "out" / "config.json")
        shutil.copytree(tmp_path / "out", tmp_path / "weights_only")
        for group in config["quantization_config"]["config_groups"].values():
            group["input_activations"] = None
        (tmp_path / "weights_only" / "config.json").write_text(json.dumps(config))
    plain = export(tmp_path / ("weights_only" if bits == 8 else "out"), tmp_path / "plain")
    convert(plain, tmp_path / "float", "--to", "hf", "--type", "f32")
    seen = consume(tmp_path / "out", "--weights-of", tmp_path / "float")
    assert seen["modules"] > 0 and seen["differing"] == [] and seen["missing"] == [] and seen["unexpected"] == [], seen
