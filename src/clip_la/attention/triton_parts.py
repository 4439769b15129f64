"""Device functions that the Triton kernels share: rows in and out, norms, quotients, products, sums.

B, H, N, M, D and E are the names of `contract`; `head` numbers the B H heads of all sequences. A program
works on one head, or on a group of its tokens.

- A tensor (B, H, N, D) comes into a kernel as a tuple, pointer and strides of B, H and N (the elements of a
  row are neighbours); `of_head` makes it pointer and stride of one head. What is one number a token,
  (B, H, N), is contiguous.
- CONFIG is a `triton_launch.Config`: BLOCK tokens in a tile, D and E padded with zeros to BLOCK_D, BLOCK_E.
- A tile begins at row `start` of its head, the number `first` of all tokens; `inside` says which of its rows
  exist. Where it begins is computed in 64 bits, offsets within it in 32: 64 for each row fill the registers.
- Norms are found from rows again rather than loaded where each column of a product needs one: addresses for
  every column would fill the registers too.
- `tl.debug_barrier()` keeps the loads of a later step out of the registers of an earlier one. What is loaded
  twice for that comes from the cache.
- The sums over tokens are S (BLOCK_D, BLOCK_E), z (BLOCK_E,) and, in Eq. 4 and for centred values, kappa
  (BLOCK_D,), in float32.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from clip_la.attention import reference

NORM_FLOOR = tl.constexpr(reference.NORM_FLOOR)
EQ4_FLOOR = tl.constexpr(reference.EQ4_FLOOR)
FLOAT16_MAX = tl.constexpr(65504.0)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def this_head():
    """In int64, as all offsets that come from it: 4 x 8 x 4e6 x 64 elements are more than 2^31."""
    return tl.program_id(0).to(tl.int64)


@triton.jit
def of_head(x, head, H):
    """Pointer to a head's first row, and the stride of its rows; `triton_launch.is_aligned` holds."""
    offset = (head // H) * x[1] + (head % H) * x[2]
    return x[0] + tl.multiple_of(offset, 8), tl.multiple_of(x[3].to(tl.int32), 8)


@triton.jit
def tile(start, num_rows, BLOCK: tl.constexpr):
    """Which rows of the tile exist."""
    return tl.arange(0, BLOCK) < num_rows - start


@triton.jit
def row_pointers(x, start, inside, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(BLOCK, BLOCK_SIZE) pointers of a tile, and which of them exist."""
    rows, columns = tl.arange(0, inside.shape[0]), tl.arange(0, BLOCK_SIZE)
    # Unsigned: a sign would be kept in a second register for each row.
    offsets = (rows[:, None] * x[1] + columns[None, :]).to(tl.uint32)
    pointers = x[0] + start * x[1].to(tl.int64) + offsets
    return pointers, inside[:, None] & (columns < SIZE)[None, :]


@triton.jit
def load_rows(x, start, inside, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(BLOCK, BLOCK_SIZE) in the dtype of the tensor, zeros outside."""
    pointers, exist = row_pointers(x, start, inside, SIZE, BLOCK_SIZE)
    return tl.load(pointers, mask=exist, other=0.0)


@triton.jit
def store_rows(x, start, inside, values, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Rounded to the dtype of the tensor."""
    pointers, exist = row_pointers(x, start, inside, SIZE, BLOCK_SIZE)
    if x[0].dtype.element_ty == tl.bfloat16:
        values = high(values)
    tl.store(pointers, values.to(x[0].dtype.element_ty), mask=exist)


@triton.jit
def dot(x, y, acc):
    """acc + x y on tensor cores, nearly as exact as in float32.

    An operand that isn't bfloat16 is split in a high and a low bfloat16 part, 16 bits together, and low by
    low is left out. Errors are 5e-6 where both operands are float32, in half the time and half the shared
    memory of three tf32 products (one tf32 product: 3e-4; "ieee" ones can't use tensor cores).
    """
    acc = tl.dot(high(x), high(y), acc)
    if x.dtype != tl.bfloat16:
        acc = tl.dot(low(x), high(y), acc)
    if y.dtype != tl.bfloat16:
        acc = tl.dot(high(x), low(y), acc)
    return acc


@triton.jit
def high(x):
    """Rounded to bfloat16. The interpreter cuts instead of rounding, and has no products of bfloat16."""
    x = x.to(tl.float32)
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        rounded = bits.to(tl.float32, bitcast=True)
    else:
        rounded = x.to(tl.bfloat16)
    return rounded


@triton.jit
def low(x):
    """What `high` leaves of x, as bfloat16."""
    return high(x.to(tl.float32) - high(x).to(tl.float32))


@triton.jit
def nothing(NUM_ROWS: tl.constexpr, NUM_COLUMNS: tl.constexpr):
    """What products are added to."""
    return tl.zeros((NUM_ROWS, NUM_COLUMNS), tl.float32)


@triton.jit
def zeros(SIZE: tl.constexpr):
    """(SIZE,) float32."""
    return tl.zeros((SIZE,), tl.float32)


@triton.jit
def product(x, y):
    """x @ y, float32."""
    return dot(x, y, nothing(x.shape[0], y.shape[1]))


@triton.jit
def row_norms(x, NORMALISE: tl.constexpr):
    """|x_i|; raw rows: 1."""
    if NORMALISE:
        x = x.to(tl.float32)
        norm = tl.sqrt(tl.sum(x * x, 1))
    else:
        norm = tl.full((x.shape[0],), 1.0, tl.float32)
    return norm


@triton.jit
def unit_factor(norm):
    """What a row is multiplied by to be x^ = x / max(|x|, NORM_FLOOR)."""
    return 1.0 / tl.maximum(norm, NORM_FLOOR)


@triton.jit
def through_norm(dunit, x, norm, NORMALISE: tl.constexpr):
    """dx from the gradient of x^.

    dx = (dunit - x^ (x^.dunit)) / |x|; in a row below the floor dunit / NORM_FLOOR, cut at float16's range.
    """
    if NORMALISE:
        factor = unit_factor(norm)[:, None]
        short = (norm < NORM_FLOOR)[:, None]
        unit = x.to(tl.float32) * factor
        along = tl.where(short, 0.0, tl.sum(dunit * unit, 1)[:, None])
        dx = (dunit - unit * along) * factor
        if x.dtype == tl.float16:
            dx = tl.where(short, tl.minimum(tl.maximum(dx, -FLOAT16_MAX), FLOAT16_MAX), dx)
    else:
        dx = dunit
    return dx


@triton.jit
def store_number(x, first, inside, values):
    """One number a token; nothing if x is None: raw rows have no norms, and a norm is stored once."""
    if x is not None:
        tl.store(x + first + tl.arange(0, inside.shape[0]), values, mask=inside)


@triton.jit
def load_number(x, first, inside):
    """What was stored; 1 outside, or if x is None."""
    if x is not None:
        values = tl.load(x + first + tl.arange(0, inside.shape[0]), mask=inside, other=1.0)
    else:
        values = tl.full(inside.shape, 1.0, tl.float32)
    return values


@triton.jit
def slope_of(gain, scale, head, H):
    """a = scale gain, the factor of the cosines."""
    return scale * tl.load(gain + head % H).to(tl.float32) if gain is not None else scale * 1.0


@triton.jit
def no_sums(BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """S, z and kappa of no tokens."""
    S = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    return S, tl.zeros((BLOCK_E,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)


@triton.jit
def add_tokens(
    S, z, kappa, x, y, x_factor, y_weight, kappa_weight, SUM_X: tl.constexpr, SUM_Y: tl.constexpr = True
):
    """S + sum_n x^_n (w_n y_n)^T, z + sum_n w_n y_n and kappa + sum_n c_n x^_n, where x^ = x_factor x.

    x enters the product as it was loaded: then it needs no second part, and is read transposed as it lies.
    """
    y = y.to(tl.float32) * y_weight[:, None]
    S = dot(tl.trans(x), y * x_factor[:, None], S)
    if SUM_Y:
        z += tl.sum(y, 0)
    if SUM_X:
        kappa += tl.sum(x.to(tl.float32) * (kappa_weight * x_factor)[:, None], 0)
    return S, z, kappa


@triton.jit
def floored(denominator):
    """Kept EQ4_FLOOR away from 0, with its sign."""
    floor = tl.where(denominator < 0, -EQ4_FLOOR, EQ4_FLOOR)
    return tl.where(tl.abs(denominator) < EQ4_FLOOR, floor, denominator)


@triton.jit
def inverse(denominator, EQ4: tl.constexpr):
    """w_i; Eq. 7: 1."""
    return 1.0 / floored(denominator) if EQ4 else tl.full(denominator.shape, 1.0, tl.float32)


@triton.jit
def load_quotient_gradients(denominators, deltas, first, inside, EQ4: tl.constexpr):
    """w_i and delta_i: w_i dout_i is the numerator's gradient, delta_i the denominator's. Eq. 7: 1 and 0."""
    weight = inverse(load_number(denominators, first, inside), EQ4)
    delta = load_number(deltas, first, inside) if EQ4 else tl.zeros(weight.shape, tl.float32)
    return weight, delta


@triton.jit
def write_attention(
    out, exact_out, denominators, first, start, inside, numerator, denominator, CONFIG: tl.constexpr
):
    """Eq. 7: the numerator. Eq. 4: the quotient, and what backward needs of it."""
    if CONFIG.EQ4:
        store_number(denominators, first, inside, denominator)
        numerator = numerator / floored(denominator)[:, None]
        if CONFIG.KEEP_EXACT:
            store_rows(exact_out, start, inside, numerator, CONFIG.E, CONFIG.BLOCK_E)
    store_rows(out, start, inside, numerator, CONFIG.E, CONFIG.BLOCK_E)


@triton.jit
def first_mean(v, M, CONFIG: tl.constexpr):
    """The mean of a head's first values: near that of all M, for the cost of a tile."""
    inside = tile(0, M, CONFIG.BLOCK)
    rows = load_rows(v, 0, inside, CONFIG.E, CONFIG.BLOCK_E)
    return tl.sum(rows.to(tl.float32), 0) / tl.minimum(tl.maximum(M, 1), CONFIG.BLOCK)


@triton.jit
def sum_tokens(x, y, norms, denominators, deltas, shift, first_token, begin, end, CONFIG: tl.constexpr):
    """S, z and kappa of the tokens begin..end: of keys x and values y, whose norms are stored unless None.

    Unless None, `shift` is taken off all y. Or dS, dz and dkappa of queries x and dout y; in Eq. 4 with their
    denominators and deltas, else None.
    """
    S, z, kappa = no_sums(CONFIG.BLOCK_D, CONFIG.BLOCK_E)
    for start in range(begin, end, CONFIG.BLOCK):
        inside = tile(start, end, CONFIG.BLOCK)
        x_rows = load_rows(x, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        y_rows = load_rows(y, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        if shift is not None:
            y_rows = tl.where(inside[:, None], y_rows.to(tl.float32) - shift[None, :], 0.0)
        norm = row_norms(x_rows, CONFIG.NORMALISE)
        store_number(norms, first_token + start, inside, norm)
        weight = tl.full(norm.shape, 1.0, tl.float32)
        kappa_weight = weight
        if denominators is not None:
            weight, kappa_weight = load_quotient_gradients(
                denominators, deltas, first_token + start, inside, CONFIG.EQ4
            )
        S, z, kappa = add_tokens(
            S, z, kappa, x_rows, y_rows, unit_factor(norm), weight, kappa_weight, CONFIG.SUM_KEYS
        )
    return S, z, kappa


@triton.jit
def store_state(state, S, CONFIG: tl.constexpr):
    """S into (D, E)."""
    d, e = tl.arange(0, CONFIG.BLOCK_D), tl.arange(0, CONFIG.BLOCK_E)
    exists = (d < CONFIG.D)[:, None] & (e < CONFIG.E)[None, :]
    tl.store(state + d[:, None] * CONFIG.E + e[None, :], S, mask=exists)


@triton.jit
def load_state(state, CONFIG: tl.constexpr):
    """S, (BLOCK_D, BLOCK_E)."""
    d, e = tl.arange(0, CONFIG.BLOCK_D), tl.arange(0, CONFIG.BLOCK_E)
    exists = (d < CONFIG.D)[:, None] & (e < CONFIG.E)[None, :]
    return tl.load(state + d[:, None] * CONFIG.E + e[None, :], mask=exists, other=0.0)


@triton.jit
def load_transposed_state(state, CONFIG: tl.constexpr):
    """S^T, (BLOCK_E, BLOCK_D). Products with transposed accumulators have been miscompiled for Hopper."""
    d, e = tl.arange(0, CONFIG.BLOCK_D), tl.arange(0, CONFIG.BLOCK_E)
    exists = (d < CONFIG.D)[None, :] & (e < CONFIG.E)[:, None]
    return tl.load(state + d[None, :] * CONFIG.E + e[:, None], mask=exists, other=0.0)


@triton.jit
def store_vector(pointer, values, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """z into (E,), kappa into (D,)."""
    columns = tl.arange(0, BLOCK_SIZE)
    tl.store(pointer + columns, values, mask=columns < SIZE)


@triton.jit
def load_vector(pointer, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """(BLOCK_SIZE,), zeros beyond SIZE."""
    columns = tl.arange(0, BLOCK_SIZE)
    return tl.load(pointer + columns, mask=columns < SIZE, other=0.0)


@triton.jit
def load_kappa(pointer, CONFIG: tl.constexpr):
    """(BLOCK_D,); zeros where there is none."""
    kappa = zeros(CONFIG.BLOCK_D)
    if CONFIG.SUM_KEYS:
        kappa = load_vector(pointer, CONFIG.D, CONFIG.BLOCK_D)
    return kappa


@triton.jit
def store_sums(sums, place, S, z, kappa, CONFIG: tl.constexpr):
    """Into row `place` of sums (places, NUM_SUMS): S (D, E), then z (E,), then kappa (D,)."""
    sums += place * CONFIG.NUM_SUMS
    store_state(sums, S, CONFIG)
    store_vector(sums + CONFIG.D * CONFIG.E, z, CONFIG.E, CONFIG.BLOCK_E)
    if CONFIG.SUM_KEYS:
        store_vector(sums + (CONFIG.D + 1) * CONFIG.E, kappa, CONFIG.D, CONFIG.BLOCK_D)


@triton.jit
def load_sums(sums, place, CONFIG: tl.constexpr):
    """What `store_sums` stored."""
    sums += place * CONFIG.NUM_SUMS
    z = load_vector(sums + CONFIG.D * CONFIG.E, CONFIG.E, CONFIG.BLOCK_E)
    return load_state(sums, CONFIG), z, load_kappa(sums + (CONFIG.D + 1) * CONFIG.E, CONFIG)


@triton.jit(do_not_specialize=["H", "N", "group"])
def group_sums_kernel(x, y, norms, denominators, deltas, shifts, sums, H, N, group, CONFIG: tl.constexpr):
    """`sum_tokens` of each group of tokens of each head; of values to be centred, less their `first_mean`."""
    head, index = this_head(), tl.program_id(1)
    shift = None
    if CONFIG.CENTRE:
        shift = first_mean(of_head(y, head, H), N, CONFIG)
        if index == 0:
            store_vector(shifts + head * CONFIG.E, shift, CONFIG.E, CONFIG.BLOCK_E)
    S, z, kappa = sum_tokens(
        of_head(x, head, H), of_head(y, head, H), norms, denominators, deltas, shift,
        head * N, index * group, tl.minimum((index + 1) * group, N), CONFIG,
    )  # fmt: skip
    store_sums(sums, head * tl.num_programs(1) + index, S, z, kappa, CONFIG)


@triton.jit(do_not_specialize=["H", "N"])
def denominator_gradients_kernel(dout, out, denominators, deltas, H, N, CONFIG: tl.constexpr):
    """Eq. 4's delta_i = -w_i dout_i.out_i, 0 where the floor acts; out is what it was before rounding."""
    head = this_head()
    start = tl.program_id(1) * CONFIG.BLOCK
    inside = tile(start, N, CONFIG.BLOCK)
    dout_rows = load_rows(of_head(dout, head, H), start, inside, CONFIG.E, CONFIG.BLOCK_E)
    out_rows = load_rows(of_head(out, head, H), start, inside, CONFIG.E, CONFIG.BLOCK_E)
    denominator = load_number(denominators, head * N + start, inside)
    along = tl.sum(dout_rows.to(tl.float32) * out_rows, 1)
    delta = tl.where(tl.abs(denominator) < EQ4_FLOOR, 0.0, -along / floored(denominator))
    store_number(deltas, head * N + start, inside, delta)
