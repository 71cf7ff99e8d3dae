"""A W8A8 MIR of a qwen3_moe preset as the compressed-tensors checkpoint that vLLM reads: the same int8 numbers and scales, only names and
the division into files change. Memory: nothing is held but what is being copied."""
import json
import pathlib
import re
import struct

LAYER = {
    "attn_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight", "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.q.weight": "self_attn.q_proj.weight", "attn.k.weight": "self_attn.k_proj.weight",
    "attn.v.weight": "self_attn.v_proj.weight", "attn.o.weight": "self_attn.o_proj.weight", "moe.router.weight": "mlp.gate.weight",
}
TOP = {"embed.weight": "model.embed_tokens.weight", "final_norm.weight": "model.norm.weight", "lm_head.weight": "lm_head.weight"}
BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}
PIECE = 1 << 24


def parts(name, shape):
    """A tensor's parts in the checkpoint: (name, shape), in the order of their bytes. [] for what a checkpoint does not hold."""
    scale = "_scale" if name.endswith("_scale") else ""
    plain = name[:-len(scale)] if scale else name
    row_scale = [1] if scale else []                  # compressed-tensors has [rows, 1]
    if plain in TOP:
        return [(TOP[plain], shape)]
    found = re.fullmatch(r"layers\.(\d+)\.(.*)", plain)
    if not found:
        raise ValueError(f"tensor {name} has no place in a qwen3_moe checkpoint")
    prefix, rest = f"model.layers.{found.group(1)}.", found.group(2)
    if rest == "rope.inv_freq":
        return []
    if rest in LAYER:
        return [(prefix + LAYER[rest] + scale, shape + row_scale)]
    expert = re.fullmatch(r"moe\.experts\.(gate|up|down)\.weight", rest)
    if not expert:
        raise ValueError(f"tensor {name} has no place in a qwen3_moe checkpoint")
    return [(f"{prefix}mlp.experts.{e}.{expert.group(1)}_proj.weight{scale}", shape[1:] + row_scale) for e in range(shape[0])]


def quantization(layers):
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False, "group_size": None, "block_structure": None,
               "actorder": None, "observer": "minmax", "observer_kwargs": {}}
    inputs = {**weights, "strategy": "token", "dynamic": True, "observer": None}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
            "global_compression_ratio": None, "ignore": ["lm_head"] + [f"model.layers.{i}.mlp.gate" for i in range(layers)],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}}}


def write(mir, config, out):
    """Writes aside and renames, like metainfer itself."""
    aside = pathlib.Path(str(out) + ".tmp")
    aside.mkdir(exist_ok=True)
    files = sorted((pathlib.Path(mir) / "weights").glob("*.safetensors"))
    places, total = {}, 0
    for number, path in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        with open(path, "rb") as source, open(aside / name, "wb") as target:
            (length,) = struct.unpack("<Q", source.read(8))
            tensors = json.loads(source.read(length))
            tensors.pop("__metadata__", None)
            order = sorted(tensors.items(), key=lambda x: x[1]["data_offsets"][0])
            head, at = {}, 0
            for old, t in order:
                for new, shape in parts(old, t["shape"]):
                    size = BYTES[t["dtype"]]
                    for n in shape:
                        size *= n
                    head[new] = {"dtype": t["dtype"], "shape": shape, "data_offsets": [at, at + size]}
                    places[new] = name
                    at += size
            raw = json.dumps(head).encode()
            raw += b" " * (-len(raw) % 8)
            target.write(struct.pack("<Q", len(raw)) + raw)
            for old, t in order:
                if not parts(old, t["shape"]):
                    continue
                begin, end = t["data_offsets"]
                source.seek(8 + length + begin)
                while begin < end:
                    piece = source.read(min(PIECE, end - begin))
                    target.write(piece)
                    begin += len(piece)
            total += at
    settings = json.loads(pathlib.Path(config).read_text())
    settings["quantization_config"] = quantization(settings["num_hidden_layers"])
    (aside / "config.json").write_text(json.dumps(settings, indent=1))
    (aside / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1))
    aside.rename(out)
