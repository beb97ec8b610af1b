"""Ports and model repositories are read before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tokenstream.diagnosis import SetupError
from tokenstream.ports import Ports, choose_ports
from tokenstream.repository import Model, find_repository, read_repository

HOST = "127.0.0.1"
PARAMETER = 'parameters { key: "model" value { string_value: "${SPEC:-package://a/b.gguf}" } }'


def add(repository: Path, name: str, config: str = PARAMETER, versions: tuple[str, ...] = ("1",)) -> None:
    (repository / name).mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(f'# a comment\nname: "{name}"\n{config}\n')
    for version in versions:
        (repository / name / version).mkdir()


def test_free_ports_differ_and_given_ones_are_kept() -> None:
    with socket.create_server((HOST, 0)) as held:
        given = held.getsockname()[1]
    chosen = choose_ports(HOST, Ports(grpc=given))
    assert chosen.grpc == given
    assert len({chosen.http, chosen.grpc, chosen.metrics}) == 3
    assert 0 not in (chosen.http, chosen.metrics)


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"metrics port {port} on {HOST} is taken .*--metrics-port, or 0"):
            choose_ports(HOST, Ports(metrics=port))


@pytest.mark.parametrize(
    ("host", "ports", "line"),
    [
        (HOST, Ports(http=70000), "http port 70000 is not from 0 to 65535"),
        (HOST, Ports(http=8000, grpc=8000), "the ports 8000, 8000 must differ"),
        ("192.0.2.1", Ports(), "192.0.2.1 is not an address of this machine"),
        ("no such host", Ports(), "host 'no such host' is not known"),
    ],
)
def test_ports_and_hosts_that_cannot_be_are_refused(host: str, ports: Ports, line: str) -> None:
    with pytest.raises(SetupError, match=line):
        choose_ports(host, ports)


def test_a_model_is_read_with_its_newest_version_and_its_variables_replaced(tmp_path: Path) -> None:
    add(tmp_path, "llm", versions=("1", "9", "10"))
    add(tmp_path, "plain", config="")
    assert read_repository(tmp_path, env={}) == (
        Model("llm", tmp_path / "llm" / "10", "package://a/b.gguf"),
        Model("plain", tmp_path / "plain" / "1", ""),
    )
    assert read_repository(tmp_path, ["llm"], env={"SPEC": "/folder"})[0].spec == "/folder"


def test_a_variable_without_a_value_is_left_for_the_model_to_refuse(tmp_path: Path) -> None:
    add(tmp_path, "llm", config=PARAMETER.replace(":-package://a/b.gguf", ""))
    assert read_repository(tmp_path, env={})[0].spec == "${SPEC}"


def test_a_repository_that_cannot_be_served_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"there is no model repository at .*absent: name one with --repository"):
        read_repository(tmp_path / "absent")
    with pytest.raises(SetupError, match="holds no model"):
        read_repository(tmp_path)
    add(tmp_path, "llm", config="max_batch_sise: 8")
    with pytest.raises(SetupError, match=r"llm/config.pbtxt cannot be read: .*max_batch_sise"):
        read_repository(tmp_path)
    with pytest.raises(SetupError, match="holds no model other: it holds llm"):
        read_repository(tmp_path, ["other"])


def test_a_model_without_a_version_is_refused(tmp_path: Path) -> None:
    add(tmp_path, "llm", versions=())
    with pytest.raises(SetupError, match="has no version folder such as llm/1"):
        read_repository(tmp_path)


def test_the_clones_repository_is_the_default() -> None:
    assert (find_repository() / "llm" / "config.pbtxt").is_file()
