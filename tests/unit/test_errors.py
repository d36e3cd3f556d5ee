"""The tree of errors."""

from __future__ import annotations

import pickle
import re

import pytest

from gpu_reclaim import errors
from gpu_reclaim.commands import Result, Script, Section
from gpu_reclaim.errors import GpuReclaimError, GpusNotReclaimed, NotRestored
from gpu_reclaim.models import ReclaimReport, RestoreReport, Verdict

RESULT = Result(
    Script("look", {"a": "x"}), "a host", "out", "first\nlast\n", 3, {"a": Section("y", 3)}
)
REPORT = ReclaimReport(
    host="llm", verdict=Verdict.ZOMBIE, summary="dead but not gone", remedy="reboot it"
)


def family(kind: type[GpuReclaimError]) -> list[type[GpuReclaimError]]:
    """A class and all below it that this package defines."""
    below = [c for c in kind.__subclasses__() if c.__module__ == errors.__name__]
    return [kind, *(member for child in below for member in family(child))]


CLASSES = family(GpuReclaimError)


def make(kind: type[GpuReclaimError]) -> GpuReclaimError:
    if kind is GpusNotReclaimed:
        return GpusNotReclaimed(REPORT)
    if kind is NotRestored:
        return NotRestored(RestoreReport(host="llm", summary="it did not start", remedy="look"))
    return kind("llm: it broke", remedy="mend it", result=RESULT)


def drawn() -> dict[str, str]:
    """Class to its parent, as the module's docstring draws them."""
    parents: dict[str, str] = {}
    line_of = [GpuReclaimError.__name__]
    for stem, name in re.findall(r"^    ([│ ]*)[├└]── (\w+)", errors.__doc__ or "", re.M):
        depth = len(stem) // 4 + 1
        line_of[depth:] = [name]
        parents[name] = line_of[depth - 1]
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    real = {kind.__name__: kind.__mro__[1].__name__ for kind in CLASSES[1:]}

    assert drawn() == real


def test_bad_input_is_a_value_error_and_nothing_else_is() -> None:
    values = {kind.__name__ for kind in CLASSES if issubclass(kind, ValueError)}

    assert values == {"BadInput", "UnknownHost", "UnknownUnit"}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_says_what_happened_what_to_do_and_what_was_said(
    kind: type[GpuReclaimError],
) -> None:
    error = make(kind)

    if kind is GpusNotReclaimed:
        assert str(error) == "llm: zombie: dead but not gone\nWhat to do: reboot it"
    elif kind is NotRestored:
        assert str(error) == "llm: it did not start\nWhat to do: look"
    else:
        assert str(error) == "llm: it broke\nWhat to do: mend it\nIt said:\nfirst\nlast"


def test_an_error_without_remedy_and_result_is_one_line() -> None:
    assert str(GpuReclaimError("llm: it broke")) == "llm: it broke"


def test_only_the_last_lines_of_a_tool_are_shown() -> None:
    result = Result(RESULT.script, "a host", "", "".join(f"line {n}\n" for n in range(50)), 1)
    shown = str(GpuReclaimError("it broke", result=result)).split("\n")

    assert shown[2:] == [f"line {n}" for n in range(40, 50)]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling(kind: type[GpuReclaimError]) -> None:
    error = make(kind)
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is kind
    assert again.args == error.args
    assert (again.message, again.remedy) == (error.message, error.remedy)
    # What a host printed stays behind: it may hold command lines with secrets.
    assert again.result is None


def test_the_report_travels_with_its_error() -> None:
    again = pickle.loads(pickle.dumps(GpusNotReclaimed(REPORT)))

    assert again.report == REPORT
