"""Worker processes that compile one program after another: JAX and libtpu are loaded once for many.

libtpu may abort its process, and reads its dump options once per process. So there are workers for each kind of dump,
and a program that fails in a worker which has served others is tried once more in a new one: what it is then told is
its own doing. A worker that was killed, ran out of time or has served MOST programs is replaced. Each leads a
session of its own: Ctrl-C does not reach it, and what a program has forked ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

# Memory of a worker: 0.4 GB after the first program, 0.84 GB after 24 of both kernels.
MOST = 100


class Stopped(RuntimeError):
    """The workers were closed while a program was being compiled."""


class Workers:
    """Any number of threads may call `run`; each gets a worker of its own, an idle one where there is one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[_Worker]] = defaultdict(list)
        self._all: set[_Worker] = set()
        self._closed = False

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, job: dict[str, Any], *, dump: str, timeout_s: float) -> dict[str, Any]:
        """What a worker answers, or {"status": "crashed" or "timed out", "reason": ...}.

        Raises   Stopped: `close` was called.
        """
        worker = self._take(dump)
        used = worker.served > 0
        answer = self._ask(worker, job, timeout_s)
        if used and _doubtful(answer):
            answer = self._ask(self._start(dump), job, timeout_s)
        return answer

    def close(self) -> None:
        """Stop all workers, those at work too."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
        for worker in workers:
            worker.stop()

    def _ask(self, worker: _Worker, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        answer = worker.ask(job, timeout_s)
        with self._lock:
            if self._closed:
                raise Stopped("the workers were closed")
            keep = worker.alive and worker.served < MOST
            if keep:
                self._idle[worker.dump].append(worker)
            else:
                self._all.discard(worker)
        if not keep:
            worker.stop()
        return answer

    def _take(self, dump: str) -> _Worker:
        with self._lock:
            if self._idle[dump]:
                return self._idle[dump].pop()
        return self._start(dump)

    def _start(self, dump: str) -> _Worker:
        with self._lock:
            if self._closed:
                raise Stopped("the workers were closed")
            worker = _Worker(dump)
            self._all.add(worker)
        return worker


def _doubtful(answer: dict[str, Any]) -> bool:
    """May it be the doing of an earlier program in the same process? A dump without the kernel that was counted too."""
    no_kernels = bool(answer.get("traffic")) and answer.get("kernels") == []
    return answer["status"] == "crashed" or "dump_error" in answer or no_kernels


class _Worker:
    """One process, which reads a job per line and answers with a line."""

    def __init__(self, dump: str) -> None:
        self.dump = dump
        self.served = 0
        self.alive = True
        self._folder = tempfile.TemporaryDirectory(prefix="pallas-hub-worker-", ignore_cleanup_errors=True)
        self._stderr_path = Path(self._folder.name, "stderr")
        environment = os.environ | {
            "TMPDIR": self._folder.name,
            "PYTHONPATH": _python_path(),
            "PYTHONSAFEPATH": "1",  # a jax.py in the working folder is not JAX
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        environment.pop("LIBTPU_INIT_ARGS", None)
        with self._stderr_path.open("wb") as stderr:
            self._process: Any = subprocess.Popen(  # Any: its pipes are never None
                [sys.executable, "-m", "pallas_hub.bench.aot.worker", dump],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    def ask(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.served += 1
        said = self._stderr_path.stat().st_size
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            if not self._answers_within(timeout_s):
                self._kill()
                self._end()
                return {"status": "timed out", "reason": f"no answer from the compiler within {timeout_s:g} s"}
            return json.loads(self._process.stdout.readline())
        except (OSError, ValueError):  # the pipe is closed, or ended within a line
            code = self._end()
            stderr = self._stderr_path.read_bytes()[said:].decode(errors="replace")
            return {"status": "crashed", "reason": _last_words(code, stderr)}

    def _answers_within(self, timeout_s: float) -> bool:
        """Is there something to read, or the worker gone? What it forked may keep its pipe open."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if select.select([self._process.stdout], [], [], min(left, 1.0))[0]:
                return True
            if self._process.poll() is not None:
                raise BrokenPipeError("the worker ended without an answer")
        return False

    def stop(self) -> None:
        self._kill()
        self._end()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was still to be written has no reader
                pipe.close()
        self._folder.cleanup()

    def _end(self) -> int:
        """Its exit code. One that does not end by itself is killed."""
        self.alive = False
        try:
            return self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def _kill(self) -> None:
        """The worker, and what its programs have forked."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _python_path() -> str:
    """So that the worker finds this package also when it runs from a checkout."""
    import pallas_hub

    roots = [str(Path(pallas_hub.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(dict.fromkeys(root for root in roots if root))


def _last_words(code: int, stderr: str) -> str:
    if code == -signal.SIGKILL:
        return "the process was killed (out of memory?)"
    if code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
        return f"the process was killed (signal {-code})"
    # A fatal log line: F, date, time, process, place in the source], message.
    fatal = re.search(r"^F\d{4} [^]]*\] (.*)|(Check failed.*)", stderr, re.MULTILINE)
    text = (fatal[1] or fatal[2]) if fatal else _last_line(stderr)
    return f"{'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}: {text[:200]}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
