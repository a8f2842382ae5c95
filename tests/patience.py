"""How long what is promised in seconds may take on a machine that does other things too."""

import os


def promised(seconds: float) -> float:
    """As long as was promised where a processor is free, longer by as many times as work waits for every processor: several
    test processes, their browsers and ranks share them."""
    return seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
