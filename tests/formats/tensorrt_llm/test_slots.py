"""Counts of a load balancer's slots, folded by the plan that ran."""

import numpy as np
import pytest

from engine.cli import main
from engine.errors import InputError
from engine.formats import read_workload
from tests.formats.tensorrt_llm.recordings import MODEL, codes, recording

PLAN = """num_slots: 6
layer_updates_per_iter: 0
initial_global_assignments:
  1: [0, 1, 2, 3, 0, 1]
  2: [3, 3, 2, 2, 1, 0]
  3: [3, 2, 1, 0, 0, 0]
"""
COUNTS = [
    {"5_1": [1, 2, 3, 4, 5, 6], "5_2": [1, 1, 2, 2, 3, 4], "5_3": [1, 2, 3, 4, 5, 6], "6_1": [9, 0, 0, 0, 0, 0]},
    {"5_1": [0, 0, 0, 0, 0, 7], "5_2": [7, 0, 0, 0, 0, 0], "5_3": [0, 0, 7, 0, 0, 0], "6_1": [0, 0, 0, 0, 0, 1]},
]
FOLDED = np.array([[15, 16, 3, 4], [4, 3, 4, 9], [15, 10, 2, 1]])


def slots(folder, plan=PLAN, name="moe.yaml"):
    recording(folder, COUNTS, experts=6)
    (folder / name).write_text(plan)
    return folder


def test_the_plan_beside_it_folds_them(tmp_path):
    load = read_workload(slots(tmp_path / "run"), model=MODEL)
    np.testing.assert_array_equal(load.load, FOLDED)
    np.testing.assert_array_equal(load.by_source[1], [[0, 8, 0, 0], [0, 0, 0, 7], [0, 7, 0, 0]])
    np.testing.assert_array_equal(load.by_step.sum(axis=0), FOLDED)
    assert codes(load) == {"slots-or-experts": "ok", "source-ranks": "ok"}


def test_the_plan_given_folds_them(tmp_path):
    folder = recording(tmp_path / "run", COUNTS, experts=6)
    plan = tmp_path / "ran.yaml"
    plan.write_text(PLAN)
    np.testing.assert_array_equal(read_workload(folder, model=MODEL, deployed=plan).load, FOLDED)


def test_a_plan_of_other_slots_is_none_that_ran(tmp_path):
    folder = slots(tmp_path / "run", PLAN.replace("6\n", "8\n", 1).replace("]", ", 0, 1]"))
    with pytest.raises(InputError, match=r"counts 6 ids, but the model has 4 experts: .* give the plan that ran"):
        read_workload(folder, model=MODEL)
    with pytest.raises(InputError, match=r"moe\.yaml: has 8 slots per layer, but 6 ids were counted"):
        read_workload(folder, model=MODEL, deployed=folder / "moe.yaml")


def test_two_plans_beside_it_are_not_chosen_from(tmp_path):
    folder = slots(tmp_path / "run")
    (folder / "same.yml").write_text(PLAN)
    np.testing.assert_array_equal(read_workload(folder, model=MODEL).load, FOLDED)
    (folder / "other.yaml").write_text(PLAN.replace("[0, 1, 2, 3, 0, 1]", "[0, 1, 2, 3, 3, 3]"))
    with pytest.raises(InputError, match=r"moe\.yaml and other\.yaml differ, say which ran"):
        read_workload(folder, model=MODEL)


def test_a_balancer_that_moved_experts_is_an_error(tmp_path):
    folder = slots(tmp_path / "run", PLAN.replace("iter: 0", "iter: 2"))
    assert codes(read_workload(folder, model=MODEL))["balancer-moved"] == "error"


class TestAsManySlotsAsExperts:
    """A balancer without redundant slots moves experts, too."""

    def recorded(self, folder, plan):
        counts = [{key: row[:4] for key, row in rank.items()} for rank in COUNTS]
        recording(folder, counts)
        (folder / "moe.yaml").write_text(plan)
        return folder

    def plan(self, row):
        return (
            f"num_slots: 4\nlayer_updates_per_iter: 0\ninitial_global_assignments: {{1: {row}, 2: {row}, 3: {row}}}\n"
        )

    def test_a_plan_that_moves_them_leaves_it_open(self, tmp_path):
        folder = self.recorded(tmp_path / "run", self.plan([3, 2, 1, 0]))
        with pytest.raises(InputError, match="give it with --deployed, or take it out of the folder"):
            read_workload(folder, model=MODEL)
        load = read_workload(folder, model=MODEL, deployed=folder / "moe.yaml").load
        (folder / "moe.yaml").unlink()
        np.testing.assert_array_equal(load, read_workload(folder, model=MODEL).load[:, ::-1])

    def test_a_plan_that_moves_none_does_not(self, tmp_path):
        folder = self.recorded(tmp_path / "run", self.plan([0, 1, 2, 3]))
        np.testing.assert_array_equal(read_workload(folder, model=MODEL).load[0], [10, 2, 3, 4])


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        (PLAN.replace("num_slots", "slots"), "knows no field 'slots'"),
        (PLAN.replace("[0, 1, 2, 3, 0, 1]", "[0, 1, 2, 0, 0, 1]"), "expert 3 is in no slot"),
        (PLAN.replace("  1: [0, 1, 2, 3, 0, 1]\n", ""), "there is no model layer 1"),
        (PLAN.replace("iter: 0", "iter: [0]"), "layer_updates_per_iter is"),
    ],
)
def test_a_broken_plan_beside_it_is_named(tmp_path, plan, part):
    with pytest.raises(InputError) as caught:
        read_workload(slots(tmp_path / "run", plan), model=MODEL)
    assert str(caught.value).startswith("moe.yaml")
    assert part in str(caught.value)


def test_a_plan_needs_the_model(tmp_path):
    folder = slots(tmp_path / "run")
    with pytest.raises(InputError, match="can only be read for a model"):
        read_workload(folder, deployed=folder / "moe.yaml")


def test_on_the_command_line(tmp_path, capsys):
    folder = recording(tmp_path / "run", COUNTS, experts=6)
    (tmp_path / "ran.yaml").write_text(PLAN)
    (tmp_path / "model.json").write_text(MODEL.to_json())
    asked = ["inspect", str(folder), "--model", str(tmp_path / "model.json"), "--json"]
    assert main(asked) == 2
    assert "--deployed" in capsys.readouterr().err
    assert main([*asked, "--deployed", str(tmp_path / "ran.yaml")]) == 0
    assert '"experts": 4' in capsys.readouterr().out
