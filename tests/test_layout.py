"""The rules of the repository, as tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "broker_ext").rglob("*.py"), *(ROOT / "storage").rglob("*.py")])


def imports(source: Path) -> set[str]:
    """Modules a file imports, but for those that only a type checker needs."""
    names: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if ast.unparse(node.test) != "TYPE_CHECKING":
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            names.update(a.name for a in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            if node.module:
                names.add(node.module)

    Visitor().visit(ast.parse(source.read_text()))
    return names


def under(names: set[str], *packages: str) -> set[str]:
    return {n for n in names if any(n == p or n.startswith(p + ".") for p in packages)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: str(s.relative_to(ROOT)))
def test_imports_go_one_way(source: Path) -> None:
    names = imports(source)
    part = source.relative_to(ROOT).parts
    if part[0] == "storage":
        assert not under(names, "broker_ext", "amqtt", "websockets", "paho")
    if part[:2] == ("broker_ext", "wire"):
        assert not under(names, "storage", "amqtt", "asyncio")
        assert all(n.startswith("broker_ext.wire") for n in under(names, "broker_ext"))
    if part[:2] != ("broker_ext", "seam"):
        assert source.name == "plugin.py" or not under(names, "broker_ext.seam")
        # what is documented for plugins, and for programs that run a broker
        documented = {"amqtt.broker", "amqtt.contexts", "amqtt.plugins.base", "amqtt.utils"}
        assert under(names, "amqtt") <= documented
        assert not under(names, "amqtt") or source.name == "plugin.py" or "cli" in part


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: str(s.relative_to(ROOT)))
def test_only_the_clock_reads_a_clock(source: Path) -> None:
    if source.name == "clock.py" or {"demo", "cli"} & set(source.relative_to(ROOT).parts):
        return
    tree = ast.parse(source.read_text())
    calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert not calls & {
        "time.time",
        "time.monotonic",
        "time.time_ns",
        "time.perf_counter",
        "time.sleep",
        "datetime.now",
    }


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: str(s.relative_to(ROOT)))
def test_public_names_are_listed(source: Path) -> None:
    tree = ast.parse(source.read_text())
    listed = next(
        (
            {ast.literal_eval(e) for e in n.value.elts}
            for n in tree.body
            if isinstance(n, ast.Assign)
            and ast.unparse(n.targets[0]) == "__all__"
            and isinstance(n.value, ast.List | ast.Tuple)
        ),
        None,
    )
    defined = {
        n.name
        for n in tree.body
        if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not n.name.startswith("_")
    }
    if not defined and listed is None:
        return
    assert listed is not None, "public names, but no __all__"
    if source.name != "__init__.py":
        assert not defined - listed, f"public but not in __all__: {defined - listed}"


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: str(s.relative_to(ROOT)))
def test_no_module_is_called_utils(source: Path) -> None:
    assert source.stem not in {"utils", "util", "common", "helpers", "misc"}
