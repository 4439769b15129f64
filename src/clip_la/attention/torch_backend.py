"""Closed-form forward and backward of Eq. 4 and Eq. 7 in plain torch operations, for any device.

With unit rows q^, k^ (or raw ones) both equations are

    out_i = w_i (z + gain S^T q^_i),    S = sum_n k^_n v_n^T  (D x E),    z = sum_n v_n

where w_i is Eq. 7's scale or, in Eq. 4 (whose gain is 1), 1 / (num_keys_i + kappa.q^_i), kappa = sum_n k^_n.
With G_i = w_i dout_i, the gradient of the numerator, and delta_i, that of Eq. 4's denominator (Eq. 7: 0),

    dS = gain sum_i q^_i G_i^T,    dz = sum_i G_i,    dkappa = sum_i delta_i q^_i
    dq^_i = gain S G_i + delta_i kappa,    dk^_n = dS v_n + dkappa,    dv_n = dS^T k^_n + dz
    dgain = sum_i q^_i.S G_i

and `write_through_norm` takes dq^ and dk^ on to q and k. Eq. 7's scale and gain are constants of a head, so
they go into the small matrices S and dS. The causal sums, in `torch_causal.py`, are the same with S, z and
kappa growing from chunk to chunk.

If v_n less the mean of the M values is to take the place of v_n, S is the same for v_n - c as for v_n:

    S = sum_n k^_n (v_n - c)^T - kappa z^T / M,    z = sum_n (v_n - c),    kappa = sum_n k^_n

and 0 then takes the place of z. With c near the mean, no sum is large beside its own remainder, and what
rounding v_n - c adds to all of them goes with z. Backward, constant rows take the place of dkappa and dz:

    dk^_n = dS (v_n - mean),    dv_n = dS^T (k^_n - kappa / M)

S, z, kappa, norms, denominators and whatever is added up over pieces are float32 (float64 for float64), and a
result is rounded to its dtype once, at the end; `operands` and `sum_operands` choose the dtype of the matrix
products. On the CPU the work is cut in pieces that suit the cores' caches; unit rows live as long as theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clip_la.attention.contract import Forward, Gradients, Inputs
from clip_la.attention.torch_causal import backward_causal, forward_causal
from clip_la.attention.torch_parts import (
    blocks,
    centred,
    first_mean,
    groups,
    operands,
    slope,
    sum_operands,
    through_denominator,
    token_sum,
    unit_rows,
    write_quotient,
    write_sum,
    write_through_norm,
)

_GAIN_FLOOR = 1e-20
"""A gain of 0 is taken as this: it adds nothing to the output, and may be divided by."""


def why_not(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why this backend can't serve such a call; None if it can, and it always can."""
    return None


def forward(inputs: Inputs, result: Forward) -> None:
    """Attention of q to k and v into `result`."""
    options, gain = inputs.options, _per_head(inputs.gain, result.state)
    run = forward_causal if options.causal else _forward_full
    for q, k, v, num_keys, *part in groups(inputs.q, inputs.k, inputs.v, inputs.visible_keys(), *result):
        q, k, v = operands(options, q, k, v)
        run(Inputs(q, k, v, gain, num_keys, options), Forward(*part))


def backward(dout: Tensor, inputs: Inputs, saved: Forward, result: Gradients) -> None:
    """Gradients into `result`, from that of the output and from what `forward` computed."""
    if saved.exact_out.shape[-1] > 0:
        saved = saved._replace(out=saved.exact_out)
    options, gain = inputs.options, _per_head(inputs.gain, saved.state)
    dgain = None if gain is None else torch.zeros_like(gain)
    run = backward_causal if options.causal else _backward_full
    for dout_, q, k, v, *kept, dq, dk, dv in groups(dout, *inputs[:3], *saved, *result[:3]):
        dout_, q, k, v = operands(options, dout_, q, k, v)
        part = Inputs(q, k, v, gain, None, options)
        run(dout_, part, Forward(*kept), Gradients(dq, dk, dv, dgain))
    if result.dgain is not None and dgain is not None:
        result.dgain.copy_(dgain.flatten())


