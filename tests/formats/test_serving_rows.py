"""Measured steps of serving engines: a person's table of twelve rows, InferenceX's results, and rows that cannot be."""

import json
from pathlib import Path

import pytest

from engine.cli import main
from engine.errors import InputError
from engine.formats import identify
from engine.formats.measured.serving_rows import is_trusted, read_steps
from engine.serving.deployment import Ranks

HEAD = "id,backend,backend_version,model_path,system,precision,mode,isl,osl,tp_size,attention_dp_size,moe_tp_size,moe_ep_size,"
HEAD += (
    "concurrency,accepted,silicon_ttft_ms,silicon_tpot_ms,decode_tp_size,decode_moe_ep_size,prefill_tp_size,silicon_data_source"
)
USUAL = {
    **{"id": "a", "backend": "sglang", "backend_version": "0.5.9", "model_path": "deepseek-ai/DeepSeek-V3", "system": "H200"},
    **{"precision": "fp8", "mode": "agg", "isl": 1024, "osl": 1024, "tp_size": 8, "attention_dp_size": 1, "moe_tp_size": 8},
    **{"moe_ep_size": 1, "concurrency": 32, "silicon_ttft_ms": 300, "silicon_tpot_ms": 20},
}


def table(folder: Path, *rows: dict, head: str = HEAD) -> Path:
    path = folder / "rows.csv"
    lines = [",".join(str((USUAL | row).get(name, "")) for name in head.split(",")) for row in rows]
    path.write_text("\n".join([head, *lines, ""]))
    return path


def test_twelve_rows_of_a_person(tmp_path, capsys):
    """Recognised, read with numbers of users of their own, predicted, and held against their times."""
    pytest.importorskip("aiconfigurator_core")
    path = table(tmp_path, *({"id": f"run {users}", "concurrency": users} for users in range(8, 104, 8)))
    assert identify(path).name == "measured-steps"
    steps, refused = read_steps(path)
    assert [step.demand.users for step in steps] == list(range(8, 104, 8)) and not refused and all(map(is_trusted, steps))
    assert {(step.first_token, step.token) for step in steps} == {(0.3, 0.02)}
    assert main(["inspect", str(path)]) == 0 and "12 measured steps" in capsys.readouterr().out
    assert main(["predict", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == [step.id for step in steps]
    assert all(set(row) == {"id", "ttft", "tpot", "low", "high", "refused"} and row["refused"] is None for row in rows)
    assert all(row["low"] < row["tpot"] < row["high"] for row in rows)
    assert main(["predict", str(path)]) == 0
    told = capsys.readouterr().out
    assert "median error" in told and "run 96" in told
    assert main(["predict", str(path), "--why", "run 96"]) == 0
    assert "would be explained by" in capsys.readouterr().out
    assert main(["predict", str(path), "--why", "run 97"]) == 2
    assert "no row has this id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"silicon_tpot_ms": 0.02}, "column 'silicon_tpot_ms' is 0.02, which no engine reaches in ms; is it in seconds?"),
        ({"silicon_ttft_ms": "0.3"}, "column 'silicon_ttft_ms' is 0.3, which no engine reaches in ms; is it in seconds?"),
        ({"silicon_tpot_ms": 20000}, "is it in microseconds?"),
        ({"silicon_tpot_ms": "fast"}, "column 'silicon_tpot_ms' is 'fast', not a number above 0"),
        ({"silicon_tpot_ms": "nan"}, "not a number above 0"),
        ({"moe_tp_size": 4}, "attention is on 8 × 1 = 8 GPUs, the experts on 4"),
        ({"tp_size": 16, "moe_tp_size": 16}, "16 GPUs are more than the 8 of one machine of H200"),
        ({"tp_size": 2.5}, "column 'tp_size' is '2.5', not a whole number of 1 or more"),
        ({"tp_size": ""}, "a value in column 'tp_size' is needed"),
        ({"concurrency": ""}, "how many users asked is not told"),
        ({"precision": ""}, "a value in column 'precision' is needed: the number format of the weights"),
        ({"accepted": "some"}, "column 'accepted' is 'some', not a number of tokens that speculation adds"),
        ({"precision": "fp3"}, "precision 'fp3'; known are bf16"),
        ({"mode": "both"}, "mode 'both'; known are agg and disagg"),
        ({"mode": "disagg"}, "a value in column 'decode_tp_size' is needed"),
        ({"isl": -4}, "column 'isl' is '-4', not a whole number of 1 or more"),
    ],
)
def test_rows_that_cannot_be_are_left_out_with_a_reason(row, says, tmp_path):
    pytest.importorskip("aiconfigurator_core")
    steps, (refused,) = read_steps(table(tmp_path, {"id": "good"}, {"id": "bad"} | row))
    assert [step.id for step in steps] == ["good"] and (refused.id, refused.place) == ("bad", "line 3")
    assert says in refused.why


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (HEAD.replace("isl,", "input,"), "the columns isl are missing; measured steps have backend"),
        (HEAD.replace("tp_size,", "gpus,", 1).replace("decode_tp_size,", ""), "tp_size or decode_tp_size are missing"),
        (HEAD, "has no rows of measured steps"),
    ],
)
def test_tables_with_wrong_columns_or_without_rows(head, says, tmp_path):
    with pytest.raises(InputError, match=says):
        read_steps(table(tmp_path, *([] if head is HEAD else [{}]), head=head))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"\x00\xff\xfe", "damaged or not"),
        ("a.csv", b'backend,model_path,system,mode,isl,osl,tp_size\n"not closed', "damaged or not"),
        ("a.json", b"[1", "not valid JSON"),
        ("a.json", b"[1]", "is no list of results"),
    ],
)
def test_damaged_files_are_refused_in_a_line(name, content, says, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    assert main(["predict", str(tmp_path / name)]) == 2 and says in capsys.readouterr().err
    assert main(["predict", str(tmp_path / "none.csv")]) == 2 and "there is no such file" in capsys.readouterr().err


def test_rows_of_one_id_and_machines_too_small_for_the_weights(tmp_path, capsys):
    pytest.importorskip("aiconfigurator_core")
    rows = ({"concurrency": 8}, {"concurrency": 64}, {"id": "wide", "precision": "bf16"})
    path = table(tmp_path, *rows)
    assert main(["predict", str(path)]) == 0
    told = capsys.readouterr().out
    assert "of 2 inside the interval" in told and "wide: 8 H200 have no room for DeepSeek-V3 in bf16" in told


def test_speculation_that_says_how_much_was_taken(tmp_path, capsys):
    pytest.importorskip("aiconfigurator_core")
    path = table(tmp_path, {}, {"id": "drafts", "accepted": 0.8})
    plain, drafts = read_steps(path)[0]
    assert (plain.demand.accepted, drafts.demand.accepted) == (0.0, 0.8)
    assert main(["predict", str(path), "--json"]) == 0
    plain, drafts = (row["tpot"] for row in json.loads(capsys.readouterr().out))
    assert plain / 1.8 < drafts < plain
    assert main(["predict", str(path), "--rate", "1"]) == 2 and "without speculation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("system", "gpu"), [("a100_sxm", "A100-80"), ("h200_sxm", "H200"), ("B300", "B300-SXM"), ("gb200", "GB200")]
)
def test_names_of_machines(system, gpu, tmp_path):
    pytest.importorskip("aiconfigurator_core")
    (step,), _ = read_steps(table(tmp_path, {"system": system}))
    assert step.deployment.gpu == gpu


