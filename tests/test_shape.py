"""The rules of the import graph, and of the flags read by functions."""

import ast
import dataclasses
import subprocess
from pathlib import Path

import pytest

import config
import eval as evaluation
import probe
from probe import doctor
from remote.sampler import SamplerFlags

ROOT = Path(__file__).resolve().parent.parent
SPINE = ("", "model", "machinery", "tasks")
WINGS = ("probe", "plan", "remote", "bench", "results")
# imports of a wing, inside a function: --samplers, --micro_tokens
DOORS = {("machinery/run.py", "remote/source.py"), ("machinery/run.py", "plan/__init__.py")}


def trees() -> dict[str, ast.Module]:
    """Path -> syntax tree of each file outside tests/."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.split() if not path.startswith("tests/") and (ROOT / path).is_file()]
    return {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in paths}


TREES = trees()
MODULES = {path.removesuffix("/__init__.py").removesuffix(".py").replace("/", "."): path for path in TREES}


def room(path: str) -> str:
    """The top-level folder of a file; "" for the root."""
    return path.split("/")[0] if "/" in path else ""


def imported(tree: ast.AST) -> set[str]:
    """Paths of the repository's files that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {MODULES[name] for name in names if name in MODULES}


GRAPH = {path: imported(tree) - {path} for path, tree in TREES.items()}


def test_the_core_imports_no_optional_folder():
    crossing = {
        (path, other) for path in GRAPH for other in GRAPH[path] if room(path) in SPINE and room(other) in WINGS
    }
    assert crossing == DOORS
    for path, other in DOORS:
        top_level = ast.Module([node for node in TREES[path].body if not isinstance(node, ast.FunctionDef)], [])
        assert other not in imported(top_level)


def test_no_circle_of_imports():
    reached = {}  # path -> files reachable from it

    def visit(path: str, way: tuple[str, ...]) -> set[str]:
        assert path not in way, f"a circle: {' -> '.join((*way[way.index(path) :], path))}"
        if path not in reached:
            reached[path] = {path}.union(*(visit(other, (*way, path)) for other in GRAPH[path]))
        return reached[path]

    for path in GRAPH:
        visit(path, ())


# -- Functions declare a flag group that contains the flags they read -------------------------------------------------

GROUPS = {kind.__name__: kind for kind in vars(config).values() if dataclasses.is_dataclass(kind)}
COMMANDS = {
    kind.__name__: kind
    for kind in (evaluation.ModelFlags, evaluation.EvalFlags, probe.ProbeFlags, doctor.DoctorFlags, SamplerFlags)
}
FIELDS = {name: {field.name for field in dataclasses.fields(kind)} for name, kind in (GROUPS | COMMANDS).items()}


def functions() -> list:
    """(path, function, annotation of its parameter cfg) of each function with such a parameter."""
    out = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    if argument.arg == "cfg":
                        kind = argument.annotation and ast.unparse(argument.annotation).removeprefix("config.")
                        out.append(pytest.param(node, kind, id=f"{path}:{node.name}"))
    return out


def is_cfg(node) -> bool:
    return isinstance(node, ast.Name) and node.id == "cfg"


def flags_read(function: ast.FunctionDef) -> set[str]:
    """Flags that a function reads as cfg.NAME, by getattr, or replaces."""
    out = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and is_cfg(node.value):
            out.add(node.attr)
        elif isinstance(node, ast.Call) and node.args and is_cfg(node.args[0]):
            called = ast.unparse(node.func)
            if called.endswith("replace"):
                out |= {keyword.arg for keyword in node.keywords if keyword.arg}
            elif called == "getattr" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
                out.add(node.args[1].value)
    return out


@pytest.mark.parametrize(("function", "kind"), functions())
def test_functions_read_only_flags_of_their_group(function, kind):
    assert kind is not None, "cfg needs a type: the smallest group of flags (config.py) that has what is read"
    assert kind == "dict" or flags_read(function) <= FIELDS[kind]


def test_the_lists_are_not_empty():
    assert "config.py" in GRAPH["train.py"] and len(functions()) > 140
    assert len([function for function in functions() if flags_read(function.values[0])]) > 100
