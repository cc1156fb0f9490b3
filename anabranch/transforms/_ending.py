"""The end of a follower: the lines that write what the function wrote, and return the result."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Protocol

from anabranch.graph._watchers import forget_all
from anabranch.transforms._plan import Plan
from anabranch.transforms._segment import Segment
from anabranch.transforms._source import Source
from anabranch.transforms._taken import Arguments
from anabranch.transforms._watch import Unplannable
from anabranch.transforms._writer import Writer, holder_of, read_cell

_FEW = 4  # objects that are named one by one; more are picked in one call


class Beginning(Protocol):
    """What the lines before have found."""

    plan: Plan
    segments: Sequence[Segment]
    writer: Writer
    source: Source
    places: list[str]  # where each leaf is
    inputs: list[str]  # how they are given to the compiled function


class Ending:
    """Adds the lines.

    Arguments:
        beginning: of the follower.
        arguments: of the call.
    """

    def __init__(self, beginning: Beginning, arguments: Arguments) -> None:
        self.plan, self.segments, self.arguments = beginning.plan, beginning.segments, arguments
        self.writer, self.source = beginning.writer, beginning.source
        self.places, self.inputs = beginning.places, beginning.inputs
        self.written: dict[int, list[int]] = {}  # the Variables that are remembered, by segment
        self.loose: list[int] = []  # those that somebody else may remember
        self.access = access = self.writer.access
        for i, index in enumerate(self.writer.indices):
            if access.own[i]:
                number = self._owner(index)
                (self.loose if number < 0 else self.written.setdefault(number, [])).append(i)
        names = self.source.names
        names.update(call=operator.call, getters=access.getters, setters=access.setters)
        if access.one is not None:
            names.update(get_value=access.one.read, set_value=access.one.write)

    def add(self) -> None:
        """Add the lines."""
        writer = self.writer
        if writer.trees or len(writer.cells) > 1 or (writer.cells and writer.indices):
            self._write_in_full()
        elif writer.cells:
            self._write_cell()
        elif len(writer.indices) > _FEW:
            self._write_many()
        elif writer.indices:
            self._write_few()
        self._return()

    def _write_few(self) -> None:
        writer, source = self.writer, self.source
        variables = [source.fresh("v") for _ in writer.indices]
        for name, index in zip(variables, writer.indices, strict=True):
            source.add(f"{name} = {self._object(index)}")
        source.add("with COMMIT:")
        for i, (name, index) in enumerate(zip(variables, writer.indices, strict=True)):
            now = f"{name}._value" if self.access.own[i] else f"getters[{i}]({name})"
            then = self.places[writer.replaced[i]]
            source.add(f"if {now} is not {then}: raise writer.changed({index})", 2)
        if len(variables) == 1:
            self._forget(2)
            source.add(f"set_value({variables[0]}, {self._value(writer.sources[0])})", 2)
            self._remember(2)
        else:
            self._write_together(f"({', '.join(variables)})")

    def _write_many(self) -> None:
        writer, source = self.writer, self.source
        owners = [self._owner(index) for index in writer.indices]
        runs: list[tuple[str, str]] = []
        start = 0
        for end in range(1, len(owners) + 1):
            if end == len(owners) or owners[end] != owners[start]:
                runs.append(self._run(owners[start], start, end))
                start = end
        joined = [
            parts[0] if len(parts) == 1 else f"({', '.join([f'*{part}' for part in parts])},)"
            for parts in zip(*runs, strict=True)
        ]
        source.add(f"written, old = {', '.join(joined)}")
        source.add("with COMMIT:")
        if self.access.is_own:
            now = "[v._value for v in written]"
        else:
            now = f"map({'call, getters' if self.access.one is None else 'get_value'}, written)"
        source.add(f"if not all(map(is_, {now}, old)): writer.complain(written, old)", 2)
        self._write_together("written")

    def _write_together(self, variables: str) -> None:
        """Write in one call in C, so that nothing can come between two of them."""
        source = self.source
        source.add(f"new = {self._outputs()}", 2)
        source.add("COMMITS.begun += 1", 2)
        source.add("try:", 2)
        self._forget(3)
        write = "call, setters" if self.access.one is None else "set_value"
        source.add(f"deque(map({write}, {variables}, new), 0)", 3)
        self._remember(3)
        source.add("finally:", 2)
        source.add("COMMITS.ended = COMMITS.begun", 3)

    def _forget(self, depth: int) -> None:
        """Let nobody remember what the Variables that are written have held; see `_watchers`."""
        source = self.source
        if self.loose:
            objects = [self._object(self.writer.indices[i]) for i in self.loose]
            source.names["forget_all"] = forget_all
            source.add(f"forget_all(({', '.join(objects)},))", depth)
        for number in self.written:
            source.add(f"k{number} = s{number}.memory", depth)
            source.add(f"m{number}, k{number}.values = k{number}.values, None", depth)
            source.add(f"if k{number}.beside: k{number}.drop_beside()", depth)

    def _remember(self, depth: int) -> None:
        """Remember what they hold now, if nobody has written another of the Variables meanwhile."""
        source, writer = self.source, self.writer
        for number, written in self.written.items():
            segment = self.segments[number]
            place = {id(variable): i for i, variable in enumerate(segment.variables)}
            at = [place[id(segment.objects[writer.indices[i]])] for i in written]
            source.add(f"if m{number} is not None:", depth)
            if len(at) <= _FEW:
                for i, k in zip(written, at, strict=True):
                    source.add(f"m{number}[{k}] = {self._value(writer.sources[i])}", depth + 1)
            else:
                new = f"new[:{len(at)}]"  # a result may follow
                if written != [*range(len(at))]:
                    new = f"{source.constant(operator.itemgetter(*written))}(new)"
                if at == [*range(len(place))]:
                    source.add(f"m{number}[:] = {new}", depth + 1)
                else:
                    places = source.constant(at)
                    source.add(f"deque(map(m{number}.__setitem__, {places}, {new}), 0)", depth + 1)
            # even None: a finaliser may have made a call while they were written
            source.add(f"k{number}.values = m{number}", depth)
            source.add(f"if k{number}.beside: k{number}.drop_beside()", depth)

    def _write_in_full(self) -> None:
        """Write things of several kinds, which takes an undo log."""
        writer = self.writer
        written = [self._object(index) for index in writer.indices]
        places = {write.entry for write in (*writer.cells, *writer.trees)}
        variables = f"({', '.join(written)}{',' if written else ''})"
        inputs, resolve = f"[{', '.join(self.inputs)}]", self._resolver(places)
        source = self.source
        source.add("with COMMIT:")
        for number in self.written:  # it makes all forget who remember what is written
            source.add(f"k{number} = s{number}.memory", 2)
            source.add(f"m{number} = k{number}.values", 2)
        source.add(f"done = writer.write({variables}, {resolve}, {inputs}, out)", 2)
        if self.written:
            source.add(f"new = {self._outputs()}", 2)
            source.add("if done:", 2)
            self._remember(3)
        source.add(f"if not done: return finish(plan, {inputs}, args, kwargs, report, groups)")

    def _resolver(self, indices: Iterable[int]) -> str:
        """Return an expression for what finds some objects by their indices."""
        objects = [f"{index}: {self._object(index)}" for index in sorted(indices)]
        return f"{{{', '.join(objects)}}}.__getitem__"

    def _write_cell(self) -> None:
        """Write one array that is an attribute or an element."""
        source = self.source
        (write,) = self.writer.cells
        if write.source >= 0:
            raise Unplannable
        key = source.constant(self.writer.key(write))
        source.names.update(holder_of=holder_of, read_cell=read_cell)
        source.add(f"holder = holder_of({self._object(write.entry)})")
        source.add("with COMMIT:")
        source.add(
            f"if read_cell(holder, {key}) is not {self.places[write.leaf]}:"
            f" raise writer.changed({write.entry})",
            2,
        )
        source.add(f"holder[{key}] = {self._value(write.source)}", 2)

    def _run(self, number: int, start: int, end: int) -> tuple[str, str]:
        """Return the Variables of one segment that are written, and what was read of them."""
        writer = self.writer
        indices, leaves = writer.indices[start:end], writer.replaced[start:end]
        if number < 0 or len(indices) <= _FEW:
            objects = ", ".join([self._object(index) for index in indices])
            return f"({objects},)", f"({', '.join([self.places[leaf] for leaf in leaves])},)"
        segment = self.segments[number]
        first = self.places.index(f"x{number}[0]")
        own = [segment.objects[index] for index in indices]
        if [*map(id, own)] == [*map(id, segment.variables)] and leaves == [
            *range(first, first + len(own))
        ]:
            return f"s{number}.variables", f"x{number}"
        pick = self.source.constant(operator.itemgetter(*indices))
        pick_old = self.source.constant(operator.itemgetter(*[leaf - first for leaf in leaves]))
        return f"{pick}(s{number}.objects)", f"{pick_old}(x{number})"

    def _outputs(self) -> str:
        return self._values(self.writer.sources)

    def _values(self, sources: Sequence[int], *, exactly: bool = False) -> str:
        """Return an expression for leaves and outputs; if not `exactly`, more may follow."""
        outputs = [~source for source in sources]
        if outputs == [*range(len(outputs))]:
            return f"out[:{len(outputs)}]" if exactly else "out"
        if len(outputs) <= _FEW or any(output < 0 for output in outputs):
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
        return self.places[place] if place >= 0 else f"out[{~place}]"

    def _return(self) -> None:
        result, source = self.writer.result, self.source
        if result.constant is not None:
            value = source.constant(result.constant[0])
        elif result.items is not None and result.treedef is None:
            items = ", ".join(map(self._value, result.items))
            value = f"({items},)" if result.is_tuple else items
        else:
            written = result.expression(self._value, self._object, source.constant)
            value = written or self._make_result()
        source.add(f"return {value}")

    def _make_result(self) -> str:
        result = self.writer.result
        if result.items is not None:
            leaves = self._values(result.items, exactly=True)
            return f"{self.source.constant(result.treedef.unflatten)}({leaves})"
        self.source.names["make_result"] = result.make
        resolve = self._resolver(result.objects)
        return f"make_result([{', '.join(self.inputs)}], out, {resolve})"
