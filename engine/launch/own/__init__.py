"""A person's own model on a rank of a launch: prefill and greedy tokens under each plan in turn, timed, and compared with the
model without a plan.

watch: the events of a pass, and the experts of one plan among those that a rank holds for all
run: the model on a rank, and the executor of a plan
check: the unplanned model
"""
