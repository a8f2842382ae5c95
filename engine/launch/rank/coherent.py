"""Context-coherent execution (ExFlow section IV-A): every rank has the contexts of all tokens, so that a token goes on
from the rank of its first expert; before the first layer every rank gives its tokens to all others, and after the last
one those that it carries.

A copy of a token in the dispatch is its hidden vector, from which a rank makes the input of its experts, and the
weights of the token's experts: the k numbers by which a row sent exceeds that of `engine.simulate.work`. The rank of
the first expert thus has all that the token's next layer starts from. The other experts' outputs follow there in the
combine, which with one expert a token sends nothing.
"""

from collections.abc import Callable

import numpy as np
import torch

from engine.launch.rank.communicator import Gathering
from engine.launch.rank.difference import Difference, worst
from engine.launch.rank.forward import Forward
from engine.launch.rank.layer import gate, normalised
from engine.launch.rank.layers import Layers, outputs
from engine.plan import Plan
from engine.runtime.exchange.recorder import Mark
from engine.runtime.exchange.routes import Piece
from engine.runtime.experts import aggregate


class CarriedLayers(Layers):
    """One model's layers if tokens stay with their first expert."""

    @property
    def width(self) -> int:
        return self.model.d_model + self.experts.shape[2]

    def homes(self, gpu_of_expert: np.ndarray) -> np.ndarray:
        first = self.experts[:, :, 0].astype(np.int64)
        home = [self.source.astype(np.int64)]
        for layer in range(self.layers):
            # A token without a first choice stays where it is.
            home.append(np.where(first[:, layer] >= 0, gpu_of_expert[layer, first[:, layer]], home[-1]))
        return np.stack(home)

    def forget(self) -> None:
        super().forget()
        self._everything = None

    def ready(self, layer: int) -> None:
        super().ready(layer)
        out, first = self.routes["dispatch"][layer], self.experts[:, layer, 0]
        before, after = self.held(layer), self.held(layer + 1)
        received = out.incoming(self.context.rank)
        of_first = np.flatnonzero(out.choice[received] == 0)
        self._after = len(after)
        self._stays, self._comes = (self._on_device(np.flatnonzero(part)) for part in (first[after] < 0, first[after] >= 0))
        self._held = self._on_device(np.searchsorted(before, after[first[after] < 0]))
        self._came = self._on_device(of_first[np.argsort(out.token[received][of_first])])

    def gate(self, layer: int) -> None:
        now = self._ready
        with self._computing("gate", layer):
            _, self.weight = gate(self.x, self.weights.router[layer], now.chosen)
        self.outgoing = torch.cat([self.x, self.weight], dim=1)[now.token]

    def _computed(self, rows: torch.Tensor) -> torch.Tensor:
        return super()._computed(normalised(rows[:, : self.model.d_model]))

    def aggregate(self, layer: int) -> None:
        now = self._ready
        with self._computing("aggregate", layer):
            token = self.x.new_empty((self._after, self.width))
            token[self._stays] = torch.cat([self.x[self._held], self.weight[self._held]], dim=1)
            token[self._comes] = now.incoming[self._came]
            x, weight = token.split([self.model.d_model, self.width - self.model.d_model], dim=1)
            self.x = aggregate(x, now.back, weight[now.token_back, now.choice_back], now.token_back)

    def ready_to_gather(self, layer: int) -> None:
        """Lay out an all-gather of the ranks' tokens before a layer, or after the last one. A token that chose no
        expert in any layer is unchanged, which every rank knows."""
        self.forget()
        self._moved = np.flatnonzero((self.experts >= 0).any(axis=(1, 2)))
        home = self.home[layer][self._moved]
        self._gathering = Gathering.between(self.context, home, self.model.bytes_per_token)
        mine = home == self.context.rank
        self._mine = self._on_device(np.searchsorted(self.held(layer), self._moved[mine]))
        self._own_rows = self._on_device(self._gathering.row_of_item[mine])
        self._everything = self.x.new_empty((len(self._moved), self.model.d_model))

    def gather(self, kind: str, layer: int) -> None:
        """Give every rank the tokens that this one holds, and take theirs, as an event of a kind in a layer. The ranks
        have to have met."""

        recorder = self.context.recorder

        def note(begin: Mark, end: Mark) -> None:
            recorder.log(kind, layer, begin, end, model=self.number)

        def log(piece: Piece, begin: Mark) -> None:
            recorder.log_piece(kind, layer, begin, piece, self.model.bytes_per_token, self.number)

        def exchange(sent: torch.Tensor, received: torch.Tensor) -> None:
            received[self._own_rows.to(received.device)] = sent
            self._gathering.run(self.context.rank, received, self.communicator.group, log, recorder.mark)

        self.communicator.carry(exchange, self.x[self._mine], self._everything, note)

    def gathered(self) -> torch.Tensor:
        """[token, d_model]: all tokens as this rank knows them after the last all-gather."""
        output = self.first_tokens()
        output[self._on_device(self._moved)] = self._everything[self._on_device(self._gathering.row_of_item)]
        return output

    def difference(self) -> Difference | None:
        """Difference of the rank with the worst output: all ranks must have all of it."""
        context, output = self.context, self.gathered()
        compare = None if context.rank else self.comparison()
        differences = [
            compare(part.to(context.device)) for _, part in outputs(output, np.full(context.ranks, len(output)), context)
        ]
        return worst(differences) if differences else None


class Coherent(Forward):
    """Executor of a plan with context-coherent execution."""

    model: CarriedLayers

    def layers_of(self, plan: Plan) -> CarriedLayers:
        return CarriedLayers(self.context, plan, self.communicator)

    def begin(self) -> None:
        super().begin()
        self._gather("prompt_gather", before=0, layer=0)

    def run(self, report: Callable[[float, str], None]) -> None:
        self.pass_through(report)
        self._gather("all_gather", before=self.model.layers, layer=self.model.layers - 1)

    def _gather(self, kind: str, before: int, layer: int) -> None:
        with self.context.recorder.paused():
            self.model.ready_to_gather(before)
        self.communicator.meet()
        self.model.gather(kind, layer)
