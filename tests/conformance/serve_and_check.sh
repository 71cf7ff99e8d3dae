#!/usr/bin/env bash
# Builds the bundled model's int8 engine, serves it, and runs the suite:  serve_and_check.sh PYTHON RESULT_DIR
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=$1 RESULTS=$2
MI=$PWD/build/release/metainfer
WORK=$(mktemp -d)
PIDS=()
finish() { kill "${PIDS[@]}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$WORK"; }
trap finish EXIT
"$MI" export --model-dir models/mini-m3 --output "$WORK/mir" --quiet >/dev/null
"$MI" quantize --model "$WORK/mir" --config scripts/quant_w8a8.yaml --calib models/mini-m3-eval/calib.jsonl --output "$WORK/w8a8" --no-compare --quiet >/dev/null
"$MI" build --model "$WORK/w8a8" --output "$WORK/engine" --quiet >/dev/null
# One thread: a token of this small model takes a fifth of a millisecond, and whoever judges when pieces arrive needs a core to receive them on.
SERVE="$MI serve --engine $WORK/engine --threads 1 --max-batch-size 32 --max-seq-len 2048 --model minimax-m3"

# start LOG [flags]: sets URL
start() {
  local log=$1; shift
  # shellcheck disable=SC2086
  $SERVE --port 0 "$@" >"$log" 2>&1 &
  PIDS+=($!)
  URL=
  for _ in $(seq 100); do
    URL=$(sed -n 's/.*listening on \(http:[^ ]*\).*/\1/p' "$log")
    [ -z "$URL" ] || return 0
    sleep 0.1
  done
  cat "$log"; return 1
}
rc=0
start "$WORK/open.log"
"$PYTHON" -m pytest tests/conformance -q --timeout 300 --base-url "$URL" --model minimax-m3 --server-cmd "$SERVE --port {port}" \
  --ignore tests/conformance/test_auth.py --junitxml "$RESULTS/conformance.xml" -o junit_family=xunit1 || rc=1
echo "a-key-for-the-tests" >"$WORK/keys"
start "$WORK/keys.log" --api-key-file "$WORK/keys"
"$PYTHON" -m pytest tests/conformance/test_auth.py -q --timeout 120 --base-url "$URL" --model minimax-m3 --api-key a-key-for-the-tests \
  --junitxml "$RESULTS/conformance_auth.xml" -o junit_family=xunit1 || rc=1
exit $rc
