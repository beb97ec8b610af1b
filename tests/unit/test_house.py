"""The shape of the house: how long its parts may be, and who may know whom."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = ROOT / "model_repository/llm/1"
ADAPTER = {path.stem for path in VERSION.glob("*.py")}
CLIENT = ROOT / "client/tokenstream"
MODULES = sorted(
    path
    for folder in ("model_repository", "client", "loadtest", "docker", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Lines of `path` that hold code: neither blank, nor a comment, nor a docstring."""
    source = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def imported(path: Path) -> set[str]:
    """First parts of the names of all modules that `path` imports absolutely."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_the_engine_stays_under_two_thousand_lines_of_python_beside_its_loading():
    engine = [path for path in (VERSION / "llm_engine").rglob("*.py") if path.parent.name != "loading"]
    assert sum(code_lines(path) for path in engine) < 2000


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_over_four_hundred_lines(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", sorted((VERSION / "llm_engine").rglob("*.py")), ids=lambda path: path.name)
def test_the_engine_knows_nothing_of_triton(path):
    assert not imported(path) & {"triton_python_backend_utils", "tritonclient", "tokenstream", *ADAPTER}


@pytest.mark.parametrize("path", sorted(CLIENT.rglob("*.py")), ids=lambda path: path.name)
def test_the_client_imports_neither_torch_nor_the_engine(path):
    assert not imported(path) & {"torch", "transformers", "llm_engine", "llm_kernels", "llm_tools"}
