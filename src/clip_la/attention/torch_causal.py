"""The causal sums of the torch backend: a masked tile inside a chunk, the sums of the other chunks beside it.

With L the lower triangle of ones (tokens x tokens of a chunk), a = scale gain (Eq. 4: 1 and 1), o elementwise
and the weights A = scale L + a L o (Q^ K^^T),

    numerator = A V + a Q^ S + scale z,    dcos = a L o (G V^T + delta),    dV = A^T G + a K^ dS + scale dz
    dQ^ = dcos K^ + a G S^T + delta kappa,    dK^ = dcos^T Q^ + a V dS^T + dkappa
    dgain = sum dQ^ o Q^ / gain

where S, z and kappa are sums over all earlier chunks, dS, dz and dkappa over all later ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clip_la.attention.contract import CHUNK, Forward, Gradients, Options
from clip_la.attention.torch_parts import (
    chunks,
    floored,
    per_head_sum,
    slope,
    through_denominator,
    token_sum,
    unit_rows,
    write_through_norm,
)


class _Sums(NamedTuple):
    """S (..., H, D, E), z (..., H, 1, E) and, in Eq. 4, kappa (..., H, D, 1); or the gradients of these."""

    S: Tensor
    z: Tensor
    kappa: Tensor | None


def forward_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    num_keys: Tensor,
    options: Options,
    result: Forward,
) -> None:
    """Fill `result`, chunk by chunk."""
    scale = options.constant(k.shape[-2])
    ones_tile, cos_tile = _tiles(q, scale, gain)
    pieces = chunks(q, k, v, num_keys, result.q_norm, result.k_norm, result.denominator, result.out)
    earlier_sums = _sums_before_chunks(k, v, result.k_norm, options)
    for rows, earlier in zip(pieces, earlier_sums, strict=True):
        q_rows, k_rows, v_rows, num_keys_rows, q_norm, k_norm, denominator, out = rows
        q_unit, k_unit = unit_rows(q_rows, q_norm, options), unit_rows(k_rows, k_norm, options)
        A = _weights(q_unit, k_unit, ones_tile, cos_tile)
        numerator = A @ v_rows
        if earlier is not None:
            numerator += (q_unit @ (earlier.S * slope(scale, gain))).add_(earlier.z, alpha=scale)
        if options.has_denominator:
            cosines = A.sum(-1, keepdim=True) - ones_tile[: A.shape[-1], : A.shape[-1]].sum(-1, keepdim=True)
            if earlier is not None and earlier.kappa is not None:
                cosines += q_unit @ earlier.kappa
            denominator.copy_(num_keys_rows + cosines)
            numerator /= floored(denominator)
        out.copy_(numerator)


def backward_causal(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    saved: Forward,
    options: Options,
    result: Gradients,
) -> None:
    """Fill `result`, from the last chunk to the first."""
    scale = options.constant(k.shape[-2])
    ones_tile, cos_tile = _tiles(q, scale, gain)
    norms_etc = (saved.out, saved.q_norm, saved.k_norm, saved.denominator)
    pieces = list(chunks(dout, q, k, v, *norms_etc, *result[:3]))
    earlier_sums = _sums_before_chunks(k, v, torch.empty_like(saved.k_norm), options)
    later: _Sums | None = None
    for rows, earlier in zip(reversed(pieces), reversed(earlier_sums), strict=True):
        G, q_rows, k_rows, v_rows, out, q_norm, k_norm, denominator, dq, dk, dv = rows
        q_unit = unit_rows(q_rows, torch.empty_like(q_norm), options)
        k_unit = unit_rows(k_rows, torch.empty_like(k_norm), options)
        delta = None
        if options.has_denominator:
            G, delta = through_denominator(G, out, denominator)
        A = _weights(q_unit, k_unit, ones_tile, cos_tile)
        dcos = G @ v_rows.mT
        if delta is not None:
            dcos += delta
        dcos *= cos_tile[..., : dcos.shape[-1], : dcos.shape[-1]]
        dq_unit, dk_unit, dv_rows = dcos @ k_unit, dcos.mT @ q_unit, A.mT @ G
        if earlier is not None:
            dq_unit += G @ (earlier.S * slope(scale, gain)).mT
            if delta is not None and earlier.kappa is not None:
                dq_unit += delta * earlier.kappa.mT
        if later is not None:
            scaled_dS = later.S * slope(scale, gain)
            dk_unit += v_rows @ scaled_dS.mT
            dv_rows += (k_unit @ scaled_dS).add_(later.z, alpha=scale)
            if later.kappa is not None:
                dk_unit += later.kappa.mT
        if earlier is not None:
            dkappa = None if delta is None else q_unit.mT @ delta
            later = _plus(later, _Sums(q_unit.mT @ G, token_sum(G), dkappa))
        write_through_norm(dq, dq_unit, q_rows, q_norm, options)
        write_through_norm(dk, dk_unit, k_rows, k_norm, options)
        dv.copy_(dv_rows)
        if gain is not None and result.dgain is not None:
            result.dgain.add_(per_head_sum(dq_unit * q_unit / gain))


def _sums_before_chunks(k: Tensor, v: Tensor, k_norm: Tensor, options: Options) -> list[_Sums | None]:
    """The sums over all keys before each chunk; None before the first."""
    sums: list[_Sums | None] = [None]
    for k_rows, v_rows, norm in list(chunks(k, v, k_norm))[:-1]:
        k_unit = unit_rows(k_rows, norm, options)
        kappa = token_sum(k_unit).mT if options.has_denominator else None
        sums.append(_plus(sums[-1], _Sums(k_unit.mT @ v_rows, token_sum(v_rows), kappa)))
    return sums


def _plus(a: _Sums | None, b: _Sums) -> _Sums:
    if a is None:
        return b
    kappa = None if a.kappa is None or b.kappa is None else a.kappa + b.kappa
    return _Sums(a.S + b.S, a.z + b.z, kappa)


def _tiles(q: Tensor, scale: float, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    """scale L, (n, n), and scale gain L, ([H,] n, n), for the largest tile of the call."""
    n = min(q.shape[-2], CHUNK)
    lower = q.new_ones(n, n).tril_()
    return lower * scale, lower * slope(scale, gain)


def _weights(q_unit: Tensor, k_unit: Tensor, ones_tile: Tensor, cos_tile: Tensor) -> Tensor:
    n = q_unit.shape[-2]
    cos = q_unit @ k_unit.mT
    return torch.addcmul(ones_tile[:n, :n], cos, cos_tile[..., :n, :n], out=cos)
