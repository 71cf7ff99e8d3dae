"""The program as its users run it. Engines are built once per session into a temporary folder."""
import inspect
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
MODEL = ROOT / "models" / "mini-m3"
EVAL = ROOT / "models" / "mini-m3-eval"
BINARY = pathlib.Path(os.environ.get("METAINFER", ROOT / "build" / "release" / "metainfer"))
LONG = os.environ.get("METAINFER_TEST_LONG") == "1"


def pytest_configure(config):
    if not BINARY.exists():
        pytest.exit(f"{BINARY} is missing: run scripts/build first", returncode=2)


def run(*args, ok=0, env=None, timeout=600, **kwargs):
    """Runs metainfer; ok is the expected exit code (None: any)."""
    done = subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, **(env or {})}, **kwargs)
    if ok is not None:
        assert done.returncode == ok, f"{args} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def export(model_dir, out, *flags):
    run("export", "--model-dir", model_dir, "--output", out, "--force", "--quiet", *flags)
    return out


def build(mir, out, *flags):
    run("build", "--model", mir, "--output", out, "--force", "--quiet", *flags)
    return out


def quantize(mir, out, recipe, *flags):
    config = out.parent / (out.name + ".yaml")
    config.write_text(recipe)
    return run("quantize", "--model", mir, "--config", config, "--output", out, "--force", "--quiet", *flags)


class Server:
    """metainfer serve on a free port."""

    def __init__(self, engine, *flags, env=None):
        self.process = subprocess.Popen([BINARY, "serve", "--engine", str(engine), "--host", "127.0.0.1", "--port", "0", *map(str, flags)],
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})})
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"listening on (https?://\S+)", line)
            if found:
                self.url = found.group(1)
                return
        raise AssertionError("the server ended before it was ready:\n" + "".join(self.lines))

    def stop(self, sig=signal.SIGTERM, timeout=30):
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            out, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.lines.append(out or "")
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class MemoryGroup:
    """A control group that may take so many bytes, where one can be made; `program` is metainfer inside it."""

    def __init__(self, limit, folder):
        base = pathlib.Path("/sys/fs/cgroup")
        self.v2 = (base / "cgroup.controllers").exists()
        self.path = (base if self.v2 else base / "memory") / f"mi-test-{os.getpid()}"
        try:
            self.path.mkdir()
            (self.path / ("memory.max" if self.v2 else "memory.limit_in_bytes")).write_text(str(limit))
        except OSError as error:
            if self.path.exists():
                self.path.rmdir()
            pytest.skip(f"memory control groups cannot be made here: {error}")
        self.program = folder / "metainfer-in-group"
        self.program.write_text(f'#!/bin/sh\necho $$ > {self.path}/cgroup.procs && exec {BINARY} "$@"\n')
        self.program.chmod(0o755)

    def most(self):
        return int((self.path / ("memory.peak" if self.v2 else "memory.max_usage_in_bytes")).read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.path.rmdir()


def mounted(mount, size):
    """For fixtures: a small file system, where mounting one is allowed."""
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount], capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """Where fixtures of the session keep what they make. A test writes to its tmp_path: here two would meet under one name."""
    return tmp_path_factory.mktemp("engines")


def pytest_collection_modifyitems(items):
    for item in items:
        if "work" in inspect.signature(item.function).parameters:
            raise pytest.UsageError(f"{item.nodeid} takes `work`, the folder of the session's fixtures: take tmp_path")


@pytest.fixture(scope="session")
def mini_mir(work):
    return export(MODEL, work / "mini-mir", "--model-type", "minimax-m3")


RECIPE = "quant: {weight_scheme: per_channel, activation_scheme: %s, smooth_quant: {enable: %s, alpha: 0.6}}\n"


@pytest.fixture(scope="session")
def mini_w8a8(mini_mir, work):
    quantize(mini_mir, work / "mini-w8a8", RECIPE % ("per_token", "true"), "--calib", EVAL / "calib.jsonl")
    return work / "mini-w8a8"


@pytest.fixture(scope="session")
def mini_int8(mini_w8a8, work):
    return build(mini_w8a8, work / "mini-int8")


RECIPE_INT4 = "quant: {weight_bits: 4, group_size: %d, smooth_quant: {enable: %s, alpha: 0.3}}\n"


@pytest.fixture(scope="session")
def mini_w4a8(mini_mir, work):
    quantize(mini_mir, work / "mini-w4a8", RECIPE_INT4 % (128, "true"), "--calib", EVAL / "calib.jsonl", "--no-compare")
    return work / "mini-w4a8"


@pytest.fixture(scope="session")
def mini_int4(mini_w4a8, work):
    return build(mini_w4a8, work / "mini-int4")


@pytest.fixture(scope="session")
def mini_float(mini_mir, work):
    return build(mini_mir, work / "mini-float", "--precision", "fp32")


@pytest.fixture(scope="session")
def damaged(mini_int8, work):
    """An engine that can be described and not loaded: what is refused with it is refused before."""
    engine = work / "damaged"
    shutil.copytree(mini_int8, engine)
    weights = bytearray((engine / "weights.bin").read_bytes())
    weights[4096] ^= 1
    (engine / "weights.bin").write_bytes(weights)
    assert "weights.bin" in run("generate", "--engine", engine, "--prompt", "x", "--quiet", ok=4).stderr
    return engine


@pytest.fixture(scope="session")
def server(mini_int8):
    with Server(mini_int8, "--max-batch-size", 32, "--max-seq-len", 2048, "--model", "minimax-m3") as s:
        yield s


def read_json(path):
    return json.loads(pathlib.Path(path).read_text())
