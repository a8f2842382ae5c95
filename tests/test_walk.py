"""The number of files that a reader opens on the two ways that everything goes: a plan's simulation, and a system's."""

import inspect
import re
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import FrameType

import engine
from engine.simulate import simulate
from engine.simulate.flows import all_to_all
from engine.systems import SYSTEMS, run
from tests.cases.samples import linear_plan, sample_problem

ENGINE = Path(engine.__file__).parent
GROUND = tuple(re.search(r"1 (.+): the ground", engine.__doc__)[1].split(", "))


def file_of(frame: FrameType) -> str | None:
    """`simulate/flows.py`; None outside the engine and for the ground floor, which every file stands on."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ENGINE):
        return None
    name = path.relative_to(ENGINE).as_posix()
    return None if name.removesuffix(".py").split("/")[0] in GROUND else name


def frames_of(work: Callable[[], object], see: Callable[[FrameType], None]) -> None:
    """Show every frame that the work enters on this thread."""
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: see(frame) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(before)


def test_a_plan_is_simulated_by_at_most_twelve_files():
    problem = sample_problem("alpha-code")
    plan, entered = linear_plan(problem), set()
    simulate(plan, problem)  # what is cached or compiled is there

    def see(frame: FrameType) -> None:
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        # Reading a property is no step, nor is the inside of a comprehension.
        is_property = isinstance(inspect.getattr_static(type(owner), name, None), property | cached_property)
        if (file := file_of(frame)) and not name.startswith("<") and not is_property:
            entered.add(file)

    frames_of(lambda: simulate(plan, problem), see)
    assert {"problem.py", "simulate/work.py", "simulate/inference.py", "simulate/flows.py"} <= entered
    assert len(entered) <= 12, sorted(entered)


def test_from_aurora_to_the_price_of_a_dispatch_it_is_at_most_six_files():
    problem, ways = sample_problem("alpha-code", tokens=200), []

    def see(frame: FrameType) -> None:
        if frame.f_code is all_to_all.__code__:
            way = [file_of(frame)]
            while frame is not None and way[0] != "systems/aurora.py":
                frame = frame.f_back
                if frame is not None and (file := file_of(frame)) and file != way[0]:
                    way.insert(0, file)
            ways.append(way)

    frames_of(lambda: run(SYSTEMS["aurora"], problem), see)
    assert ways and all(way[0] == "systems/aurora.py" and way[-1] == "simulate/flows.py" for way in ways)
    assert max(map(len, ways)) <= 6, max(ways, key=len)
