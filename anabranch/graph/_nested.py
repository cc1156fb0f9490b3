"""The nested reading of a flat tuple of leaves.

What is below a key is computed on the first lookup, one level at a time, and kept: most States
are never read by key, and a State never changes.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping

from anabranch.errors import ArgumentError, MissingPathError, bounded
from anabranch.graph._filters import Path
from anabranch.graph._leaf_info import DeferredInfos, LeafInfo, LeafInfos, path_text


class _Missing:
    """What a lookup returns when nothing is there; a leaf may be None."""


_MISSING: typing.Final = _Missing()


class NestedReading(Mapping[Hashable, typing.Any]):
    """Read leaves by key, level by level, or by path.

    A leaf at the root, at path (), has the key (). A key that is itself a tuple comes before a
    path.
    """

    __slots__ = ("__weakref__", "_children", "_leaves", "_positions", "_source")

    _source: LeafInfos | DeferredInfos
    _leaves: tuple[typing.Any, ...]
    # Built on the first lookup: most States are never read by key.
    _children: dict[Hashable, typing.Any] | None
    _positions: dict[Path, int] | None

    def __init__(
        self, infos: tuple[LeafInfo, ...] | DeferredInfos, leaves: tuple[typing.Any, ...]
    ) -> None:
        if len(infos) != len(leaves):
            raise ArgumentError(f"State: {len(infos)} infos but {len(leaves)} leaves")
        kept = isinstance(infos, (LeafInfos, DeferredInfos))
        self._source = infos if kept else LeafInfos(infos)
        self._leaves = leaves
        self._children = None
        self._positions = None

    @property
    def infos(self) -> tuple[LeafInfo, ...]:
        """The static part of each leaf."""
        return self._infos

    @property
    def _infos(self) -> tuple[LeafInfo, ...]:
        source = self._source
        return source.found() if isinstance(source, DeferredInfos) else source

    @property
    def leaves(self) -> tuple[typing.Any, ...]:
        """The arrays, in the order of `infos`."""
        return self._leaves

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path of each leaf."""
        return tuple(info.path for info in self._infos)

    def flat(self) -> dict[Path, typing.Any]:
        """Return the leaves by path, in order."""
        return dict(zip(self.paths, self._leaves, strict=True))

    def to_dict(self) -> dict[Hashable, typing.Any]:
        """Return nested dicts; those of a list are keyed by position, a root leaf by ()."""
        nested: dict[Hashable, typing.Any] = {}
        for info, leaf in zip(self._infos, self._leaves, strict=True):
            level = nested
            for key in info.path[:-1]:
                level = level.setdefault(key, {})
            level[info.path[-1] if info.path else ()] = leaf
        return nested

    def _by_key(self) -> dict[Hashable, typing.Any]:
        """Return what is below each top-level key: a leaf, or a State with shorter paths."""
        if self._children is None:
            groups: dict[Hashable, list[tuple[LeafInfo, typing.Any]]] = {}
            for info, leaf in zip(self._infos, self._leaves, strict=True):
                groups.setdefault(info.path[0] if info.path else (), []).append((info, leaf))
            self._children = {key: self._below(group) for key, group in groups.items()}
        return self._children

    def _position_of(self, key: Hashable) -> int | None:
        """Return the position of the leaf with a path; a key that is no tuple is a path of one."""
        if self._positions is None:
            self._positions = {info.path: i for i, info in enumerate(self._infos)}
        return self._positions.get(key if isinstance(key, tuple) else (key,))

    def _find(self, key: Hashable) -> typing.Any:
        found: typing.Any = self._by_key().get(key, _MISSING)
        if found is not _MISSING or not isinstance(key, tuple):
            return found
        position = self._position_of(key)
        if position is not None:
            return self._leaves[position]
        found = self
        for step in typing.cast("Path", key):
            if not isinstance(found, NestedReading):
                return _MISSING
            found = found._by_key().get(step, _MISSING)
        return found

    def __getitem__(self, key: Hashable) -> typing.Any:
        found = self._find(key)
        if found is _MISSING:
            raise MissingPathError(self._missing_text(key))
        return found

    def _missing_text(self, key: Hashable, what: str = "nothing") -> str:
        """Say what is not there, and name a few keys that are there, similar ones first."""
        path: Path = key if isinstance(key, tuple) else (key,)
        # A key is compared with keys and a path with paths; finding similar ones is slow.
        paths = [p if isinstance(key, tuple) else p[:1] for p in self.paths[:1_000]]
        texts = list(dict.fromkeys(map(path_text, paths)))
        similar = difflib.get_close_matches(path_text(path), texts, n=5, cutoff=0.5)
        shown = list(dict.fromkeys([*similar, *texts]))[:5]
        known = ", ".join(shown) + (", ..." if len(texts) > len(shown) else "")
        return bounded(f"State has {what} at {path_text(path)}; it has {known or 'no leaves'}")

    def __contains__(self, key: object) -> bool:
        return self._find(key) is not _MISSING

    def get(self, key: Hashable, default: typing.Any = None) -> typing.Any:
        """Return what is at a key or path, `default` if nothing is."""
        found = self._find(key)
        return default if found is _MISSING else found

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._by_key())

    def __len__(self) -> int:
        return len(self._by_key())

    @classmethod
    def _of_pairs(cls, pairs: Iterable[tuple[LeafInfo, typing.Any]]) -> typing.Self:
        listed = list(pairs)
        return cls(LeafInfos(info for info, _ in listed), tuple(leaf for _, leaf in listed))

    def _below(self, group: list[tuple[LeafInfo, typing.Any]]) -> typing.Any:
        """Return the leaf, or the State, below the first key, which all the paths share."""
        if len(group) == 1 and len(group[0][0].path) <= 1:
            return group[0][1]
        return self._of_pairs((info._replace(path=info.path[1:]), leaf) for info, leaf in group)
