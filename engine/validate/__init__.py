"""Is this answer legal, and what is it worth? Recomputed from scratch; knows no optimiser and calls none.

Every function returns what it measured and raises `IllegalError` with the first broken rule. The tests of every kernel go
through here. One module a family of problems.
"""

from engine.errors import IllegalError
from engine.validate.assignment import check_assignment
from engine.validate.communication import check_flows, check_schedule
from engine.validate.plan import check_plan

__all__ = ["IllegalError", "check_assignment", "check_flows", "check_plan", "check_schedule"]
