"""metainfer bench: the protocol, the regression gate, the history. No test judges how fast the machine is."""
import json
import os
import re
import stat
import subprocess

import pytest
from conftest import BINARY, mounted, run

QUICK = ["--prefill", "16", "--decode", "4", "--batch", "2", "--rounds", "2", "--quiet", "--no-checksums"]
GATE = [*QUICK[:6], "--rounds", "5", "--quiet", "--no-checksums", "--no-probe"]


def lines(done):
    return [json.loads(l) for l in done.stdout.splitlines() if l.startswith("{")]


def error(done, code, *words):
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    text = [l for l in done.stderr.splitlines() if l.startswith("error: ")]
    assert len(text) == 1, done.stderr
    for word in words:
        assert word in text[0], f"{word!r} not in {text[0]!r}"


def test_protocol_limits_and_memory(mini_int8):
    got = lines(run("bench", "--engine", mini_int8, *QUICK, "--json"))
    assert got[0]["version"].startswith("metainfer ") and got[0]["load_s"] > 0
    rows = {(r["metric"], r["n"]): r for r in got if "metric" in r}
    assert set(rows) == {("prefill", 16), ("decode", 4), ("batch", 2)}
    for (metric, _), r in rows.items():
        assert r["tok_s"] > 0 and r["ttft_s"] > 0 and ("total_tok_s" in r) == (metric != "prefill")
        assert r["tok_s_min"] <= r["tok_s"] <= r["tok_s_max"] and len(r["tok_s_rounds"]) == 2
        assert r["gops"] > 0 and r["share"] > 0 and r["bound"] in ("memory", "arithmetic")
    machine = next(r["machine"] for r in got if "machine" in r)
    for name in ("read_gbs", "int8_gops", "f32_gflops"):
        assert machine["limits"][name]["one"] > 0 and machine["limits"][name]["all"] > 0
    memory = next(r["memory"] for r in got if "memory" in r)
    notes = [r["note"] for r in got if "note" in r]
    assert (memory["peak_bytes"] or 0) > os.path.getsize(mini_int8 / "weights.bin") / 2 or notes


def test_without_probe_nothing_is_claimed(mini_int8):
    got = lines(run("bench", "--engine", mini_int8, *QUICK, "--json", "--no-probe"))
    assert all("share" not in r for r in got)
    assert "limits" not in next(r["machine"] for r in got if "machine" in r)
    assert "not measured" in run("bench", "--engine", mini_int8, *QUICK, "--no-probe").stdout


def test_limits_follow_the_forced_isa(mini_int8):
    got = lines(run("bench", "--engine", mini_int8, *QUICK, "--json", env={"MI_FORCE_ISA": "scalar"}))
    machine = next(r["machine"] for r in got if "machine" in r)
    assert machine["isa"] == "scalar" and "scalar" in machine["limits"]["int8_gops"]["kernel"]
    assert any("MI_FORCE_ISA" in n for n in machine["limits"]["notes"])


def test_engine_is_asked_for(tmp_path):
    error(run("bench", ok=2), 2, "--engine")


@pytest.mark.parametrize("flags", [["--prefill", "8"], ["--decode", "8"], ["--batch", "8"], ["--save", "x"], ["--baseline", "x"],
                                   ["--against", BINARY], ["--history", "x"], ["--force"]])
def test_sweep_takes_no_cases_and_is_not_kept(flags, damaged):
    error(run("bench", "--engine", damaged, "--sweep", *flags, ok=2), 2, "--sweep", flags[0])


def test_flags_that_need_another_are_refused_without_it(damaged, tmp_path):
    for flags in (["--against-engine", tmp_path], ["--other-engine"], ["--threshold", "5"]):
        error(run("bench", "--engine", damaged, *flags, ok=2), 2, flags[0])
    same = ["--save", tmp_path / "x", "--history", tmp_path / "x"]
    error(run("bench", "--engine", damaged, *same, ok=2), 2, "same file")
    error(run("bench", "--json", "history", tmp_path / "x", ok=2), 2, "--json")


def test_cases_that_cannot_be_measured_are_refused_before_loading(damaged):
    for tool in ("bench", "profile"):
        for flags, word in (["--prefill", "0"], "small"), (["--prefill", "9999999"], "positions"), (["--batch", "0"], "small"):
            error(run(tool, "--engine", damaged, *flags, ok=2), 2, word)
    for flags, word in (["--decode", "1"], "small"), (["--prefill", "", "--decode", "", "--batch", ""], "nothing to measure"):
        error(run("bench", "--engine", damaged, *flags, ok=2), 2, word)
        error(run("bench", "--engine", damaged, *flags, "--against", BINARY, ok=2), 2, word)
    error(run("profile", "--engine", damaged, "--prefill", "", "--batch", "", ok=2), 2, "nothing to measure")


