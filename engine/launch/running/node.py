"""One node of a job on several: starts torchrun with the meeting place of the nodes.

A scheduler gives a job's first node in an environment variable. torchrun reads none and there is no shell to fill it
in, so this module does: `python -m engine.launch.running.node VARIABLE PORT NODE SECONDS [other arguments of torchrun]...`
"""

import os
import sys
from collections.abc import Mapping


def torchrun(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    """The argument list that starts torchrun on this node. Raises KeyError if the scheduler did not set the variable.

    The first node meets itself, for which it needs no name. It is told explicitly to keep the meeting place, not left
    to guess from names, so that a port in use is an error at once.

    arguments: VARIABLE, which names the first node; PORT; NODE, 0 for the first; SECONDS that nodes wait for each
        other; and others
    """
    variable, port, node, seconds, *others = arguments
    head = "localhost" if node == "0" else environment[variable]
    settings = f"is_host={int(node == '0')},join_timeout={seconds},read_timeout={seconds}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{port}", "--rdzv-conf", settings]
    if "SLURMD_NODENAME" in environment:
        # The others know Slurm's name of this node; its own name of itself they may not.
        meeting += ["--local-addr", environment["SLURMD_NODENAME"]]
    return [sys.executable, "-m", "torch.distributed.run", *meeting, *others]


if __name__ == "__main__":
    command = torchrun(sys.argv[1:], os.environ)
    os.execv(command[0], command)
