"""The command `switchyard`: `switchyard studio` opens the studio, any other command is one of the engine's.

Streamlit runs in this process, so that Ctrl-C and signals reach it as they do under `make studio`, from any folder.
"""

import argparse
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from switchyard import ROOT

STUDIO = "studio"
KERNELS = "engine.simulate.compile_ahead"
COMPILED = ROOT / "engine" / "simulate" / "__pycache__" / ".compiled"
"""Made when the kernels have been compiled, by `make` too."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command. arguments: without the program's name (default: those of this process)"""
    arguments = sys.argv[1:] if arguments is None else arguments
    # First of all, for a module of another package called `app` or `pages` would be taken for ours.
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT))]
    if arguments[:1] == [STUDIO]:
        return studio(arguments[1:])
    sys.argv[1:] = arguments
    runpy.run_module("engine", run_name="__main__", alter_sys=True)
    return 0


def studio(arguments: list[str]) -> int:
    """Serve the studio until it is told to end."""
    options = "Other options are Streamlit's own, such as --server.address and --server.baseUrlPath."
    parser = argparse.ArgumentParser(prog=f"switchyard {STUDIO}", description="Open the studio.", epilog=options)
    parser.add_argument("--port", type=int, default=8501, help="default: 8501")
    parser.add_argument("--sample", action="store_true", help="open the sample in a session that has nothing open")
    known, others = parser.parse_known_args(arguments)
    # Read when NumPy is loaded, see `engine`.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not is_compiled() and not compile_kernels():
        return 130
    from streamlit.web import cli  # here, as the other commands have no use for it

    own = ["--", "--sample"] if known.sample else []
    sys.argv = ["streamlit", "run", str(ROOT / "app" / "main.py"), "--server.port", str(known.port), *others, *own]
    return cli.main(standalone_mode=False) or 0


def is_compiled() -> bool:
    """True if the kernels have been compiled since this version was installed. Where nothing can be written next to them they
    are taken to be: numba then compiles what is needed when it is needed, and keeps it for this user."""
    if not os.access(COMPILED.parent.parent, os.W_OK):
        return True
    return COMPILED.exists() and COMPILED.stat().st_mtime >= Path(__file__).stat().st_mtime


def compile_kernels() -> bool:
    """Compile the kernels in a process that ends with this one; False if a person breaks it off. Should it fail, each is
    compiled when it is needed."""
    print("compiling the kernels, this once: a minute or two", file=sys.stderr, flush=True)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run([sys.executable, "-m", KERNELS], env=environment)
    except KeyboardInterrupt:
        return False
    finally:
        signal.signal(signal.SIGTERM, before)
    if done.returncode == 0:
        COMPILED.parent.mkdir(exist_ok=True)
        COMPILED.touch()
    return True
