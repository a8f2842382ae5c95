"""How much longer a running job will take, from how far its reports say it is."""

import time

from engine.jobs.protocol import first_progress
from engine.jobs.runner import Job, State


def seconds_left(job: Job) -> float | None:
    """Seconds until a job is likely to end; 0 where it takes longer than its reports let expect. None while nothing can be
    said: it waits, is stopped or has ended, or has not come far enough."""
    latest = job.progress
    if latest is None or job.state is not State.RUNNING or latest.done is None or latest.done >= 1:
        return None
    first = first_progress(job.folder) or latest
    so_far, done = latest.time - first.time, latest.done - (first.done or 0.0)
    if latest.expected is not None:
        # What has done nothing yet goes by what it expected; the further it is, the more its own pace counts.
        yet = (1 - latest.done) * ((1 - latest.done) * latest.expected + so_far)
    elif done > 0 and so_far > 0:
        yet = (1 - latest.done) * so_far / done
    else:
        return None
    return max(0.0, yet - (time.time() - latest.time))
