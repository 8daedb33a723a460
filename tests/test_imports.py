"""The import rules, checked by parsing the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for package in ("collectives", "fsdp", "launch") for path in (ROOT / package).rglob("*.py"))

# A module of collectives imports only modules of its own layer or of layers before it.
LAYERS = [
    {"types", "errors"},
    {"hosts"},
    {"schedules"},
    {"backend"},
    {
        "arguments",
        "capabilities",
        "collective",
        "control",
        "engine",
        "express",
        "fork",
        "hub",
        "interrupts",
        "messages",
        "operation",
        "polling",
        "progress",
        "selection",
        "statistics",
        "validate",
    },
    {"endpoint", "communicator"},
    {"backends"},
    {"borrowed", "launchers", "local", "meeting", "rendezvous", "slurm"},
    {""},  # collectives/__init__.py
    {"info", "bench", "capability_table", "conformance", "torch_backend"},
]
# The benchmark compares with torch's own data parallelism, which only this file of it knows.
TORCH_DISTRIBUTED = {
    "collectives/backends/process_group.py",
    "collectives/backends/torch_dist.py",
    "fsdp/bench/torch_parts.py",
    *(f"collectives/torch_backend/{path.name}" for path in (ROOT / "collectives" / "torch_backend").glob("*.py")),
}
MPI4PY = {"collectives/backends/mpi.py"}
SHARED_BY_BENCHMARKS = (
    "collectives.bench",
    "collectives.launchers",
    "collectives.rendezvous",
    "collectives.torch_backend",
)
ENVIRONMENT = {"collectives/rendezvous.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST, package: str) -> Iterator[tuple[str, ast.stmt]]:
    """Every module that is imported, by full name; ``from a import b`` counts as both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*parts, *filter(None, [node.module])])
            yield module, node
            for alias in node.names:
                yield f"{module}.{alias.name}", node


def imported(path: Path) -> set[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return {name for name, _ in imports(ast.parse(path.read_text()), package)}


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer(module: str) -> int:
    """The layer of a module of collectives, named without the package."""
    head = module.split(".")[0]
    return next((number for number, heads in enumerate(LAYERS) if head in heads), -1)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_imports_tests_or_launch(path: Path) -> None:
    forbidden = ("tests",) if relative(path).startswith("launch/") else ("tests", "launch")
    assert [name for name in imported(path) if any(is_in(name, package) for package in forbidden)] == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_libraries_stay_behind_the_seam(path: Path) -> None:
    names = imported(path)
    if relative(path) not in TORCH_DISTRIBUTED:
        assert [name for name in names if is_in(name, "torch.distributed")] == []
    if relative(path) not in MPI4PY:
        assert [name for name in names if is_in(name, "mpi4py")] == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_mpi_is_imported_inside_functions_only(path: Path) -> None:
    top = ast.parse(path.read_text()).body
    checking = [node for node in top if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    eager = ast.Module(
        [n for n in top if not isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n not in checking], type_ignores=[]
    )
    bodies = [node for cls in top if isinstance(cls, ast.ClassDef) for node in cls.body]
    eager.body += [node for node in bodies if not isinstance(node, ast.FunctionDef)]
    assert [name for name, _ in imports(eager, "") if is_in(name, "mpi4py")] == []


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p).startswith("fsdp/")], ids=relative)
def test_fsdp_uses_public_names_only(path: Path) -> None:
    import collectives

    public = {f"collectives.{name}" for name in collectives.__all__}
    used = {name for name in imported(path) if is_in(name, "collectives")}
    if relative(path).startswith(
        "fsdp/bench/"
    ):  # how ranks are started and a machine is described, all benchmarks share
        used -= {name for name in used if any(is_in(name, shared) for shared in SHARED_BY_BENCHMARKS)}
    errors = {name for name in used if is_in(name, "collectives.errors")}
    assert used - public - errors - {"collectives"} == set()
    assert [name for name in imported(path) if is_in(name, "torch.cuda")] == []


@pytest.mark.parametrize("path", [p for p in SOURCES if relative(p).startswith("collectives/")], ids=relative)
def test_layers_of_collectives(path: Path) -> None:
    own = path.relative_to(ROOT / "collectives").with_suffix("").as_posix().replace("/", ".").removesuffix("__init__")
    assert layer(own) >= 0, f"{relative(path)} is in no layer; add it to LAYERS"
    used = {name.removeprefix("collectives").lstrip(".") for name in imported(path) if is_in(name, "collectives")}
    known = {module.stem for module in (ROOT / "collectives").glob("*.py")} | {
        folder.name for folder in (ROOT / "collectives").iterdir() if folder.is_dir()
    }
    # A name that is no module comes from the package's own front door, the last layer.
    above = {name for name in used if name and name.split(".")[0] in known and layer(name) > layer(own)}
    assert above == set()
    if layer(own) < layer(""):
        assert {name for name in used if name and name.split(".")[0] not in known} == set(), "name the defining module"


@pytest.mark.parametrize("path", [p for p in SOURCES if not relative(p).startswith("launch/")], ids=relative)
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    if relative(path) in ENVIRONMENT:
        return
    names = {"environ", "environb", "getenv", "getenvb"}
    readers = []
    for node in ast.walk(ast.parse(path.read_text())):
        attribute = isinstance(node, ast.Attribute) and node.attr in names
        imported_name = (
            isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & names
        )
        if attribute or imported_name:
            readers.append(node.lineno)
    assert readers == []
