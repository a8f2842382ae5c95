"""Whole steps of serving engines: the factors of `engine.serving.forecast` fitted to one half of the measured ones that
aiconfigurator-core brings along, and held against the other half.

The halves are of settings: fitted are those whose id, without its number of users, has a SHA-256 with an odd first byte. So no
setting is fitted at some numbers of users and judged at others. `tests.benchmarks.bench_whole_steps --fit` fits anew.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import NamedTuple

import numpy as np
import pandas as pd

from engine.catalogue.packaged import PACKAGE, installed_folder
from engine.compare.trust.prediction import Prediction
from engine.errors import InputError
from engine.formats import read_sizes
from engine.formats.measured.serving_rows import is_trusted, read_steps
from engine.formats.packaged import packaged_config, packaged_model
from engine.model import MoEModel
from engine.result import Floats, Ints
from engine.serving.deployment import MeasuredStep
from engine.serving.forecast import (
    KIND_OF_PART,
    Factors,
    Forecast,
    Margins,
    Stack,
    fitted,
    forecast,
    groups_of,
    growth,
    times,
    work,
)
from engine.serving.parts import ACROSS, FACTORS, PARTS
from engine.serving.sizes import TransformerSizes

Sizes = tuple[MoEModel, TransformerSizes]
OTHER_FORMAT = re.compile(r"-(?:NV)?(?:FP4|FP8|BF16|AWQ|GPTQ|INT4)$", re.IGNORECASE)
USERS = re.compile(r"_c\d+(?=_|$)")
FIRST_TOKEN_WEIGHT, NEAR_ONE, NEAR_ALL = 0.6, 0.05, 0.8
"""Weights of logarithms: of a first token's error against that of a token's; of a part's factor; of a kind's factor for a GPU,
a number format or a version."""
ROUND = 0.1
"""Errors beyond this share count less than their square."""
SPREAD, FOLDS = 0.9, 5


def is_fitted(id: str) -> bool:
    """True for a measured step of the fitted half."""
    return hashlib.sha256(USERS.sub("", id).encode()).digest()[0] % 2 == 1


@lru_cache
def known_model(checkpoint: str) -> Sizes:
    """A packaged model and its other sizes; one with the same weights in another number format, or of another owner on the Hub,
    counts as the same. Raises InputError for one that the package lacks."""
    plain = OTHER_FORMAT.sub("", checkpoint)
    names = dict.fromkeys((checkpoint, plain, plain.rpartition("/")[2]))
    for name in names:
        with contextlib.suppress(InputError):
            config = packaged_config(name)
            break
    else:
        raise InputError(f"no packaged model is called {checkpoint}; name its config.json with --config")
    return packaged_model(name), read_sizes(config)


@lru_cache
def measured_steps() -> tuple[MeasuredStep, ...]:
    """The trusted steps of the package that can be. Raises InputError if it is not installed."""
    steps, _ = read_steps(installed_folder("measured steps") / "systems" / "silicon_sample.csv")
    return tuple(step for step in steps if is_trusted(step))


class Predicted(NamedTuple):
    """A measured step and its prediction."""

    step: MeasuredStep
    forecast: Forecast

    @property
    def error(self) -> float | None:
        """By how much of the measured time per token the predicted one is longer; None where it was not measured."""
        return None if self.step.token is None else self.forecast.token / self.step.token - 1

    @property
    def first_error(self) -> float | None:
        """The same of the first token."""
        return None if self.step.first_token is None else self.forecast.first_token / self.step.first_token - 1

    @property
    def inside(self) -> bool:
        """True if the measured time per token lies in the interval."""
        return self.step.token is not None and self.forecast.low <= self.step.token <= self.forecast.high


def predicted(step: MeasuredStep, own: Sizes | None = None) -> Predicted:
    """A step's prediction. Raises InputError for a model that is not packaged, and where `forecast` does.

    own: a model in place of the packaged one
    """
    return Predicted(step, forecast(step.deployment, step.demand, *(own or known_model(step.deployment.checkpoint))))


SPLITS: dict[str, Callable[[MeasuredStep], str]] = {
    "engine": lambda step: step.deployment.engine,
    "GPU": lambda step: step.deployment.gpu,
    "model": lambda step: step.deployment.checkpoint,
    "number format": lambda step: step.deployment.precision,
    "servers": lambda step: {"agg": "take prompts and generate", "disagg": "for prompts and for generating"}[
        step.deployment.mode
    ],
    "GPUs with experts": lambda step: str(step.deployment.decode.expert),
    "users of a replica": lambda step: _range_of(
        step.demand.users / (step.deployment.decode.servers * step.deployment.decode.data)
    ),
}
"""The kinds by which errors are summed up."""


def _range_of(users: float) -> str:
    """A power of four and the next one."""
    low = 4 ** int(np.log2(max(users, 1)) // 2)
    return f"{low:,} to {4 * low - 1:,}"


def errors_by(rows: Sequence[Predicted], split: str) -> pd.DataFrame:
    """Errors without sign by one of SPLITS: columns of its name, steps, token and first_token (medians), token_mean, inside
    (share of measured times per token in their interval)."""
    measured = [row for row in rows if row.error is not None]
    table = pd.DataFrame(
        {
            split: [SPLITS[split](row.step) for row in measured],
            "token": [abs(row.error) for row in measured],
            "first_token": [np.nan if row.first_error is None else abs(row.first_error) for row in measured],
            "inside": [row.inside for row in measured],
        }
    )
    parts = {"steps": ("token", "size"), "token": ("token", "median"), "token_mean": ("token", "mean")}
    parts |= {"first_token": ("first_token", "median"), "inside": ("inside", "mean")}
    grouped = table.groupby(split, sort=False).agg(**parts).reset_index()
    return grouped.sort_values(split, key=lambda names: names.map(_in_order))


def _in_order(name: str) -> list[tuple[int, int | str]]:
    """A key by which numbers in names count as numbers: 4 before 16."""
    pieces = re.split(r"(\d+)", name.replace(",", ""))
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in pieces if piece]


def engine_steps() -> Iterator[Prediction]:
    """Time per token, and to the first one, of every measured step."""
    for step in measured_steps():
        deployment, demand = step.deployment, step.demand
        found = predicted(step).forecast
        gpus = f"{deployment.gpus} GPUs" if deployment.gpus > 1 else "1 GPU"
        setting = f"{step.id}: {gpus}, {demand.users:,} users, {demand.prompt} in, {demand.output} out"
        was_fitted = is_fitted(step.id)
        for of, measured, ours in (
            ("a token", step.token, found.token),
            ("the first token", step.first_token, found.first_token),
        ):
            if measured is not None:
                name = f"{of}, {deployment.engine}"
                yield Prediction(name, deployment.gpu, 1, setting, measured, ours, was_fitted)


class Table(NamedTuple):
    """Measured steps as arrays: float64[row] seconds, and int64[row, 3] groups by their place in `groups`."""

    steps: Sequence[MeasuredStep]
    stack: Stack
    token: Floats
    first: Floats
    group: Ints
    groups: tuple[str, ...]


def table_of(steps: Sequence[MeasuredStep]) -> Table:
    """The table of steps that tell both times."""
    steps = [step for step in steps if step.token is not None and step.first_token is not None]
    stack = Stack.of([work(each.deployment, each.demand, *known_model(each.deployment.checkpoint)) for each in steps])
    named = [groups_of(step.deployment) for step in steps]
    groups = tuple(dict.fromkeys(name for each in named for name in each))
    places = np.array([[groups.index(name) for name in each] for each in named])
    token, first = (np.array([getattr(step, name) for step in steps]) for name in ("token", "first_token"))
    return Table(steps, stack, token, first, places, groups)


def fit(table: Table, rows: Ints) -> Factors:
    """Factors that bring the predictions of some rows, int64[row], near their measurements. The margins are still to be
    measured."""
    from scipy.optimize import minimize

    parts, kinds, group = len(PARTS), len(FACTORS), table.group[rows]
    alone = [place for place, part in enumerate(PARTS) if part in ACROSS]  # of too few steps: they stay 1
    stack, token, first = table.stack.part(rows), table.token[rows], table.first[rows]

    def factors(x: Floats) -> Floats:
        of_kind = x[parts:].reshape(-1, kinds)[group].sum(axis=1)
        return np.exp(np.clip(x[:parts] + of_kind[:, KIND_OF_PART], -15, 8))

    def miss(x: Floats) -> tuple[float, Floats]:
        """The sum to be least, and its slopes: of errors in logarithms, those beyond `ROUND` less than squared, and of factors
        away from 1."""
        of_parts = factors(x)
        timed = times(stack, of_parts)
        total, slopes = float(near @ x**2), 2 * near * x
        off = (timed.token / token, 1.0), (timed.first / first, FIRST_TOKEN_WEIGHT)
        for (ratio, weight), grows in zip(off, growth(stack, of_parts), strict=True):
            error = weight * np.log(ratio)
            total += float((2 * ROUND**2 * (np.sqrt(1 + (error / ROUND) ** 2) - 1)).sum())
            slope = (2 * weight * error / np.sqrt(1 + (error / ROUND) ** 2))[:, None] * grows
            slopes[:parts] += slope.sum(axis=0)
            of_kinds = slopes[parts:].reshape(-1, kinds)
            for column in group.T:
                np.add.at(of_kinds, column, slope @ np.eye(kinds)[KIND_OF_PART])
        slopes[alone] = 0
        return total, slopes

    near = np.full(parts + kinds * len(table.groups), NEAR_ALL**2)
    near[:parts] = NEAR_ONE**2
    found = minimize(miss, np.zeros(len(near)), jac=True, method="L-BFGS-B", options={"maxiter": 3000, "maxfun": 4000}).x
    of_kind = np.exp(found[parts:].reshape(-1, kinds))
    seen = sorted(set(group.ravel().tolist()))
    return Factors(
        parts=dict(zip(PARTS, np.exp(found[:parts]).round(4).tolist(), strict=True)),
        kinds={table.groups[at]: tuple(of_kind[at].round(4).tolist()) for at in seen},
        checkpoints=tuple(sorted({table.steps[row].deployment.checkpoint for row in rows})),
        margins=Margins(known=1.0, other_version=1.0, other_gpu=1.0, other_model=1.0),
        source=f"{len(rows)} measured steps of {PACKAGE} {version(PACKAGE)}",
    )


def errors(table: Table, rows: Ints, factors: Factors) -> tuple[Floats, Floats]:
    """float64[row], twice: by how much predicted times per token, and to the first one, are longer than measured ones."""
    of_rows = np.array([factors.of(table.steps[row].deployment) for row in rows])
    timed = times(table.stack.part(rows), of_rows)
    return timed.token / table.token[rows] - 1, timed.first / table.first[rows] - 1


def fit_with_margins() -> Factors:
    """The factors of the fitted half. Its margins are of its rows that were not fitted to, in turn: a fold of the settings,
    each version, each GPU, each model."""
    table = table_of(measured_steps())
    rows = np.flatnonzero([is_fitted(step.id) for step in table.steps])
    fold = np.array([hashlib.sha256(USERS.sub("", table.steps[row].id).encode()).digest()[1] % FOLDS for row in rows])
    by = {
        "known": fold,
        "other_version": np.array(
            [f"{table.steps[row].deployment.engine} {table.steps[row].deployment.version}" for row in rows]
        ),
        "other_gpu": np.array([table.steps[row].deployment.gpu for row in rows]),
        "other_model": np.array([table.steps[row].deployment.checkpoint for row in rows]),
    }
    margins = {name: _spread(np.concatenate(list(_left_out(table, rows, key)))) for name, key in by.items()}
    return fit(table, rows).model_copy(update={"margins": Margins(**margins)})


def _left_out(table: Table, rows: Ints, key: np.ndarray) -> Iterator[Floats]:
    """Errors of a token in the rows of every key, by what was fitted to all others."""
    for value in np.unique(key):
        yield errors(table, rows[key == value], fit(table, rows[key != value]))[0]


def _spread(off: Floats) -> float:
    """The share within which so many of these errors are, upwards as a factor as downwards."""
    return round(float(np.exp(np.quantile(np.abs(np.log1p(off)), SPREAD)) - 1), 4)


def leave_one_out() -> pd.DataFrame:
    """Errors on all steps of a GPU, a model or an engine, by factors that were fitted to all others: columns left_out, steps,
    token and first_token (median errors without sign), token_mean."""
    table = table_of(measured_steps())
    rows = np.arange(len(table.steps))
    found = []
    for name in ("gpu", "checkpoint", "engine"):
        key = np.array([getattr(step.deployment, name) for step in table.steps])
        for value in np.unique(key):
            off, first = errors(table, rows[key == value], fit(table, rows[key != value]))
            token = np.abs(off)
            row = {"left_out": value, "steps": len(off), "token": np.median(token), "token_mean": token.mean()}
            found.append(row | {"first_token": np.median(np.abs(first))})
    return pd.DataFrame(found)


class Explanation(NamedTuple):
    """One kind of work that alone would explain the difference.

    seconds: predicted of it for a token
    times: so many times as long it would take
    usual: engines, GPUs and versions differ in it by this factor, as the fit has it
    """

    kind: str
    seconds: float
    times: float
    usual: float


def seconds_of_kinds(forecast: Forecast) -> dict[str, float]:
    """Predicted seconds of a token by kind of work."""
    spent: dict[str, float] = {}
    for part, seconds in forecast.parts.items():
        spent[PARTS[part]] = spent.get(PARTS[part], 0.0) + seconds
    return spent


def explanations(forecast: Forecast, token: float, factors: Factors | None = None) -> list[Explanation]:
    """The kinds of work that could explain a measured token; those that would have to change least against how much they
    usually differ come first. A kind that takes less than the difference cannot explain a faster one, and is left out.

    token: seconds measured
    factors: those of the forecast; None: those that come with Switchyard
    """
    logarithms = np.log(np.array(list((factors or fitted()).kinds.values())))
    usual = dict(zip(FACTORS, np.exp(np.sqrt((logarithms**2).mean(axis=0))).tolist(), strict=True))
    found = []
    for kind, seconds in seconds_of_kinds(forecast).items():
        needed = seconds + token - forecast.token
        if needed > 0:
            found.append(Explanation(kind, seconds, needed / seconds, usual[kind]))
    return sorted(found, key=lambda each: abs(np.log(each.times)) / max(np.log(each.usual), 1e-3))
