"""A serving engine as it is deployed: how its GPUs divide a model, who asks it, and what was measured of it."""

from typing import Literal

from pydantic import Field, model_validator

from engine.schema import Frozen

Precision = Literal["bf16", "fp8", "fp4", "int4"]
"""Numbers of the weights; those of `int4` are computed with in 16 bits."""
BYTES_PER_WEIGHT: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625, "int4": 0.53125}
"""With their scales: NVFP4 has one of 8 bits for 16 weights, 4-bit integers one of 16 bits for 32 at most."""
Mode = Literal["agg", "disagg"]


class Ranks(Frozen):
    """GPUs of one server, and how they divide a model: attention by heads (tensor) and by sequences (data), experts by their
    matrices (expert_tensor) and one by one (expert)."""

    tensor: int = Field(ge=1, le=4096, description="GPUs that share the attention of a sequence (tp)")
    data: int = Field(default=1, ge=1, le=4096, description="replicas of attention with sequences of their own (dp)")
    expert_tensor: int = Field(default=1, ge=1, le=4096, description="GPUs that share an expert (moe_tp)")
    expert: int = Field(default=1, ge=1, le=4096, description="GPUs that experts are divided among (moe_ep)")
    servers: int = Field(default=1, ge=1, le=4096, description="such servers, which divide the requests (workers)")

    @model_validator(mode="after")
    def _consistent(self) -> "Ranks":
        attention, experts = self.tensor * self.data, self.expert_tensor * self.expert
        if attention != experts:
            raise ValueError(f"attention is on {self.tensor} × {self.data} = {attention} GPUs, the experts on {experts}")
        return self

    @property
    def gpus(self) -> int:
        """GPUs of one server."""
        return self.tensor * self.data

    @property
    def in_words(self) -> str:
        """`tp8`, `dp8 ep8` or `tp4 moe_tp2 ep2`; of one GPU `1 GPU`. Experts without a word are shared as attention."""
        moe = 1 if self.tensor == self.expert_tensor else self.expert_tensor
        named = {"tp": self.tensor, "dp": self.data, "moe_tp": moe, "ep": self.expert}
        return " ".join(f"{name}{count}" for name, count in named.items() if count > 1) or "1 GPU"


class Deployment(Frozen):
    """An engine that serves one model.

    In `agg` one set of servers takes prompts and generates, in `disagg` some only take prompts and send keys and values on.
    """

    engine: str = Field(min_length=1, max_length=80)
    version: str = Field(default="", max_length=200)
    checkpoint: str = Field(min_length=1, max_length=200, description="the model's name on the Hugging Face Hub")
    gpu: str = Field(min_length=1, max_length=80, description="a GPU type")
    precision: Precision
    decode: Ranks
    prefill: Ranks | None = Field(default=None, description="servers that only take prompts; absent: those that generate")

    @property
    def mode(self) -> Mode:
        return "agg" if self.prefill is None else "disagg"

    @property
    def prompts(self) -> Ranks:
        """The servers that take prompts."""
        return self.prefill or self.decode

    @property
    def servers_in_words(self) -> str:
        """`3 × tp16, prompts: 1 × dp4 ep4`."""
        said = f"{self.decode.servers} × {self.decode.in_words}"
        return f"{said}, prompts: {self.prefill.servers} × {self.prefill.in_words}" if self.prefill else said

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.decode.gpus * self.decode.servers + (self.prefill.gpus * self.prefill.servers if self.prefill else 0)


class Demand(Frozen):
    """Users who each wait for an answer and then ask again, all of them from the beginning on (a closed loop).

    accepted: tokens that speculation adds to one step in the mean: 0.8 where 80 % of one drafted token are taken
    """

    prompt: int = Field(ge=1, le=10_000_000, description="tokens of a prompt")
    output: int = Field(ge=1, le=10_000_000, description="tokens generated for it")
    users: int = Field(ge=1, le=1_000_000, description="requests under way at any time")
    accepted: float = Field(default=0.0, ge=0, le=16)


class MeasuredStep(Frozen):
    """Times that somebody measured of a deployment.

    first_token, token: seconds to the first token, and for every further one, the mean or median of requests
    """

    id: str = Field(min_length=1, max_length=200)
    deployment: Deployment
    demand: Demand
    first_token: float | None = Field(default=None, gt=0)
    token: float | None = Field(default=None, gt=0)
    source: str = Field(default="", max_length=500)
