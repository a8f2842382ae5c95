"""Names that tell plans apart: what differs is in them and nothing else, and no two are the same."""

import pytest

from engine.plan import Placement, Plan, SendOrder, Travel
from engine.result import Provenance
from engine.systems import SYSTEMS
from engine.systems.plan_names import LONGEST, in_words, names_of

CODE, PROSE, SMALL, LARGE = "a" * 64, "b" * 64, "c" * 64, "d" * 64
INPUTS = {CODE: "Alpha code", PROSE: "Alpha prose", SMALL: "8 mixed", LARGE: "16 mixed"}
PLACEMENT = Placement(experts=4, experts_of_gpu=(((0, 1), (2, 3)),), model_layers=(0,))


def made(
    name: str = "Aurora", workload: str = CODE, cluster: str = SMALL, travel: Travel | None = None, **options
) -> Plan:
    origin = Provenance(optimiser="aurora", options=options, inputs={"workload": workload, "cluster": cluster})
    order = SendOrder(mode="concurrent")
    return Plan(name=name, placement=PLACEMENT, send_order=order, travel=travel, provenance=origin)


def names(*plans: Plan, chosen: dict[str, str] | None = None) -> list[str]:
    return list(names_of({plan.id: plan for plan in plans}, chosen or {}, INPUTS).values())


def test_a_name_that_only_one_plan_has_stays() -> None:
    assert names(made(), made("EPLB", PROSE)) == ["Aurora", "EPLB"]


@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"workload": PROSE}, ["Aurora · on Alpha code", "Aurora · on Alpha prose"]),
        ({"cluster": LARGE}, ["Aurora · 8 mixed", "Aurora · 16 mixed"]),
        ({"redundant": 16}, ["Aurora · no spare slots", "Aurora · 36 slots (32 spare)"]),
        ({"travel": Travel(unit="node")}, ["Aurora · one row per token copy", "Aurora · one row per node"]),
        ({"order": "matched"}, ["Aurora · best order", "Aurora · matched order"]),
        ({"time_limit": 5.0}, ["Aurora · 20 s limit", "Aurora · 5 s limit"]),
        (
            {"workload": PROSE, "redundant": 1},
            ["Aurora · on Alpha code · no spare slots", "Aurora · on Alpha prose · 6 slots (2 spare)"],
        ),
    ],
)
def test_what_differs_is_added_and_nothing_else(other: dict, both: list[str]) -> None:
    usual = {"redundant": 0, "order": "best", "time_limit": 20.0}
    assert names(made(**usual), made(**usual | other)) == both


def test_only_plans_of_one_name_are_told_apart() -> None:
    aurora, reseeded, eplb = made(seed=0), made(seed=1), made("EPLB", PROSE, seed=2)
    assert names(aurora, reseeded, eplb) == ["Aurora · seed 0", "Aurora · seed 1", "EPLB"]


def test_a_person_s_name_stays_and_what_remains_alone_needs_no_more() -> None:
    first, second = made(seed=0), made(seed=1)
    assert names(first, second, chosen={second.id: "for Monday"}) == ["Aurora", "for Monday"]
    assert names(first, second, chosen={second.id: "mine", first.id: "mine"}) == ["mine · seed 0", "mine · seed 1"]


def test_ids_are_the_last_resort() -> None:
    """Recordings that nobody knows the names of."""
    first, second = made(workload="e" * 64), made(workload="f" * 64)
    assert names(first, second) == [f"Aurora · {first.id[:8]}", f"Aurora · {second.id[:8]}"]


def test_a_hundred_long_names_are_all_different_and_fit() -> None:
    plans = [made("x" * 120, workload, seed=seed) for seed in range(50) for workload in (CODE, PROSE)]
    told = names(*plans)
    assert len(set(told)) == 100 and max(map(len, told)) <= LONGEST


def test_every_option_of_every_system_is_said_in_words_of_its_own() -> None:
    for system in SYSTEMS.values():
        for name, schema in system.options.schemas().items():
            words = in_words(name, schema["default"], made())
            assert ("_" not in words and words != f"{name} {schema['default']}") or name == "seed", (system.name, words)
            assert schema["title"][0].isupper() and "_" not in schema["title"]
