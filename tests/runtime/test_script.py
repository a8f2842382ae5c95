"""The page docs/runtime.md, as a person would follow it: its commands in order, with the script that it prints, on 2 ranks."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers

from engine.cli import main
from engine.plan import Plan
from engine.runtime.apply import apply_plan
from engine.runtime.checkpoint import SWITCH
from tests.cases.plans import plan_of as plan_at
from tests.cases.tiny_models import model_of, plan_of, tokens_of
from tests.cases.two_nodes import cluster_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "runtime.md").read_text()
TEXTS = ("w5 w17 w3 w40", "w8 w9", "w2")
"""One more than the ranks take at a time."""


def test_the_page_is_a_way_from_a_recording_to_the_words_of_the_plain_model(tmp_path, monkeypatch, capsys, warm_python):
    folder = tmp_path / "models" / "olmoe"
    model = model_of("olmoe")
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "cluster.json").write_text(cluster_of((1, None), (1, None)).model_dump_json())
    (script,) = re.findall(r"^`run.py`:\n\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "run.py").write_text(script)
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    record, plan, launch, run = (shlex.split(line.replace("/models/olmoe", str(folder))) for line in block.splitlines())

    monkeypatch.setenv(SWITCH, str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    assert main(record[3:]) == 0 and main(plan[3:]) == 0
    assert main(launch[3:]) == 0 and "the same tokens" in capsys.readouterr().out
    made = Plan.from_json(Path("plan.json").read_text(), "plan.json")
    assert made.placement.gpus == 2 and not made.placement.single
    assert run[0] == "torchrun"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHON_EXEC": sys.executable}
    command = [sys.executable, "-m", "torch.distributed.run", *run[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("text ") == len(TEXTS)
    for number, text in enumerate(TEXTS):
        ids = torch.tensor([tokenizer.encode(text).ids])
        words = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        # Without the end of the line: ranks share the output, and each writes it by itself.
        assert f"text {number}, rank {number % 2}: {tokenizer.decode(words[0].tolist())}" in done.stdout


def test_the_page_exchanges_a_plan_under_a_generation(tmp_path, monkeypatch, capsys):
    """On one rank, where nothing moves; on four see `test_moving`."""
    (excerpt,) = re.findall(r"^```python\n(from itertools.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    plan = plan_of(model_of("olmoe"), 1)
    other = plan_at(plan.placement.model_copy(update={"experts_of_gpu": ((tuple(range(8))[::-1],),) * 2}))
    (tmp_path / "other.json").write_text(other.model_dump_json())
    monkeypatch.chdir(tmp_path)
    model, ids = apply_plan(model_of("olmoe"), plan), tokens_of()
    exec(excerpt, {"Plan": Plan, "Path": Path, "model": model})
    words = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert capsys.readouterr().out.startswith("Moved(copies=0, bytes=0, seconds=")
    assert torch.equal(words, model_of("olmoe").generate(ids, max_new_tokens=12, do_sample=False))
    assert not torch.equal(
        model.model.layers[0].mlp.experts.experts.down_proj, model_of("olmoe").model.layers[0].mlp.experts.down_proj
    )
