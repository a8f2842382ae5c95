#!/usr/bin/env bash
# Version: aiconfigurator-core 0.12.0, systems/silicon_sample.csv
# Behaviour: Of the package's 5,221 measured serving runs 882 name a source that says how they were run (it begins with db-dump),
# and 151 of these, all of servers that take prompts and generate, have more GPUs than their machine: 16 or 64 (tp_size times
# attention_dp_size, and as many by moe_tp_size times moe_ep_size) on nodes of eight, the squares of 4 and 8. It looks as if the
# tensor-parallel and the expert-parallel or data-parallel size of one set of GPUs had been multiplied.
# Output seen: 882 trusted, 151 beyond the machine, with 16 or 64 GPUs by both counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    -d "$folder" aiconfigurator-core==0.12.0
python3 - "$folder" <<'END'
import csv
import io
import sys
import zipfile
from pathlib import Path

wheel = zipfile.ZipFile(next(Path(sys.argv[1]).glob("*.whl")))
name = next(name for name in wheel.namelist() if name.endswith("systems/silicon_sample.csv"))
rows = list(csv.DictReader(io.StringIO(wheel.read(name).decode())))
trusted = [row for row in rows if row["silicon_data_source"].startswith("db-dump")]


def count(row, column):
    return int(float(row[column] or 1))


beyond = []
for row in trusted:
    if row["mode"] == "agg":
        tp, dp, moe_tp, moe_ep = (count(row, f"{part}_size") for part in ("tp", "attention_dp", "moe_tp", "moe_ep"))
        if tp * dp > (72 if row["system"].startswith("gb") else 8):
            beyond.append((tp * dp, moe_tp * moe_ep))
print(f"aiconfigurator-core 0.12.0: {len(rows)} rows, {len(trusted)} trusted, {len(beyond)} beyond the machine: {set(beyond)}")
assert (len(rows), len(trusted), len(beyond)) == (5221, 882, 151)
assert set(beyond) == {(16, 16), (64, 64)}, set(beyond)
END
