# Shared by the scripts; source it. Says what is being done, and works as root or through sudo.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

if [ -t 1 ]; then BOLD=$'\e[1m'; PLAIN=$'\e[0m'; else BOLD=; PLAIN=; fi
say() { printf '%s== %s%s\n' "$BOLD" "$*" "$PLAIN"; }
die() { printf 'error: %s\n' "$*" >&2; exit 3; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "this needs root: run it as root or install sudo ($*)"
  fi
}

# cargo of the user's own toolchain first, Debian's otherwise.
[ -d "$HOME/.cargo/bin" ] && PATH="$HOME/.cargo/bin:$PATH"
JOBS=${JOBS:-$(nproc)}
VENV=$ROOT/.venv
