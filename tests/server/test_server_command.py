"""`pallas-hub serve` as a process: what it prints, how it stops, how it fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from server_tools import SERVE, client_env, request, run_python, serving, start_serve


def fails(*options: str, env: dict[str, str] | None = None) -> str:
    """The one line on stderr of a serve that cannot start."""
    process = start_serve(Path(options[0]), *options[1:], env=env)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, ""), error
    assert error.count("\n") == 1, error
    return error.strip()


def test_it_prints_where_it_is_and_answers_there(tmp_path: Path) -> None:
    with serving(tmp_path / "s", "--trust", "acme", "--trust", "other") as (process, url):
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(4)]
        assert lines[0] == f"for the clients    export HF_ENDPOINT={url}"
        assert lines[1] == "trusted publishers acme, other"
        assert lines[2] == "writes             by anybody: there is no authentication"
        assert lines[3].startswith("for tests, air-gapped clusters and development; stop with Ctrl-C")
        assert url.startswith("http://127.0.0.1:")
        assert HfApi(endpoint=url).get_organization_overview("other").trustedKernelPublisher is True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "s") as (process, url):
        assert request("GET", url)[0] == 200
        process.send_signal(number)
        out, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (0, "")
    assert out.endswith("stopped\n")


def test_a_request_at_work_is_finished_before_the_stop(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as (process, url):
        HfApi(endpoint=url, token=False).create_repo("acme/a", repo_type="kernel")
        from server_tools import commit_lines

        body = commit_lines({"a": b"x" * 1000})
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            head = (
                f"POST /api/kernels/acme/a/commit/main HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            sock.sendall(head.encode() + body[:100])
            assert request("GET", url)[0] == 200  # by now the server has read the head of the first request
            process.send_signal(signal.SIGTERM)
            sock.sendall(body[100:])
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"200 OK" in answer
    assert b"commitOid" in answer


def test_a_port_in_use_is_named_with_the_mend(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert fails(str(tmp_path / "s"), "--port", str(port)) == (
            f"pallas-hub serve: port {port} on 127.0.0.1 is in use. Choose another one with --port, or --port 0 for "
            "a free one."
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "port must be 0 to 65535; got 70000. Choose another one with --port"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1, port 8787: .* Give an address of this machine"),
        (["--host", "no-such-host.invalid"], "cannot listen on no-such-host.invalid, port 8787"),
        (["--max-commit-mb", "0"], "--max-commit-mb must be at least 1; got 0"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    import re

    assert re.match(f"pallas-hub serve: {message}", fails(str(tmp_path / "s"), *options))


def test_a_store_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert fails(str(tmp_path / "f")) == (
        f"pallas-hub serve: store {tmp_path}/f is a file, not a directory. Choose another one with --store DIR."
    )


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    drop = "import os; os.getuid() or (os.setgid(65534), os.setuid(65534)); "  # root may write everywhere
    closed.parent.chmod(0o755)
    for parent in closed.parents:
        if parent.stat().st_uid == os.getuid() and str(parent) != "/" and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    env = client_env(tmp_path, "http://unused")
    code = SERVE.replace("import argparse, sys; from", f"import argparse, sys, pallas_hub.registry.server; {drop}from")
    result = run_python(code, env, "serve", "--store", str(closed / "s"), "--port", "0")
    assert result.returncode == 1
    assert result.stderr == (
        f"pallas-hub serve: store {closed}/s cannot be used: Permission denied. Choose a directory that you may "
        "write to with --store DIR.\n"
    )


def test_other_hosts_than_loopback_get_a_warning(tmp_path: Path) -> None:
    process = start_serve(tmp_path / "s", "--host", "0.0.0.0", "--port", "0")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving http://0.0.0.0:")
    process.terminate()
    _, error = process.communicate(timeout=30)
    assert error == (
        "warning: 0.0.0.0 can be reached from other machines, without encryption; anybody may publish code there. "
        "For tests, air-gapped clusters and development only.\n"
    )


def test_the_token_can_come_from_the_environment(tmp_path: Path) -> None:
    process = start_serve(tmp_path / "s", "--port", "0", env={"PALLAS_HUB_SERVE_TOKEN": "s3cret"})
    assert process.stdout is not None
    url = process.stdout.readline().split()[1]
    try:
        assert request("POST", f"{url}/api/repos/create", b"{}")[0] == 401
        HfApi(endpoint=url, token="s3cret").create_repo("acme/a", repo_type="kernel")
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_missing_packages_are_named_with_the_mend(tmp_path: Path) -> None:
    code = SERVE.replace("import argparse, sys;", "import argparse, sys; sys.modules['starlette'] = None;")
    result = run_python(code, client_env(tmp_path, "http://unused"), "serve", "--store", str(tmp_path / "s"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("pallas-hub serve: the package starlette")
    assert result.stderr.endswith("Install what the server needs: pip install 'pallas-hub[serve]'\n")


def test_help_has_an_example() -> None:
    result = subprocess.run(
        [os.sys.executable, "-c", SERVE, "serve", "--help"], capture_output=True, text=True, env={**os.environ}
    )
    assert result.returncode == 0
    assert "pallas-hub serve --store ~/kernel-store --trust pallas-hub" in result.stdout
    assert "for tests, air-gapped clusters and development" in result.stdout
