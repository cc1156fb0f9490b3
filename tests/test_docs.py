"""Every Python block of the README and of the documentation runs, page by page, from top to bottom.

The blocks of a page share one namespace. They are compiled under the name of the page with their
own line numbers, so that a traceback points into the Markdown. A block that opens with
```python no-run is only compiled.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import textwrap
import tomllib
import traceback
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

OPTIONAL = {"flax", "optax", "equinox", "orbax", "chex"}
"""Libraries that a page may show, but that nobody has to have."""

_FENCE = re.compile(r"(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})(?P<info>.*)")
_LOOKS_LIKE_PYTHON = re.compile(r"(py|pycon|python\S+|Python\b.*|python\s+(?!no-run$).*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of Python."""

    line: int  # of the first line of code, counted from 1
    code: str
    run: bool


class PageError(Exception):
    """The fences of a page make no sense."""


def python_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    fence: str | None = None  # the ticks of the fence that is open
    for number, line in enumerate(text.splitlines(), start=1):
        match = _FENCE.fullmatch(line)
        if fence is None:
            if match:
                fence, info, start, lines = match["ticks"], match["info"].strip(), number, []
                if _LOOKS_LIKE_PYTHON.fullmatch(info):
                    raise PageError(f"line {number}: write ```python or ```python no-run")
        elif match and match["ticks"].startswith(fence) and not match["info"].strip():
            if info in {"python", "python no-run"}:
                code = textwrap.dedent("".join(f"{text}\n" for text in lines))
                blocks.append(Block(start + 1, code, info == "python"))
            fence = None
        else:
            lines.append(line)
    if fence is not None:
        raise PageError(f"line {start}: this block is never closed")
    return blocks


def run_page(path: Path) -> types.ModuleType:
    """Run the blocks of a page in a fresh module, and return it."""
    # Dataclasses and pickling look up the module of a class, so it has to be a real one.
    module = types.ModuleType(f"page_{path.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    try:
        for block in python_blocks(path.read_text(encoding="utf-8")):
            padded = "\n" * (block.line - 1) + block.code
            code = compile(padded, str(path), "exec", dont_inherit=True)
            if block.run:
                exec(code, module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a page may write files
    try:
        run_page(page)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library in OPTIONAL and importlib.util.find_spec(library) is None:
            # the suite also runs with JAX alone; a missing part of an installed library is an error
            pytest.skip(f"{library} is not installed")
        raise


def test_the_tests_are_installed_with_all_that_a_page_may_lack():
    """So a page is passed over only where somebody has chosen to install less."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, installed, pending = project["optional-dependencies"], set[str](), ["test"]
    while pending:
        for requirement in extras[pending.pop()]:
            name, _, names = re.split("[<>=;]", requirement)[0].rstrip("]").partition("[")
            installed.add(name)
            pending += names.split(",") if name == project["name"] else []
    assert {name.removesuffix("-checkpoint") for name in installed} >= OPTIONAL


# The machinery above.


def _page(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "page.md"
    path.write_text(textwrap.dedent(text))
    return path


def test_blocks_share_a_namespace_in_order(tmp_path):
    page = _page(
        tmp_path,
        """
        ```python
        x = [1]
        ```
        ```text
        x.append("not Python")
        ```
        - in a list

          ```python
          x.append(2)
          ```
        """,
    )
    assert run_page(page).x == [1, 2]


def test_a_failing_block_fails_at_its_line(tmp_path):
    page = _page(
        tmp_path,
        """
        # Page

        ```python
        def f():
            raise KeyError("here")
        ```

        ```python
        f()
        ```
        """,
    )
    with pytest.raises(KeyError, match="here") as info:
        run_page(page)
    frames = traceback.extract_tb(info.tb)[-2:]
    assert [(frame.filename, frame.lineno) for frame in frames] == [(str(page), 10), (str(page), 6)]
    assert [frame.line for frame in frames] == ["f()", 'raise KeyError("here")']


def test_no_run_is_compiled_and_not_run(tmp_path):
    run_page(_page(tmp_path, "```python no-run\nraise SystemExit\n```\n"))
    with pytest.raises(SyntaxError, match=r"page\.md, line 2"):
        run_page(_page(tmp_path, "```python no-run\nraise raise\n```\n"))


def test_dataclasses_with_string_annotations_work(tmp_path):
    code = "from __future__ import annotations\nimport dataclasses\n"
    code += "@dataclasses.dataclass\nclass Point:\n    x: int\n"
    module = run_page(_page(tmp_path, f"```python\n{code}```\n"))
    assert module.Point(1).x == 1
    assert module.__name__ not in sys.modules


@pytest.mark.parametrize("info", ["py", "python3", "Python", "pycon", "python norun"])
def test_a_misspelt_block_is_not_skipped(info):
    with pytest.raises(PageError, match="line 1"):
        python_blocks(f"```{info}\nx\n```\n")


def test_an_open_block_is_not_skipped():
    with pytest.raises(PageError, match="line 2"):
        python_blocks("\n```python\nx\n")


def test_a_longer_fence_holds_a_shorter_one():
    assert python_blocks("````text\n```python\nx\n```\n````\n") == []
