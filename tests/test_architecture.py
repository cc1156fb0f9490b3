"""Who may import whom, what is public, and what importing costs.

The rules are read off the syntax trees, so that an import inside a function or under
`TYPE_CHECKING` counts too. Each checker is itself tested on a few lines that break its rule.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "anabranch"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 450

# What each part of the package may import of the others. The leaves know nothing of the rest;
# nothing imports `_jax_check`, which is for tests of a new JAX.
# "" is the top: `import anabranch` itself, which nothing below may do.
_LEAVES = {"errors", "_jax", "_boundary", "_source"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_jax": {"errors"},
    "_boundary": {"errors"},
    "_source": set(),
    "_jax_check": {"errors", "_jax"},
    "contextvars_ext": _LEAVES,
    "graph": _LEAVES | {"contextvars_ext"},
    "transforms": _LEAVES | {"contextvars_ext", "graph"},
    "debug": _LEAVES | {"contextvars_ext", "graph", "transforms"},
    "interop": _LEAVES | {"contextvars_ext", "graph", "transforms"},
    "": _LEAVES | {"contextvars_ext", "graph", "transforms", "debug", "interop"},
}

_TRANSFORMS = """
    jit pmap vmap shard_map grad value_and_grad vjp jvp linearize linear_transpose
    jacfwd jacrev hessian custom_vjp custom_jvp custom_gradient custom_batching remat checkpoint
    eval_shape make_jaxpr closure_convert named_call
""".split()
_CONTROL_FLOW = """
    scan associative_scan map fori_loop while_loop cond switch custom_root custom_linear_solve
""".split()
JAX_TRANSFORMS = {f"jax.{name}" for name in _TRANSFORMS} | {
    f"jax.lax.{name}" for name in _CONTROL_FLOW
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    """Tell the part of the package that a dotted name belongs to; "" for the top."""
    parts = name.split(".")
    if len(parts) > 1 and parts[1] in MAY_IMPORT:
        return parts[1]
    return ""


def imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything that is imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                up = node.level - 1 if is_package else node.level
                base = ".".join(filter(None, [*parents[: len(parents) - up], base]))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def layer_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    own = part_of(module)
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(source, module, is_package=is_package)
        if name.split(".")[0] == "anabranch"
        and part_of(name) != own
        and part_of(name) not in MAY_IMPORT[own]
    ]


def jax_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of every use of JAX: imports, attributes, dotted strings."""
    tree = ast.parse(source)
    local = {"jax": "jax", "jaxlib": "jaxlib"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            local |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            local |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for line, name in imports(source, "", is_package=True):
        if name.split(".")[0] in {"jax", "jaxlib"}:
            yield line, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                name = ".".join([local.get(inner.id, ""), *reversed(chain)])
                if name.split(".")[0] in {"jax", "jaxlib"}:
                    yield node.lineno, name
        elif isinstance(node, ast.Constant) and re.fullmatch(r"jax(\.\w+)+", str(node.value)):
            yield node.lineno, str(node.value)  # importlib.import_module("jax.…")


def private_jax_names(source: str) -> list[str]:
    return [
        f"line {line}: {name}"
        for line, name in jax_names(source)
        if any(re.match(r"_(?!_)", part) for part in name.split("."))
    ]


def jax_transforms(source: str) -> list[str]:
    return [
        f"line {line}: {name}"
        for line, name in jax_names(source)
        if name in JAX_TRANSFORMS or name.startswith("jax.experimental.shard_map")
    ]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
class TestSources:
    def test_imports_go_one_way(self, path):
        is_package = path.name == "__init__.py"
        assert layer_violations(path.read_text(), module_name(path), is_package=is_package) == []

    def test_has_a_place_in_the_architecture(self, path):
        first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert first == "__init__" or first in MAY_IMPORT, f"add {first} to MAY_IMPORT"

    def test_private_jax_names_only_behind_the_one_door(self, path):
        if path != PACKAGE / "_jax.py":
            assert private_jax_names(path.read_text()) == []

    def test_is_short_enough_to_read(self, path):
        assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", sorted((PACKAGE / "graph").rglob("*.py")), ids=module_name)
def test_graph_knows_no_jax_transform(path):
    assert jax_transforms(path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("anabranch.graph._split", "from anabranch.transforms import jit"),
        ("anabranch.graph._split", "from anabranch import transforms"),
        ("anabranch.graph._split", "from ..transforms._box import Box"),
        ("anabranch.graph._split", "from .. import Module"),
        ("anabranch.graph._split", "import anabranch"),
        ("anabranch.contextvars_ext._var", "import anabranch.graph._node as node"),
        ("anabranch.contextvars_ext._var", "def f():\n    from anabranch import graph"),
        ("anabranch.transforms._jit", "from anabranch.debug import explain"),
        ("anabranch.errors", "from anabranch._jax import Tracer"),
    ],
)
def test_an_import_against_the_stream_is_seen(module, line):
    assert len(layer_violations(line, module)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("anabranch.graph._split", "from anabranch.graph._node import Node"),
        ("anabranch.graph._split", "from . import _node"),
        ("anabranch.graph._split", "from anabranch import _jax, errors"),
        ("anabranch.transforms._jit", "from anabranch import graph"),
        ("anabranch.transforms._jit", "from ..contextvars_ext import JitAwareContextVar"),
        ("anabranch", "from anabranch.transforms import jit"),
    ],
)
def test_an_import_with_the_stream_passes(module, line):
    assert layer_violations(line, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "import jax\njax._src.core.Tracer",
        "from jax import core as c\nc._private",
        "import importlib\nimportlib.import_module('jax._src.core')",
        "import jaxlib._jax",
    ],
)
def test_a_private_jax_name_is_seen(source):
    assert private_jax_names(source) != []


