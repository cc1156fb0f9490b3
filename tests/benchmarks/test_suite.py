"""The benchmarks run, at tiny sizes; what they print and write is checked, never the times."""

import argparse
import json

import numpy as np
import pytest

from benchmarks import __main__ as cli
from benchmarks import measure, models, report
from benchmarks.measure import BARE, CONTESTANTS, NNX, OURS, QUICK, Effort, Line, Step
from benchmarks.rows import (
    ROWS,
    TITLES,
    adam,
    arguments,
    cold,
    containers,
    dispatch,
    growth,
    memory,
    steady,
    tracing,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries warn of what they will change

TINY = Effort(
    quick=True, seconds=0.0, rounds=1, budget=0.0, least_rounds=1, contestants=(OURS, BARE)
)
SMALL = {
    1: lambda: dispatch.lines(TINY._replace(contestants=CONTESTANTS), depths=(1,)),
    2: lambda: containers.lines(TINY, depths=(1,)),
    3: lambda: arguments.lines(TINY, depths=(1,)),
    4: lambda: adam.lines(TINY, depths=(1,)),
    5: lambda: tracing.lines(
        TINY, [tracing.adam_program(1), tracing.scan_program(2), tracing.nested_program(1)]
    ),
    6: lambda: cold.lines(TINY, depths=(1,)),
    7: lambda: growth.lines(TINY, sizes=(21,), variants=3),
    8: lambda: memory.lines(TINY, depth=1, dropped=3),
    9: lambda: steady.lines(TINY, count=10, calls=2),
}
TIMED_WITHOUT_OURS = {"flax nnx objects"}


@pytest.mark.parametrize("row", sorted(ROWS))
def test_every_row_measures_ours_and_bare_jax(row):
    lines = list(SMALL[row]())
    assert lines
    for line in lines:
        assert line.row == row
        assert BARE in line.values, line.absent
        if line.case not in TIMED_WITHOUT_OURS:
            assert OURS in line.values, line.absent
            assert line.ratios.keys() == line.values.keys() or line.values[BARE] == 0


def test_all_rows_have_a_title_and_a_small_form():
    assert ROWS.keys() == TITLES.keys() == SMALL.keys()


def test_a_contestant_that_is_not_there_says_why():
    def missing():
        raise measure.Absent("it is not installed")

    def broken():
        raise ValueError("it refuses\nand goes on about it")

    makers = {BARE: lambda: Step(lambda: None), OURS: missing, NNX: broken}
    line = measure.compare(1, "case", 3, makers, QUICK)
    assert line.absent == {OURS: "it is not installed", NNX: "ValueError: it refuses"}
    notes = []
    row = report.cells(line, notes)
    assert row[:4] == ["case", "3", "us", "[1]"]
    assert notes == [f"{OURS}: it is not installed", f"{NNX}: ValueError: it refuses"]


def test_the_adam_step_of_objects_computes_what_the_pure_step_computes():
    (net, moments), (x, y) = adam.trained(models.ours(), 2)
    arrays = [v[...] for v in models.params_of(net)]
    params = list(zip(arrays[::2], arrays[1::2], strict=True))
    zeros = [(0 * w, 0 * b) for w, b in params]
    *_, count, loss = new = adam.pure_step(params, zeros, zeros, 0, x, y)
    assert float(adam.stepper(models.ours())(net, moments, x, y)) == pytest.approx(float(loss))
    expected = [x for layer in new[0] for x in layer]
    for variable, array in zip(models.params_of(net), expected, strict=True):
        assert variable.value == pytest.approx(np.asarray(array), rel=1e-4, abs=1e-6)
    assert int(moments.count) == count == 1


def test_the_json_and_the_picture_hold_what_was_measured(tmp_path, capsys, monkeypatch):
    def lines(effort):
        assert effort == QUICK
        for size in (1, 10):
            yield Line(1, "case", size, "us", {OURS: 2.0 * size, BARE: 1.0 * size}, {OURS: 2.0}, {})

    monkeypatch.setitem(ROWS, 1, lines)
    cli.main(["--rows", "1", "--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "20.0 (2.00x)" in printed
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["lines"][1]["values"] == {OURS: 20.0, BARE: 10.0}
    assert found["machine"]["versions"]["jax"]
    assert found["clock"] == "wall"
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_plain_table_is_printed_without_rich():
    head, body = ["", "size"], [["a long case", "1"], ["b", "1,000"]]
    assert report.plain(head, body) == "              size\na long case      1\nb            1,000"


def test_rows_are_chosen_by_number_and_range():
    assert cli.rows_of("1,4-6") == [1, 4, 5, 6]
    for wrong in ("0", "x", "99", "4-2"):
        with pytest.raises(argparse.ArgumentTypeError, match="no row"):
            cli.rows_of(wrong)
