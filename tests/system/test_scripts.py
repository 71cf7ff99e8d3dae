"""What the build scripts say while they work."""
import subprocess
import threading

from conftest import ROOT

CARGO = """#!/bin/sh
echo "   Compiling something v1.0.0" >&2
for i in $(seq 100); do [ -e "{heard}" ] && break; sleep 0.1; done
[ -e "{heard}" ] || exit 1
mkdir -p "$CARGO_TARGET_DIR/release" && touch "$CARGO_TARGET_DIR/release/libmi_text.a"
"""
PROJECT = """cmake_minimum_required(VERSION 3.25)
project(x C)
find_package(Threads REQUIRED)
include({root}/cmake/rust.cmake)
"""


def test_cargo_is_heard_while_it_works(tmp_path):
    """It works for minutes, and ninja used to keep all that it said until the end."""
    heard = tmp_path / "heard"
    cargo = tmp_path / "cargo"
    cargo.write_text(CARGO.format(heard=heard))
    cargo.chmod(0o755)
    source = tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    for f in ("rust/Cargo.toml", "rust/Cargo.lock"):
        (source / f).parent.mkdir(exist_ok=True)
        (source / f).write_text("")
    build = tmp_path / "build"
    subprocess.run(["cmake", "-G", "Ninja", "-S", source, "-B", build, f"-DMI_CARGO={cargo}"], check=True, capture_output=True)
    ninja = subprocess.Popen(["ninja", "-C", build, "mi_rust_build"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(60, ninja.kill)
    timer.start()
    said = []
    for line in ninja.stdout:
        said.append(line)
        if "Compiling something" in line:
            heard.touch()
    timer.cancel()
    assert ninja.wait() == 0, "".join(said)
