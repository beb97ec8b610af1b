"""Other servers for a comparison: installs that go on, launches that are fair and end, and the command."""

import json
import socket
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokenstream.repository import read_repository
from tokenstream_loadtest.peers import __main__ as command
from tokenstream_loadtest.peers import contestants
from tokenstream_loadtest.peers.contestants import (
    CONTESTANTS,
    OURS,
    Place,
    lay_out_tutorial,
    vllm_cores,
)
from tokenstream_loadtest.peers.environments import Environment, Recipe, Unavailable, installed
from tokenstream_loadtest.peers.models import Models, gguf_in_bf16, without_end


def silent(_line):
    pass


@pytest.fixture
def place(tmp_path):
    models = Models(tmp_path / "model", tmp_path / "endless", "package://nothing/x.gguf")
    return Place(tmp_path, models, (0, 1), silent, silent, patience=0.0)


# Environments


def recipe(steps, pins=("a==1",)):
    return Recipe("peer", "1.0", pins, steps)


def test_a_finished_install_is_not_repeated_until_its_pins_change(tmp_path, monkeypatch):
    monkeypatch.setattr(Environment, "create", lambda self: self.folder.mkdir(exist_ok=True))
    done = []
    for pins in (("a==1",), ("a==1",), ("a==2",)):
        installed(recipe(lambda environment: done.append(environment.folder), pins), silent, tmp_path)
    assert done == [tmp_path / "peer-1.0"] * 2