def test_public_jax_names_and_prose_are_not_private():
    source = '''
    """What `jax._src.core` does is no concern of ours."""
    import jax
    jax.__version__, jax.core.Tracer
    '''
    assert private_jax_names(textwrap.dedent(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.jit(f)",
        "import jax as j\nj.vmap",
        "from jax import grad",
        "from jax import lax\nlax.scan(f, x, y)",
        "import jax.lax as L\nL.cond",
        "from jax.experimental.shard_map import shard_map",
    ],
)
def test_a_jax_transform_is_seen(source):
    assert jax_transforms(source) != []


# Public names. A part without `__init__.py` does not exist yet.
PARTS = ["contextvars_ext", "graph", "transforms", "debug", "interop"]
PACKAGES = {
    part: importlib.import_module(f"anabranch.{part}")
    for part in PARTS
    if (PACKAGE / part / "__init__.py").exists()
}
PUBLIC = [(part, name) for part, package in PACKAGES.items() for name in package.__all__]
# `debug` and `interop` are asked for by name; the others are also at the top.
AT_THE_TOP = [(part, name) for part, name in PUBLIC if part not in {"debug", "interop"}]


def test_every_public_name_has_one_home():
    homes = Counter(name for _, name in PUBLIC)
    assert [name for name, count in homes.items() if count > 1] == []


@pytest.mark.parametrize(("part", "name"), AT_THE_TOP, ids=lambda value: value)
def test_public_name_is_at_the_top(part, name):
    top = importlib.import_module("anabranch")
    assert name in top.__all__
    assert getattr(top, name) is getattr(PACKAGES[part], name)


def test_the_top_has_nothing_of_its_own():
    top = importlib.import_module("anabranch")
    known = {name for _, name in AT_THE_TOP} | set(PACKAGES) | {"errors", "__version__"}
    known |= {name for name in vars(errors) if name.endswith("Error")}
    assert set(top.__all__) <= known


@pytest.mark.parametrize(("part", "name"), PUBLIC, ids=lambda value: value)
def test_public_name_is_defined_at_home(part, name):
    obj = getattr(PACKAGES[part], name)
    if inspect.isclass(obj) or inspect.isroutine(obj):
        assert f"{obj.__module__}.".startswith(f"anabranch.{part}.")


def example_failures(obj: object, name: str) -> list[str]:
    """Run the examples of `obj` and, of a class, those of its methods; return what went wrong."""
    names = {"ab": importlib.import_module("anabranch"), "jax": jax, "jnp": jnp, "np": np}
    output: list[str] = []
    # Of a public module only its own docstring: what it exports is public by itself.
    finder = doctest.DocTestFinder(recurse=not inspect.ismodule(obj))
    for test in finder.find(obj, name, globs={**names, **PACKAGES}):
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        doctest.DocTestRunner(optionflags=flags, verbose=False).run(test, out=output.append)
    return output


@pytest.mark.parametrize(("part", "name"), PUBLIC, ids=lambda value: value)
def test_public_name_has_an_example_that_runs(part, name):
    obj = getattr(PACKAGES[part], name)
    is_error = inspect.isclass(obj) and issubclass(obj, Exception)
    is_code = inspect.isclass(obj) or inspect.isroutine(obj)
    is_alias = type(obj).__module__ in {"typing", "types", "builtins"} and not is_code
    if not is_alias:  # a type alias, a `...`: nowhere to put a docstring
        assert (obj.__doc__ or "").strip(), f"{name} has no docstring"
    if is_code and not is_error:
        assert ">>> " in obj.__doc__, f"the docstring of {name} has no example"
    if part == "interop" and "flax" in obj.__doc__:
        pytest.importorskip("flax", reason="flax is not installed")
    failures = example_failures(obj, name)
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


def test_every_error_has_a_docstring():
    classes = [obj for _, obj in inspect.getmembers(errors, inspect.isclass)]
    own = [cls for cls in classes if cls.__module__ == "anabranch.errors"]
    assert own
    assert [cls.__name__ for cls in own if not (cls.__doc__ or "").strip()] == []


def test_a_wrong_example_is_seen():
    class Wrong:
        def method(self):
            """Add.

            >>> jnp.add(1, 1).item()
            3
            """

    Wrong.__module__ = Wrong.method.__module__ = __name__
    assert "Expected:" in "".join(example_failures(Wrong, "Wrong"))


# What importing does. A platform that does not exist makes any start of a backend fail.
def _import(statement: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", statement],
        env={**os.environ, "JAX_PLATFORMS": "none_such"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_loads_no_optional_library():
    extras = "chex equinox flax optax orbax treescope hypothesis matplotlib sklearn rich".split()
    done = _import(f"import anabranch, sys; print([m for m in {extras} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_starts_no_backend():
    assert _import("import anabranch").returncode == 0
    assert _import("import anabranch, jax; jax.devices()").returncode != 0
