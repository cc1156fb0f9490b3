"""The lines of a follower that take the arguments of a call apart.

Trees of arrays are taken apart by JAX, in C. What stands in a long list and has one form (the
layers of a model) is read by columns: see `_columns`.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from anabranch._source import Source
from anabranch.graph import _classify, _kinds, _static
from anabranch.graph._function import is_settled
from anabranch.graph._kinds import Kind
from anabranch.graph._state import State
from anabranch.transforms._captures import is_itself
from anabranch.transforms._columns import (
    LONG,
    Columns,
    has_plain_attributes,
    have_types,
    leaf_types,
    runs_of,
)
from anabranch.transforms._opened import contents_of, static_of
from anabranch.transforms._places import spine_of
from anabranch.transforms._sharing import Sharing
from anabranch.transforms._trees import is_large, statics_of, tree_of
from anabranch.transforms._watch import Unplannable, Watch
from anabranch.transforms._words import ids_in

_LINES = 20000  # of source; longer ones take long to compile
_FEW = 4  # elements of a list that are named one by one
_SOME = 12  # arrays, beyond which their types are compared at once
_MANY = 16  # ids, from which on their bytes are read faster


class Arguments:
    """The part that takes the arguments of a call apart, and compares them.

    Arguments:
        source: where the lines go.
        shared: expressions for the arguments that hang on a Module which is passed, too, by id.
    """

    def __init__(self, source: Source, shared: Mapping[int, str]) -> None:
        self.source, self._shared = source, shared
        self.roots: list[str] = []
        self.leaves: list[str] = []
        self.lengths: dict[str, int] = {}  # of lists of leaves
        self.nodes: list[str] = []  # those with identity that are no roots
        self._listed: list[str] = []  # the same, as they are written in a list
        self.children: dict[str, Sequence[str]] = {}  # of nodes: the names of what they hold
        self.plain: set[str] = set()  # the names of nodes with all attributes in `__dict__`
        self._arrays: dict[bool, list[tuple[str, Any]]] = {False: [], True: []}  # to be compared
        self._named: list[tuple[str, list[str]]] = []  # attributes, and their names
        self._attached: list[tuple[str, str]] = []  # names of arguments, and what they have to be
        self._first: dict[int, str] = {}  # the names of nodes by id
        self._num_repeated = 0

    def take(self, name: str, x: Any, *, numbers: bool = True) -> None:
        """Compare what a variable holds with what it held when the plan was made.

        Arguments:
            name: of the variable.
            x: what it held.
            numbers: whether Python numbers are leaves.
        """
        source, cls = self.source, type(x)
        rule = _classify.RULES.get(cls)
        has_identity = isinstance(rule, Kind) and rule.identity and not rule.is_root
        if has_identity and self.is_shared(name, x):
            for root in spine_of(x).roots:  # below something that is known to be the same
                self.add_root(f"{source.constant(weakref.ref(root))}()")
            return
        if rule is _classify.LEAF or (rule is _classify.NUMBER and numbers):
            self._arrays[numbers].append((name, x))
            self.leaves.append(name)
        elif isinstance(rule, Kind) and rule.is_root:
            source.unless(f"id({name}) == {id(x)}")
            self.add_root(name)
        elif rule is _kinds.VARIABLE:
            self._take_variable(name, x)
        elif isinstance(rule, Kind) and rule.is_object and rule is not _kinds.OBJECT:
            self._take_foreign(name, x, rule)
        elif rule is _kinds.OBJECT or rule is _kinds.FROZEN:
            self._take_object(name, x, numbers=numbers and rule is _kinds.FROZEN)
        elif cls in (list, dict):
            self._take_container(name, x, numbers=numbers)
        elif rule is _kinds.TUPLE or rule is _kinds.PYTREE:
            self._take_tree(name, x, numbers=numbers)
        elif rule is _kinds.METHOD or rule is _kinds.PARTIAL:
            self._take_bound(name, x, numbers=numbers)
        elif cls is types.FunctionType:
            self._take_function(name, x)
        elif isinstance(rule, Kind) and cls not in _classify.LOOK:
            self._take_opened(name, x, rule, numbers=numbers)
        else:
            self.take_static(name, x)

    def is_shared(self, name: str, x: Any) -> bool:
        """Tell whether a node hangs on a Module or came before; then that is compared."""
        if id(x) in self._shared:
            self._attached.append((name, self._shared[id(x)]))
            return True
        first = self._first.setdefault(id(x), name)
        if first != name:
            self.source.unless(f"{name} is {first}")
            self._num_repeated += 1
        return first != name

    def add_root(self, name: str) -> None:
        """Add an object that can keep what plans know of it, and that is known to be the same."""
        self.roots.append(name)

    def add_node(self, name: str) -> None:
        """Add an object with identity."""
        self.nodes.append(name)
        self._listed.append(name)

    def add_nodes(self, columns: Columns, count: int) -> None:
        """Add objects with identity that stand in columns, row by row."""
        self.nodes += [column.element(row) for row in range(count) for column in columns.nodes]
        self._listed += [f"*{name}" for name in columns.lists]

    def add_leaves(self, name: str, count: int) -> None:
        """Add all elements of a list."""
        self.lengths[name] = count
        self.leaves += [f"{name}[{i}]" for i in range(count)]

    def inputs(self, leaves: Sequence[str]) -> list[str]:
        """Return leaves as they are given to a function: what stands together, in one piece."""
        parts = [split_name(leaf) for leaf in leaves]
        found: list[str] = []
        at = 0
        while at < len(parts):
            name, index = parts[at]
            end = at + 1
            while name and end < len(parts) and parts[end] == (name, index + end - at):
                end += 1
            if self.lengths.get(name) == end - at:
                found.append(f"*{name}")
            elif end - at < _FEW:
                found += leaves[at:end]
            else:
                found.append(f"*{name}[{index}:{index + end - at}]")
            at = end
        return found

    def take_static(self, name: str, x: Any) -> None:
        """Compare a static value."""
        value, cls = self.source.constant(x), self.source.constant(type(x))
        if type(x) in _static.EXACT_BY_TYPE:
            same = f"{name} is {value} or (type({name}) is {cls} and {name} == {value})"
        elif type(x) in (float, complex) or is_itself(x):
            same = f"{name} is {value}"
        else:
            encoded = static_of(x)
            if encoded is None:
                raise Unplannable
            self.source.names["static_of"] = static_of
            same = f"type({name}) is {cls} and static_of({name}) == {self.source.constant(encoded)}"
        self.source.unless(same)

    def _take_opened(self, name: str, x: Any, kind: Any, *, numbers: bool) -> None:
        """Compare an object of any other kind."""
        source, found, contents = self.source, self.source.fresh(), contents_of(kind, x)
        if contents is None:
            raise Unplannable
        extra, keys, values = contents
        source.names["contents_of"] = contents_of
        source.add(f"{found} = contents_of({source.constant(kind)}, {name})")
        source.unless(f"type({name}) is {source.constant(type(x))} and {found} is not None")
        source.unless(f"{found}[:2] == {source.constant((extra, keys))}")
        if kind.identity:
            self.add_node(name)
        if kind.numbers is not None:
            numbers = kind.numbers
        self.children[name] = self.take_all(f"{found}[2]", values, numbers=numbers)

    def take_captured(self, name: str, metadata: Any, cls: type) -> None:
        """Read a Variable that the function captures."""
        self.leaves.append(self._read_variable(name, metadata, cls))

    def compare_captures(self, watch: Watch) -> dict[int, str]:
        """Compare what functions capture; return the names of containers by their places."""
        source = self.source
        conditions, names = watch.conditions(source) or (
            (f"{source.constant(watch.is_same)}()",),
            {},
        )
        if conditions:
            source.unless(" and ".join(conditions))
        return names

    def _take_function(self, name: str, x: types.FunctionType) -> None:
        """Compare a function that reaches no object, and see that it still reaches none."""
        if _classify.rule_of(x) is not _classify.STATIC:
            raise Unplannable
        self.source.unless(f"{name} is {self.source.constant(x)}")
        if not is_settled(x):
            self.compare_captures(Watch([x]))

    def _take_bound(self, name: str, x: Any, *, numbers: bool) -> None:
        """Compare a method or a partial function."""
        source = self.source
        source.unless(f"type({name}) is {source.constant(type(x))}")
        if isinstance(x, types.MethodType):
            parts = f"({name}.__func__, {name}.__self__)"
            self.take_all(parts, [x.__func__, x.__self__], numbers=numbers)
            return
        source.unless(f"len({name}.args) == {len(x.args)}")
        source.unless(f"[*{name}.keywords] == {source.constant([*x.keywords])}")
        children = [x.func, *x.args, *x.keywords.values()]
        self.take_all(
            f"({name}.func, *{name}.args, *{name}.keywords.values())", children, numbers=False
        )

    def _take_variable(self, name: str, x: Any) -> None:
        self.add_node(name)
        value = self._read_variable(name, x._metadata, type(x))
        self.children[name] = (value,)
        if _classify.RULES.get(type(x._value)) in (_classify.LEAF, _classify.NUMBER):
            self.leaves.append(value)  # what is no leaf, JAX takes for another structure
        else:
            self.take(value, x._value)

    def _read_variable(self, name: str, metadata: Any, cls: type) -> str:
        """Compare a Variable, and return the name of its value."""
        source, value = self.source, self.source.fresh()
        known = source.constant(cls), source.constant(metadata)
        source.unless(f"type({name}) is {known[0]} and {name}._metadata is {known[1]}")
        source.add(f"{value} = {name}._value")
        return value

    def _take_foreign(self, name: str, x: Any, kind: Kind) -> None:
        """Compare a Variable of another library, or an object that is a dictionary within."""
        source, held = self.source, self.source.fresh()
        source.unless(f"type({name}) is {source.constant(type(x))}")
        self.add_node(name)
        if kind.is_variable and kind.cell is not None:
            metadata, value = kind.cell.metadata(x), source.fresh()
            if type(metadata) is not dict:
                raise Unplannable
            source.add(f"{held} = {source.constant(kind.cell.metadata)}({name})")
            source.unless(f"[*{held}] == {source.constant([*metadata])}")
            values = source.constant([*metadata.values()])
            source.unless(f"all(map(is_, {held}.values(), {values}))")
            source.add(f"{value} = {source.constant(kind.cell.read)}({name})")
            if _classify.RULES.get(type(kind.cell.read(x))) is not _classify.LEAF:
                raise Unplannable
            self.leaves.append(value)
            return
        attributes = kind.attributes(x)
        if kind.is_variable or kind.is_root or kind.bookkeeping or type(attributes) is not dict:
            raise Unplannable
        source.add(f"{held} = {source.constant(kind.attributes)}({name})")
        self._take_items(held, attributes, numbers=bool(kind.numbers))

    def _take_items(self, name: str, x: dict[Any, Any], *, numbers: bool) -> Sequence[str]:
        """Compare what a dictionary holds, and return its names."""
        source = self.source
        types = {*map(type, x)}
        if not types <= {str, int}:
            raise Unplannable
        source.unless(f"[*{name}] == {source.constant([*x])}")
        # others may equal them: True, or one of a class that is derived from `str`
        source.unless(f"[*map(type, {name})] == {source.constant([*map(type, x)])}")
        return self.take_all(f"{name}.values()", [*x.values()], numbers=numbers)

    def _take_object(self, name: str, x: Any, *, numbers: bool) -> None:
        source, cls = self.source, type(x)
        if not has_plain_attributes(x):
            self._take_opened(name, x, _classify.RULES[cls], numbers=numbers)
            return
        attributes = source.fresh()
        source.unless(f"type({name}) is {source.constant(cls)}")
        source.add(f"{attributes} = {name}.__dict__")
        self._named.append((attributes, [*vars(x)]))
        if _classify.RULES[cls] is _kinds.OBJECT:
            self.add_node(name)
            self.plain.add(name)
        children = [*vars(x).values()]
        self.children[name] = self.take_all(f"{attributes}.values()", children, numbers=numbers)

    def _take_container(self, name: str, x: Any, *, numbers: bool) -> None:
        source, cls = self.source, type(x)
        if cls is dict and not {*map(type, x)} <= {str, int}:
            self._take_opened(name, x, _kinds.DICT, numbers=numbers)
            return
        known = cls.__name__ if cls in (list, dict, tuple) else source.constant(cls)
        source.unless(f"type({name}) is {known} and len({name}) == {len(x)}")
        if cls in (list, dict):
            self.add_node(name)
        if cls is dict:
            self.children[name] = self._take_items(name, x, numbers=numbers)
        else:
            self.children[name] = self.take_all(name, [*x], numbers=numbers)

    def _take_tree(self, name: str, x: Any, *, numbers: bool) -> None:
        """Compare a State, a tuple or the like; JAX takes large ones apart, if it can."""
        source, tree = self.source, None
        if type(x) is State and {*map(type, x.leaves)} <= leaf_types(numbers):
            self._take_state(name, x, numbers=numbers)
            return
        if not isinstance(x, tuple) or is_large(x):
            tree = tree_of(x, leaf_types(numbers))
        if tree is not None:
            leaves, found = source.fresh(), source.fresh()
            source.names.update(flatten=jax.tree.flatten, statics_of=statics_of)
            source.add(f"{leaves}, {found} = flatten({name})")
            source.unless(f"{found} == {source.constant(tree.treedef)}")
            if tree.statics:
                source.unless(f"statics_of({found}) == {source.constant(tree.statics)}")
            numbers = numbers and tree.numbers
            source.unless(have_types(source, leaves, jax.tree.leaves(x), numbers=numbers))
            self.add_leaves(leaves, tree.treedef.num_leaves)
        elif isinstance(x, tuple):
            self._take_container(name, x, numbers=numbers)
        elif _is_frozen(x) and not jax.tree.leaves(x):
            source.unless(f"{name} is {source.constant(x)}")
        else:
            self._take_opened(name, x, _classify.RULES[type(x)], numbers=numbers)

    def _take_state(self, name: str, x: State, *, numbers: bool) -> None:
        source, leaves, infos = self.source, self.source.fresh(), self.source.constant(x._source)
        source.unless(f"type({name}) is {source.constant(State)}")
        source.unless(f"{name}._source is {infos} or {name}._source == {infos}")
        source.add(f"{leaves} = {name}._leaves")
        if len(x.leaves) <= _SOME:
            self.take_all(leaves, x.leaves, numbers=numbers)
        else:
            source.unless(have_types(source, leaves, x.leaves, numbers=numbers))
            self.add_leaves(leaves, len(x.leaves))

    def take_all(
        self, expression: str, children: Sequence[Any], *, numbers: bool = True
    ) -> Sequence[str]:
        """Compare all children, and return their names; none if they are read by columns."""
        source = self.source
        if len(source.lines) > _LINES:
            raise Unplannable
        if not children:
            return ()
        apart = {*self._shared, *self._first}
        runs = runs_of(children, apart, numbers=numbers) if len(children) >= LONG else []
        if not runs:
            names = [source.fresh() for _ in children]
            source.add(f"{', '.join(names)}, = {expression}")
            for name, child in zip(names, children, strict=True):
                self.take(name, child, numbers=numbers)
            return names
        every = source.fresh()
        source.add(f"{every} = [*{expression}]")
        source.unless(f"len({every}) == {len(children)}")
        at = 0
        for start, end in [*runs, (len(children), len(children))]:
            for i in range(at, start):
                name = source.fresh()
                source.add(f"{name} = {every}[{i}]")
                self.take(name, children[i], numbers=numbers)
            if start < end:
                self._take_run(every, start, end, children, numbers=numbers)
            at = end
        return ()

    def _take_run(
        self, every: str, start: int, end: int, children: Sequence[Any], *, numbers: bool
    ) -> None:
        """Compare children of one form."""
        source, name, rows = self.source, every, children[start:end]
        if end - start < len(children):
            name = source.fresh()
            source.add(f"{name} = {every}[{start}:{end}]")
        columns = Columns(source, name, rows, numbers=numbers)
        self.add_nodes(columns, len(rows))
        leaves = columns.join()
        if leaves is not None:
            self.add_leaves(leaves, len(columns.leaves) * len(rows))

    def check_all(self) -> None:
        """Compare the types of arrays and the names of attributes, which were left for the end.

        How many attributes there are of each object has been seen when they were unpacked.
        """
        source = self.source
        for numbers, arrays in self._arrays.items():
            names, held = [name for name, _ in arrays], [x for _, x in arrays]
            if len(arrays) > _SOME:
                every = source.fresh()
                source.add(f"{every} = ({', '.join(names)})")
                source.unless(have_types(source, every, held, numbers=numbers))
            elif arrays:
                types = source.constant(leaf_types(numbers))
                source.unless(" and ".join([f"type({name}) in {types}" for name in names]))
            arrays.clear()
        if self._named:
            found = ", ".join([f"*{attributes}" for attributes, _ in self._named])
            known = [name for _, names in self._named for name in names]
            source.unless(f"[{found}] == {source.constant(known)}")
            self._named.clear()

    def check_shared(self, sharing: Sharing | None) -> None:
        """Compare the arguments that hang on a Module, when the segments are known."""
        attached, repeated = sharing[:2] if sharing is not None else ((), ())
        if (len(self._attached), self._num_repeated) != (len(attached), len(repeated)):
            raise Unplannable  # one of them is read by columns
        for name, expected in self._attached:
            self.source.unless(f"{name} is {expected}")

    def check_nodes(self, others: Sequence[str]) -> None:
        """Compare nodes with one another, and with other ids: all must be different.

        Arguments:
            others: sets of ids: of what hangs on roots, and of constants.
        """
        source = self.source
        if len(self.nodes) == 1:
            for ids in others:
                source.unless(f"id({self.nodes[0]}) not in {ids}")
        elif self.nodes:
            # most often they are those of the last call
            source.names["latest"] = [None]
            source.add(f"nodes = [{', '.join(self._listed)}]")
            ids = "[*map(id, nodes)]"
            if len(self.nodes) >= _MANY:
                ids = f"{ids_in(source, 'nodes', len(self.nodes))}.raw"
            source.add(f"ids = {ids}")
            source.add("if ids != latest[0]:")
            source.add("different = {*map(id, nodes)}", 2)
            conditions = [f"len(different) == {len(self.nodes)}"]
            conditions += [f"different.isdisjoint({ids})" for ids in others]
            source.add(f"if not ({' and '.join(conditions)}): return AGAIN", 2)
            source.add("latest[0] = ids", 2)


def split_name(leaf: str) -> tuple[str, int]:
    """Return the list that a leaf is an element of, and its position; no name if it is none."""
    name, _, index = leaf.rstrip("]").partition("[")
    return (name, int(index)) if index else ("", -1)


def _is_frozen(x: Any) -> bool:
    parameters: Any = getattr(type(x), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen
