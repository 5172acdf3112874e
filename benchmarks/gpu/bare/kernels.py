"""SGLang's compiled kernels that a small model's forward cannot avoid, as torch operations.

``sgl_kernel`` is 370 MB, and its extensions need the torch they were compiled with. The pack has
its Python files alone, and this file as ``sgl_kernel/load_utils.py``. Any other kernel raises
``AttributeError`` with its name when something calls it. All operations run on the current stream
and may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu

NAMESPACE = "sgl_kernel"

# the library unregisters its operations when it is collected
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _load_architecture_specific_ops() -> None:
    """Register the operations; ``sgl_kernel`` calls this under SGLang's name."""
    for schema, function in _OPERATIONS.items():
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _preload_cuda_library() -> None:
    """Do nothing: torch has loaded the CUDA runtime."""


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view, which keeps the memory: a graph's outputs then share none, and stay right."""
    return tensor.view_as(tensor)


def silu_and_mul(out: torch.Tensor, gate_and_up: torch.Tensor) -> None:
    gate, up = gate_and_up.chunk(2, dim=-1)
    torch.mul(silu(gate), up, out=out)


def gelu_and_mul(out: torch.Tensor, gate_and_up: torch.Tensor) -> None:
    gate, up = gate_and_up.chunk(2, dim=-1)
    torch.mul(gelu(gate), up, out=out)


def gelu_tanh_and_mul(out: torch.Tensor, gate_and_up: torch.Tensor) -> None:
    gate, up = gate_and_up.chunk(2, dim=-1)
    torch.mul(gelu(gate, approximate="tanh"), up, out=out)


def moe_sum_reduce(by_expert: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """Write the sum over dimension 1, the experts of a token, times ``factor``."""
    out.copy_(by_expert.sum(dim=1, dtype=torch.float32) * factor)


def merge_state_v2(
    values_a: torch.Tensor,
    log_sums_a: torch.Tensor,
    values_b: torch.Tensor,
    log_sums_b: torch.Tensor,
    values: torch.Tensor,
    log_sums: torch.Tensor,
) -> None:
    """Merge attention over two parts of a context.

    Values are (tokens, heads, width), and log sums of exponents (tokens, heads) in float32.
    """
    merged = torch.logaddexp(log_sums_a, log_sums_b)
    # two empty parts weigh nothing, instead of NaN
    scale = merged.masked_fill(merged == -torch.inf, 0.0)
    weight_a = torch.exp(log_sums_a - scale).unsqueeze(-1)
    weight_b = torch.exp(log_sums_b - scale).unsqueeze(-1)
    values.copy_(values_a * weight_a + values_b * weight_b)
    log_sums.copy_(merged)


_OPERATIONS = {
    "weak_ref_tensor(Tensor(a) tensor) -> Tensor(a)": weak_ref_tensor,
    "silu_and_mul(Tensor! out, Tensor input) -> ()": silu_and_mul,
    "gelu_and_mul(Tensor! out, Tensor input) -> ()": gelu_and_mul,
    "gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()": gelu_tanh_and_mul,
    "moe_sum_reduce(Tensor input, Tensor! output, float factor) -> ()": moe_sum_reduce,
    "merge_state_v2(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, Tensor! v, Tensor! s) -> ()": (
        merge_state_v2
    ),
}
