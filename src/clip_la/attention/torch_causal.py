"""The causal sums of the torch backend: masked tiles on the diagonal, sums over the other tiles beside them.

With L the lower triangle of ones (tokens x tokens of a tile), a = scale gain (Eq. 4: 1 and 1), o elementwise
and the weights A = scale L + a L o (Q^ K^^T), in each tile

    numerator = A V + a Q^ S + scale z,    dcos = a L o (G V^T + delta),    dV = A^T G + a K^ dS + scale dz
    dQ^ = dcos K^ + a G S^T + delta kappa,    dK^ = dcos^T Q^ + a V dS^T + dkappa
    dgain = sum dQ^ o Q^ / gain

where S, z and kappa are sums over all earlier tiles, dS, dz and dkappa over all later ones. The tokens are
cut in blocks, worked on one after another, and a block in tiles, worked on together: (B, H, T tiles, n, D).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_la.attention.contract import CHUNK, Forward, Gradients, Inputs, Options
from clip_la.attention.torch_parts import (
    blocks,
    slope,
    through_denominator,
    token_sum,
    unit_rows,
    write_quotient,
    write_through_norm,
)


class _Sums(NamedTuple):
    """S (B, H, T, D, E), z (B, H, T, 1, E) and, in Eq. 4, kappa (B, H, T, D, 1), one for each of T tiles.

    Or the gradients of these.
    """

    S: Tensor
    z: Tensor
    kappa: Tensor | None


class _Factors(NamedTuple):
    """scale; a = scale gain, a number or (1, H, 1, 1, 1); scale L and a L for the largest tile."""

    scale: float
    a: float | Tensor
    ones_tile: Tensor
    cos_tile: Tensor


def forward_causal(inputs: Inputs, result: Forward) -> None:
    """Fill `result`, from the first block to the last."""
    q, k, v, _, _, options = inputs
    factors = _factors(inputs)
    earlier: _Sums | None = None
    before: _Sums | None = None
    kept = (result.q_norm, result.k_norm, result.denominator, result.out, result.exact_out)
    for piece in blocks(q, k, v, inputs.visible_keys(), *kept):
        q_rows, k_rows, v_rows, num_keys_rows, q_norm, k_norm, denominator, out, exact_out = piece
        Q = _tiled(unit_rows(q_rows, q_norm, options))
        K, V = _tiled(unit_rows(k_rows, k_norm, options)), _tiled(v_rows)
        if q.shape[2] > CHUNK:
            earlier, before = _sums_beside(_key_sums(K, V, options), before)
        A = _weights(Q, K, factors)
        numerator = A @ V
        if earlier is not None:
            numerator += (Q @ (earlier.S * factors.a)).add_(earlier.z, alpha=factors.scale)
        numerator = _untiled(numerator, out)
        if options.has_denominator:
            denominator.copy_(num_keys_rows + _untiled(_cosine_sums(A, Q, earlier), denominator))
            write_quotient(out, exact_out, numerator, denominator)
        else:
            out.copy_(numerator)


def backward_causal(dout: Tensor, inputs: Inputs, saved: Forward, result: Gradients) -> None:
    """Fill `result`, from the last block to the first."""
    q, k, v, gain, _, options = inputs
    factors = _factors(inputs)
    kept = (saved.out, saved.q_norm, saved.k_norm, saved.denominator)
    pieces = list(blocks(dout, q, k, v, *kept, *result[:3]))
    sums_before = _sums_before_blocks(k, v, options)
    earlier: _Sums | None = None
    later: _Sums | None = None
    after: _Sums | None = None
    for piece, before in zip(reversed(pieces), reversed(sums_before), strict=True):
        dout_rows, q_rows, k_rows, v_rows, out, q_norm, k_norm, denominator, dq, dk, dv = piece
        delta = None
        if options.has_denominator:
            dout_rows, delta = through_denominator(dout_rows, out, denominator)
            delta = _tiled(delta)
        Q = _tiled(unit_rows(q_rows, torch.empty_like(q_norm), options))
        K = _tiled(unit_rows(k_rows, torch.empty_like(k_norm), options))
        V, G = _tiled(v_rows), _tiled(dout_rows)
        if q.shape[2] > CHUNK:
            earlier, _ = _sums_beside(_key_sums(K, V, options), before)
            later, after = _sums_beside(_sums(Q, G, delta), after, reverse=True)
        dQ, dK, dV = _tile_gradients(Q, K, V, G, delta, factors)
        if earlier is not None:
            dQ += G @ (earlier.S * factors.a).mT
            if delta is not None and earlier.kappa is not None:
                dQ += delta * earlier.kappa.mT
        if later is not None:
            scaled_dS = later.S * factors.a
            dK += V @ scaled_dS.mT
            dV += (K @ scaled_dS).add_(later.z, alpha=factors.scale)
            if later.kappa is not None:
                dK += later.kappa.mT
        write_through_norm(dq, _untiled(dQ, dq), q_rows, q_norm, options)
        write_through_norm(dk, _untiled(dK, dk), k_rows, k_norm, options)
        dv.copy_(_untiled(dV, dv))
        if gain is not None and result.dgain is not None:
            result.dgain.add_((dQ * Q).sum((0, 2, 3, 4))[:, None, None] / gain)


def _tile_gradients(
    Q: Tensor, K: Tensor, V: Tensor, G: Tensor, delta: Tensor | None, factors: _Factors
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ^, dK^ and dV, as far as they come from within the tiles."""
    n = Q.shape[-2]
    dcos = G @ V.mT
    if delta is not None:
        dcos += delta
    dcos *= factors.cos_tile[..., :n, :n]
    return dcos @ K, dcos.mT @ Q, _weights(Q, K, factors).mT @ G


