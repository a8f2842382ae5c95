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
    kept_with_refusal,
    key_of,
    metrics,
    migration,
    sends_of_layer,
    simulate,
    utilisation,
    waits,
)
from app.cached.headlines import (
    evidence_of,
    figures_for,
    gains_held_out,
    is_soon,
    kind_of_verdict,
    open_standing,
    seconds_for,
    standing,
    unseen,
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
from app.cached.steps import (
    SERVED,
    ModelBeside,
    Serving,
    beside_experts,
    kept_serving,
    open_serving,
    routing_is_assumed,
    served,
    serving_of,
)
