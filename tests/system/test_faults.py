"""Killed at any moment, or out of disk: the old output or none, a clear sentence, nothing half-written."""
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from conftest import BINARY, EVAL, LONG, MODEL, RECIPE, build, run


def commands(mini_mir, out, recipe):
    return {
        "export": ["export", "--model-dir", MODEL, "--output", out],
        "quantize": ["quantize", "--model", mini_mir, "--config", recipe, "--calib", EVAL / "calib.jsonl", "--output", out, "--no-compare"],
        "build": ["build", "--model", mini_mir, "--output", out],
        "convert": ["convert", "--model", mini_mir, "--output", out],
    }


def snapshot(folder):
    if folder.is_file():
        return folder.read_bytes()
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def leftovers(folder, out):
    return [p.name for p in folder.iterdir() if p.name not in (out.name, "recipe.yaml")]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["int", "term", "kill"])
@pytest.mark.parametrize("command", ["export", "quantize", "build", "convert"])
def test_killed_at_any_moment(command, sig, mini_mir, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % ("per_token", "true"))
    out = tmp_path / "out"
    args = [BINARY, *map(str, commands(mini_mir, out, recipe)[command]), "--quiet"]
    began = time.time()
    subprocess.run(args, check=True, capture_output=True)
    whole = time.time() - began
    old = snapshot(out)
    rnd = random.Random(f"{command}{sig}")
    for _ in range(25 if LONG else 6):
        fresh = rnd.random() < 0.5
        if fresh:
            out.unlink() if out.is_file() else shutil.rmtree(out)
        process = subprocess.Popen(args + ([] if fresh else ["--force"]), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(rnd.random() * whole * 1.1)
        process.send_signal(sig)
        process.communicate(timeout=60)
        if out.exists():
            assert snapshot(out) == old        # the old one, or the new one, which has the same bytes
        else:
            assert fresh
        if sig != signal.SIGKILL:
            assert leftovers(tmp_path, out) == []
        subprocess.run(args + ["--force"], check=True, capture_output=True)
        assert snapshot(out) == old and leftovers(tmp_path, out) == []   # what kill -9 left is cleared by the next run


@pytest.fixture
def small_disk(tmp_path):
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.parametrize("command", ["export", "quantize", "build", "convert"])
def test_full_disk(command, mini_mir, small_disk, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % ("per_token", "true"))
    done = run(*commands(mini_mir, small_disk / "out", recipe)[command], "--quiet", ok=3)
    assert "free" in done.stderr or "disk is full" in done.stderr
    assert list(small_disk.iterdir()) == []


def test_output_folder_that_does_not_exist(mini_mir, tmp_path):
    done = run("build", "--model", mini_mir, "--output", tmp_path / "a" / "b", ok=4)
    assert str(tmp_path / "a") in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(mini_mir, tmp_path):
    tmp_path.chmod(0o555)
    run("build", "--model", mini_mir, "--output", tmp_path / "e", ok=3)
