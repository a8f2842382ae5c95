"""The plan: what to do on a cluster for a model, and the parts it is made of."""

from engine.plan.placement import Placement, expert_groups, redundant_experts, together
from engine.plan.plan import Claim, Execution, Plan, Reaction
from engine.plan.send_order import OrderMode, Schedule, SendOrder, Travel, TravelUnit
from engine.plan.training import Offload, Overlap, PartitionRange, Pipeline, Priority