def test_an_interrupted_install_is_taken_up_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Environment, "create", lambda self: self.folder.mkdir(exist_ok=True))

    def cut(environment):
        (environment.folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        installed(recipe(cut), silent, tmp_path)
    found = []
    installed(recipe(lambda environment: found.append((environment.folder / "half").exists())), silent, tmp_path)
    assert found == [True]


def test_a_command_that_fails_is_told_with_its_own_words(tmp_path):
    environment = Environment(tmp_path, silent)
    program = "import sys; print('working'); sys.exit('ERROR: no such wheel')"
    with pytest.raises(Unavailable, match="ERROR: no such wheel"):
        environment.run(sys.executable, "-c", program)


def test_a_command_that_hangs_is_ended(tmp_path):
    environment = Environment(tmp_path, silent)
    with pytest.raises(Unavailable, match="was not done after"):
        environment.run(sys.executable, "-c", "import time; time.sleep(600)", seconds=0.5)


def test_every_line_of_a_command_is_heard_and_kept(tmp_path):
    heard = []
    lines = Environment(tmp_path, heard.append).run(sys.executable, "-c", "print('one'); print('two')")
    assert lines == heard == ["one", "two"]
    assert "one\ntwo" in (tmp_path / "install.log").read_text()


def test_another_environments_packages_are_not_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    variables = Environment(tmp_path, silent).variables()
    assert "PYTHONPATH" not in variables
    assert variables["PATH"].startswith(f"{tmp_path}/bin:")


# Models and servers


def test_the_endless_copy_differs_in_the_end_of_text_alone(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "generation_config.json"):
        (model / name).write_text(json.dumps({"eos_token_id": 2, "other": name}))
    (model / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):  # again over what is there
        copy = without_end(model, tmp_path / "copy")
    assert json.loads((copy / "config.json").read_text()) == {"eos_token_id": None, "other": "config.json"}
    assert json.loads((copy / "generation_config.json").read_text())["eos_token_id"] is None
    assert (copy / "model.safetensors").resolve() == model / "model.safetensors"
    assert json.loads((model / "config.json").read_text())["eos_token_id"] == 2


def test_weights_that_are_no_gguf_file_leave_llama_out(tmp_path):
    with pytest.raises(Unavailable, match="GGUF"):
        gguf_in_bf16("some/model", tmp_path, Environment(tmp_path, silent))


@pytest.mark.parametrize(("cores", "text"), [((0, 1), "0-1"), ((3,), "3"), ((5, 0, 1, 2), "0-2,5")])
def test_all_usable_cores_are_bound_to(cores, text):
    assert vllm_cores(cores) == text


def test_the_tutorial_is_a_model_repository(tmp_path):
    (model,) = read_repository(lay_out_tutorial(tmp_path))
    assert (model.name, model.version.name) == ("tutorial", "1")
    compile((model.version / "model.py").read_text(), "model.py", "exec")


def test_our_own_server_is_always_among_the_compared():
    assert next(each.name for each in CONTESTANTS) == OURS
    assert len({each.name for each in CONTESTANTS}) == len(CONTESTANTS)


def launch_of(*code, port=1):
    return contestants.Launch((sys.executable, "-c", "\n".join(code)), {"NAME": "value"}, port, "/health")


def test_a_server_that_is_ready_is_gone_behind_the_block(tmp_path):
    port = contestants.free_port()
    code = (
        "import os, http.server",
        "class Answer(http.server.BaseHTTPRequestHandler):",
        "    def do_GET(self): self.send_response(200 if self.path == '/health' else 404); self.end_headers()",
        f"print(os.environ['NAME'], flush=True); http.server.HTTPServer(('127.0.0.1', {port}), Answer).serve_forever()",
    )
    with contestants.started(launch_of(*code, port=port), Environment(tmp_path, silent), tmp_path / "log", silent):
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert (tmp_path / "log").read_text().startswith("value")


def test_a_server_that_ends_while_it_starts_is_told_with_its_last_words(tmp_path):
    launch = launch_of("import sys; sys.exit('no such model')", port=contestants.free_port())
    starting = contestants.started(launch, Environment(tmp_path, silent), tmp_path / "log", silent)
    with pytest.raises(Unavailable, match="ended while it was starting: no such model") as told, starting:
        pass
    assert told.value.log == tmp_path / "log"


@pytest.fixture
def launches(monkeypatch, place):
    """How each foreign server would be launched, by name."""
    seen = {}

    @contextmanager
    def started(launch, _environment, log, _say):
        seen[log.stem] = launch
        yield

    def run(_environment, *command, seconds=0):
        return [f"{package} 1.0" for package in command[3:]] or ["3.11"]

    monkeypatch.setattr(contestants, "started", started)
    monkeypatch.setattr(contestants, "installed", lambda recipe, say, root: Environment(root / recipe.name, say))
    monkeypatch.setattr(contestants, "gguf_in_bf16", lambda source, into, llama: into / "model-bf16.gguf")
    monkeypatch.setattr(Environment, "run", run)
    servings = {}
    for each in CONTESTANTS:
        if each.name in ("vllm", "llamacpp", "transformers"):
            with each.serve(place, place.root / f"{each.name}.log") as serving:
                servings[each.name] = serving
    return seen, servings


def test_every_server_gets_all_cores_and_listens_on_this_machine_alone(launches):
    seen, _ = launches
    assert len(seen) == 3
    for launch in seen.values():
        assert launch.settings["OMP_NUM_THREADS"] == "2"
        assert launch.command[launch.command.index("--host") + 1] == "127.0.0.1"
    assert seen["vllm"].settings["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert seen["llamacpp"].command[seen["llamacpp"].command.index("-t") + 1] == "2"


def test_a_server_that_cannot_ignore_the_end_gets_weights_without_one(launches, place):
    seen, servings = launches
    assert str(place.models.folder) in seen["vllm"].command
    assert servings["vllm"].options.knows_ignore_eos
    assert str(place.models.endless) in seen["transformers"].command
    assert not servings["transformers"].options.knows_ignore_eos


def test_a_launch_is_told_without_folders_of_this_machine(launches, place):
    _, servings = launches
    for serving in servings.values():
        assert str(place.root) not in serving.command
        assert "$ENV" in serving.command


# The command


def test_requests_may_be_one_number_for_all_levels():
    given = command._read(["--levels", "1,4", "--requests", "8"])
    assert given.requests == (8, 8)


@pytest.mark.parametrize(
    "wrong", [["--levels", "0"], ["--peers", "nobody"], ["--levels", "1,2", "--requests", "1,2,3"]]
)
def test_wrong_usage_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        command._read(wrong)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_the_written_command_gives_the_same_settings_again():
    given = command._read(["--peers", "vllm", "--levels", "1,4", "--repeats", "2"])
    again = command._read(command._command(given).split()[3:])
    assert again == given


def test_the_package_carries_the_tutorial():
    folder = Path(command.__file__).parent / "tutorial"
    assert {path.name for path in folder.iterdir()} >= {"config.pbtxt", "model.py"}
