"""verify judges what it says it judges: references that were changed, cut, emptied or belong to another model."""
import json
import shutil

import numpy as np
import pytest
import tensors
from conftest import DATA, build, export, run
from test_cli import refused

MIXTRAL = DATA / "goldens" / "mixtral"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    d = tmp_path_factory.mktemp("verify")
    return build(export(MIXTRAL, d / "mir"), d / "engine", "--precision", "fp32")


@pytest.fixture
def reference(tmp_path):
    """change(function) -> the reference with it applied, its limits beside it."""
    def change(function):
        t = tensors.load(MIXTRAL / "golden.safetensors")
        function(t)
        tensors.save(tmp_path / "golden.safetensors", t)
        shutil.copy(MIXTRAL / "golden.json", tmp_path)
        return tmp_path / "golden.safetensors"
    return change


def verify(engine, file, ok):
    return run("verify", "--engine", engine, "--reference", file, "--json", "--quiet", ok=ok)


def test_unchanged_passes_with_every_row(engine, reference):
    report = json.loads(verify(engine, reference(lambda t: None), 0).stdout)
    t = tensors.load(MIXTRAL / "golden.safetensors")
    ends = [row["what"].split()[-1] for row in report["rows"]]
    assert all(row["judged"] for row in report["rows"])
    assert ends.count("experts") == ends.count("weights") == sum(k.endswith(".experts") for k in t)
    assert ends.count("logits") == ends.count("tokens") == 2


def shift(name, at, by):
    def change(t):
        t[name].flat[at] += by
    return change


@pytest.mark.parametrize("change,first", [
    (shift("seq0.hidden", -1, 1e-2), "output"), (shift("seq1.logits", 3, 1e-2), "logits"), (shift("seq0.layer1.experts", 0, 1), "seq0 layer 1 experts"),
    (shift("seq0.layer1.weights", 0, 1e-2), "seq0 layer 1 weights"), (shift("seq1.greedy_tokens", 0, 1), "seq1 greedy tokens"),
    (shift("seq0.logits", 0, np.float32("nan")), "logits")])
def test_a_changed_number_is_named(engine, reference, change, first):
    assert first in json.loads(verify(engine, reference(change), 1).stdout)["first_difference"]


def cut(name):
    def change(t):
        t[name] = t[name][:len(t[name]) // 2]
    return change


def empty(name):
    def change(t):
        t[name] = t[name][:0]
    return change


def inputs_only(t):
    for name in list(t):
        if not name.endswith("input_ids"):
            del t[name]


def of_another_layer(t):
    t["seq0.layer9.experts"] = t["seq0.layer1.experts"]


@pytest.mark.parametrize("change,words", [
    (cut("seq0.layer1.weights"), ["seq0.layer1.weights", "another model"]), (cut("seq0.layer1.experts"), ["another model"]), (cut("seq0.logits"), ["another model"]),
    (cut("seq0.hidden"), ["another model"]), (empty("seq0.greedy_tokens"), ["greedy_tokens is empty"]), (inputs_only, ["nothing that this engine is judged by"]),
    (of_another_layer, ["seq0.layer9.experts", "another model"])])
def test_a_reference_that_cannot_be_compared_is_refused(engine, reference, change, words):
    refused(verify(engine, reference(change), 4), 4, *words)


def test_expert_choices_of_a_dense_model_are_refused(tmp_path):
    dense = DATA / "goldens" / "qwen3"
    made = build(export(dense, tmp_path / "mir"), tmp_path / "engine", "--precision", "fp32")
    t = tensors.load(dense / "golden.safetensors")
    t["seq0.layer0.experts"] = np.zeros((len(t["seq0.input_ids"]), 2), np.int32)
    tensors.save(tmp_path / "r.safetensors", t)
    refused(verify(made, tmp_path / "r.safetensors", 4), 4, "routes nothing", "another model")


def test_an_engine_as_the_model_comes_is_verified(mini_mir, tmp_path):
    """Without --precision the weights stay bfloat16 and so is the cache: that rounds, and is judged like rounding."""
    made = build(mini_mir, tmp_path / "engine")
    report = json.loads(run("verify", "--engine", made, "--model", mini_mir, "--json", "--quiet").stdout)
    assert report["ok"] and 0 < report["mean_kl"] < 0.02