def test_two_sets_of_servers_and_users_told_by_the_source(tmp_path):
    source = "db-dump/2026; config_id=1; silicon_concurrency=48"
    servers = {"decode_tp_size": 4, "decode_moe_ep_size": 4, "prefill_tp_size": 2}
    row = {"mode": "disagg", "system": "gb200", "silicon_data_source": source, "concurrency": "", **servers}
    untrusted = {"id": "b", "silicon_data_source": "source_file=x.csv", "precision": "fp8_block"}
    (first, second), refused = read_steps(table(tmp_path, row, untrusted))
    assert not refused and first.demand.users == 48 and first.deployment.gpu == "GB200"
    assert first.deployment.decode == Ranks(tensor=4, expert=4) and first.deployment.prefill == Ranks(tensor=2, expert_tensor=2)
    assert first.deployment.gpus == 6 and is_trusted(first) and not is_trusted(second)
    assert second.deployment.precision == "fp8"


def test_results_as_inferencex_writes_them(tmp_path):
    """Seconds, and attention by data on as many GPUs; a run that speculated is left out."""
    result = {"hw": "h200-nv", "framework": "vllm", "model": "openai/gpt-oss-120b", "precision": "fp4", "tp": 4, "ep": 2}
    result |= {"dp_attention": "true", "conc": 16, "isl": 1024, "osl": 1024, "median_ttft": 0.2, "mean_tpot": 0.01}
    path = tmp_path / "results.json"
    path.write_text(json.dumps([result, result | {"dp_attention": "false"}, result | {"spec_decoding": "mtp"}]))
    (spread, shared), (refused,) = read_steps(path)
    assert (spread.first_token, spread.token, spread.demand.users) == (0.2, 0.01, 16)
    assert spread.deployment.decode == Ranks(tensor=1, data=4, expert_tensor=2, expert=2)
    assert shared.deployment.decode == Ranks(tensor=4, data=1, expert_tensor=2, expert=2)
    assert (refused.place, "speculated" in refused.why) == ("result 3", True)
    path.write_text('{"hw": "h200"}')
    with pytest.raises(InputError, match="is no list of results with hw, framework"):
        read_steps(path)
