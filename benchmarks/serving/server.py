"""`metainfer serve` as a child process, and what /proc and /metrics say of it."""
import pathlib
import re
import subprocess
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "release" / "metainfer"


class Server:
    def __init__(self, engine, *flags, program=PROGRAM):
        self.process = subprocess.Popen([str(program), "serve", "--engine", str(engine), "--host", "127.0.0.1", "--port", "0", *map(str, flags)],
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"listening on http://([^:]+):(\d+)", line):
                self.host, self.port = found.group(1), int(found.group(2))
                threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()
                return
        self.process.wait()
        raise RuntimeError("the server did not start:\n" + "".join(self.lines))

    @property
    def pid(self):
        return self.process.pid

    def alive(self):
        return self.process.poll() is None

    def stop(self, seconds=60):
        """Exit code after SIGTERM."""
        self.process.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.alive():
            self.stop()


def memory(pid):
    """Bytes of the process that no file backs, swapped ones included: what a leak grows and the page cache does not."""
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = dict(re.findall(r"^(\w+): +(\d+) kB", text, re.M))
    return 1024 * (int(kb["Anonymous"]) + int(kb["Swap"]))


def descriptors(pid):
    return sum(1 for _ in pathlib.Path(f"/proc/{pid}/fd").iterdir())


def threads(pid):
    return sum(1 for _ in pathlib.Path(f"/proc/{pid}/task").iterdir())


def parse_metrics(text):
    """{(name, (sorted label pairs without model_name)): value}"""
    values = {}
    for name, labels, value in re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^}\n]*)\})? (\S+)$", text, re.M):
        pairs = tuple(sorted(p for p in re.findall(r'([a-z_]+)="([^"]*)"', labels) if p[0] != "model_name"))
        values[name, pairs] = float(value)
    return values