def test_a_history_is_checked_before_loading(damaged, tmp_path):
    (tmp_path / "list.txt").write_text("milk\n")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, word in ("list.txt", "line 1"), ("folder", "regular"), ("pipe", "regular"), ("none/x", "does not exist"):
        error(run("bench", "--engine", damaged, "--history", tmp_path / name, ok=4), 4, word)
    assert (tmp_path / "list.txt").read_text() == "milk\n"


@pytest.fixture
def read_only(tmp_path):
    for mount in mounted(tmp_path / "mount", "1m"):
        (mount / "runs.jsonl").write_text("")
        subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
        yield mount


def test_a_history_that_cannot_be_written_to_is_refused_before_loading(damaged, read_only):
    for name in "runs.jsonl", "new.jsonl":
        error(run("bench", "--engine", damaged, "--history", read_only / name, ok=3), 3, str(read_only), "Read-only")


def test_outputs_that_cannot_be_written_are_refused_before_measuring(mini_int8, tmp_path):
    for path, code, word in (tmp_path / "none" / "x.json", 4, "none"), (tmp_path, 4, "regular"):
        done = run("bench", "--engine", mini_int8, *GATE, "--force", "--save", path, ok=code)
        error(done, code, word)
        assert "prefill" not in done.stdout
        done = run("profile", "--engine", mini_int8, "--no-probe", "--quiet", "--force", "--html", path, ok=code)
        error(done, code, word)
    same = ["--html", tmp_path / "x", "--chrome-trace", tmp_path / "x"]
    error(run("profile", "--engine", mini_int8, "--no-probe", "--quiet", *same, ok=2), 2, "same file")
    assert list(tmp_path.iterdir()) == []


def shifted(record, path, factor, **changes):
    """The record with speeds times factor (and times divided by it), as a file."""
    r = json.loads(json.dumps(record))
    for row in r["rows"]:
        row["tok_s"] = [v * factor for v in row["tok_s"]]
        row["total_tok_s"] = [v * factor for v in row["total_tok_s"]]
        row["ttft_s"] = [v / factor for v in row["ttft_s"]]
    for key, value in changes.items():
        node = r
        *parents, last = key.split("__")
        for p in parents:
            node = node[p]
        node[last] = value
    path.write_text(json.dumps(r))
    return path


