"""safetensors files as numpy arrays, for tests that change a reference."""
import json
import struct

import numpy as np

# BF16 as its bits: see bf16() and from_bf16().
TYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "BF16": np.uint16, "F16": np.float16, "I8": np.int8, "U8": np.uint8}


def bf16(x):
    """Rounded to the nearest, ties to even."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def change(folder, function):
    """function(name, array) -> the new array or None, for every tensor of every safetensors file of the folder; returns the changed names."""
    changed = []
    for file in sorted(folder.glob("*.safetensors")):
        t = load(file)
        for name in t:
            new = function(name, t[name])
            if new is not None:
                assert new.shape == t[name].shape and new.dtype == t[name].dtype
                t[name] = new
                changed.append(name)
        save(file, t)
    return changed


def folder(path):
    """All tensors of a folder's files."""
    return {name: x for file in sorted(path.glob("*.safetensors")) for name, x in load(file).items()}


def load(path):
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + n])
    header.pop("__metadata__", None)
    return {k: np.frombuffer(raw[8 + n + e["data_offsets"][0]:8 + n + e["data_offsets"][1]], TYPES[e["dtype"]]).reshape(e["shape"]).copy()
            for k, e in header.items()}


def save(path, tensors):
    names = {np.dtype(t).name: name for name, t in TYPES.items()}
    header, body = {}, b""
    for k, v in tensors.items():
        data = np.ascontiguousarray(v).tobytes()
        header[k] = {"dtype": names[v.dtype.name], "shape": list(v.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
