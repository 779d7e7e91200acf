# pyright: basic
"""Attention of packed batches on a CPU, request by request.

The manager packs all requests of a step into one sequence, and leaves it to a mask that none sees
another's tokens. Flash kernels skip what is masked; the CPU's kernel computes it, so its work grows
with the square of the number of requests: at 16 requests of 600 tokens, 10 ms a layer against 1.6
for each request on its own (two cores). Here, a request's numbers also do not depend on the others.

They do depend, in the last digits, on how many of its tokens a step reads: another worker that goes
on with it reads at once what the first one wrote token by token. Where values are rounded to 8 or
16 bits those digits become other texts, so attention is computed in float64 there, whose
differences are lost when its results are cut (docs/adr/0034-int8-sums-are-exact.md,
docs/adr/0037-bfloat16-keeps-its-text.md).
"""

import threading
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from millstream.worker.engines.transformers_int8 import Int8Linear


class _Kept(threading.local):
    """Memory for a request's keys and values in float64, one of each for each thread.

    What is allocated anew for each would come from the system, which clears it: 0.6 ms for 600
    tokens of the bundled model, where the numbers are written in 0.02.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, torch.Tensor] = {}

    def doubled(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The values in float64, until the next of that name."""
        room = self._rooms.get(name)
        if room is None or room.numel() < values.numel():
            room = self._rooms[name] = torch.empty(2 * values.numel(), dtype=torch.float64)
        return room[: values.numel()].view(values.shape).copy_(values)


_kept = _Kept()


def install() -> None:
    """Have transformers use this wherever a model asks for `sdpa`."""
    AttentionInterface.register("sdpa", attention)


def attention(  # noqa: PLR0917 - transformers calls it so
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What `sdpa_attention_forward` computes, faster for packed batches on a CPU.

    Args:
        module: The attention layer.
        query: [1, heads, query tokens of all requests, head dimension].
        key: [1, key-value heads, tokens of all requests, head dimension].
        value: As `key`.
        attention_mask: [1, 1, query tokens, tokens], added to the scores.
        dropout: Unused while generating.
        scaling: Factor of the scores; None takes one over the root of the head dimension.
        options: `cu_seq_lens_q` and `cu_seq_lens_k`, int32 [requests + 1], say where each request
            begins in a packed batch.

    Returns:
        [1, query tokens, heads, head dimension], and no weights.
    """
    special = any(options.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    packed = "cu_seq_lens_q" in options and query.device.type == "cpu" and not special
    if attention_mask is None or not packed:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
    exact = query.dtype is torch.bfloat16 or any(
        isinstance(layer, Int8Linear) for layer in module.children()
    )
    heads_kv, head_dim = key.shape[1], query.shape[3]
    # Query heads grouped by the key-value head they share, so that keys need no copy per head.
    query = query.view(heads_kv, query.shape[1] // heads_kv, query.shape[2], head_dim)
    windowed = options.get("sliding_window") is not None
    begin_q, begin_k = options["cu_seq_lens_q"].tolist(), options["cu_seq_lens_k"].tolist()
    outputs: list[torch.Tensor] = []
    for i in range(len(begin_q) - 1):
        q0, q1, k0, k1 = begin_q[i], begin_q[i + 1], begin_k[i], begin_k[i + 1]
        own_query = query[:, :, q0:q1]
        own_key, own_value = key[0, :, k0:k1], value[0, :, k0:k1]
        if exact:
            own_query = own_query.double()
            own_key, own_value = _kept.doubled("key", own_key), _kept.doubled("value", own_value)
        if q1 - q0 == 1 and not windowed:
            # The one new token sees everything; the heads of a group are as good as query tokens.
            own = scaled_dot_product_attention(
                own_query.view(1, heads_kv, -1, head_dim),
                own_key[None],
                own_value[None],
                scale=scaling,
            )
            outputs.append(own.view(heads_kv, -1, 1, value.shape[3]))
            continue
        fresh = q1 - q0 == k1 - k0 and not windowed
        shape = (-1, own_query.shape[1], -1, -1)
        outputs.append(
            scaled_dot_product_attention(
                own_query,
                own_key[:, None].expand(shape),
                own_value[:, None].expand(shape),
                attn_mask=None if fresh else attention_mask[:, :, q0:q1, k0:k1].to(own_query.dtype),
                is_causal=fresh,
                scale=scaling,
            )
        )
    whole = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    whole = whole.to(attention_mask.dtype)
    return whole.permute(2, 0, 1, 3).reshape(1, query.shape[2], -1, value.shape[3]), None
