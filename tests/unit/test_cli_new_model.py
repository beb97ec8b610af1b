"""`tokenstream new-model`: a copy under a new name, edited in two places and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tokenstream.commands import app
from tokenstream.scaffold import ScaffoldError, edit_config, new_model

CONFIG = """\
# The only file to edit.
name: "llm"
backend: "python"
# parameters { key: "model" value { string_value: "an old note" } }
parameters { key: "model" value { string_value: "${TOKENSTREAM_MODEL:-package://a/b.gguf}" } }  # what is loaded
parameters { key: "dtype" value { string_value: "auto" } }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    version = folder / "llm" / "1" / "llm_engine"
    version.mkdir(parents=True)
    (folder / "llm" / "config.pbtxt").write_text(CONFIG)
    (version.parent / "model.py").write_text("model\n")
    (version / "__pycache__").mkdir()
    (version / "engine.py").write_text("engine\n")
    return folder


def test_name_and_model_change_and_every_other_character_stays():
    edited = edit_config(CONFIG, "small", "org/small")
    changed = [(old, new) for old, new in zip(CONFIG.splitlines(), edited.splitlines(), strict=True) if old != new]
    assert changed == [
        ('name: "llm"', 'name: "small"'),
        (
            'parameters { key: "model" value { string_value: "${TOKENSTREAM_MODEL:-package://a/b.gguf}" } }'
            "  # what is loaded",
            'parameters { key: "model" value { string_value: "org/small" } }  # what is loaded',
        ),
    ]


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1))
def test_triton_reads_back_any_model_that_was_written(spec):
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    config = text_format.Parse(edit_config(CONFIG, "m", spec), model_config_pb2.ModelConfig())
    assert config.parameters["model"].string_value == spec
    assert config.name == "m"


def test_a_parameter_spread_over_lines_is_found():
    spread = 'parameters {\n  key: "model"\n  value: {\n    string_value: "old"\n  }\n}\n'
    assert edit_config(spread, "m", "new") == 'name: "m"\n' + spread.replace("old", "new")


@pytest.mark.parametrize("config", ["", CONFIG + CONFIG, '# key: "model" value { string_value: "x" }'])
def test_a_config_without_exactly_one_model_is_refused(config):
    with pytest.raises(ScaffoldError, match="parameter `model` once"):
        edit_config(config, "m", "spec")


def test_the_new_folder_is_a_whole_copy_without_caches(repository):
    result = CliRunner().invoke(app, ["new-model", "small", "--model", "org/x", "--repository", str(repository)])
    assert result.exit_code == 0, result.output
    files = {str(path.relative_to(repository / "small")) for path in (repository / "small").rglob("*")}
    assert files == {"config.pbtxt", "1", "1/model.py", "1/llm_engine", "1/llm_engine/engine.py"}
    assert sorted(path.name for path in repository.iterdir()) == ["llm", "small"]
    assert (repository / "llm" / "config.pbtxt").read_text() == CONFIG


def test_a_relative_path_is_written_out_whole_and_a_hub_id_is_not(repository, monkeypatch):
    monkeypatch.chdir(repository)
    (repository / "org").mkdir()
    (repository / "weights").mkdir()
    for name, spec, written in (("a", "./weights", str(repository / "weights")), ("b", "org/x", "org/x")):
        new_model(name, spec, repository / "llm", repository)
        assert f'string_value: "{written}"' in (repository / name / "config.pbtxt").read_text()


def test_a_path_that_is_not_there_is_refused_and_nothing_is_made(repository):
    result = CliRunner().invoke(app, ["new-model", "small", "--model", "/nowhere/x", "--repository", str(repository)])
    assert result.exit_code == 1
    assert "there is no model at /nowhere/x" in result.stderr
    assert not (repository / "small").exists()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 65, "é"])
def test_a_bad_name_is_refused_and_nothing_is_made(repository, name):
    result = CliRunner().invoke(app, ["new-model", name, "--model", "m", "--repository", str(repository)])
    assert result.exit_code == 1
    assert "is no model name" in result.stderr
    assert [path.name for path in repository.iterdir()] == ["llm"]


def test_an_existing_model_is_refused_and_left_alone(repository):
    result = CliRunner().invoke(app, ["new-model", "llm", "--model", "m", "--repository", str(repository)])
    assert result.exit_code == 1
    assert "exists already" in result.stderr
    assert (repository / "llm" / "config.pbtxt").read_text() == CONFIG


def test_a_copy_that_fails_leaves_nothing_behind(repository):
    (repository / "llm" / "1" / "dangling").symlink_to(repository / "nowhere")
    with pytest.raises(ScaffoldError):
        new_model("small", "m", repository / "llm", repository)
    assert [path.name for path in repository.iterdir()] == ["llm"]
