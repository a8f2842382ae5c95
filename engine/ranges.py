"""What quantities of real machines can be, with room to spare: beyond that a number is a slip of the keyboard, and the products
and quotients of such numbers are none. As types for the fields of documents."""

from typing import Annotated

from pydantic import Field

Rate = Annotated[float, Field(ge=1e-3, le=1e30)]
"""Bytes/s or FLOP/s of one GPU, port or link; 1e30 is as good as a network that costs nothing, to plan without one."""
Memory = Annotated[float, Field(ge=1, le=1e21)]
"""Bytes of one GPU."""
StartUp = Annotated[float, Field(ge=0, le=3600)]
"""Seconds before a transfer or an operation begins."""
Amount = Annotated[float, Field(ge=1e-3, le=1e18)]
"""Bytes of a transfer, or a side of a matrix."""
Seconds = Annotated[float, Field(ge=1e-12, le=1e6)]
"""That something was measured to take."""
