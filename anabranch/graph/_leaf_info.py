"""What is static about the leaves of a State: where each one is and what kind it is.

The infos of a State are its aux data. JAX compares aux data with `==` on every call, hence a
`NamedTuple` (compared and hashed in C) and plain equality: whoever builds infos sees to it that
1, True and 1.0 differ in the metadata.
"""

from __future__ import annotations

import typing
from collections.abc import Hashable, Sequence

import jax

from anabranch.errors import StructureError, bounded, first_few
from anabranch.graph import _static
from anabranch.graph._filters import Path

_SHOWN_INFOS = 8
_SHOWN_CHARACTERS = 200


def path_text(path: Path) -> str:
    """Show a path as it is written behind a State, `['layers'][0]['w']`, in 200 characters."""
    text = "".join(f"[{key!r}]" for key in path) or "[()]"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


class VariableName(str):
    """The name that a function has for something that it captures, as a key of a path."""

    __slots__ = ()


def call_text(path: Path) -> str:
    """Show a path in a call as the call, or the function that is called, is written."""
    start: typing.Any = "the call"
    below: list[Hashable] = []
    for i, key in enumerate(path):
        if i == 0 or key == "__self__" or type(key) is VariableName:
            start, below = "self" if key == "__self__" else key, []
        else:
            below.append(key)
    return f"{start}{path_text(tuple(below)) if below else ''}"


class LeafInfo(typing.NamedTuple):
    """Say what is static about one leaf.

    Arguments:
      path: where the leaf is.
      kind: the class of its Variable; `jax.Array` for a plain array attribute.
      metadata: the metadata of its Variable, in a form that compares strictly with `==`.

    >>> import anabranch as ab
    >>> ab.State.from_flat({("w",): np.ones(2)}, kinds=ab.Param).infos[0].path
    ('w',)
    """

    path: Path
    kind: type
    metadata: tuple[tuple[str, Hashable], ...] = ()

    @property
    def kind_text(self) -> str:
        """The kind as messages show it; some versions of JAX name the array class otherwise."""
        return "Array" if self.kind is jax.Array else self.kind.__name__

    def __reduce__(self) -> tuple[typing.Any, ...]:
        # jax 0.10 can pickle arrays but not their class.
        kind = None if self.kind is jax.Array else self.kind
        return _restore, (self.path, kind, self.metadata)


def _restore(path: Path, kind: type | None, metadata: tuple[tuple[str, Hashable], ...]) -> LeafInfo:
    return LeafInfo(path, jax.Array if kind is None else kind, metadata)


class LeafInfos(tuple[LeafInfo, ...]):
    """The infos of a State: a tuple with a short repr.

    JAX prints both tuples when two structures differ; for a large model that were megabytes.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        rows = [f"{path_text(info.path)} {info.kind_text}" for info in self[:_SHOWN_INFOS]]
        if len(self) > _SHOWN_INFOS:
            rows.append(f"... {len(self):,} leaves")
        # The hash tells two tuples apart that begin alike.
        return f"<{', '.join(rows)}; fingerprint {hash(self) & 0xFFFF_FFFF:08x}>"


class DeferredInfos:
    """The infos of leaves of a graphdef, found when somebody asks for them.

    The paths of a chain of n nodes have n * n / 2 keys in all, and a State that is merged again, or
    mapped over, needs none of them.

    Arguments:
        source: the graphdef.
        numbers: of the leaves; None: all of them.
    """

    __slots__ = ("_found", "_source", "numbers")

    def __init__(self, source: _HasInfos, numbers: tuple[int, ...] | None = None) -> None:
        self._source, self.numbers = source, numbers
        self._found: tuple[LeafInfo, ...] | None = None

    def found(self) -> tuple[LeafInfo, ...]:
        """Return the infos."""
        if self._found is None:
            infos, numbers = self._source.infos, self.numbers
            self._found = infos if numbers is None else tuple([infos[i] for i in numbers])
        return self._found

    def numbers_in(self, source: object) -> Sequence[int] | None:
        """Return the numbers of the leaves in a graphdef, None if they are those of another one."""
        if self._source is not source:
            return None
        return range(self._source.num_leaves) if self.numbers is None else self.numbers

    def __len__(self) -> int:
        return self._source.num_leaves if self.numbers is None else len(self.numbers)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, DeferredInfos):
            same = self._source is other._source and self.numbers == other.numbers
            return same or self.found() == other.found()
        return self.found() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.found())  # as the tuple that it may equal

    def __repr__(self) -> str:
        return repr(LeafInfos(self.found()))

    def __reduce__(self) -> tuple[type, tuple[typing.Any, ...]]:
        return LeafInfos, (self.found(),)


_static.SAME_AS[DeferredInfos] = LeafInfos


class _HasInfos(typing.Protocol):
    @property
    def infos(self) -> tuple[LeafInfo, ...]: ...
    @property
    def num_leaves(self) -> int: ...


def path_name(path: Path) -> str:
    """Return the name of a path in a file, `layers/0/w`; two paths have two names."""
    return "/".join(map(_key_name, path)) or "()"


def _key_name(key: Hashable) -> str:
    if isinstance(key, str):  # a name is itself, what may be read as something else is quoted
        plain = (key[:1].isalpha() or key[:1] == "_") and "/" not in key
        return key if plain else repr(key)
    return str(key) if type(key) is int else f"({key!r})"


class LeafKey(jax.tree_util.GetAttrKey):
    """The key of a leaf in the key paths of `jax.tree_util`: the whole path, as a name.

    One of JAX's own keys, as others know no more (orbax names what it saves by them); but no
    `DictKey`: code that looks at the `key` of the last entry to find, say, all biases would
    compare it with the name of one attribute, and silently find none.
    """

    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__(path_name(path))
        self.path = path

    def __str__(self) -> str:
        return path_text(self.path)

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return LeafKey, (self.path,)


def check_paths_are_disjoint(infos: Sequence[LeafInfo]) -> None:
    """Refuse two leaves at one path, and a leaf below another one.

    Raises:
      StructureError: there are such leaves; the message names their paths.
    """
    seen: set[Path] = set()
    twice: list[str] = []
    for info in infos:
        if info.path in seen:
            twice.append(path_text(info.path))
        seen.add(info.path)
    if twice:
        raise StructureError(bounded(f"more than one leaf at the same path:\n{first_few(twice)}"))
    below = [
        f"{path_text(path)} is below the leaf at {path_text(path[:length])}"
        for path in seen
        for length in range(len(path))
        if path[:length] in seen
    ]
    if below:
        raise StructureError(bounded(f"leaves have no room for others:\n{first_few(below)}"))
