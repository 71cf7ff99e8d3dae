"""safetensors files as numpy arrays, for tests that change a reference."""
import json
import struct

import numpy as np

TYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64}


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
