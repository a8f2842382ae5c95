#!/usr/bin/env bash
# Version: torch 2.13.0, torch.nn.functional.grouped_mm on a CPU
# Behaviour: The gradient of a plain sum is one number expanded to the shape of the output, with strides of 0. The backward pass of
# grouped_mm raises a RuntimeError on it, where one product per expert takes it. With the mean, a sum of squares, or a copy of the
# gradient in memory of its own the gradients equal those of one product per expert. Whoever tests an MoE layer by the sum of its
# output meets it; with other losses it stays unseen.
# Output seen: {'sum': 'RuntimeError', 'mean': 'equal', 'squares': 'equal', 'copied gradient of the sum': 'equal'}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'END'
import torch

torch.manual_seed(0)
rows, weights, ends = torch.randn(24, 16), torch.randn(3, 16, 32), torch.tensor([8, 11, 24], dtype=torch.int32)


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous()


def grouped(x, w):
    return torch.nn.functional.grouped_mm(x, w, offs=ends)


def one_by_one(x, w):
    return torch.cat([part @ w[expert] for expert, part in enumerate(x.tensor_split(ends[:-1].long()))])


def gradients(product, loss):
    x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    loss(product(x, w)).backward()
    return torch.cat([x.grad.flatten(), w.grad.flatten()])


losses = {"sum": torch.sum, "mean": torch.mean, "squares": lambda y: y.square().sum()}
losses["copied gradient of the sum"] = lambda y: Copied.apply(y).sum()
seen = {}
for name, loss in losses.items():
    wanted = gradients(one_by_one, loss)
    try:
        seen[name] = "equal" if torch.allclose(gradients(grouped, loss), wanted, atol=1e-4) else "other"
    except RuntimeError as error:
        seen[name] = "RuntimeError"
        print(error)
print("torch", torch.__version__, seen)
assert list(seen.values()) == ["RuntimeError", "equal", "equal", "equal"], seen
END