@pytest.fixture(scope="module")
def saved(mini_int8, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "base.json"
    run("bench", "--engine", mini_int8, *GATE, "--save", path)
    return path


def test_gate(mini_int8, saved, tmp_path):
    """A baseline a hundred times slower passes and one a hundred times faster fails, whatever this machine is doing now."""
    record = json.loads(saved.read_text())
    again = ["bench", "--engine", mini_int8, *GATE]
    slow = run(*again, "--baseline", shifted(record, tmp_path / "slow.json", 0.01))
    assert "no regression" in slow.stdout
    fast = run(*again, "--baseline", shifted(record, tmp_path / "fast.json", 100), ok=1)
    assert "REGRESSION" in fast.stdout
    verdict = lines(run(*again, "--json", "--baseline", tmp_path / "fast.json", ok=1))[-1]["compare"]
    assert verdict["regressed"] and all(r["low"] <= r["ratio"] <= r["high"] for r in verdict["rows"])


def test_gate_refuses_what_cannot_be_compared(mini_int8, mini_float, saved, tmp_path):
    record = json.loads(saved.read_text())
    again = ["bench", "--engine", mini_int8, *GATE, "--baseline"]
    error(run(*again, shifted(record, tmp_path / "a.json", 1, machine__cpu="Other CPU"), ok=3), 3, "Other CPU", "--against")
    error(run(*again, shifted(record, tmp_path / "b.json", 1, machine__threads=99), ok=3), 3, "--threads 99")
    error(run(*again, shifted(record, tmp_path / "c.json", 1, settings__prefill=[99]), ok=2), 2, "--prefill 99")
    error(run("bench", "--engine", mini_float, *GATE, "--baseline", saved, ok=2), 2, "another engine", "--other-engine")
    (tmp_path / "d.json").write_text("{}")
    error(run(*again, tmp_path / "d.json", ok=4), 4, "d.json", "--save")
    error(run(*again, tmp_path / "none.json", ok=None), 4, "none.json")


def test_save_keeps_existing_files(mini_int8, saved):
    before = saved.read_text()
    error(run("bench", "--engine", mini_int8, *GATE, "--save", saved, ok=4), 4, "--force")
    error(run("bench", "--engine", mini_int8, *QUICK, "--save", saved, "--force", ok=2), 2, "--rounds 2")
    assert saved.read_text() == before


def test_against_itself_and_against_a_liar(mini_int8, tmp_path):
    """In turns with the same program nothing is surely a hundredfold worse; with one that claims a hundredfold speed, it is."""
    flags = ["bench", "--engine", mini_int8, *GATE]
    same = run(*flags, "--threshold", "90", "--against", BINARY)
    assert "in turns" in same.stdout and "no regression" in same.stdout
    liar = tmp_path / "liar"
    liar.write_text("#!/bin/sh\n"
                    "echo '{\"version\": \"liar 1\", \"load_s\": 0}'\n"
                    "for m in 'prefill\", \"n\": 16' 'decode\", \"n\": 4' 'batch\", \"n\": 2'; do\n"
                    "  echo \"{\\\"metric\\\": \\\"$m, \\\"tok_s\\\": 1e9, \\\"ttft_s\\\": 1e-9, \\\"total_tok_s\\\": 1e9}\"\ndone\n")
    liar.chmod(liar.stat().st_mode | stat.S_IXUSR)
    worse = run(*flags, "--against", liar, ok=1)
    assert "liar 1" in worse.stdout and "REGRESSION" in worse.stdout
    error(run(*flags, "--against", tmp_path / "none", ok=3), 3, "none")


# Of bench, what is not for a program that it runs: cases and rounds it is given in any case, the rest is this program's.
OURS = {"--engine", "--prefill", "--decode", "--batch", "--rounds", "--json", "--no-probe", "--sweep", "--save", "--baseline", "--against",
        "--against-engine", "--threshold", "--other-engine", "--history", "--force", "--help",
        "--expert-cache", "--expert-profile"}    # refused beside --against


def test_both_programs_are_told_every_flag_of_the_engine(mini_int8, tmp_path):
    values = {"--threads": "1", "--kv-type": "bf16", "--attention-order": "pairs", "--weights": "map", "--memory-pool": "false", "--no-numa": None,
              "--no-checksums": None}
    known = set(re.findall(r"^  +(?:-\w,)?(--[a-z-]+)", run("bench", "--help").stdout, re.M))
    assert known - OURS - {"--quiet"} == set(values), "a new flag of bench: does it change what is measured?"
    spy = tmp_path / "spy"
    spy.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/said\nexec {BINARY} "$@"\n')
    spy.chmod(0o755)
    given = [word for flag, value in values.items() for word in (flag, value) if word]
    run("bench", "--engine", mini_int8, *GATE[:8], "--quiet", "--no-probe", "--threshold", "90", *given, "--against", spy)
    said = (tmp_path / "said").read_text().splitlines()
    assert len(said) == 5
    for line in said:
        for flag, value in values.items():
            assert (f"{flag} {value}" if value else flag) in line, line


def test_a_baseline_holds_for_rounds_in_turns(mini_int8, saved):
    run("bench", "--engine", mini_int8, *GATE, "--threshold", "90", "--against", BINARY, "--baseline", saved)


def test_history(mini_int8, tmp_path):
    runs = tmp_path / "runs.jsonl"
    for _ in range(2):
        run("bench", "--engine", mini_int8, *QUICK, "--no-probe", "--history", runs)
    assert len(runs.read_text().splitlines()) == 2
    shown = run("bench", "history", runs, "--html", tmp_path / "runs.html").stdout
    assert "prefill 16" in shown and "batch 2" in shown
    page = (tmp_path / "runs.html").read_text()
    assert "<svg" in page and "<script" not in page and not re.search(r"(src|href)=", page)
    error(run("bench", "history", runs, "--html", tmp_path / "runs.html", ok=4), 4, "--force")
    (tmp_path / "list.txt").write_text("milk\n")
    error(run("bench", "--engine", mini_int8, *QUICK, "--history", tmp_path / "list.txt", ok=4), 4, "list.txt")
    assert (tmp_path / "list.txt").read_text() == "milk\n"


def test_sweep(mini_int8):
    cells = [r["sweep"] for r in lines(run("bench", "--engine", mini_int8, "--sweep", "--rounds", "1", "--json", "--no-probe", "--no-checksums")) if "sweep" in r]
    assert [(c["prompt"], c["batch"]) for c in cells] == [(p, b) for p in (1, 8, 64, 512) for b in (1, 4, 16)]
    assert all(c["prefill_tok_s"] > 0 and c["decode_tok_s"] > 0 for c in cells)
