"""What transformers and compressed-tensors make of a checkpoint folder; run by test_convert_checkpoint.py with a Python that has them. Prints a JSON object.

  --golden FILE       the model computes FILE's logits (float32)
  --weights-of OTHER  compressed-tensors' own dequantizer gives OTHER's weights, rounded to the type of the scales; where transformers can load the
                      folder (dense models: its experts are no linear layers), what it loads too
"""
import argparse
import json
import pathlib

import torch
from safetensors.torch import load_file


def tensors_of(folder):
    out = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        out.update(load_file(path))
    return out


def load(folder, **settings):
    import transformers
    try:
        kind = transformers.AutoModelForCausalLM
        return kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager", **settings)
    except ValueError as e:
        if "Unrecognized configuration class" not in str(e):
            raise
        return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager", **settings)


def names(info, what):
    # Tied heads and what a MIR has no place for.
    return sorted(n for n in info[what] if "vision_tower" not in n and "multi_modal" not in n and "patch_merge" not in n)


def logits(folder, golden):
    model, info = load(folder)
    recorded = load_file(golden)
    worst = 0.0
    for key, ids in recorded.items():
        if not key.endswith(".input_ids"):
            continue
        want = recorded[key.replace(".input_ids", ".logits")].float()
        with torch.no_grad():
            got = model(input_ids=ids.reshape(1, -1).long()).logits[0].float()
        worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
    return {"missing": names(info, "missing_keys"), "unexpected": names(info, "unexpected_keys"), "difference": worst}


def differing(got, want, scales):
    """Names of weights that are not the other checkpoint's, rounded as the reader does."""
    out = []
    for name, w in want.items():
        if name not in got:
            continue
        scale = scales.get(name + "_scale")
        g = got[name].float()
        w = (w.to(scale.dtype) if scale is not None else w).float()
        if g.shape != w.shape or not torch.equal(g, w):
            out.append(name)
    return out


def weights(folder, other):
    from compressed_tensors.entrypoints.convert.converters.ct_dequantizer import CompressedTensorsDequantizer
    stored, want = tensors_of(folder), tensors_of(other)
    scales = {n: t for n, t in stored.items() if n.endswith("_scale")}
    # It looks at names only, and where quantized weights are named "weight" takes an embedding for a linear layer.
    got = CompressedTensorsDequantizer(folder, ignore=["re:.*embed_tokens$"], dtype=torch.float32).validate(dict(stored))
    result = {"modules": len(scales), "differing": differing(got, want, scales), "missing": sorted(want.keys() - got.keys()),
              "unexpected": sorted(got.keys() - want.keys()), "negative_scales": sum(int((s < 0).sum()) for s in scales.values())}
    if not any(".experts." in n for n in stored):
        import transformers
        model, info = load(folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
        result["loaded"] = len(model.state_dict())
        result["differing"] += differing(model.state_dict(), want, {})
        result["missing"] += names(info, "missing_keys")
        result["unexpected"] += names(info, "unexpected_keys")
    return result


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("--golden")
    p.add_argument("--weights-of")
    a = p.parse_args()
    print(json.dumps(logits(a.folder, a.golden) if a.golden else weights(a.folder, a.weights_of)))
