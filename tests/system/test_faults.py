"""Killed at any moment, or out of disk: the old output or none, a clear sentence, nothing half-written."""
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from conftest import BINARY, EVAL, LONG, MODEL, RECIPE, build, mounted, run


def commands(mini_mir, out, recipe):
    spread = recipe.with_name("recipe-gptq.yaml")
    spread.write_text("quant: {rounding: gptq, calibration_samples: 16, calibration_length: 64}\n")
    return {
        "export": ["export", "--model-dir", MODEL, "--output", out],
        "quantize": ["quantize", "--model", mini_mir, "--config", recipe, "--calib", EVAL / "calib.jsonl", "--output", out, "--no-compare"],
        "quantize-gptq": ["quantize", "--model", mini_mir, "--config", spread, "--output", out],   # an engine of every layer, twice
        "build": ["build", "--model", mini_mir, "--output", out],
        "convert": ["convert", "--model", mini_mir, "--output", out],
    }


def snapshot(folder):
    if folder.is_file():
        return folder.read_bytes()
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def leftovers(folder, out):
    return [p.name for p in folder.iterdir() if p.name not in (out.name, "recipe.yaml", "recipe-gptq.yaml")]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["int", "term", "kill"])
@pytest.mark.parametrize("command", ["export", "quantize", "quantize-gptq", "build", "convert"])
def test_killed_at_any_moment(command, sig, mini_mir, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("quant: {smooth_quant: {alpha: 0.6}, calibration_samples: 32}\n")     # most moments are of the writing
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


def test_what_a_killed_run_left_of_its_layers_is_cleared(mini_mir, tmp_path):
    """Killed while the engine of a layer is there: old output or none, and the next run takes the rest away."""
    out, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    args = [BINARY, *map(str, commands(mini_mir, out, recipe)["quantize-gptq"]), "--quiet"]
    for _ in range(20):
        process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(".piece" in p.name for p in tmp_path.iterdir()):
            time.sleep(0.001)
        process.kill()
        process.wait()
        if any(".piece" in p.name for p in tmp_path.iterdir()):
            break
    else:
        raise AssertionError("no run was caught with the engine of a layer on disk")
    assert not out.exists()
    subprocess.run(args, check=True, capture_output=True)
    assert out.exists() and leftovers(tmp_path, out) == []


@pytest.fixture
def small_disk(tmp_path):
    yield from mounted(tmp_path / "disk", "4m")


@pytest.fixture
def disk_for_the_output_only(tmp_path):
    yield from mounted(tmp_path / "disk", "14m")


@pytest.mark.parametrize("command", ["export", "quantize", "quantize-gptq", "build", "convert"])
def test_full_disk(command, mini_mir, small_disk, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % ("per_token", "true"))
    done = run(*commands(mini_mir, small_disk / "out", recipe)[command], "--quiet", ok=3)
    assert "free" in done.stderr or "disk is full" in done.stderr
    assert list(small_disk.iterdir()) == []


def test_disk_that_holds_the_output_but_no_engine_of_a_layer(mini_mir, disk_for_the_output_only, tmp_path):
    done = run(*commands(mini_mir, disk_for_the_output_only / "out", tmp_path / "recipe.yaml")["quantize-gptq"], "--quiet", ok=3)
    errors = [l for l in done.stderr.splitlines() if l.startswith("error: ")]
    assert len(errors) == 1 and "free" in errors[0] and str(disk_for_the_output_only) in errors[0]
    assert list(disk_for_the_output_only.iterdir()) == []


def test_output_folder_that_does_not_exist(mini_mir, tmp_path):
    done = run("build", "--model", mini_mir, "--output", tmp_path / "a" / "b", ok=4)
    assert str(tmp_path / "a") in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(mini_mir, tmp_path):
    tmp_path.chmod(0o555)
    run("build", "--model", mini_mir, "--output", tmp_path / "e", ok=3)
