"""Requests that schemathesis makes from /openapi.json, fitting ones and ones that are wrong in every field: no 5xx, nothing that is not described, and no hang."""
import json
import re
import subprocess
import sys

import pytest
from conftest import LONG, Server
from test_operations import long_answer, metrics, request, until

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"


def answer(server):
    return json.loads(request(server, "/v1/completions", long_answer(max_tokens=100, logprobs=2))[2])["choices"]


@pytest.mark.timeout(3600)
def test_every_operation(mini_int8, tmp_path):
    with Server(mini_int8, "--model", "m", "--max-seq-len", 128) as s:
        paths = json.loads(request(s, "/openapi.json")[2])["paths"]
        # It leaves out the one that it has the description from.
        operations = sum((method, path) != ("get", "/openapi.json") for path, methods in paths.items() for method in methods)
        before = answer(s)
        done = subprocess.run([sys.executable, "-m", "schemathesis.cli", "run", s.url + "/openapi.json", "--phases", "coverage,fuzzing", "--seed", "1",
                               "--max-examples", "500" if LONG else "10", "--request-timeout", "60", "--checks", CHECKS, "--no-color", "--generation-database", "none"],
                              capture_output=True, text=True, timeout=3500, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr
        assert re.search(rf"Operations: +{operations} selected / {operations} total", done.stdout), done.stdout
        assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 50 * operations
        until(lambda: metrics(s)["vllm:num_requests_running"] == metrics(s)["vllm:num_requests_waiting"] == metrics(s)["vllm:kv_cache_usage_perc"] == 0)
        assert answer(s) == before
