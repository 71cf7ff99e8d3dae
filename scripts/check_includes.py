#!/usr/bin/env python3
"""The arrows between rooms: each src/<room> may include its own headers, base, and the rooms in its row; nothing else.
Prints file:line and the forbidden arrow, exits 1; a room without a row fails too. Test files may besides include the rooms
in TESTS.

  check_includes.py [SOURCE_ROOT]
"""
import pathlib
import re
import sys

ROWS = {
    "base": [],
    "hw": [],
    "tensor": [],
    "text": [],
    "kernels": ["tensor", "hw"],
    "ir": ["tensor"],
    "artifact": ["tensor"],
    "model": ["ir", "tensor"],
    "compiler": ["ir", "tensor", "kernels", "artifact", "hw"],
    "exec": ["artifact", "tensor", "kernels", "hw"],
    "quant": ["model", "ir", "tensor", "text", "kernels", "compiler", "exec", "artifact", "hw"],
    "runtime": ["exec", "kernels", "hw", "text"],
    "server": ["runtime", "text"],
    "tools": ["quant", "model", "compiler", "runtime", "exec", "artifact", "ir", "kernels", "text", "hw", "tensor"],
    "cli": ["tools", "server", "quant", "compiler", "model", "runtime", "exec", "artifact", "ir", "text", "hw", "tensor"],
}
# What tests of a room may include besides.
TESTS = {"exec": ["ir", "compiler"], "server": ["exec", "hw"], "quant": ["hw"]}
INCLUDE = re.compile(r'\s*#\s*include\s+"([a-z_0-9]+)/')


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[1]) / "src"
    faults, files = [], 0
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".h", ".cc", ".inc"):
            continue
        files += 1
        room = path.relative_to(root).parts[0]
        if room not in ROWS:
            faults.append(f"{path.relative_to(root.parent)}: room '{room}' has no row in scripts/check_includes.py")
            continue
        allowed = {room, "base", *ROWS[room]}
        if path.stem.endswith(("_test", "_bench", "_fuzz")) or path.name.startswith(("testing", "fake")):
            allowed |= set(TESTS.get(room, []))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = INCLUDE.match(line)
            if found and found.group(1) in ROWS and found.group(1) not in allowed:
                faults.append(f"{path.relative_to(root.parent)}:{number}: {room} may not include {found.group(1)}")
    for fault in faults:
        print(fault)
    print(f"{files} files, {len(faults)} forbidden arrows")
    return 1 if faults or not files else 0


if __name__ == "__main__":
    sys.exit(main())
