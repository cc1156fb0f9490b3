"""The end of a follower: the lines that write what the function wrote, and return the result."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import starmap
from threading import get_ident
from typing import Any, Protocol

from anabranch._source import Source
from anabranch.graph import _kinds
from anabranch.graph._turn import FREE, HAS_LOCK, HOLDER, wait
from anabranch.graph._watchers import forget_all
from anabranch.transforms._plan import Plan
from anabranch.transforms._result import Result
from anabranch.transforms._segment import Segment
from anabranch.transforms._spine import are_arrays
from anabranch.transforms._taken import Arguments, split_name
from anabranch.transforms._watch import Unplannable
from anabranch.transforms._writer import PLAIN_KEYS, Put, Writer, key_of

_TAKE_TURN = (
    ("me = get_ident()", 1),
    ("try: del FREE[0]", 1),
    ("except IndexError: mine = wait(me)", 1),
    ("else: HOLDER.thread = me; mine = True", 1),
    ("try:", 1),
)
_GIVE_BACK = (
    ("if mine:", 2),
    ("COMMITS.ended = COMMITS.begun", 3),
    ("HOLDER.thread = None", 3),
    ("FREE.append(None)", 3),
)
FEW = 4
"""Objects and arrays that are named one by one; more are picked in one call."""


class Beginning(Protocol):
    """What the lines before have found."""

    plan: Plan
    segments: Sequence[Segment]
    writer: Writer
    source: Source
    places: list[str]  # where each leaf is
    inputs: list[str]  # how they are given to the compiled function
    outputs: list[str]  # what it returns
    trees: dict[tuple[int, int], str]  # see `Reading`


class Ending:
    """Adds the lines.

    Arguments:
        beginning: of the follower.
        arguments: of the call.
    """

    def __init__(self, beginning: Beginning, arguments: Arguments) -> None:
        self.plan, self.segments, self.arguments = beginning.plan, beginning.segments, arguments
        self.writer, self.source = beginning.writer, beginning.source
        self.places, self.inputs, self.trees = beginning.places, beginning.inputs, beginning.trees
        self.outputs = beginning.outputs
        self.written: dict[int, list[int]] = {}  # the Variables that are remembered, by segment
        self.loose: list[int] = []  # those that somebody else may remember
        self.access = access = self.writer.access
        for i, index in enumerate(self.writer.indices):
            if access.own[i]:
                number = self._owner(index)
                (self.loose if number < 0 else self.written.setdefault(number, [])).append(i)
        self._turn = 0  # the line where it begins
        self._at_once: str | None = None
        """A line that does the same if it is nobody's turn, so that none has to be taken."""
        names = self.source.names
        names.update(FREE=FREE, HOLDER=HOLDER, get_ident=get_ident, wait=wait)
        names.update(replacing=access.replacing, starmap=starmap)
        if access.one is not None:
            names["set_value"] = access.one.write

    def add(self) -> None:
        """Add the lines."""
        writer = self.writer
        if len(writer.puts) == 1 and writer.are_arrays and not writer.indices:
            self._put_array()
        elif writer.puts:
            self._write_and_put()
        elif len(writer.indices) > FEW:
            self._write_many()
        elif writer.indices:
            self._write_few()
        if writer.writes:
            self._give_back()
            if self._at_once is not None:
                self.source.prefer(self._turn, self._at_once)
        self._return()

    def _take_turn(self) -> None:
        """Begin what only one thread may do at a time; see `in_turn`."""
        self._turn = len(self.source.lines)
        for line, depth in _TAKE_TURN:
            self.source.add(line, depth)

    def _give_back(self) -> None:
        source = self.source
        source.add("finally:")
        for number in self.written:
            source.add(f"k{number}.held = None", 2)
        for line, depth in _GIVE_BACK:
            source.add(line, depth)

    def _write_few(self) -> None:
        writer, source = self.writer, self.source
        variables = [source.fresh("v") for _ in writer.indices]
        for name, index in zip(variables, writer.indices, strict=True):
            source.add(f"{name} = {self._object(index)}")
        self._at_once = self._write_at_once(variables)
        self._take_turn()
        old = [self.places[leaf] for leaf in writer.replaced]
        source.add(f"written, old = ({', '.join(variables)},), ({', '.join(old)},)", 2)
        self._write_together()

    def _write_at_once(self, variables: Sequence[str]) -> str | None:
        """Return one line that writes, with nothing in it where another thread may come in.

        A line before makes what it takes. None if there is no such line.
        """
        source, writer, one = self.source, self.writer, self.access.one
        entries = [self.plan.graphdef.entries[index] for index in writer.indices]
        if one is None or not (HAS_LOCK and all(_reads_slots(entry.cls) for entry in entries)):
            return None
        pairs = [
            f"({name}, {self._value(new)})"
            for name, new in zip(variables, writer.sources, strict=True)
        ]
        conditions = ["FREE"]
        for name, leaf in zip(variables, writer.replaced, strict=True):
            conditions.append(f"{name}.{one.name} is {self.places[leaf]}")
        conditions += [f"{variables[i]}._memories is None" for i in self.loose]
        for number in self.written:
            conditions += [f"k{number}.values", f"not k{number}.beside"]
        steps = [
            line for number in self.written for line in self._notes(number, f"k{number}.values")
        ]
        if len(pairs) == 1:
            source.add(f"pair = {pairs[0]}")
            steps.append("set_value(*pair)")
        else:
            source.add(f"writing = starmap(set_value, ({', '.join(pairs)}))")
            steps += ["COMMITS.begun = COMMITS.ended = COMMITS.begun + 1", "True in writing"]
        return f"if {' and '.join(conditions)}: {'; '.join(steps)}"

    def _notes(self, number: int, values: str) -> list[str]:
        """Return lines that note a few values that are written, in a list of all of a segment."""
        return [
            f"{values}[{place}] = {self._value(self.writer.sources[i])}"
            for i, place in self._noted(number)
        ]

    def _noted(self, number: int) -> list[tuple[int, int]]:
        """Return the Variables of a segment that are written, with their places among all of it."""
        segment = self.segments[number]
        place = {id(variable): i for i, variable in enumerate(segment.variables)}
        indices = self.writer.indices
        return [(i, place[id(segment.objects[indices[i]])]) for i in self.written[number]]

    def _write_many(self) -> None:
        self._list_written()
        self._take_turn()
        self._write_together()

    def _list_written(self) -> None:
        """List the Variables that are written, and what was read of them."""
        source, writer = self.source, self.writer
        keys = [
            (self._owner(index), split_name(self.places[leaf])[0])
            for index, leaf in zip(writer.indices, writer.replaced, strict=True)
        ]
        runs: list[tuple[str, str]] = []
        start = 0
        for end in range(1, len(keys) + 1):
            if end == len(keys) or keys[end] != keys[start]:
                runs.append(self._run(*keys[start], start, end))
                start = end
        joined = [
            parts[0] if len(parts) == 1 else f"({', '.join([f'*{part}' for part in parts])},)"
            for parts in zip(*runs, strict=True)
        ]
        source.add(f"written, old = {', '.join(joined)}")

    def _write_and_put(self) -> None:
        """Put trees, or several arrays, in their places; Variables may be written, too."""
        writer, source = self.writer, self.source
        inputs = f"[{', '.join(self.inputs)}]"
        passed = [self.places[leaf] for leaf in writer.passed]
        if passed:  # which may be numbers in another call
            source.names["are_arrays"] = are_arrays
            source.add(f"if not are_arrays(({', '.join([*passed, ''])})):")
            source.add(f"return finish(plan, {inputs}, args, kwargs, out, report_then)", 2)
        source.add(f"placed = {self._built(writer.placed)}")
        objects = f"({', '.join([*map(self._object, writer.holders), ''])})"
        if writer.tells:
            source.add(f"objects = {objects}")
        source.add(f"holders = {self._holders() or f'writer.places({objects})'}")
        before = [self._put_before(put) for put in writer.puts]
        source.add(f"before = ({', '.join([*before, ''])})")
        if writer.indices:
            self._list_written()
        self._take_turn()
        self._put_together()

    def _holders(self) -> str | None:
        """Return an expression for what the places are in, None if there are many."""
        if len(self.writer.puts) > FEW:
            return None
        return f"({', '.join([self._holder(put.entry) for put in self.writer.puts])},)"

    def _holder(self, index: int) -> str:
        """Return an expression for what the attributes or elements of an object are in."""
        obj, writer = self._object(index), self.writer
        if obj in self.arguments.plain:
            return f"{obj}.__dict__"
        function = writer.holder_functions[writer.holders.index(index)]
        return obj if function is None else f"{self.source.constant(function)}({obj})"

    def _put_before(self, put: Put) -> str:
        """Return the name of what was in a place."""
        if put.old < 0:
            return self.places[~put.old]
        name = self.trees.get((put.entry, put.position))
        if name is not None:
            return name
        children = self.arguments.children.get(self._object(put.entry))
        if not children:
            raise Unplannable  # it is read by columns
        return children[put.position]

    def _write_together(self) -> None:
        """Write several Variables, so that nothing can come between."""
        source = self.source
        source.add(f"new = {self._outputs()}", 2)
        source.add("COMMITS.begun += 1", 2)
        self._forget(2)
        source.add("same, writing = replacing(written, old, new)", 2)
        source.add("if False in same or True in writing: writer.complain(written, old)", 2)
        self._remember(2)

    def _put_together(self) -> None:
        """Do the same, and put things in their places, which may fail."""
        source, tells = self.source, self.writer.tells
        if self.writer.indices:
            source.add(f"new = {self._outputs()}", 2)
        else:
            source.add("written = old = new = ()", 2)
        if tells:
            source.add("writer.tell(objects)", 2)
        source.add("changes = written, old, new, holders, before, placed", 2)
        source.add("same, writing = writer.replacing(*changes)", 2)
        source.add("COMMITS.begun += 1", 2)
        source.add("try:", 2)
        self._forget(3)
        source.add("are_others = False in same or True in writing", 3)
        if self.written:
            source.add("if not are_others:", 3)
            self._remember(4)
        # an interrupt may come when all has been written
        source.add("except BaseException as error:", 2)
        source.add("writer.undo(*changes)", 3)
        self._forget(3)
        source.add("if not isinstance(error, LookupError): raise", 3)
        source.add("are_others = True", 3)  # there is no such place any more
        if tells:
            source.add("finally:", 2)
            source.add("writer.tell(objects)", 3)
        source.add("if are_others:", 2)
        source.add("writer.check(holders, before)", 3)
        source.add("writer.complain(written, old)", 3)

    def _forget(self, depth: int) -> None:
        """Let nobody remember what the Variables that are written have held; see `_watchers`."""
        source = self.source
        if self.loose:
            objects = [self._object(self.writer.indices[i]) for i in self.loose]
            source.names["forget_all"] = forget_all
            source.add(f"forget_all(({', '.join(objects)},))", depth)
        for number in self.written:
            source.add(f"k{number} = s{number}.memory", depth)
            source.add(f"m{number} = k{number}.held = k{number}.values", depth)
            source.add(f"k{number}.values = None", depth)
            source.add(f"if k{number}.beside: k{number}.drop_beside()", depth)

    def _remember(self, depth: int) -> None:
        """Remember what they hold now, if nobody has written another of the Variables meanwhile."""
        source = self.source
        for number, written in self.written.items():
            at = [place for _, place in self._noted(number)]
            source.add(f"if m{number} is not None:", depth)
            if len(at) <= FEW:
                for line in self._notes(number, f"m{number}"):
                    source.add(line, depth + 1)
            else:
                new = f"new[:{len(at)}]"  # a result may follow
                if written != [*range(len(at))]:
                    new = f"{source.constant(operator.itemgetter(*written))}(new)"
                if at == [*range(len(self.segments[number].variables))]:
                    source.add(f"m{number}[:] = {new}", depth + 1)
                else:
                    places = source.constant(at)
                    source.add(f"any(map(m{number}.__setitem__, {places}, {new}))", depth + 1)
            # not if a finaliser has written, or made a call, meanwhile
            same = f"k{number}.held is m{number}"
            source.add(f"k{number}.values = m{number} if {same} else None", depth)
            source.add(f"if k{number}.beside: k{number}.drop_beside()", depth)

    def _resolver(self, indices: Iterable[int]) -> str:
        """Return an expression for what finds some objects by their indices."""
        objects = [f"{index}: {self._object(index)}" for index in sorted(indices)]
        return f"{{{', '.join(objects)}}}.__getitem__"

    def _put_array(self) -> None:
        """Put one array in a place."""
        source, writer = self.source, self.writer
        (put,), (index,), (key,) = writer.puts, writer.holders, writer.keys
        (new,) = writer.placed.leaves
        if new >= 0:
            raise Unplannable
        name, old = source.constant(key), self.places[~put.old]
        write = f"holder[{name}] = {self._value(new)}"
        source.add(f"holder = {self._holder(index)}")
        if HAS_LOCK and self._has_plain_keys(index):
            self._at_once = f"if FREE and {name} in holder and holder[{name}] is {old}: {write}"
        self._take_turn()
        source.add(f"try: same = holder[{name}] is {old}", 2)
        source.add("except LookupError: same = False", 2)
        source.add(f"if not same: raise writer.changed({index})", 2)
        source.add(write, 2)

    def _has_plain_keys(self, index: int) -> bool:
        """Tell whether no code of the user runs when a key of an object is looked up."""
        entry = self.plan.graphdef.entries[index]
        if entry.kind in (_kinds.LIST, _kinds.DEQUE):
            return False
        return {type(key_of(entry, position)) for position in range(len(entry.keys))} <= PLAIN_KEYS

    def _run(self, number: int, leaves: str, start: int, end: int) -> tuple[str, str]:
        """Return some Variables that are written, and what was read of them.

        Arguments:
            number: of the segment that all of them belong to.
            leaves: the list that all of them were read into, empty if there is none.
            start: the first one.
            end: after the last one.
        """
        indices = self.writer.indices[start:end]
        names = [self.places[leaf] for leaf in self.writer.replaced[start:end]]
        if number < 0 or len(indices) <= FEW or not leaves:
            objects = ", ".join([self._object(index) for index in indices])
            return f"({objects},)", f"({', '.join(names)},)"
        segment = self.segments[number]
        at = [split_name(name)[1] for name in names]
        if leaves == f"x{number}" and at == [*range(len(segment.variables))]:
            own = [segment.objects[index] for index in indices]
            if [*map(id, own)] == [*map(id, segment.variables)]:
                return f"s{number}.variables", leaves
        pick = self.source.constant(operator.itemgetter(*indices))
        pick_old = self.source.constant(operator.itemgetter(*at))
        return f"{pick}(s{number}.objects)", f"{pick_old}({leaves})"

    def _outputs(self) -> str:
        return self._values(self.writer.sources)

    def _values(self, sources: Sequence[int], *, exactly: bool = False) -> str:
        """Return an expression for leaves and outputs; if not `exactly`, more may follow."""
        outputs = [~source for source in sources]
        if outputs == [*range(len(outputs))]:
            return f"out[:{len(outputs)}]" if exactly else "out"
        if len(outputs) <= FEW or any(output < 0 for output in outputs):
            return f"({', '.join(map(self._value, sources))},)"
        return f"{self.source.constant(operator.itemgetter(*outputs))}(out)"

    def _owner(self, index: int) -> int:
        """Return the number of the segment that an object belongs to, -1 for the arguments."""
        for number, segment in enumerate(self.segments):
            if index in segment.objects:
                return number
        return -1

    def _object(self, index: int) -> str:
        """Return an expression for an object."""
        if index in self.plan.nodes:
            return self.arguments.nodes[self.plan.nodes[index]]
        if index in self.plan.roots:
            return self.arguments.roots[self.plan.roots[index]]
        number = self._owner(index)
        if number < 0:
            raise Unplannable
        return f"s{number}.objects[{index}]"

    def _value(self, place: int) -> str:
        return self.places[place] if place >= 0 else self.outputs[~place]

    def _return(self) -> None:
        result = self.writer.result
        if result.items is not None and result.treedef is None and not result.is_tuple:
            self.source.add(f"return {self._value(result.items[0])}")
        else:
            self.source.add(f"return {self._built(result)}")

    def _built(self, result: Result) -> str:
        """Return an expression for something that the function has made."""
        source = self.source
        if result.constant is not None:
            return source.constant(result.constant[0])
        if result.items is not None and result.is_tuple:
            return f"({', '.join([*map(self._value, result.items), ''])})"
        written = result.expression(self._value, self._object, source.constant)
        if written is not None:
            return written
        if result.items is not None:
            leaves = self._values(result.items, exactly=True)
            return f"{source.constant(result.treedef.unflatten)}({leaves})"
        make = source.constant(result.make)
        return f"{make}([{', '.join(self.inputs)}], out, {self._resolver(result.objects)})"


def _reads_slots(cls: type[Any]) -> bool:
    """Tell whether attributes in slots are read without code of the user."""
    return cls.__getattribute__ is object.__getattribute__
