"""Triton kernels of polynomial attention at degrees 1 and 2: the survey, the forward pass, and gradients.

The parameters of a kernel are tensors, a tuple of integers, floats, and `C`, the `Config` that it is compiled for.
In Triton 3.6, `tl.full` accepts its sizes, and `tl.zeros` does not. Importing this module imports triton.

Features are computed in registers for the matrix unit. The products x_a y_b of two tiles of 16 coordinates are 256
features; a pair of tiles and its mirror image are computed once. Keys are transposed to [D, tokens], so that every
fragment of the feature matrix is one wide load. The sequence is split, one program sums one split, and a program holds
the sums of up to two tile pairs (512 features) in registers.

A tile of rows or keys of a gradient never crosses a block of `per_state` tokens. Every address is masked, or inside its
tensor because a size is a multiple of the tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

import triton
import triton.language as tl


@triton.jit
def transpose(x_ptr, out_ptr, sizes, C: tl.constexpr):
    """Compute out[head, :, t] = x[head, t, :] with zeros after the last token."""
    n, padded = sizes
    head = tl.program_id(1).to(tl.int64)
    r, c = tl.program_id(0) * C.T + tl.arange(0, C.T), tl.arange(0, C.D)
    x = tl.load(x_ptr + head * n * C.D + r[:, None] * C.D + c[None, :], mask=r[:, None] < n, other=0)
    tl.store(out_ptr + head * padded * C.D + c[:, None] * padded + r[None, :], tl.trans(x))


@triton.jit
def glance(q_ptr, k_ptr, out_ptr, sizes, factor, C: tl.constexpr):
    """Compute the share of the rows of a program that have B_i beyond a bound: [programs, heads].

    Each program has an equal part of the rows, and compares row i of its first half with row i of its second half.
    `factor` · ‖q_i − q_j‖² · max ‖k_a − k_b‖² > 1 proves it for one of the two: see `share_beyond` of bounds.py.
    """
    rows, m, heads = sizes
    program, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d, t = tl.arange(0, C.D)[None, :], tl.arange(0, C.T)
    step = tl.maximum(m // (2 * C.T), 1)
    a, k_at = (t * step)[:, None], k_ptr + head * m * C.D + d
    b = a + C.T * step
    first, second = tl.load(k_at + a * C.D, mask=b < m, other=0), tl.load(k_at + b * C.D, mask=b < m, other=0)
    apart = first.to(tl.float32) - second.to(tl.float32)
    widest = tl.max(tl.sum(apart * apart, 1), 0) * factor
    begin, end = program * rows // tl.num_programs(0), (program + 1) * rows // tl.num_programs(0)
    half = (end - begin) // 2
    found = tl.full([C.T], 0.0, tl.float32)
    for start in tl.range(0, half, C.T, num_stages=2):
        here = (start + t < half)[:, None]
        at = q_ptr + (head * rows + begin + start + t)[:, None] * C.D + d
        x, y = tl.load(at, mask=here, other=0), tl.load(at + half * C.D, mask=here, other=0)
        apart = x.to(tl.float32) - y.to(tl.float32)
        found += tl.where(tl.sum(apart * apart, 1) * widest > 1, 1.0, 0.0)
    share = tl.sum(found, 0) / tl.maximum(end - begin, 1).to(tl.float32)
    tl.store(out_ptr + program * heads + head, share)


@triton.jit
def survey(q_ptr, k_ptr, v_ptr, out_ptr, sizes, C: tl.constexpr):
    """Raise 6 numbers per head, which start at 0, to the maxima over STEPS·T tokens of a head. NaN counts as ∞.

    They are written to out [6, heads], and behind them the centres [2, heads, D]. The numbers are the largest ‖q‖²,
    ‖k‖², ‖q−μ‖², ‖k−c‖² and Σ|v|, then ‖μ‖². A program reads either q, k or v. The centre is the mean of T evenly
    spaced tokens; any centre is valid.
    """
    rows, m, heads = sizes
    block, head, which = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, e, t = tl.arange(0, C.D), tl.arange(0, C.E), tl.arange(0, C.T)
    to = out_ptr + head
    plain, centred = tl.full([C.T], 0.0, tl.float32), tl.full([C.T], 0.0, tl.float32)
    if which == 2:
        for step in tl.range(0, C.STEPS, num_stages=2):
            r = (block * C.STEPS + step) * C.T + t
            v = tl.load(v_ptr + head * m * C.E + r[:, None] * C.E + e[None, :], mask=r[:, None] < m, other=0)
            long = tl.sum(tl.abs(v.to(tl.float32)), 1)
            plain = tl.maximum(plain, tl.where(long == long, long, float("inf")))
        tl.atomic_max(to + 4 * heads, tl.max(plain, 0), sem="relaxed")
    else:
        n = rows if which == 0 else m
        x_at = q_ptr + head * rows * C.D if which == 0 else k_ptr + head * m * C.D
        r = t * tl.maximum(n // C.T, 1)
        sample = tl.load(x_at + r[:, None] * C.D + d[None, :], mask=r[:, None] < n, other=0)
        centre = tl.sum(sample.to(tl.float32), 0) / tl.minimum(n, C.T)
        if block == 0:
            tl.store(out_ptr + 6 * heads + (which * heads + head) * C.D + d, centre)
        for step in tl.range(0, C.STEPS, num_stages=2):
            r = (block * C.STEPS + step) * C.T + t
            here = r < n
            x = tl.load(x_at + r[:, None] * C.D + d[None, :], mask=here[:, None], other=0).to(tl.float32)
            long = tl.sum(x * x, 1)
            plain = tl.maximum(plain, tl.where(long == long, long, float("inf")))
            apart = x - centre[None, :]
            long = tl.where(here, tl.sum(apart * apart, 1), 0.0)
            centred = tl.maximum(centred, tl.where(long == long, long, float("inf")))
        tl.atomic_max(to + which * heads, tl.max(plain, 0), sem="relaxed")
        tl.atomic_max(to + (2 + which) * heads, tl.max(centred, 0), sem="relaxed")
        if which == 0:
            size = tl.sum(centre * centre, 0)
            tl.atomic_max(to + 5 * heads, tl.where(size == size, size, float("inf")), sem="relaxed")


@triton.jit
def store_first(to, mixed, square, total, mean, weight, C: tl.constexpr):
    """Store the sums of degree 0 and 1 of a split: [D, E], [D, D], [D], [E] and one number."""
    d, e = tl.arange(0, C.D), tl.arange(0, C.E)
    tl.store(to + d[:, None] * C.E + e[None, :], mixed)
    tl.store(to + C.D * C.E + d[:, None] * C.D + d[None, :], square)
    tl.store(to + C.D * C.E + C.D * C.D + d, total)
    tl.store(to + C.D * C.E + C.D * C.D + C.D + e, mean)
    tl.store(to + C.D * C.E + C.D * C.D + C.D + C.E, weight)


@triton.jit
def first_moments(x_ptr, y_ptr, v_ptr, w_ptr, out_ptr, sizes, C: tl.constexpr):
    """Compute Σ y vᵀ [D, E], Σ y xᵀ [D, D], Σ y [D], Σ w v [E] and Σ w of one split; x and y are [D, tokens].

    BY_PRODUCTS computes sums as products with ones in the matrix unit, which needs no exchange between threads.
    """
    m, padded, per_split = sizes
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d, e, t = tl.arange(0, C.D), tl.arange(0, C.E), tl.arange(0, C.T)
    x_at, y_at = x_ptr + head * padded * C.D, y_ptr + head * padded * C.D
    mixed, square = tl.full([C.D, C.E], 0.0, tl.float32), tl.full([C.D, C.D], 0.0, tl.float32)
    total, mean, weight = tl.full([C.D], 0.0, tl.float32), tl.full([C.E], 0.0, tl.float32), 0.0
    ones = tl.full([C.T, 16], 1.0, x_ptr.dtype.element_ty)
    totals, means = tl.full([C.D, 16], 0.0, tl.float32), tl.full([C.E, 16], 0.0, tl.float32)
    begin, end = split * per_split, tl.minimum((split + 1) * per_split, padded)
    for start in tl.range(begin, end, C.T, num_stages=C.STAGES):
        r = start + t
        here, laid = r < m, d[:, None] * padded + r[None, :]
        x, y = tl.load(x_at + laid), tl.load(y_at + laid)
        v = tl.load(v_ptr + head * m * C.E + r[:, None] * C.E + e[None, :], mask=here[:, None], other=0)
        mixed = tl.dot(y, v, mixed, input_precision=C.PRECISION)
        square = tl.dot(y, tl.trans(x), square, input_precision=C.PRECISION)
        if C.BY_PRODUCTS:
            totals = tl.dot(y, ones, totals, input_precision=C.PRECISION)
        else:
            total += tl.sum(y.to(tl.float32), 1)
        if C.HAS_W:
            w = tl.load(w_ptr + head * m + r, mask=here, other=0)
            mean += tl.sum(v.to(tl.float32) * w[:, None], 0)
            weight += tl.sum(w, 0)
        elif C.BY_PRODUCTS:
            means = tl.dot(tl.trans(v), ones, means, input_precision=C.PRECISION)
        else:
            mean += tl.sum(v.to(tl.float32), 0)
    if C.BY_PRODUCTS:  # all 16 columns are equal
        total = tl.max(totals, 1)
        if not C.HAS_W:
            mean = tl.max(means, 1)
    if not C.HAS_W:
        weight = tl.maximum(tl.minimum(end, m) - begin, 0).to(tl.float32)
    store_first(out_ptr + (split * tl.num_programs(1) + head) * C.first_size, mixed, square, total, mean, weight, C)


@triton.jit
def second_moments(x_ptr, y_ptr, v_ptr, table_ptr, out_ptr, sizes, C: tl.constexpr):
    """Compute Σ_t (y_a x_b)(t) v(t) of one split, for the features of one shared tile b and WIDE/16 tiles a."""
    m, padded, per_split = sizes
    program, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, e, t, wide = tl.arange(0, 16), tl.arange(0, C.E), tl.arange(0, C.T), tl.arange(0, C.WIDE)
    shared = tl.load(table_ptr + 3 * program)
    first = tl.load(table_ptr + 3 * program + 1)
    second = tl.maximum(tl.load(table_ptr + 3 * program + 2), 0)
    columns = tl.where(wide < 16, first * 16 + wide, second * 16 + wide - 16)
    y_at = y_ptr + head * padded * C.D + columns[:, None] * padded
    x_at = x_ptr + head * padded * C.D + (shared * 16 + i)[:, None] * padded
    v_at = v_ptr + head * m * C.E + e[None, :]
    sums = tl.full([C.WIDE * 16, C.E], 0.0, tl.float32)
    for start in tl.range(split * per_split, tl.minimum((split + 1) * per_split, padded), C.T, num_stages=C.STAGES):
        r = start + t
        y, x = tl.load(y_at + r[None, :]), tl.load(x_at + r[None, :])
        v = tl.load(v_at + r[:, None] * C.E, mask=r[:, None] < m, other=0)
        features = tl.reshape(y[:, None, :] * x[None, :, :], [C.WIDE * 16, C.T])
        sums = tl.dot(features, v, sums, input_precision=C.PRECISION)
    rows = tl.arange(0, C.WIDE * 16)
    at = out_ptr + ((split * tl.num_programs(2) + head) * tl.num_programs(0) + program) * (512 * C.E)
    tl.store(at + rows[:, None] * C.E + e[None, :], sums.to(out_ptr.dtype.element_ty))


@triton.jit
def own_coefficients(coefficients_ptr, head, a0, a1, a2, C: tl.constexpr):
    """Return the coefficients of the polynomial of a head."""
    if not C.ALIKE:  # every head has its own polynomial
        a0 = tl.load(coefficients_ptr + head * 3)
        a1 = tl.load(coefficients_ptr + head * 3 + 1)
        a2 = tl.load(coefficients_ptr + head * 3 + 2)
    return a0, a1, a2


@triton.jit
def add_first(mixed, square, z1, n0, z0, source, over, C: tl.constexpr):
    """Add the sums of degree 0 and 1 of a split, times `over`."""
    d, e = tl.arange(0, C.D), tl.arange(0, C.E)
    mixed += tl.load(source + d[:, None] * C.E + e[None, :]) * over
    square += tl.load(source + C.D * C.E + d[:, None] * C.D + d[None, :]) * over
    z1 += tl.load(source + C.D * C.E + C.D * C.D + d) * over
    n0 += tl.load(source + C.D * C.E + C.D * C.D + C.D + e) * over
    z0 += tl.load(source + C.D * C.E + C.D * C.D + C.D + C.E) * over
    return mixed, square, z1, n0, z0


@triton.jit
def store_state(to, small, mixed, square, z1, n0, z0, a0, a1, a2, C: tl.constexpr):
    """Store the parts of degree 0 and 1 of a state and C, times coefficients: to [2, D, E] and [D, D], and small."""
    d, e = tl.arange(0, C.D), tl.arange(0, C.E)
    value = mixed * a1
    high = value.to(to.dtype.element_ty)
    low = (value - high.to(tl.float32)).to(to.dtype.element_ty)
    tl.store(to + d[:, None] * C.E + e[None, :], high)
    tl.store(to + C.D * C.E + d[:, None] * C.E + e[None, :], low)
    rounded = (square * a2).to(to.dtype.element_ty)
    tl.store(to + 2 * C.D * C.E + d[:, None] * C.D + d[None, :], rounded)
    tl.store(small + d, z1 * a1)
    tl.store(small + C.D, z0 * a0)
    tl.store(small + C.D + 1 + e, n0 * a0)


@triton.jit
def finish(
    sums_ptr, first_ptr, coefficients_ptr, slot_ptr, big_ptr, small_ptr, sizes, a0, a1, a2, C: tl.constexpr
):  # fmt: skip
    """Add the splits (all of them, or the earlier ones if CAUSAL), centre values, apply the coefficients, round.

    Everything is divided by the total weight. This cancels in the quotient N/Z and keeps short dtypes in range.
    big: S [SLOTS, 256, E], L as a sum of two matrices [2, D, E], C [D, D]. small: z1 [D], z0, n0 [E], mean [E],
    1/total weight.
    """
    splits, heads = sizes
    slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    e, rows = tl.arange(0, C.E), tl.arange(0, 256)
    a0, a1, a2 = own_coefficients(coefficients_ptr, head, a0, a1, a2, C)
    total, mean = 0.0, tl.full([C.E], 0.0, tl.float32)
    for split in range(splits):
        at = first_ptr + (split * heads + head) * C.first_size + C.D * C.E + C.D * C.D + C.D
        mean += tl.load(at + e)
        total += tl.load(at + C.E)
    share = 1.0 / total
    mean = mean * (share if C.CENTRE else 0.0)
    if slot < C.SLOTS:
        kept = tl.load(slot_ptr + 3 * slot)
        first, second = tl.load(slot_ptr + 3 * slot + 1), tl.load(slot_ptr + 3 * slot + 2)
        factor = a2 * share * tl.where(first == second, 1.0, 2.0)
        at_square = C.D * C.E + (first * 16 + rows // 16) * C.D + second * 16 + rows % 16
        sums, weights = tl.full([256, C.E], 0.0, tl.float32), tl.full([256], 0.0, tl.float32)
        for step in range(splits + 1):
            if C.CAUSAL or step == splits:
                target = big_ptr + ((step if C.CAUSAL else 0) * heads + head) * C.big_size + slot * 256 * C.E
                value = (sums - weights[:, None] * mean[None, :]) * factor
                tl.store(target + rows[:, None] * C.E + e[None, :], value.to(big_ptr.dtype.element_ty))
            if step < splits:
                source = sums_ptr + ((step * heads + head) * C.kept_slots + kept) * (256 * C.E)
                sums += tl.load(source + rows[:, None] * C.E + e[None, :]).to(tl.float32)
                weights += tl.load(first_ptr + (step * heads + head) * C.first_size + at_square)
    else:
        mixed, square = tl.full([C.D, C.E], 0.0, tl.float32), tl.full([C.D, C.D], 0.0, tl.float32)
        z1, n0, z0 = tl.full([C.D], 0.0, tl.float32), tl.full([C.E], 0.0, tl.float32), 0.0
        for step in range(splits + 1):
            if C.CAUSAL or step == splits:
                state = (step if C.CAUSAL else 0) * heads + head
                to, small = big_ptr + state * C.big_size + C.SLOTS * 256 * C.E, small_ptr + state * C.small_size
                apart = mixed - z1[:, None] * mean[None, :]
                store_state(to, small, apart, square, z1, n0 - z0 * mean, z0, a0 * share, a1 * share, a2 * share, C)
                tl.store(small + C.D + 1 + C.E + e, mean)
                tl.store(small + C.D + 1 + 2 * C.E, share)
            if step < splits:
                source = first_ptr + (step * heads + head) * C.first_size
                mixed, square, z1, n0, z0 = add_first(mixed, square, z1, n0, z0, source, 1.0, C)


@triton.jit
def add_products(total, y_at, x_at, s_at, slot_ptr, here, SLOTS: tl.constexpr, C: tl.constexpr):
    """Return total + Σ_slots (y ⊗ x) S for T rows. SUB of the 16 coordinates of a tile are multiplied at once."""
    OUT: tl.constexpr = total.shape[1]
    i, sub, rows, co = tl.arange(0, 16), tl.arange(0, C.SUB), tl.arange(0, C.SUB * 16), tl.arange(0, OUT)
    if SLOTS > 0:  # at degree 1 there is no S, and s_at is another tensor
        for step in tl.range(0, SLOTS * (16 // C.SUB), num_stages=C.STAGES):
            slot, offset = step // (16 // C.SUB), step % (16 // C.SUB) * C.SUB
            first, second = tl.load(slot_ptr + 3 * slot + 1), tl.load(slot_ptr + 3 * slot + 2)
            a = tl.load(y_at + first * 16 + offset + sub[None, :], mask=here, other=0)
            b = tl.load(x_at + second * 16 + i[None, :], mask=here, other=0)
            s = tl.load(s_at + (slot * 256 + offset * 16) * OUT + rows[:, None] * OUT + co[None, :])
            features = tl.reshape(a[:, :, None] * b[:, None, :], [C.T, C.SUB * 16])
            total = tl.dot(features, s, total, input_precision=C.PRECISION)
    return total


@triton.jit
def evaluate(
    q_ptr, big_ptr, small_ptr, kt_ptr, v_ptr, w_ptr, slot_ptr, out_ptr, z_ptr, sizes, scale, C: tl.constexpr
):  # fmt: skip
    """Compute N/Z + mean for T rows q, with N = Σ_slots (q ⊗ q) S + q L + n0 and Z = q·(q C + z1) + z0.

    Causal rows add the exact exponentials of their own block to N and Z.
    """
    n, m, padded, groups, heads, states, per_state = sizes
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = row_head // groups
    r = block * C.T + tl.arange(0, C.T)
    here = r[:, None] < n
    cx, co = tl.arange(0, C.D), tl.arange(0, C.E)
    state = tl.minimum(block * C.T // per_state, states - 1) if C.CAUSAL else 0
    big, small = big_ptr + (state * heads + head) * C.big_size, small_ptr + (state * heads + head) * C.small_size
    q_at = q_ptr + row_head * n * C.D + r[:, None] * C.D
    q = tl.load(q_at + cx[None, :], mask=here, other=0)
    total, z = tl.full([C.T, C.E], 0.0, tl.float32), tl.full([C.T], 0.0, tl.float32)
    if C.CAUSAL:
        tk = tl.arange(0, C.TK)
        k_at, v_at = kt_ptr + head * padded * C.D + cx[:, None] * padded, v_ptr + head * m * C.E + co[None, :]
        first, edge = state * per_state, tl.minimum(block * C.T, m // C.TK * C.TK)
        # First the key tiles that lie before all of these rows, then those that contain the diagonal.
        for EDGE in tl.static_range(2):
            begin = tl.maximum(first, edge) if EDGE else first
            end = tl.minimum(block * C.T + C.T, padded) if EDGE else edge
            for start in tl.range(begin, end, C.TK, num_stages=1 if EDGE else C.STAGES):
                c = start + tk
                k = tl.load(k_at + c[None, :])
                v = tl.load(v_at + c[:, None] * C.E, mask=c[:, None] < m if EDGE else None, other=0 if EDGE else None)
                p = tl.exp2(tl.dot(q, k, input_precision=C.PRECISION) * scale)
                if C.HAS_W:
                    p *= tl.load(w_ptr + head * m + c, mask=c < m if EDGE else None, other=0 if EDGE else None)[None, :]
                if EDGE:
                    p = tl.where((c[None, :] <= r[:, None]) & (c[None, :] < m), p, 0.0)
                z += tl.sum(p, 1)
                total = tl.dot(p.to(v.dtype), v, total, input_precision=C.PRECISION)
        share = tl.load(small + C.D + 1 + 2 * C.E)
        total = (total - z[:, None] * tl.load(small + C.D + 1 + C.E + co)[None, :]) * share
        z = z * share
    for part in tl.static_range(2):
        linear = tl.load(big + (C.SLOTS * 256 + part * C.D) * C.E + cx[:, None] * C.E + co[None, :])
        total = tl.dot(q, linear, total, input_precision=C.PRECISION)
    total += tl.load(small + C.D + 1 + co)[None, :]
    along = tl.full([C.T, C.D], 0.0, tl.float32) + tl.load(small + cx)[None, :]
    if C.SLOTS > 0:
        square = tl.load(big + C.SLOTS * 256 * C.E + 2 * C.D * C.E + cx[:, None] * C.D + cx[None, :])
        along = tl.dot(q, square, along, input_precision=C.PRECISION)
    z += tl.sum(q.to(tl.float32) * along, 1) + tl.load(small + C.D)
    total = add_products(total, q_at, q_at, big, slot_ptr, here, C.SLOTS, C)
    if C.HAS_Z:
        tl.store(z_ptr + row_head * n + r, z, mask=r < n)
    total = total / z[:, None] + tl.load(small + C.D + 1 + C.E + co)[None, :]
    at = out_ptr + row_head * n * C.E + r[:, None] * C.E + co[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def prepare(q_ptr, v_ptr, shift_ptr, x_ptr, vt_ptr, sizes, C: tl.constexpr):
    """Compute ṽ = v − shift [m, E] and, at degree 2, x = qᵀ [D, padded] with zeros after the last row."""
    n, m, padded, groups, shift_size, shift_at = sizes
    row_head = tl.program_id(1).to(tl.int64)
    head = row_head // groups
    r, d, e = tl.program_id(0) * C.T + tl.arange(0, C.T), tl.arange(0, C.D), tl.arange(0, C.E)
    if C.SLOTS > 0:
        q = tl.load(q_ptr + row_head * n * C.D + r[:, None] * C.D + d[None, :], mask=r[:, None] < n, other=0)
        to = x_ptr + row_head * padded * C.D + d[:, None] * padded + r[None, :]
        tl.store(to, tl.trans(q), mask=r[None, :] < padded)
    if row_head % groups == 0:
        at = head * m * C.E + r[:, None] * C.E + e[None, :]
        shift = tl.load(shift_ptr + head * shift_size + shift_at + e)
        apart = tl.load(v_ptr + at, mask=r[:, None] < m, other=0).to(tl.float32) - shift[None, :]
        tl.store(vt_ptr + at, apart.to(vt_ptr.dtype.element_ty), mask=r[:, None] < m)


@triton.jit
def query_moments(
    q_ptr, grad_ptr, o_ptr, z_ptr, shift_ptr, floor_ptr, dn_ptr, level_ptr, out_ptr, sizes, C: tl.constexpr
):  # fmt: skip
    """Compute dN = ρ ∂o and level = −∂o·(o − shift) of the rows of a split, with ρ = floor/Z, and their sums.

    The sums are Σ q dNᵀ [D, E], Σ ρ level q qᵀ [D, D] at degree 2, Σ ρ level q [D], Σ dN [E] and Σ ρ level. If
    CAUSAL, floor is the smallest Z of the split over all query heads of the key head, and it is stored; otherwise it
    is 1.
    """
    n, groups, per_split, shift_size, shift_at = sizes
    split, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = row_head // groups
    d, e, t = tl.arange(0, C.D), tl.arange(0, C.E), tl.arange(0, C.T)
    begin, end = split * per_split, tl.minimum((split + 1) * per_split, n)
    floor = 1.0
    if C.CAUSAL:
        many, low = tl.arange(0, 256), tl.full([256], float("inf"), tl.float32)
        for group in range(groups):
            for start in range(begin, end, 256):
                c = start + many
                z_at = z_ptr + (head * groups + group) * n + c
                low = tl.minimum(low, tl.load(z_at, mask=c < end, other=float("inf")))
        floor = tl.min(low, 0)
        if row_head % groups == 0:
            tl.store(floor_ptr + head * tl.num_programs(0) + split, floor)
    shift = tl.load(shift_ptr + head * shift_size + shift_at + e)
    mixed, square = tl.full([C.D, C.E], 0.0, tl.float32), tl.full([C.D, C.D], 0.0, tl.float32)
    # The other sums are added up by row of the tile, and over the rows after the loop.
    along, numerator = tl.full([C.T, C.D], 0.0, tl.float32), tl.full([C.T, C.E], 0.0, tl.float32)
    weight = tl.full([C.T], 0.0, tl.float32)
    for start in range(begin, end, C.T):
        r = start + t
        here = r < end
        at = row_head * n + r
        grad = tl.load(grad_ptr + at[:, None] * C.E + e[None, :], mask=here[:, None], other=0)
        o = tl.load(o_ptr + at[:, None] * C.E + e[None, :], mask=here[:, None], other=0)
        q = tl.load(q_ptr + at[:, None] * C.D + d[None, :], mask=here[:, None], other=0)
        share = floor / tl.load(z_ptr + at, mask=here, other=float("inf"))
        wide = grad.to(tl.float32)
        level = -tl.sum(wide * (o.to(tl.float32) - shift[None, :]), 1)
        dn = (wide * share[:, None]).to(q.dtype)
        tl.store(dn_ptr + at[:, None] * C.E + e[None, :], dn, mask=here[:, None])
        tl.store(level_ptr + at, level, mask=here)
        level *= share
        weighted = q.to(tl.float32) * level[:, None]
        mixed = tl.dot(tl.trans(q), dn, mixed, input_precision=C.PRECISION)
        if C.SLOTS > 0:
            square = tl.dot(tl.trans(weighted.to(q.dtype)), q, square, input_precision=C.PRECISION)
        along += weighted
        numerator += dn.to(tl.float32)
        weight += level
    to = out_ptr + (split * tl.num_programs(1) + row_head) * C.first_size
    store_first(to, mixed, square, tl.sum(along, 0), tl.sum(numerator, 0), tl.sum(weight, 0), C)


@triton.jit
def finish_queries(
    sums_ptr, first_ptr, coefficients_ptr, floor_ptr, slot_ptr, big_ptr, small_ptr, after_ptr, sizes, a0, a1, a2,
    C: tl.constexpr,
):  # fmt: skip
    """Compute the states that keys read: sums over queries, divided by a weight, times the coefficients of p.

    CAUSAL: state b sums the blocks after b of all query heads, each times 1/floor. The weight after[b] is the sum
    of 1/floor over these rows, or 1 if there are none. Otherwise one state sums all rows, and the weight is n. S is
    the sum of `splits` parts, the rest is the sum of `blocks` parts; causal parts are the same.
    big: S [SLOTS, 256, E], L as a sum of two matrices [2, D, E], C [D, D]. small: z1 [D], z0, n0 [E].
    """
    splits, blocks, states, heads, groups, n, per_block = sizes
    slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    e, rows = tl.arange(0, C.E), tl.arange(0, 256)
    a0, a1, a2 = own_coefficients(coefficients_ptr, head, a0, a1, a2, C)
    after = 0.0
    if slot < C.SLOTS:
        kept = tl.load(slot_ptr + 3 * slot)
        first, second = tl.load(slot_ptr + 3 * slot + 1), tl.load(slot_ptr + 3 * slot + 2)
        factor = a2 * tl.where(first == second, 1.0, 2.0)
        sums = tl.full([256, C.E], 0.0, tl.float32)
        for step in range(splits + 1):
            block = splits - 1 - step
            if (block >= 0) & (block < states) if C.CAUSAL else block < 0:
                weight = tl.where(after > 0, after, 1.0) if C.CAUSAL else n * 1.0
                target = big_ptr + (tl.maximum(block, 0) * heads + head) * C.big_size + slot * 256 * C.E
                value = sums * (factor / weight)
                tl.store(target + rows[:, None] * C.E + e[None, :], value.to(big_ptr.dtype.element_ty))
            if block >= 0:
                over = 1.0 / tl.load(floor_ptr + head * blocks + block) if C.CAUSAL else 1.0
                if C.CAUSAL:
                    after += over * (groups * tl.minimum(n - block * per_block, per_block))
                for group in range(groups):
                    source = ((block * heads + head) * groups + group) * C.kept_slots + kept
                    part = tl.load(sums_ptr + source * (256 * C.E) + rows[:, None] * C.E + e[None, :])
                    sums += part.to(tl.float32) * over
    else:
        mixed, square = tl.full([C.D, C.E], 0.0, tl.float32), tl.full([C.D, C.D], 0.0, tl.float32)
        z1, n0, z0 = tl.full([C.D], 0.0, tl.float32), tl.full([C.E], 0.0, tl.float32), 0.0
        for step in range(blocks + 1):
            block = blocks - 1 - step
            if (block >= 0) & (block < states) if C.CAUSAL else block < 0:
                weight = tl.where(after > 0, after, 1.0) if C.CAUSAL else n * 1.0
                each = 1.0 / weight
                state = tl.maximum(block, 0) * heads + head
                to, small = big_ptr + state * C.big_size + C.SLOTS * 256 * C.E, small_ptr + state * C.query_small_size
                store_state(to, small, mixed, square, z1, n0, z0, a0 * each, a1 * each, a2 * each, C)
                if C.CAUSAL:
                    tl.store(after_ptr + head * states + block, weight)
            if block >= 0:
                over = 1.0 / tl.load(floor_ptr + head * blocks + block) if C.CAUSAL else 1.0
                if C.CAUSAL:
                    after += over * (groups * tl.minimum(n - block * per_block, per_block))
                for group in range(groups):
                    source = first_ptr + ((block * heads + head) * groups + group) * C.first_size
                    mixed, square, z1, n0, z0 = add_first(mixed, square, z1, n0, z0, source, over, C)


@triton.jit
def turn(big_ptr, pair_ptr, out_ptr, sizes, C: tl.constexpr):
    """Compute 2 S_abc for all a and b, as slots of 256 products c·b (tile of c, tile of b) by D columns a.

    pair[a, b] holds the slot of the two tiles and whether b is the first factor. Sums of two different tiles are
    stored doubled already.
    """
    (big_size,) = sizes
    slot, state = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile_c, tile_b = slot // (C.D // 16), slot % (C.D // 16)
    bc, a = tl.arange(0, 256), tl.arange(0, 16)
    b, c = bc // 16, bc % 16
    to = out_ptr + (state * tl.num_programs(0) + slot) * (256 * C.D)
    for tile_a in tl.static_range(C.D // 16):
        pair = pair_ptr + (tile_a * (C.D // 16) + tile_b) * 2
        kept, is_swapped = tl.load(pair), tl.load(pair + 1)
        product = tl.where(is_swapped > 0, b[:, None] * 16 + a[None, :], a[None, :] * 16 + b[:, None])
        source = big_ptr + state * big_size + (kept * 256 + product) * C.E + tile_c * 16 + c[:, None]
        value = tl.load(source) * tl.where(tile_a == tile_b, 2.0, 1.0).to(out_ptr.dtype.element_ty)
        tl.store(to + (c * 16 + b)[:, None] * C.D + tile_a * 16 + a[None, :], value)


@triton.jit
def exact_queries(
    q_ptr, grad_ptr, level_ptr, k_ptr, v_ptr, w_ptr, small_ptr, out_ptr, sizes, scale, slope, C: tl.constexpr
):  # fmt: skip
    """Compute slope · share · Σ_j w_j e^t (∂o·ṽ_j + level) k_j over the keys j ≤ i in the block of row i.

    `small` is the state of the forward pass, which ends with share, 1 / total weight.
    """
    n, m, groups, per_state = sizes
    block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head = row_head // groups
    r, d, e, tk = block * C.T + tl.arange(0, C.T), tl.arange(0, C.D), tl.arange(0, C.E), tl.arange(0, C.TK)
    at = row_head * n + r
    q = tl.load(q_ptr + at[:, None] * C.D + d[None, :], mask=r[:, None] < n, other=0)
    grad = tl.load(grad_ptr + at[:, None] * C.E + e[None, :], mask=r[:, None] < n, other=0)
    level = tl.load(level_ptr + at, mask=r < n, other=0)
    total = tl.full([C.T, C.D], 0.0, tl.float32)
    first = block * C.T // per_state * per_state
    for start in tl.range(first, tl.minimum(block * C.T + C.T, m), C.TK, num_stages=C.STAGES):
        c = start + tk
        k = tl.load(k_ptr + (head * m + c)[:, None] * C.D + d[None, :], mask=c[:, None] < m, other=0)
        v = tl.load(v_ptr + (head * m + c)[:, None] * C.E + e[None, :], mask=c[:, None] < m, other=0)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=C.PRECISION) * scale)
        if C.HAS_W:
            p *= tl.load(w_ptr + head * m + c, mask=c < m, other=0)[None, :]
        p = tl.where((c[None, :] <= r[:, None]) & (c[None, :] < m), p, 0.0)
        p *= tl.dot(grad, tl.trans(v), input_precision=C.PRECISION) + level[:, None]
        total = tl.dot(p.to(k.dtype), k, total, input_precision=C.PRECISION)
    total *= tl.load(small_ptr + head * C.small_size + C.small_size - 1) * slope
    tl.store(out_ptr + at[:, None] * C.D + d[None, :], total, mask=r[:, None] < n)


@triton.jit
def exact_keys(
    q_ptr, grad_ptr, level_ptr, z_ptr, k_ptr, v_ptr, floor_ptr, after_ptr, dk_ptr, dv_ptr, dw_ptr, sizes, scale, slope,
    C: tl.constexpr,
):  # fmt: skip
    """Compute Σ_i e^t/Z u_i / after over the rows i ≥ j in the block of key j, of all its query heads.

    u is slope (∂o·ṽ_j + level) q for dk, ∂o for dv, and, if HAS_Z, level for dw. The sums use floor/Z in place of 1/Z.
    """
    n, m, groups, blocks, states, per_state = sizes
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c, d, e, tk = block * C.T + tl.arange(0, C.T), tl.arange(0, C.D), tl.arange(0, C.E), tl.arange(0, C.TK)
    own = head * m + c
    k = tl.load(k_ptr + own[:, None] * C.D + d[None, :], mask=c[:, None] < m, other=0)
    v = tl.load(v_ptr + own[:, None] * C.E + e[None, :], mask=c[:, None] < m, other=0)
    state = block * C.T // per_state
    floor = tl.load(floor_ptr + head * blocks + state)
    end = tl.minimum((state + 1) * per_state, n)
    dk, dv = tl.full([C.T, C.D], 0.0, tl.float32), tl.full([C.T, C.E], 0.0, tl.float32)
    dw = tl.full([C.T], 0.0, tl.float32)
    for group in range(groups):
        row = (head * groups + group) * n
        for start in tl.range(block * C.T, end, C.TK, num_stages=C.STAGES):
            r = start + tk
            here = r < end
            q = tl.load(q_ptr + (row + r)[:, None] * C.D + d[None, :], mask=here[:, None], other=0)
            grad = tl.load(grad_ptr + (row + r)[:, None] * C.E + e[None, :], mask=here[:, None], other=0)
            level = tl.load(level_ptr + row + r, mask=here, other=0)
            share = floor / tl.load(z_ptr + row + r, mask=here, other=float("inf"))
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=C.PRECISION) * scale) * share[None, :]
            p = tl.where(c[:, None] <= r[None, :], p, 0.0)
            dv = tl.dot(p.to(q.dtype), grad, dv, input_precision=C.PRECISION)
            if C.HAS_Z:
                dw += tl.sum(p * level[None, :], 1)
            p *= tl.dot(v, tl.trans(grad), input_precision=C.PRECISION) + level[None, :]
            dk = tl.dot(p.to(q.dtype), q, dk, input_precision=C.PRECISION)
    factor = 1.0 / (tl.load(after_ptr + head * states + state) * floor)
    tl.store(dk_ptr + own[:, None] * C.D + d[None, :], dk * (factor * slope), mask=c[:, None] < m)
    tl.store(dv_ptr + own[:, None] * C.E + e[None, :], dv * factor, mask=c[:, None] < m)
    if C.HAS_Z:
        tl.store(dw_ptr + own, dw * factor, mask=c < m)


@triton.jit
def bilinear(
    x_ptr, y_ptr, turned_ptr, big_ptr, z1_at, slot_ptr, at, here, state, first_state, heads, head, C: tl.constexpr
):  # fmt: skip
    """Return Σ_slots (y ⊗ x) S + y Lᵀ and 2 x C + z1 for T rows x [D] and y [E] of a head and a state.

    S is the output of `turn`, which starts with first_state.
    """
    cx, cy = tl.arange(0, C.D), tl.arange(0, C.E)
    turned = turned_ptr + ((state - first_state) * heads + head) * (C.turned_slots * 256 * C.D)
    linear = big_ptr + (state * heads + head) * C.big_size + C.SLOTS * 256 * C.E
    x_at, y_at = x_ptr + at[:, None] * C.D, y_ptr + at[:, None] * C.E
    total, along = tl.full([C.T, C.D], 0.0, tl.float32), tl.full([C.T, C.D], 0.0, tl.float32)
    total = add_products(total, y_at, x_at, turned, slot_ptr, here, C.turned_slots, C)
    # These products come after the loop: before it, their operands would hold shared memory until it ends.
    x = tl.load(x_at + cx[None, :], mask=here, other=0)
    y = tl.load(y_at + cy[None, :], mask=here, other=0)
    for part in tl.static_range(2):
        matrix = tl.load(linear + part * C.D * C.E + cx[None, :] * C.E + cy[:, None])
        total = tl.dot(y, matrix, total, input_precision=C.PRECISION)
    if C.SLOTS > 0:
        square = tl.load(linear + 2 * C.D * C.E + cx[:, None] * C.D + cx[None, :])
        along = tl.dot(x, square, along, input_precision=C.PRECISION)
    return total, 2 * along + tl.load(z1_at + cx)[None, :]


@triton.jit(do_not_specialize=["first_state"])
def query_rows(
    q_ptr, grad_ptr, turned_ptr, big_ptr, small_ptr, level_ptr, exact_ptr, z_ptr, head_ptr, slot_ptr, out_ptr, sizes,
    first_state, C: tl.constexpr,
):  # fmt: skip
    """Compute ∂q = (Σ_slots (∂o ⊗ q) S + ∂o Lᵀ + level (2 q C + z1) + exact) / Z, times the factor of the head.

    T rows have the state of their block. The first of all rows are those of the block of first_state.
    """
    n, groups, heads, last_state, per_state = sizes
    row_head = tl.program_id(1).to(tl.int64)
    head = row_head // groups
    start = first_state * per_state + tl.program_id(0) * C.T
    r, d = start + tl.arange(0, C.T), tl.arange(0, C.D)
    here, at = r[:, None] < n, row_head * n + r
    state = tl.minimum(start // per_state, last_state)
    z1_at = small_ptr + (state * heads + head) * C.small_size
    total, along = bilinear(
        q_ptr, grad_ptr, turned_ptr, big_ptr, z1_at, slot_ptr, at, here, state, first_state, heads, head, C
    )
    total += along * tl.load(level_ptr + at, mask=r < n, other=0)[:, None]
    if C.CAUSAL:
        total += tl.load(exact_ptr + at[:, None] * C.D + d[None, :], mask=here, other=0)
    total *= ((1.0 if C.PLAIN else tl.load(head_ptr + head)) / tl.load(z_ptr + at, mask=r < n, other=1))[:, None]
    tl.store(out_ptr + at[:, None] * C.D + d[None, :], total.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def key_factors(factor, head_ptr, after_ptr, w_ptr, head, states, state, at, is_key, C: tl.constexpr):
    """Return factor · (factor of the head) · after[state] · w for T keys, where present."""
    scaled = tl.full([C.T], 0.0, tl.float32) + factor
    scaled *= tl.load(head_ptr + head * C.small_size + (C.small_size - 1) if C.PLAIN else head_ptr + head)
    if C.CAUSAL:
        scaled *= tl.load(after_ptr + head * states + state)
    if C.HAS_W:
        scaled *= tl.load(w_ptr + at, mask=is_key, other=0)
    return scaled


@triton.jit(do_not_specialize=["first_state"])
def key_rows(
    k_ptr, v_ptr, turned_ptr, big_ptr, small_ptr, exact_ptr, w_ptr, head_ptr, after_ptr, slot_ptr, out_ptr, sizes,
    first_state, factor, C: tl.constexpr,
):  # fmt: skip
    """Compute ∂k = (Σ_slots (ṽ ⊗ k) S + ṽ Lᵀ + 2 k C + z1 + exact) · `key_factors`, as `query_rows` does."""
    n, heads, last_state, per_state = sizes
    head = tl.program_id(1).to(tl.int64)
    start = first_state * per_state + tl.program_id(0) * C.T
    r, d = start + tl.arange(0, C.T), tl.arange(0, C.D)
    here, at = r[:, None] < n, head * n + r
    state = tl.minimum(start // per_state, last_state)
    z1_at = small_ptr + (state * heads + head) * C.query_small_size
    total, along = bilinear(
        k_ptr, v_ptr, turned_ptr, big_ptr, z1_at, slot_ptr, at, here, state, first_state, heads, head, C
    )
    total += along
    if C.CAUSAL:
        total += tl.load(exact_ptr + at[:, None] * C.D + d[None, :], mask=here, other=0)
    total *= key_factors(factor, head_ptr, after_ptr, w_ptr, head, last_state + 1, state, at, r < n, C)[:, None]
    tl.store(out_ptr + at[:, None] * C.D + d[None, :], total.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def value_rows(
    k_ptr, big_ptr, small_ptr, exact_ptr, w_ptr, head_ptr, after_ptr, slot_ptr, out_ptr, z_ptr, sizes, factor,
    C: tl.constexpr,
):  # fmt: skip
    """Compute ∂v = (Σ_slots (k ⊗ k) S + k L + n0 + exact) · `key_factors` for T keys with the state of their block.

    If HAS_Z, k·(k C + z1) + z0 + exact, times the same factors, replaces the exact part in z.
    """
    n, heads, last_state, per_state = sizes
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    r, d, e = block * C.T + tl.arange(0, C.T), tl.arange(0, C.D), tl.arange(0, C.E)
    here, at = r[:, None] < n, head * n + r
    state = tl.minimum(block * C.T // per_state, last_state)
    big, small = big_ptr + (state * heads + head) * C.big_size, small_ptr + (state * heads + head) * C.query_small_size
    k_at, linear = k_ptr + at[:, None] * C.D, big + C.SLOTS * 256 * C.E
    total = tl.full([C.T, C.E], 0.0, tl.float32)
    total = add_products(total, k_at, k_at, big, slot_ptr, here, C.SLOTS, C)
    scaled = key_factors(factor, head_ptr, after_ptr, w_ptr, head, last_state + 1, state, at, r < n, C)
    k = tl.load(k_at + d[None, :], mask=here, other=0)  # after the loop, as in `bilinear`
    for part in tl.static_range(2):
        matrix = tl.load(linear + part * C.D * C.E + d[:, None] * C.E + e[None, :])
        total = tl.dot(k, matrix, total, input_precision=C.PRECISION)
    total += tl.load(small + C.D + 1 + e)[None, :]
    if C.HAS_Z:
        along = tl.full([C.T, C.D], 0.0, tl.float32)
        if C.SLOTS > 0:
            square = tl.load(linear + 2 * C.D * C.E + d[:, None] * C.D + d[None, :])
            along = tl.dot(k, square, along, input_precision=C.PRECISION)
        z = tl.sum(k.to(tl.float32) * (along + tl.load(small + d)[None, :]), 1) + tl.load(small + C.D)
        if C.CAUSAL:
            z += tl.load(z_ptr + at, mask=r < n, other=0)
        tl.store(z_ptr + at, z * scaled, mask=r < n)
    if C.CAUSAL:
        total += tl.load(exact_ptr + at[:, None] * C.E + e[None, :], mask=here, other=0)
    total *= scaled[:, None]
    tl.store(out_ptr + at[:, None] * C.E + e[None, :], total.to(out_ptr.dtype.element_ty), mask=here)
