"""Every command that talks gRPC over TLS, with tokens and headers; and wrong options for that, in one line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from unit.certificates import Authority, Pair
from unit.scripted_triton import WAIT, ScriptedTriton, answer
from unit.test_cli_commands import run

COMMANDS = (["generate", "x"], ["chat"], ["probe"], ["models"])
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def caller(authority: Authority) -> Pair:
    return authority.sign("caller")


@pytest.fixture(scope="module")
def encrypted(authority: Authority) -> Iterator[ScriptedTriton]:
    """It wants to know who calls."""
    host = authority.sign("server", "IP:127.0.0.1")
    pairs = [(host.key.read_bytes(), host.certificate.read_bytes())]
    roots = authority.root.read_bytes()
    server = ScriptedTriton(answer("Hello"), credentials=grpc.ssl_server_credentials(pairs, roots, True))
    yield server
    server.close()


@pytest.fixture
def plain() -> Iterator[ScriptedTriton]:
    server = ScriptedTriton(answer("Hello"))
    yield server
    server.close()


def known(authority: Authority, caller: Pair) -> list[str]:
    """The options of one whom the encrypted server lets in."""
    proof = ["--tls-cert", str(caller.certificate), "--tls-key", str(caller.key)]
    return ["--tls-ca", str(authority.root), *proof]


@each_command
def test_both_sides_of_an_encrypted_line_prove_who_they_are(encrypted, authority, caller, command) -> None:
    options = [*known(authority, caller), "--token", "secret", "--header", "X-Tenant=blue=sky", "--header", "x-team=a"]
    result = run(*command, "--url", encrypted.url, *options, stdin="Hi\n")
    assert result.exit_code == 0, result.stderr
    sent = encrypted.calls[-1].metadata
    assert (sent["authorization"], sent["x-tenant"], sent["x-team"]) == ("Bearer secret", "blue=sky", "a")


@each_command
def test_who_proves_nothing_or_trusts_nobody_here_gets_no_connection(encrypted, authority, command) -> None:
    asked = len(encrypted.requests)
    for options in ([], ["--tls"], ["--tls-ca", str(authority.root)]):
        result = run(*command, "--url", encrypted.url, *options, stdin="Hi\n")
        assert result.exit_code == 3, (options, result.stderr)
        assert result.stderr.count("\n") == 1
    assert len(encrypted.requests) == asked


@each_command
def test_a_token_may_come_by_the_environment(plain, monkeypatch: pytest.MonkeyPatch, command) -> None:
    monkeypatch.setenv("TOKENSTREAM_TOKEN", "hidden")
    assert run(*command, "--url", plain.url, stdin="Hi\n").exit_code == 0
    assert plain.calls[-1].metadata["authorization"] == "Bearer hidden"


@each_command
@pytest.mark.parametrize("secret", [["--token", "sesame"], ["--header", "authorization=sesame"]])
def test_a_secret_goes_unencrypted_to_another_machine_only_if_that_is_said(command, secret) -> None:
    elsewhere = [*command, "--url", "192.0.2.1:8001,127.0.0.1:1", *secret]
    result = run(*elsewhere)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "authorization would travel unencrypted to 192.0.2.1:8001: encrypt with --tls" in result.stderr
    assert "--allow-insecure-credentials" in result.stderr
    assert "sesame" not in result.stderr


@each_command
def test_a_secret_goes_where_it_is_said_to_be_safe(plain, command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenstream.security.is_local", lambda url: False)
    told = [*command, "--url", plain.url, "--token", "t"]
    assert run(*told, stdin="Hi\n").exit_code == 2
    assert run(*told, "--allow-insecure-credentials", stdin="Hi\n").exit_code == 0
    assert plain.calls[-1].metadata["authorization"] == "Bearer t"


WRONG = {
    "a file that is not there": (["--tls-ca", "{folder}/none.pem"], "none.pem"),
    "a folder": (["--tls-ca", "{folder}"], "--tls-ca"),
    "no certificate": (["--tls-ca", "{folder}/notes.txt"], "notes.txt holds no PEM certificate"),
    "a key for a root": (["--tls-ca", "{key}"], "holds no PEM certificate"),
    "a certificate without its key": (["--tls-cert", "{certificate}"], "--tls-cert and --tls-key go together"),
    "a key without its certificate": (["--tls-key", "{key}"], "--tls-cert and --tls-key go together"),
    "another's key": (["--tls-cert", "{root}", "--tls-key", "{key}"], "are no PEM pair"),
    "no key": (["--tls-cert", "{certificate}", "--tls-key", "{folder}/notes.txt"], "are no PEM pair"),
    "a header without a value": (["--header", "sesame"], "--header wants NAME=VALUE"),
    "a header without a name": (["--header", "=sesame"], "--header wants NAME=VALUE"),
    "a header of gRPC's own": (["--header", "grpc-timeout=1S"], "'grpc-timeout' cannot be sent"),
    "a header that is no ASCII": (["--header", "x-name=\u00fc"], "'x-name' holds more than printable ASCII"),
    "a token that is no ASCII": (["--token", "sesame\n"], "'authorization' holds more than printable ASCII"),
    "an empty token": (["--token", ""], "the token is empty"),
}


@each_command
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("json_lines", [False, True])
def test_wrong_options_are_one_line_and_exit_code_2_and_nothing_is_sent(
    plain, authority, caller, tmp_path: Path, command, wrong, json_lines
) -> None:
    (tmp_path / "notes.txt").write_text("no PEM\n")
    given, told = WRONG[wrong]
    names = {"folder": tmp_path, "root": authority.root, "key": caller.key, "certificate": caller.certificate}
    options = [option.format(**names) for option in given]
    result = run(*command, "--url", plain.url, *options, *(["--json"] if json_lines else []), stdin="Hi\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    line = json.loads(result.stderr)["error"] if json_lines else result.stderr
    assert told in line
    assert "sesame" not in line
    assert plain.requests == []


def test_a_key_with_a_password_is_told_without_asking_for_it(plain, authority, caller, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    lock = ["openssl", "pkcs8", "-topk8", "-in", str(caller.key), "-out", str(locked), "-passout", "pass:sesame"]
    subprocess.run(lock, check=True, capture_output=True, timeout=WAIT)
    result = run("probe", "--url", plain.url, "--tls-cert", str(caller.certificate), "--tls-key", str(locked))
    assert result.exit_code == 2
    assert "without a password" in result.stderr