def _forward_full(inputs: Inputs, result: Forward) -> None:
    """One pass over the keys for S, z and kappa, one over the queries that read them."""
    q, k, v, gain, _, options = inputs
    scale = inputs.scale
    S, kappa = result.state.zero_(), result.key_sum.zero_()
    z = S.new_zeros(*S.shape[:-2], 1, S.shape[-1])
    if options.centre_values:
        result.value_mean.copy_(first_mean(v))
    for k_rows, v_rows, k_norm in blocks(k, v, result.k_norm):
        k_rows, v_rows = sum_operands(gain, k_rows, v_rows)
        if options.centre_values:
            v_rows = centred(v_rows, result.value_mean)
        k_unit = unit_rows(k_rows, k_norm, options)
        S += k_unit.mT @ v_rows
        z += token_sum(v_rows)
        if options.keeps_key_sum:
            kappa += token_sum(k_unit).mT
    if options.centre_values:
        _centre_sums(result, z, inputs.mean_count)
    z *= scale
    scaled_S = (S * slope(scale, gain)).to(q.dtype)
    for q_rows, num_keys_rows, q_norm, denominator, out, exact_out in blocks(
        q, inputs.visible_keys(), result.q_norm, result.denominator, result.out, result.exact_out
    ):
        q_unit = unit_rows(q_rows, q_norm, options)
        product = q_unit @ scaled_S
        if options.has_denominator:
            denominator.copy_(num_keys_rows + q_unit @ kappa)
            write_quotient(out, exact_out, product + z, denominator)
        else:
            write_sum(out, product, z)


def _backward_full(dout: Tensor, inputs: Inputs, saved: Forward, result: Gradients) -> None:
    """One pass over the queries for dq, dS, dz and dkappa, one over the keys that read these."""
    q, k, v, gain, _, options = inputs
    scale = inputs.scale
    S, kappa = saved.state, saved.key_sum
    scaled_S = (S * slope(scale, gain)).to(q.dtype)
    dS, dkappa = torch.zeros_like(S), torch.zeros_like(kappa)
    dz = S.new_zeros(*S.shape[:-2], 1, S.shape[-1])
    for G, q_rows, out, q_norm, denominator, dq in blocks(
        dout, q, saved.out, saved.q_norm, saved.denominator, result.dq
    ):
        delta = None
        if options.has_denominator:
            G, delta = through_denominator(G, out, denominator)
        dq_unit = G @ scaled_S.mT
        if delta is not None:
            dq_unit += delta * kappa.mT
        write_through_norm(dq, dq_unit, q_rows, q_norm, options)
        G, q_rows = sum_operands(gain, G, q_rows)
        q_unit = unit_rows(q_rows, torch.empty_like(q_norm), options)
        dS += q_unit.mT @ G
        if not options.centre_values:
            dz += token_sum(G)
        if delta is not None:
            dkappa += q_unit.mT @ delta
    if result.dgain is not None:
        result.dgain.add_((S * dS).sum((0, 2, 3), keepdim=True), alpha=scale)
    dz *= scale
    scaled_dS = (dS * slope(scale, gain)).to(q.dtype)
    if options.centre_values:
        dz = kappa.mT @ scaled_dS.to(kappa.dtype) / -inputs.mean_count
    for k_rows, v_rows, k_norm, dk, dv in blocks(k, v, saved.k_norm, result.dk, result.dv):
        if options.centre_values:
            v_rows = centred(v_rows, saved.value_mean)
        k_unit = unit_rows(k_rows, torch.empty_like(k_norm), options)
        dk_unit = v_rows @ scaled_dS.mT
        if options.has_denominator:
            dk_unit += dkappa.mT
        write_through_norm(dk, dk_unit, k_rows, k_norm, options)
        write_sum(dv, k_unit @ scaled_dS, dz)


def _centre_sums(result: Forward, z: Tensor, mean_count: int) -> None:
    """From sums over v less a row, kept as `value_mean`, to those over v less its mean; z becomes 0."""
    z /= mean_count
    result.state.sub_(result.key_sum * z)
    result.value_mean.add_(z)
    z.zero_()


def _per_head(gain: Tensor | None, like: Tensor) -> Tensor | None:
    """The gain as this backend's own functions take it: (1, H, 1, 1), never 0."""
    if gain is None:
        return None
    gain = gain.to(like.dtype)[None, :, None, None]
    return torch.where(gain.abs() < _GAIN_FLOOR, _GAIN_FLOOR, gain)
