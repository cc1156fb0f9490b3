"""One class per failure; each is a subclass of the built-in that it specialises.

Every message says what was done, at which path of which argument, and what to write
instead. `bounded` keeps messages short whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterable

_MESSAGE_LIMIT = 4_000
_SHOWN = 5


class AnabranchError(Exception):
    """Base of all errors raised by anabranch.

    The text ends with the transforms that the error came through, innermost first.
    """

    _passed: tuple[str, ...] = ()

    def pass_through(self, transform: str, function: str | None) -> None:
        """Note that the error left a transform.

        Arguments:
            transform: its name.
            function: name and place of the function that was transformed.
        """
        if function is None and str(self).startswith(f"{transform}:"):
            return
        line = f"in {transform}" if function is None else f"in {transform} of {function[:300]}"
        self._passed = (*self._passed, line)

    def __str__(self) -> str:
        passed = first_few(self._passed)
        # not as it would be for a KeyError, which shows its argument in quotes
        text = str(self.args[0]) if len(self.args) == 1 else super().__str__()
        if not passed:
            return bounded(text)
        return f"{bounded(text, _MESSAGE_LIMIT - len(passed) - 1)}\n{passed}"


class ArgumentError(AnabranchError, TypeError, ValueError):
    """A function of anabranch was given something that it does not take."""


class CopyError(AnabranchError, TypeError):
    """An object of which there can be only one was copied or pickled."""


class ReadOnlyError(AnabranchError, TypeError):
    """A view that is only for reading was written."""


class ContextValueNotSetError(AnabranchError, LookupError):
    """A jit-aware context variable was read where no value is set."""


class BehindBoundaryError(AnabranchError, LookupError):
    """The value of a jit-aware context variable was set outside a jit-like boundary."""


class MissingStateError(AnabranchError, LookupError):
    """The current state dictionary has no state for a stateful node."""


class ContextExitError(AnabranchError, RuntimeError):
    """A context was left that is not open."""


class NodeTypeError(AnabranchError, TypeError):
    """An object is neither a node, a value nor a static, so that it cannot be split."""


class StaticValueError(AnabranchError, TypeError):
    """A static value cannot be compared, or would be shared although it is mutable."""


class ValueWriteError(AnabranchError, TypeError):
    """The children of an immutable value were replaced in place."""


class AliasError(AnabranchError, ValueError):
    """One object was given two different specs (axes, shardings, ...)."""


class BroadcastWriteError(AnabranchError, ValueError):
    """A broadcast Variable was left different in different lanes."""


class SharedStreamError(BroadcastWriteError):
    """A key was drawn from a random stream that is broadcast to several lanes."""


class StructureError(AnabranchError, ValueError):
    """Two structures that have to agree differ."""


class FilterError(AnabranchError, ValueError):
    """A filter is invalid, matches nothing, or the filters are not exhaustive."""


class UpdateError(AnabranchError, ValueError):
    """A state does not fit the object that it is written to."""


class DeletedArrayError(UpdateError, RuntimeError):
    """An array is used that was donated to a compiled call, so that nothing is left of it."""


class MissingPathError(AnabranchError, KeyError):
    """A state has nothing at a path."""


class MissingStreamError(AnabranchError, AttributeError, KeyError):
    """A random stream is asked for that is not there."""


class VariableAttributeError(AnabranchError, AttributeError):
    """A Variable has no such attribute, or not one that can be set or deleted."""


class IndexWriteError(AnabranchError, TypeError, ValueError):
    """What is written into a Variable by index does not fit its array, or is out of range."""


class TraceLevelError(AnabranchError, RuntimeError):
    """An object was written from a trace that it does not belong to."""


class CapturedWriteError(TraceLevelError):
    """An object of an outer trace was changed inside a traced function."""


class StaleCaptureError(AnabranchError, RuntimeError):
    """A constant of a compiled function has changed since."""


class HoistError(TraceLevelError):
    """A value cannot leave the traces that it was to leave, as it depends on them."""


class SpentTwinError(AnabranchError, RuntimeError):
    """An inner twin was used after the trace that it was made for."""


class MissingRuleError(AnabranchError, AttributeError):
    """A function with custom derivatives was called before it was given its rules."""


class ConcurrentWriteError(AnabranchError, RuntimeError):
    """An object was changed by somebody else while a call was running."""


class ContextTagError(AnabranchError, LookupError):
    """A split or merge context was opened without its update context."""


class MissingExtraError(AnabranchError, ImportError):
    """An optional dependency is not installed."""


class RetraceWarning(UserWarning):
    """A compiled function is traced again and again because a Python number changes."""


class UnsupportedJaxError(AnabranchError, RuntimeError):
    """The installed JAX does not behave as anabranch expects."""


def bounded(text: str, limit: int = _MESSAGE_LIMIT) -> str:
    """Cut a message to 4,000 characters: in the middle, since the remedy is at the end."""
    if len(text) <= limit:
        return text
    note = f" ... ({len(text):,} characters in all) ... "
    end = limit // 3
    return text[: limit - end - len(note)] + note + text[-end:]


def first_few(lines: Iterable[str]) -> str:
    """Join the first five lines, indented, and count the rest."""
    rows = list(lines)
    shown = [f"  {row[:400]}" for row in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        shown.append(f"  ... and {len(rows) - _SHOWN} more")
    return "\n".join(shown)
