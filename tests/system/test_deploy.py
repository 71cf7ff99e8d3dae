"""What deploy/ and the Dockerfile promise, held against the program."""
import configparser
import json
import os
import pathlib
import re
import shutil
import subprocess
import urllib.request

import pytest
import yaml
from conftest import BINARY, ROOT, run

DEPLOY = ROOT / "deploy"
DOCS = ROOT / "docs" / "operations.md"
PREFIXES = ("vllm:", "metainfer:", "process_")
METRIC = re.compile(r"\b((?:vllm|metainfer):[a-z0-9_]+|process_[a-z_]+)")
SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def served(server):
    """Names of /metrics, with the parts of histograms."""
    urllib.request.urlopen(urllib.request.Request(server.url + "/v1/completions", b'{"model":"minimax-m3","prompt":"a","max_tokens":1}',
                                                  {"Content-Type": "application/json"}), timeout=60).read()
    text = urllib.request.urlopen(server.url + "/metrics", timeout=20).read().decode()
    return {"series": set(re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)[{ ]", text, re.M)), "families": dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M)),
            "labels": {n: set(re.findall(r'([a-z_]+)="', l)) for n, l in re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}\n]*)\}", text, re.M)}}


def expressions():
    dashboard = json.loads((DEPLOY / "grafana" / "metainfer.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for rule in yaml.safe_load((DEPLOY / "helm-values" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]:
        yield "adapter", rule["seriesQuery"]
        yield "adapter", rule["metricsQuery"]


def test_dashboards_and_alerts_ask_for_what_is_served(served):
    asked = list(expressions())
    assert len(asked) > 25
    for where, expression in asked:
        names = METRIC.findall(expression)
        assert names, where
        for name in names:
            # Counters that an event has yet to give a first value are families with labels alone: api_requests_total.
            assert name in served["series"], f"{where}: {name}"
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}"), where
        for group in re.findall(r"by \(([^)]*)\)", expression):
            for label in re.split(r",\s*", group):
                assert label == "instance" or any(label in served["labels"][n] for n in names), f"{where}: {label}"


def test_page_asks_for_what_is_served(served):
    script = (ROOT / "src" / "server" / "ui" / "dashboard.js").read_text()
    later = {"vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "metainfer:expert_tokens_total"}   # drawn where a server has them
    for name in set(METRIC.findall(script)) - later:
        assert name in served["families"], name


def test_every_metric_is_documented(served):
    documented = set(METRIC.findall(DOCS.read_text()))
    assert set(served["families"]) - documented == set()
    for name in documented - {"metainfer:access_log_dropped_total", "metainfer:traffic_dropped_total", "metainfer:expert_tokens_total", "metainfer:fallback_info"}:     # there when asked for, or needed, only
        assert name in served["families"] or name.removesuffix("_bucket") in served["families"], f"{DOCS.name} names {name}, which is not served"


def serve_flags():
    return set(re.findall(r"(--[a-z][a-z0-9-]*)", run("serve", "--help").stdout))


def test_units_and_manifests_use_flags_that_exist():
    known = serve_flags()
    service = configparser.ConfigParser(strict=False, interpolation=None, allow_no_value=True)
    service.optionxform = str
    service.read(DEPLOY / "systemd" / "metainfer.service")
    command = service["Service"]["ExecStart"].split()
    assert command[1] == "serve"
    checked = [a for a in command if a.startswith("--")]
    assert int(service["Service"]["WatchdogSec"]) > float(command[command.index("--watchdog-seconds") + 1])
    assert int(service["Service"]["TimeoutStopSec"]) > float(command[command.index("--drain-seconds") + 1])
    for document in manifests():
        if document["kind"] != "Deployment":
            continue
        pod = document["spec"]["template"]["spec"]
        arguments = pod["containers"][0]["args"]
        assert arguments[0] == "serve"
        checked += [a for a in arguments if a.startswith("--")]
        assert pod["terminationGracePeriodSeconds"] > float(arguments[arguments.index("--drain-seconds") + 1]) + 5
    checked += re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)", " ".join(l for l in DOCS.read_text().splitlines() if "metainfer serve" in l or l.startswith("| `--")))
    assert len(checked) > 12
    for flag in checked:
        assert flag in known, flag
    # What no file repeats is refused by the program itself; this one gets as far as the engine that is not there.
    done = run(*command[1:command.index("--engine")], "--engine", "/nonexistent/engine", *(a for a in command[command.index("--engine") + 2:] if a not in
               ("--api-key-file", "/etc/metainfer/keys")), "--port", "0", ok=4, timeout=60)
    assert "/nonexistent/engine" in done.stderr


def manifests():
    return [d for f in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for d in yaml.safe_load_all(f.read_text())]


def test_manifests_fit_together():
    documents = {(d["kind"], d["metadata"]["name"]): d for d in manifests()}
    deployment = documents["Deployment", "metainfer"]
    pod = deployment["spec"]["template"]
    container = pod["spec"]["containers"][0]
    labels = pod["metadata"]["labels"].items()
    for kind in ("Service", "PodDisruptionBudget"):
        selector = documents[kind, "metainfer"]["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= labels
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert str(ports["http"]) == container["args"][container["args"].index("--port") + 1]
    assert documents["Service", "metainfer"]["spec"]["ports"][0]["targetPort"] in ports
    for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
    mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
    engine = container["args"][container["args"].index("--engine") + 1]
    keys = pathlib.PurePath(container["args"][container["args"].index("--api-key-file") + 1])
    assert ("PersistentVolumeClaim", mounts[engine]["persistentVolumeClaim"]["claimName"]) in documents
    secret = documents["Secret", mounts[str(keys.parent)]["secret"]["secretName"]]
    assert keys.name in secret["stringData"]
    scaler = documents["HorizontalPodAutoscaler", "metainfer"]["spec"]
    assert (scaler["scaleTargetRef"]["kind"], scaler["scaleTargetRef"]["name"]) == ("Deployment", "metainfer")
    adapter = yaml.safe_load((DEPLOY / "helm-values" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] in [r["name"]["as"] for r in adapter]
    monitor = documents["PodMonitor", "metainfer"]["spec"]["podMetricsEndpoints"][0]
    assert monitor["port"] in ports
    credentials = monitor["authorization"]["credentials"]
    assert credentials["key"] in documents["Secret", credentials["name"]]["stringData"]


def test_open_paths_of_probes_answer(server):
    for path in ("/health", "/ready"):
        assert urllib.request.urlopen(server.url + path, timeout=20).status == 200


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_units_are_legal(tmp_path):
    for unit in ("metainfer.service", "metainfer.socket"):
        text = (DEPLOY / "systemd" / unit).read_text().replace("/usr/local/bin/metainfer", str(BINARY)).replace("User=metainfer", "User=root").replace("Group=metainfer", "Group=root")
        (tmp_path / unit).write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", tmp_path / "metainfer.service"], capture_output=True, text=True,
                          env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"})
    assert not [l for l in done.stderr.splitlines() if "metainfer" in l], done.stderr


def test_image_has_the_libraries_of_the_program():
    dockerfile = (ROOT / "Dockerfile").read_text()
    base = {"libc6", "libstdc++6", "libgcc-s1", "zlib1g"}        # of debian:12-slim
    if "12 (bookworm)" not in pathlib.Path("/etc/os-release").read_text():
        pytest.skip("the image is Debian 12, this machine is not")
    needed = subprocess.run(["ldd", BINARY], capture_output=True, text=True, check=True).stdout
    for path in re.findall(r"=> (/\S+)", needed):
        owner = subprocess.run(["dpkg", "-S", os.path.realpath(path)], capture_output=True, text=True)
        package = owner.stdout.split(":")[0]
        assert package in base or re.search(rf"(^|\s){re.escape(package)}(\s|$)", dockerfile), f"{path} is of {package}, which the Dockerfile does not install"


def test_health_check_of_the_image(server):
    """Its command, pointed at a server here: well and ill are told apart."""
    line = re.search(r'^HEALTHCHECK .*?CMD (\[.*\])$', (ROOT / "Dockerfile").read_text(), re.M)
    command = json.loads(line.group(1))
    port = server.url.rsplit(":", 1)[1]
    assert subprocess.run([a.replace("/8000", "/" + port) for a in command], timeout=20).returncode == 0
    assert subprocess.run([a.replace("/8000", "/1") for a in command], capture_output=True, timeout=20).returncode != 0
