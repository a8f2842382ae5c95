"""Switchyard as one package: `import switchyard` makes `engine` importable, in a wheel and in a checkout.

A wheel has `app`, `engine`, `pages` and `sample_traces` in this folder, a checkout next to it. Their folder is put last on
Python's path: modules of a person's own script go first.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "engine").is_dir() else HERE.parent
"""The folder of `engine` and the others."""

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
