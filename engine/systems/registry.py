"""All systems by name and by goal, the proposed one (first of the goal's systems), and the one that counts as deployed."""

from importlib import import_module

from engine.errors import InputError
from engine.goal import Goal
from engine.problem import Problem
from engine.systems import FILES
from engine.systems.base import System

_EVERY: tuple[System, ...] = tuple(system for file in FILES for system in import_module(f"engine.systems.{file}").SYSTEMS)

SYSTEMS = {system.name: system for system in _EVERY if Goal.TRAINING not in system.goals}
"""Systems by name, for inference of one model or two."""

_OF_GOAL = {goal: {system.name: system for system in _EVERY if goal in system.goals} for goal in Goal}

TRAINING = _OF_GOAL[Goal.TRAINING]
"""Systems by name, for a training step."""


def systems_for(problem: Problem) -> dict[str, System]:
    """Systems that can plan for the problem's goal, by name."""
    return _OF_GOAL[problem.goal]


def named_for(problem: Problem) -> dict[str, System]:
    """The systems that a name can mean for a problem: those for a training step, or all others, of which some refuse it and
    say why."""
    return TRAINING if problem.goal is Goal.TRAINING else SYSTEMS


def system_named(name: str, problem: Problem) -> System:
    """The system of a name that a person typed. Raises InputError if none for the problem's goal has it."""
    named = named_for(problem)
    if name not in named:
        raise InputError(f"'{name}' does not plan {problem.goal}; those that do: {', '.join(systems_for(problem))}")
    return named[name]


def proposed_for(problem: Problem) -> System:
    """The system that is proposed until a person chooses."""
    return next(iter(systems_for(problem).values()))


_BASELINES = {Goal.INFERENCE: "linear", Goal.TWO_MODELS: "linear", Goal.TRAINING: "deepspeed"}


def baseline_for(problem: Problem) -> System:
    """The system that counts as deployed, with its usual options, until a person says more: contiguous blocks of experts, for a
    training step DeepSpeed's."""
    return systems_for(problem)[_BASELINES[problem.goal]]
