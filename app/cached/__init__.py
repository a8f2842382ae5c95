"""Engine calls with answers that are kept between runs, keyed by content digests; the data itself is passed unhashed.

Nothing here changes the session. Only simulated figures go to the data folder, so that a restarted studio need not simulate
again. The pages call all of it as `cached.problem()`.
"""

from app.cached.figures import (
    BY_CONTENT,
    BY_NAME,
    balance,
    bound,
    check_launch,
    check_plan,
    is_soon,
    kept_with_refusal,
    key_of,
    metrics,
    migration,
    other_recordings,
    sends_of_layer,
    simulate,
    standing,
    utilisation,
    waits,
)
from app.cached.inputs import (
    attached,
    inspection,
    measured_pairs,
    model_fault,
    placement_in_use,
    problem,
    recording,
    testbed_fault,
    workload,
)
from app.cached.plans import (
    Baseline,
    Candidate,
    Planned,
    answer_of,
    baseline,
    candidates,
    forget_saved_plans,
    jobs,
    made_for,
    open_plan,
    result_of,
    resume_jobs,
)