def _weights(Q: Tensor, K: Tensor, factors: _Factors) -> Tensor:
    """A, (B, H, T, n, n)."""
    n = Q.shape[-2]
    cos = Q @ K.mT
    return torch.addcmul(factors.ones_tile[:n, :n], cos, factors.cos_tile[..., :n, :n], out=cos)


def _cosine_sums(A: Tensor, Q: Tensor, earlier: _Sums | None) -> Tensor:
    """sum_n q^_i.k^_n over all keys that a query sees, (B, H, T, n, 1), in Eq. 4."""
    num_ones = torch.arange(1, A.shape[-1] + 1, dtype=A.dtype, device=A.device)[:, None]
    sums = A.sum(-1, keepdim=True) - num_ones
    return sums if earlier is None or earlier.kappa is None else sums + Q @ earlier.kappa


def _factors(inputs: Inputs) -> _Factors:
    scale, gain = inputs.scale, inputs.gain
    a = slope(scale, None if gain is None else gain.unsqueeze(2))
    n = min(inputs.q.shape[2], CHUNK)
    lower = inputs.q.new_ones(n, n).tril_()
    return _Factors(scale, a, lower * scale, lower * a)


def _tiled(x: Tensor) -> Tensor:
    """(B, H, N, D) as tiles of one length up to CHUNK, (B, H, T, n, D), with zeros after the last token."""
    N = x.shape[2]
    num_tiles = max((N + CHUNK - 1) // CHUNK, 1)
    n = (N + num_tiles - 1) // num_tiles
    padded = F.pad(x, (0, 0, 0, num_tiles * n - N)) if num_tiles * n > N else x
    return torch.unflatten(padded, 2, (num_tiles, n))


def _untiled(x: Tensor, like: Tensor) -> Tensor:
    return x.flatten(2, 3)[:, :, : like.shape[2]]


def _sums(K: Tensor, V: Tensor, weights: Tensor | None) -> _Sums:
    """K^T V, the sum of V's rows and K^T weights of each tile."""
    return _Sums(K.mT @ V, token_sum(V), None if weights is None else K.mT @ weights)


def _key_sums(K: Tensor, V: Tensor, options: Options) -> _Sums:
    return _sums(K, V, torch.ones_like(K[..., :1]) if options.has_denominator else None)


def _sums_before_blocks(k: Tensor, v: Tensor, options: Options) -> list[_Sums | None]:
    """The sums over all keys before each block; None before the first."""
    norm = k.new_empty(*k.shape[:3], int(options.normalise))
    before: list[_Sums | None] = [None]
    for k_rows, v_rows, norm_rows in list(blocks(k, v, norm))[:-1]:
        K, V = _tiled(unit_rows(k_rows, norm_rows, options)), _tiled(v_rows)
        before.append(_sums_beside(_key_sums(K, V, options), before[-1])[1])
    return before


def _sums_beside(tiles: _Sums, start: _Sums | None, reverse: bool = False) -> tuple[_Sums | None, _Sums]:
    """For each tile the sums over `start` and all tiles before it (reverse: after it), and over everything.

    None where there is nothing before: one tile and no start.
    """
    if start is None and tiles.S.shape[2] == 1:
        return None, tiles
    starts = (None,) * len(tiles) if start is None else start
    pairs = [
        (None, None) if x is None else _exclusive_sums(x, first, reverse)
        for x, first in zip(tiles, starts, strict=True)
    ]
    beside, total = zip(*pairs, strict=True)
    return _Sums(*beside), _Sums(*total)


def _exclusive_sums(x: Tensor, start: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    total = torch.zeros_like(x[:, :, :1]) if start is None else start.clone()
    sums = torch.empty_like(x)
    indices = range(x.shape[2])
    for i in reversed(indices) if reverse else indices:
        sums[:, :, i : i + 1] = total
        total += x[:, :, i : i + 1]
    return sums, total
