"""Triton kernels of polynomial attention at degrees 1 and 2: the survey, the forward pass, and gradients.

Features are computed in registers for the matrix unit. The products x_a y_b of two tiles of 16 coordinates are 256
features; a pair of tiles and its mirror image are computed once. Keys are transposed to [D, tokens], so that every
fragment of the feature matrix is one wide load. The sequence is split, one program sums one split, and a program holds
the sums of up to two tile pairs (512 features) in registers.

A tile of rows or keys of a gradient never crosses a block of `per_state` tokens. Every address is masked, or inside its
tensor because a size is a multiple of the tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from functools import lru_cache
from types import SimpleNamespace

TILE = 16


def programs(dim: int) -> tuple[tuple[int, int, int], ...]:
    """Return tile pairs in groups of two with a shared tile: (shared, first, second), where second may be −1 (none).

    Every unordered pair of tiles appears once. Tile b is paired with tiles b, b−1, …, two at a time. If their number is
    odd, the pair with tile 0 is left over; the left-over pairs are grouped with shared tile 0.

    >>> programs(64)
    ((1, 1, 0), (2, 2, 1), (3, 3, 2), (3, 1, 0), (0, 0, 2))
    """
    tiles = dim // TILE
    found, left = [], []
    for b in range(tiles):
        others = list(range(b, -1, -1))
        if len(others) % 2:
            left.append(b)
            others.pop()
        found += [(b, others[i], others[i + 1]) for i in range(0, len(others), 2)]
    left += [-1] * (len(left) % 2)
    found += [(0, left[i], left[i + 1]) for i in range(0, len(left), 2)]
    return tuple(found)


def second_programs(dim: int) -> tuple[tuple[int, int, int], ...]:
    """Return the programs with their second tile in place of the first, for kernels that hold one tile pair."""
    return tuple((shared, max(second, 0), 0) for shared, _, second in programs(dim))


def slots(dim: int) -> tuple[tuple[int, int, int], ...]:
    """Return where the sums of every tile pair are stored: (slot, first tile, second tile)."""
    found = []
    for p, (shared, first, second) in enumerate(programs(dim)):
        found.append((2 * p, first, shared))
        if second >= 0:
            found.append((2 * p + 1, second, shared))
    return tuple(found)


def turned_slots(dim: int, width: int) -> tuple[tuple[int, int, int], ...]:
    """Return the tiles of the turned slots: (slot, tile of c, tile of b)."""
    others = dim // TILE
    return tuple((c * others + b, c, b) for c in range(width // TILE) for b in range(others))


def pair_slots(dim: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for tiles a and b the slot of their products and whether b is the first factor: [tiles, tiles, 2]."""
    count = dim // TILE
    table = [[(0, 0)] * count for _ in range(count)]
    for slot, (_, first, second) in enumerate(slots(dim)):
        table[second][first] = slot, 1
        table[first][second] = slot, 0
    return tuple(tuple(row) for row in table)


@lru_cache(maxsize=1)
def kernels() -> SimpleNamespace:
    """Return the kernels, which Triton compiles on their first launch. The first call imports triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def transpose(x_ptr, out_ptr, n, padded, D: tl.constexpr, T: tl.constexpr):
        """Compute out[head, :, t] = x[head, t, :] with zeros after the last token."""
        head = tl.program_id(1).to(tl.int64)
        r, c = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, D)
        x = tl.load(x_ptr + head * n * D + r[:, None] * D + c[None, :], mask=r[:, None] < n, other=0)
        tl.store(out_ptr + head * padded * D + c[:, None] * padded + r[None, :], tl.trans(x))

    @triton.jit
    def survey(
        q_ptr, k_ptr, v_ptr, out_ptr, rows, m, heads,
        D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
    ):  # fmt: skip
        """Raise 8 numbers per head, which start at 0, to the maxima over S·T tokens of a head. NaN counts as ∞.

        They are written to out [8, heads], and behind them the centres [2, heads, D]. The numbers are the largest ‖q‖²,
        ‖k‖², ‖q−μ‖², ‖k−c‖² and Σ|v|, then ‖μ‖², and the largest 1/‖q‖² and 1/‖q−μ‖², in which NaN does not count and
        squares are put between 1e-36 and 1e36. A program reads either q, k or v. The centre is the mean of T evenly
        spaced tokens; any centre is valid.
        """
        block, head, which = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
        d, e, t = tl.arange(0, D), tl.arange(0, E), tl.arange(0, T)
        to = out_ptr + head
        plain, centred = tl.zeros([T], tl.float32), tl.zeros([T], tl.float32)
        if which == 2:
            for step in tl.range(0, S, num_stages=2):
                r = (block * S + step) * T + t
                v = tl.load(v_ptr + head * m * E + r[:, None] * E + e[None, :], mask=r[:, None] < m, other=0)
                long = tl.sum(tl.abs(v.to(tl.float32)), 1)
                plain = tl.maximum(plain, tl.where(long == long, long, float("inf")))
            tl.atomic_max(to + 4 * heads, tl.max(plain, 0), sem="relaxed")
        else:
            n = rows if which == 0 else m
            x_at = q_ptr + head * rows * D if which == 0 else k_ptr + head * m * D
            r = t * tl.maximum(n // T, 1)
            sample = tl.load(x_at + r[:, None] * D + d[None, :], mask=r[:, None] < n, other=0)
            centre = tl.sum(sample.to(tl.float32), 0) / tl.minimum(n, T)
            if block == 0:
                tl.store(out_ptr + 8 * heads + (which * heads + head) * D + d, centre)
            least = tl.full([T], float("inf"), tl.float32)
            centred_least = least
            for step in tl.range(0, S, num_stages=2):
                r = (block * S + step) * T + t
                here = r < n
                x = tl.load(x_at + r[:, None] * D + d[None, :], mask=here[:, None], other=0).to(tl.float32)
                long = tl.sum(x * x, 1)
                plain = tl.maximum(plain, tl.where(long == long, long, float("inf")))
                least = tl.minimum(least, tl.where(here, long, float("inf")))
                apart = x - centre[None, :]
                long = tl.where(here, tl.sum(apart * apart, 1), 0.0)
                centred = tl.maximum(centred, tl.where(long == long, long, float("inf")))
                centred_least = tl.minimum(centred_least, tl.where(here, long, float("inf")))
            tl.atomic_max(to + which * heads, tl.max(plain, 0), sem="relaxed")
            tl.atomic_max(to + (2 + which) * heads, tl.max(centred, 0), sem="relaxed")
            if which == 0:
                size = tl.sum(centre * centre, 0)
                tl.atomic_max(to + 5 * heads, tl.where(size == size, size, float("inf")), sem="relaxed")
                small = tl.minimum(tl.maximum(tl.min(least, 0), 1e-36), 1e36)
                tl.atomic_max(to + 6 * heads, 1 / small, sem="relaxed")
                small = tl.minimum(tl.maximum(tl.min(centred_least, 0), 1e-36), 1e36)
                tl.atomic_max(to + 7 * heads, 1 / small, sem="relaxed")

    @triton.jit
    def first_moments(
        x_ptr, y_ptr, v_ptr, w_ptr, out_ptr, m, padded, per_split,
        D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, HAS_W: tl.constexpr, BY_PRODUCTS: tl.constexpr,
        PRECISION: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Compute Σ y vᵀ [D, E], Σ y xᵀ [D, D], Σ y [D], Σ w v [E] and Σ w of one split; x and y are [D, tokens].

        BY_PRODUCTS computes sums as products with ones in the matrix unit, which needs no exchange between threads.
        """
        split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        d, e, t = tl.arange(0, D), tl.arange(0, E), tl.arange(0, T)
        x_at, y_at = x_ptr + head * padded * D, y_ptr + head * padded * D
        mixed, square = tl.zeros([D, E], tl.float32), tl.zeros([D, D], tl.float32)
        total, mean, weight = tl.zeros([D], tl.float32), tl.zeros([E], tl.float32), 0.0
        ones = tl.full([T, 16], 1.0, x_ptr.dtype.element_ty)
        totals, means = tl.zeros([D, 16], tl.float32), tl.zeros([E, 16], tl.float32)
        begin, end = split * per_split, tl.minimum((split + 1) * per_split, padded)
        for start in tl.range(begin, end, T, num_stages=STAGES):
            r = start + t
            here, laid = r < m, d[:, None] * padded + r[None, :]
            x, y = tl.load(x_at + laid), tl.load(y_at + laid)
            v = tl.load(v_ptr + head * m * E + r[:, None] * E + e[None, :], mask=here[:, None], other=0)
            mixed = tl.dot(y, v, mixed, input_precision=PRECISION)
            square = tl.dot(y, tl.trans(x), square, input_precision=PRECISION)
            if BY_PRODUCTS:
                totals = tl.dot(y, ones, totals, input_precision=PRECISION)
            else:
                total += tl.sum(y.to(tl.float32), 1)
            if HAS_W:
                w = tl.load(w_ptr + head * m + r, mask=here, other=0)
                mean += tl.sum(v.to(tl.float32) * w[:, None], 0)
                weight += tl.sum(w, 0)
            elif BY_PRODUCTS:
                means = tl.dot(tl.trans(v), ones, means, input_precision=PRECISION)
            else:
                mean += tl.sum(v.to(tl.float32), 0)
        if BY_PRODUCTS:  # all 16 columns are equal
            total = tl.max(totals, 1)
            if not HAS_W:
                mean = tl.max(means, 1)
        if not HAS_W:
            weight = tl.maximum(tl.minimum(end, m) - begin, 0).to(tl.float32)
        to = out_ptr + (split * tl.num_programs(1) + head) * (D * E + D * D + D + E + 1)
        tl.store(to + d[:, None] * E + e[None, :], mixed)
        tl.store(to + D * E + d[:, None] * D + d[None, :], square)
        tl.store(to + D * E + D * D + d, total)
        tl.store(to + D * E + D * D + D + e, mean)
        tl.store(to + D * E + D * D + D + E, weight)

    @triton.jit
    def second_moments(
        x_ptr, y_ptr, v_ptr, table_ptr, out_ptr, m, padded, per_split,
        D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """Compute Σ_t (y_a x_b)(t) v(t) of one split, for the features of one shared tile b and WIDE/16 tiles a."""
        program, split, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        i, e, t, wide = tl.arange(0, 16), tl.arange(0, E), tl.arange(0, T), tl.arange(0, WIDE)
        shared = tl.load(table_ptr + 3 * program)
        first = tl.load(table_ptr + 3 * program + 1)
        second = tl.maximum(tl.load(table_ptr + 3 * program + 2), 0)
        columns = tl.where(wide < 16, first * 16 + wide, second * 16 + wide - 16)
        y_at = y_ptr + head * padded * D + columns[:, None] * padded
        x_at = x_ptr + head * padded * D + (shared * 16 + i)[:, None] * padded
        v_at = v_ptr + head * m * E + e[None, :]
        sums = tl.zeros([WIDE * 16, E], tl.float32)
        for start in tl.range(split * per_split, tl.minimum((split + 1) * per_split, padded), T, num_stages=STAGES):
            r = start + t
            y, x = tl.load(y_at + r[None, :]), tl.load(x_at + r[None, :])
            v = tl.load(v_at + r[:, None] * E, mask=r[:, None] < m, other=0)
            features = tl.reshape(y[:, None, :] * x[None, :, :], [WIDE * 16, T])
            sums = tl.dot(features, v, sums, input_precision=PRECISION)
        rows = tl.arange(0, WIDE * 16)
        at = out_ptr + ((split * tl.num_programs(2) + head) * tl.num_programs(0) + program) * (512 * E)
        tl.store(at + rows[:, None] * E + e[None, :], sums.to(out_ptr.dtype.element_ty))

    @triton.jit
    def finish(
        sums_ptr, first_ptr, coefficients_ptr, slot_ptr, big_ptr, small_ptr, splits, heads, a0, a1, a2,
        PROGRAMS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr,
        CENTRE: tl.constexpr, ALIKE: tl.constexpr,
    ):  # fmt: skip
        """Add the splits (all of them, or the earlier ones if CAUSAL), centre values, apply the coefficients, round.

        Everything is divided by the total weight. This cancels in the quotient N/Z and keeps short dtypes in range.
        big: S [SLOTS, 256, E], L as a sum of two matrices [2, D, E], C [D, D]. small: z1 [D], z0, n0 [E], mean [E],
        1/total weight.
        """
        slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        d, e, rows = tl.arange(0, D), tl.arange(0, E), tl.arange(0, 256)
        size = D * E + D * D + D + E + 1
        big_size, small_size = SLOTS * 256 * E + 2 * D * E + D * D, D + 2 * E + 2
        if not ALIKE:  # every head has its own polynomial
            a0 = tl.load(coefficients_ptr + head * 3)
            a1 = tl.load(coefficients_ptr + head * 3 + 1)
            a2 = tl.load(coefficients_ptr + head * 3 + 2)
        total, mean = 0.0, tl.zeros([E], tl.float32)
        for split in range(splits):
            at = first_ptr + (split * heads + head) * size + D * E + D * D + D
            mean += tl.load(at + e)
            total += tl.load(at + E)
        share = 1.0 / total
        mean = mean * (share if CENTRE else 0.0)
        if slot < SLOTS:
            kept = tl.load(slot_ptr + 3 * slot)
            first, second = tl.load(slot_ptr + 3 * slot + 1), tl.load(slot_ptr + 3 * slot + 2)
            factor = a2 * share * tl.where(first == second, 1.0, 2.0)
            at_square = D * E + (first * 16 + rows // 16) * D + second * 16 + rows % 16
            sums, weights = tl.zeros([256, E], tl.float32), tl.zeros([256], tl.float32)
            for step in range(splits + 1):
                if CAUSAL or step == splits:
                    target = big_ptr + ((step if CAUSAL else 0) * heads + head) * big_size + slot * 256 * E
                    value = (sums - weights[:, None] * mean[None, :]) * factor
                    tl.store(target + rows[:, None] * E + e[None, :], value.to(big_ptr.dtype.element_ty))
                if step < splits:
                    source = sums_ptr + ((step * heads + head) * PROGRAMS * 2 + kept) * (256 * E)
                    sums += tl.load(source + rows[:, None] * E + e[None, :]).to(tl.float32)
                    weights += tl.load(first_ptr + (step * heads + head) * size + at_square)
        else:
            mixed, square = tl.zeros([D, E], tl.float32), tl.zeros([D, D], tl.float32)
            z1, n0, z0 = tl.zeros([D], tl.float32), tl.zeros([E], tl.float32), 0.0
            for step in range(splits + 1):
                if CAUSAL or step == splits:
                    state = (step if CAUSAL else 0) * heads + head
                    to = big_ptr + state * big_size + SLOTS * 256 * E
                    value = (mixed - z1[:, None] * mean[None, :]) * (a1 * share)
                    high = value.to(big_ptr.dtype.element_ty)
                    low = (value - high.to(tl.float32)).to(big_ptr.dtype.element_ty)
                    tl.store(to + d[:, None] * E + e[None, :], high)
                    tl.store(to + D * E + d[:, None] * E + e[None, :], low)
                    rounded = (square * (a2 * share)).to(big_ptr.dtype.element_ty)
                    tl.store(to + 2 * D * E + d[:, None] * D + d[None, :], rounded)
                    small = small_ptr + state * small_size
                    tl.store(small + d, z1 * (a1 * share))
                    tl.store(small + D, z0 * (a0 * share))
                    tl.store(small + D + 1 + e, (n0 - z0 * mean) * (a0 * share))
                    tl.store(small + D + 1 + E + e, mean)
                    tl.store(small + D + 1 + 2 * E, share)
                if step < splits:
                    source = first_ptr + (step * heads + head) * size
                    mixed += tl.load(source + d[:, None] * E + e[None, :])
                    square += tl.load(source + D * E + d[:, None] * D + d[None, :])
                    z1 += tl.load(source + D * E + D * D + d)
                    n0 += tl.load(source + D * E + D * D + D + e)
                    z0 += tl.load(source + D * E + D * D + D + E)

    @triton.jit
    def evaluate(
        q_ptr, big_ptr, small_ptr, kt_ptr, v_ptr, w_ptr, slot_ptr, out_ptr, z_ptr, n, m, padded, groups, heads, states,
        per_state, scale,
        SLOTS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, TK: tl.constexpr, SUB: tl.constexpr,
        CAUSAL: tl.constexpr, HAS_W: tl.constexpr, HAS_Z: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Compute N/Z + mean for T rows q, with N = Σ_slots (q ⊗ q) S + q L + n0 and Z = q·(q C + z1) + z0.

        Causal rows add the exact exponentials of their own block to N and Z.
        """
        block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        head = row_head // groups
        r = block * T + tl.arange(0, T)
        here = r[:, None] < n
        cx, co = tl.arange(0, D), tl.arange(0, E)
        i, sub, rows = tl.arange(0, 16), tl.arange(0, SUB), tl.arange(0, SUB * 16)
        state = tl.minimum(block * T // per_state, states - 1) if CAUSAL else 0
        big = big_ptr + (state * heads + head) * (SLOTS * 256 * E + 2 * D * E + D * D)
        small = small_ptr + (state * heads + head) * (D + 2 * E + 2)
        q_at = q_ptr + row_head * n * D + r[:, None] * D
        q = tl.load(q_at + cx[None, :], mask=here, other=0)
        total, z = tl.zeros([T, E], tl.float32), tl.zeros([T], tl.float32)
        if CAUSAL:
            tk = tl.arange(0, TK)
            k_at, v_at = kt_ptr + head * padded * D + cx[:, None] * padded, v_ptr + head * m * E + co[None, :]
            # First the key tiles that lie before all of these rows, then those that contain the diagonal.
            for start in tl.range(state * per_state, tl.minimum(block * T, m // TK * TK), TK, num_stages=STAGES):
                c = start + tk
                k, v = tl.load(k_at + c[None, :]), tl.load(v_at + c[:, None] * E)
                p = tl.exp2(tl.dot(q, k, input_precision=PRECISION) * scale)
                if HAS_W:
                    p *= tl.load(w_ptr + head * m + c)[None, :]
                z += tl.sum(p, 1)
                total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)
            edge = tl.maximum(state * per_state, tl.minimum(block * T, m // TK * TK))
            for start in tl.range(edge, tl.minimum(block * T + T, padded), TK, num_stages=1):
                c = start + tk
                k = tl.load(k_at + c[None, :])
                v = tl.load(v_at + c[:, None] * E, mask=c[:, None] < m, other=0)
                p = tl.exp2(tl.dot(q, k, input_precision=PRECISION) * scale)
                if HAS_W:
                    p *= tl.load(w_ptr + head * m + c, mask=c < m, other=0)[None, :]
                p = tl.where((c[None, :] <= r[:, None]) & (c[None, :] < m), p, 0.0)
                z += tl.sum(p, 1)
                total = tl.dot(p.to(v.dtype), v, total, input_precision=PRECISION)
            share = tl.load(small + D + 1 + 2 * E)
            total = (total - z[:, None] * tl.load(small + D + 1 + E + co)[None, :]) * share
            z = z * share
        for part in tl.static_range(2):
            linear = tl.load(big + (SLOTS * 256 + part * D) * E + cx[:, None] * E + co[None, :])
            total = tl.dot(q, linear, total, input_precision=PRECISION)
        total += tl.load(small + D + 1 + co)[None, :]
        along = tl.zeros([T, D], tl.float32) + tl.load(small + cx)[None, :]
        if SLOTS > 0:
            square = tl.load(big + SLOTS * 256 * E + 2 * D * E + cx[:, None] * D + cx[None, :])
            along = tl.dot(q, square, along, input_precision=PRECISION)
        z += tl.sum(q.to(tl.float32) * along, 1) + tl.load(small + D)
        if SLOTS > 0:
            for step in tl.range(0, SLOTS * (16 // SUB), num_stages=STAGES):
                slot, offset = step // (16 // SUB), step % (16 // SUB) * SUB
                first, second = tl.load(slot_ptr + 3 * slot + 1), tl.load(slot_ptr + 3 * slot + 2)
                a = tl.load(q_at + first * 16 + offset + sub[None, :], mask=here, other=0)
                b = tl.load(q_at + second * 16 + i[None, :], mask=here, other=0)
                s = tl.load(big + (slot * 256 + offset * 16) * E + rows[:, None] * E + co[None, :])
                features = tl.reshape(a[:, :, None] * b[:, None, :], [T, SUB * 16])
                total = tl.dot(features, s, total, input_precision=PRECISION)
        if HAS_Z:
            tl.store(z_ptr + row_head * n + r, z, mask=r < n)
        total = total / z[:, None] + tl.load(small + D + 1 + E + co)[None, :]
        at = out_ptr + row_head * n * E + r[:, None] * E + co[None, :]
        tl.store(at, total.to(out_ptr.dtype.element_ty), mask=here)

    return SimpleNamespace(
        transpose=transpose, survey=survey, first_moments=first_moments,
        second_moments=second_moments, finish=finish, evaluate=evaluate,
    )  # fmt: skip


@lru_cache(maxsize=1)
def gradient_kernels() -> SimpleNamespace:
    """Return the kernels, which Triton compiles on their first launch. The first call imports triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def prepare(
        q_ptr, v_ptr, shift_ptr, x_ptr, vt_ptr, n, m, padded, groups, shift_size, shift_at,
        D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, TRANSPOSES: tl.constexpr,
    ):  # fmt: skip
        """Compute ṽ = v − shift [m, E] and, if TRANSPOSES, x = qᵀ [D, padded] with zeros after the last row."""
        row_head = tl.program_id(1).to(tl.int64)
        head = row_head // groups
        r, d, e = tl.program_id(0) * T + tl.arange(0, T), tl.arange(0, D), tl.arange(0, E)
        if TRANSPOSES:
            q = tl.load(q_ptr + row_head * n * D + r[:, None] * D + d[None, :], mask=r[:, None] < n, other=0)
            to = x_ptr + row_head * padded * D + d[:, None] * padded + r[None, :]
            tl.store(to, tl.trans(q), mask=r[None, :] < padded)
        if row_head % groups == 0:
            at = head * m * E + r[:, None] * E + e[None, :]
            shift = tl.load(shift_ptr + head * shift_size + shift_at + e)
            apart = tl.load(v_ptr + at, mask=r[:, None] < m, other=0).to(tl.float32) - shift[None, :]
            tl.store(vt_ptr + at, apart.to(vt_ptr.dtype.element_ty), mask=r[:, None] < m)

    @triton.jit
    def query_moments(
        q_ptr, grad_ptr, o_ptr, z_ptr, shift_ptr, floor_ptr, dn_ptr, level_ptr, out_ptr, n, groups, per_split,
        shift_size, shift_at,
        D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, SQUARE: tl.constexpr, HAS_FLOOR: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Compute dN = ρ ∂o and level = −∂o·(o − shift) of the rows of a split, with ρ = floor/Z, and their sums.

        The sums are Σ q dNᵀ [D, E], Σ ρ level q qᵀ [D, D], Σ ρ level q [D], Σ dN [E] and Σ ρ level. If HAS_FLOOR, floor
        is the smallest Z of the split over all query heads of the key head, and it is stored; otherwise it is 1.
        """
        split, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        head = row_head // groups
        d, e, t = tl.arange(0, D), tl.arange(0, E), tl.arange(0, T)
        begin, end = split * per_split, tl.minimum((split + 1) * per_split, n)
        floor = 1.0
        if HAS_FLOOR:
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
        mixed, square = tl.zeros([D, E], tl.float32), tl.zeros([D, D], tl.float32)
        # The other sums are added up by row of the tile, and over the rows after the loop.
        along, numerator = tl.zeros([T, D], tl.float32), tl.zeros([T, E], tl.float32)
        weight = tl.zeros([T], tl.float32)
        for start in range(begin, end, T):
            r = start + t
            here = r < end
            at = row_head * n + r
            grad = tl.load(grad_ptr + at[:, None] * E + e[None, :], mask=here[:, None], other=0)
            o = tl.load(o_ptr + at[:, None] * E + e[None, :], mask=here[:, None], other=0)
            q = tl.load(q_ptr + at[:, None] * D + d[None, :], mask=here[:, None], other=0)
            share = floor / tl.load(z_ptr + at, mask=here, other=float("inf"))
            wide = grad.to(tl.float32)
            level = -tl.sum(wide * (o.to(tl.float32) - shift[None, :]), 1)
            dn = (wide * share[:, None]).to(q.dtype)
            tl.store(dn_ptr + at[:, None] * E + e[None, :], dn, mask=here[:, None])
            tl.store(level_ptr + at, level, mask=here)
            level *= share
            weighted = q.to(tl.float32) * level[:, None]
            mixed = tl.dot(tl.trans(q), dn, mixed, input_precision=PRECISION)
            if SQUARE:
                square = tl.dot(tl.trans(weighted.to(q.dtype)), q, square, input_precision=PRECISION)
            along += weighted
            numerator += dn.to(tl.float32)
            weight += level
        to = out_ptr + (split * tl.num_programs(1) + row_head) * (D * E + D * D + D + E + 1)
        tl.store(to + d[:, None] * E + e[None, :], mixed)
        tl.store(to + D * E + d[:, None] * D + d[None, :], square)
        tl.store(to + D * E + D * D + d, tl.sum(along, 0))
        tl.store(to + D * E + D * D + D + e, tl.sum(numerator, 0))
        tl.store(to + D * E + D * D + D + E, tl.sum(weight, 0))

    @triton.jit
    def finish_queries(
        sums_ptr, first_ptr, coefficients_ptr, floor_ptr, slot_ptr, big_ptr, small_ptr, after_ptr, splits, blocks,
        states, heads, groups, n, per_block, a0, a1, a2,
        PROGRAMS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr,
        ALIKE: tl.constexpr,
    ):  # fmt: skip
        """Compute the states that keys read: sums over queries, divided by a weight, times the coefficients of p.

        CAUSAL: state b sums the blocks after b of all query heads, each times 1/floor. The weight after[b] is the sum
        of 1/floor over these rows, or 1 if there are none. Otherwise one state sums all rows, and the weight is n. S is
        the sum of `splits` parts, the rest is the sum of `blocks` parts; causal parts are the same.
        big: S [SLOTS, 256, E], L as a sum of two matrices [2, D, E], C [D, D]. small: z1 [D], z0, n0 [E].
        """
        slot, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        d, e, rows = tl.arange(0, D), tl.arange(0, E), tl.arange(0, 256)
        size = D * E + D * D + D + E + 1
        big_size, small_size = SLOTS * 256 * E + 2 * D * E + D * D, D + E + 1
        if not ALIKE:  # every head has its own polynomial
            a0 = tl.load(coefficients_ptr + head * 3)
            a1 = tl.load(coefficients_ptr + head * 3 + 1)
            a2 = tl.load(coefficients_ptr + head * 3 + 2)
        after = 0.0
        if slot < SLOTS:
            kept = tl.load(slot_ptr + 3 * slot)
            first, second = tl.load(slot_ptr + 3 * slot + 1), tl.load(slot_ptr + 3 * slot + 2)
            factor = a2 * tl.where(first == second, 1.0, 2.0)
            sums = tl.zeros([256, E], tl.float32)
            for step in range(splits + 1):
                block = splits - 1 - step
                if (block >= 0) & (block < states) if CAUSAL else block < 0:
                    weight = tl.where(after > 0, after, 1.0) if CAUSAL else n * 1.0
                    target = big_ptr + (tl.maximum(block, 0) * heads + head) * big_size + slot * 256 * E
                    value = sums * (factor / weight)
                    tl.store(target + rows[:, None] * E + e[None, :], value.to(big_ptr.dtype.element_ty))
                if block >= 0:
                    over = 1.0 / tl.load(floor_ptr + head * blocks + block) if CAUSAL else 1.0
                    if CAUSAL:
                        after += over * (groups * tl.minimum(n - block * per_block, per_block))
                    for group in range(groups):
                        source = ((block * heads + head) * groups + group) * PROGRAMS * 2 + kept
                        part = tl.load(sums_ptr + source * (256 * E) + rows[:, None] * E + e[None, :])
                        sums += part.to(tl.float32) * over
        else:
            mixed, square = tl.zeros([D, E], tl.float32), tl.zeros([D, D], tl.float32)
            z1, n0, z0 = tl.zeros([D], tl.float32), tl.zeros([E], tl.float32), 0.0
            for step in range(blocks + 1):
                block = blocks - 1 - step
                if (block >= 0) & (block < states) if CAUSAL else block < 0:
                    weight = tl.where(after > 0, after, 1.0) if CAUSAL else n * 1.0
                    each = 1.0 / weight
                    state = tl.maximum(block, 0) * heads + head
                    to = big_ptr + state * big_size + SLOTS * 256 * E
                    value = mixed * (a1 * each)
                    high = value.to(big_ptr.dtype.element_ty)
                    low = (value - high.to(tl.float32)).to(big_ptr.dtype.element_ty)
                    tl.store(to + d[:, None] * E + e[None, :], high)
                    tl.store(to + D * E + d[:, None] * E + e[None, :], low)
                    rounded = (square * (a2 * each)).to(big_ptr.dtype.element_ty)
                    tl.store(to + 2 * D * E + d[:, None] * D + d[None, :], rounded)
                    small = small_ptr + state * small_size
                    tl.store(small + d, z1 * (a1 * each))
                    tl.store(small + D, z0 * (a0 * each))
                    tl.store(small + D + 1 + e, n0 * (a0 * each))
                    if CAUSAL:
                        tl.store(after_ptr + head * states + block, weight)
                if block >= 0:
                    over = 1.0 / tl.load(floor_ptr + head * blocks + block) if CAUSAL else 1.0
                    if CAUSAL:
                        after += over * (groups * tl.minimum(n - block * per_block, per_block))
                    for group in range(groups):
                        source = first_ptr + ((block * heads + head) * groups + group) * size
                        mixed += tl.load(source + d[:, None] * E + e[None, :]) * over
                        square += tl.load(source + D * E + d[:, None] * D + d[None, :]) * over
                        z1 += tl.load(source + D * E + D * D + d) * over
                        n0 += tl.load(source + D * E + D * D + D + e) * over
                        z0 += tl.load(source + D * E + D * D + D + E) * over

    @triton.jit
    def turn(big_ptr, pair_ptr, out_ptr, big_size, D: tl.constexpr, E: tl.constexpr):
        """Compute 2 S_abc for all a and b, as slots of 256 products c·b (tile of c, tile of b) by D columns a.

        pair[a, b] holds the slot of the two tiles and whether b is the first factor. Sums of two different tiles are
        stored doubled already.
        """
        slot, state = tl.program_id(0), tl.program_id(1).to(tl.int64)
        tile_c, tile_b = slot // (D // 16), slot % (D // 16)
        bc, a = tl.arange(0, 256), tl.arange(0, 16)
        b, c = bc // 16, bc % 16
        to = out_ptr + (state * tl.num_programs(0) + slot) * (256 * D)
        for tile_a in tl.static_range(D // 16):
            pair = pair_ptr + (tile_a * (D // 16) + tile_b) * 2
            kept, is_swapped = tl.load(pair), tl.load(pair + 1)
            product = tl.where(is_swapped > 0, b[:, None] * 16 + a[None, :], a[None, :] * 16 + b[:, None])
            source = big_ptr + state * big_size + (kept * 256 + product) * E + tile_c * 16 + c[:, None]
            value = tl.load(source) * tl.where(tile_a == tile_b, 2.0, 1.0).to(out_ptr.dtype.element_ty)
            tl.store(to + (c * 16 + b)[:, None] * D + tile_a * 16 + a[None, :], value)

    @triton.jit
    def exact_queries(
        q_ptr, grad_ptr, level_ptr, k_ptr, v_ptr, w_ptr, small_ptr, out_ptr, n, m, groups, per_state, small_size,
        scale, slope,
        D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, TK: tl.constexpr, HAS_W: tl.constexpr,
        PRECISION: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Compute slope · share · Σ_j w_j e^t (∂o·ṽ_j + level) k_j over the keys j ≤ i in the block of row i.

        `small` is the state of the forward pass, which ends with share, 1 / total weight.
        """
        block, row_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        head = row_head // groups
        r, d, e, tk = block * T + tl.arange(0, T), tl.arange(0, D), tl.arange(0, E), tl.arange(0, TK)
        at = row_head * n + r
        q = tl.load(q_ptr + at[:, None] * D + d[None, :], mask=r[:, None] < n, other=0)
        grad = tl.load(grad_ptr + at[:, None] * E + e[None, :], mask=r[:, None] < n, other=0)
        level = tl.load(level_ptr + at, mask=r < n, other=0)
        total = tl.zeros([T, D], tl.float32)
        first = block * T // per_state * per_state
        for start in tl.range(first, tl.minimum(block * T + T, m), TK, num_stages=STAGES):
            c = start + tk
            k = tl.load(k_ptr + (head * m + c)[:, None] * D + d[None, :], mask=c[:, None] < m, other=0)
            v = tl.load(v_ptr + (head * m + c)[:, None] * E + e[None, :], mask=c[:, None] < m, other=0)
            p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale)
            if HAS_W:
                p *= tl.load(w_ptr + head * m + c, mask=c < m, other=0)[None, :]
            p = tl.where((c[None, :] <= r[:, None]) & (c[None, :] < m), p, 0.0)
            p *= tl.dot(grad, tl.trans(v), input_precision=PRECISION) + level[:, None]
            total = tl.dot(p.to(k.dtype), k, total, input_precision=PRECISION)
        total *= tl.load(small_ptr + head * small_size + small_size - 1) * slope
        tl.store(out_ptr + at[:, None] * D + d[None, :], total, mask=r[:, None] < n)

    @triton.jit
    def exact_keys(
        q_ptr, grad_ptr, level_ptr, z_ptr, k_ptr, v_ptr, floor_ptr, after_ptr, dk_ptr, dv_ptr, dw_ptr, n, m, groups,
        blocks, states, per_state, scale, slope,
        D: tl.constexpr, E: tl.constexpr, T: tl.constexpr, TQ: tl.constexpr, HAS_DW: tl.constexpr,
        PRECISION: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Compute Σ_i e^t/Z u_i / after over the rows i ≥ j in the block of key j, of all its query heads.

        u is slope (∂o·ṽ_j + level) q for dk, ∂o for dv, and level for dw. The sums use floor/Z in place of 1/Z.
        """
        block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        c, d, e, tq = block * T + tl.arange(0, T), tl.arange(0, D), tl.arange(0, E), tl.arange(0, TQ)
        own = head * m + c
        k = tl.load(k_ptr + own[:, None] * D + d[None, :], mask=c[:, None] < m, other=0)
        v = tl.load(v_ptr + own[:, None] * E + e[None, :], mask=c[:, None] < m, other=0)
        state = block * T // per_state
        floor = tl.load(floor_ptr + head * blocks + state)
        end = tl.minimum((state + 1) * per_state, n)
        dk, dv, dw = tl.zeros([T, D], tl.float32), tl.zeros([T, E], tl.float32), tl.zeros([T], tl.float32)
        for group in range(groups):
            row = (head * groups + group) * n
            for start in tl.range(block * T, end, TQ, num_stages=STAGES):
                r = start + tq
                here = r < end
                q = tl.load(q_ptr + (row + r)[:, None] * D + d[None, :], mask=here[:, None], other=0)
                grad = tl.load(grad_ptr + (row + r)[:, None] * E + e[None, :], mask=here[:, None], other=0)
                level = tl.load(level_ptr + row + r, mask=here, other=0)
                share = floor / tl.load(z_ptr + row + r, mask=here, other=float("inf"))
                p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale) * share[None, :]
                p = tl.where(c[:, None] <= r[None, :], p, 0.0)
                dv = tl.dot(p.to(q.dtype), grad, dv, input_precision=PRECISION)
                if HAS_DW:
                    dw += tl.sum(p * level[None, :], 1)
                p *= tl.dot(v, tl.trans(grad), input_precision=PRECISION) + level[None, :]
                dk = tl.dot(p.to(q.dtype), q, dk, input_precision=PRECISION)
        factor = 1.0 / (tl.load(after_ptr + head * states + state) * floor)
        tl.store(dk_ptr + own[:, None] * D + d[None, :], dk * (factor * slope), mask=c[:, None] < m)
        tl.store(dv_ptr + own[:, None] * E + e[None, :], dv * factor, mask=c[:, None] < m)
        if HAS_DW:
            tl.store(dw_ptr + own, dw * factor, mask=c < m)

    @triton.jit(do_not_specialize=["first_state"])
    def add_rows(
        x_ptr, y_ptr, s_ptr, big_ptr, small_ptr, g_ptr, exact_ptr, row_ptr, head_ptr, after_ptr, slot_ptr, out_ptr,
        z_ptr, n, groups, heads, first_state, last_state, per_state, s_size, big_size, small_size,
        linear_at, head_size, head_at, factor,
        SLOTS: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, T: tl.constexpr, SUB: tl.constexpr,
        TURNED: tl.constexpr, EXACT: tl.constexpr, HAS_G: tl.constexpr, HAS_Z: tl.constexpr, HAS_HEAD: tl.constexpr,
        HAS_AFTER: tl.constexpr, MULTIPLIES: tl.constexpr, DIVIDES: tl.constexpr, PRECISION: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """Compute factor · (Σ_slots (y ⊗ x) S + rest + exact) for T rows with the state of their block.

        The rows start at the block of first_state, whose S comes first. TURNED (bilinear): rest = y Lᵀ +
        g (2 x C + z1), and S is the output of `turn`. Otherwise y = x and rest = x L + n0; if HAS_Z, the same sum for
        x·(x C + z1) + z0 is stored in z. EXACT: the exact blocks are in `exact` and z. The factor is a number times the
        factor of the head, times after[state], times or divided by the number of the row, where present.
        """
        row_head = tl.program_id(1).to(tl.int64)
        head = row_head // groups
        start = first_state * per_state + tl.program_id(0) * T
        r = start + tl.arange(0, T)
        here = r[:, None] < n
        cx, cy, co = tl.arange(0, X), tl.arange(0, Y), tl.arange(0, OUT)
        i, sub, rows = tl.arange(0, 16), tl.arange(0, SUB), tl.arange(0, SUB * 16)
        state = tl.minimum(start // per_state, last_state)
        s_at = s_ptr + ((state - first_state) * heads + head) * s_size
        linear = big_ptr + (state * heads + head) * big_size + linear_at
        small = small_ptr + (state * heads + head) * small_size
        at = row_head * n + r
        x_at, y_at = x_ptr + at[:, None] * X, y_ptr + at[:, None] * Y
        total = tl.zeros([T, OUT], tl.float32)
        if SLOTS > 0:
            for step in tl.range(0, SLOTS * (16 // SUB), num_stages=STAGES):
                slot, offset = step // (16 // SUB), step % (16 // SUB) * SUB
                first, second = tl.load(slot_ptr + 3 * slot + 1), tl.load(slot_ptr + 3 * slot + 2)
                a = tl.load(y_at + first * 16 + offset + sub[None, :], mask=here, other=0)
                b = tl.load(x_at + second * 16 + i[None, :], mask=here, other=0)
                s = tl.load(s_at + (slot * 256 + offset * 16) * OUT + rows[:, None] * OUT + co[None, :])
                features = tl.reshape(a[:, :, None] * b[:, None, :], [T, SUB * 16])
                total = tl.dot(features, s, total, input_precision=PRECISION)
        scaled = tl.zeros([T], tl.float32) + factor
        if HAS_HEAD:
            scaled *= tl.load(head_ptr + head * head_size + head_at)
        if HAS_AFTER:
            scaled *= tl.load(after_ptr + head * (last_state + 1) + state)
        if MULTIPLIES:
            scaled *= tl.load(row_ptr + at, mask=r < n, other=0)
        if DIVIDES:
            scaled /= tl.load(row_ptr + at, mask=r < n, other=1)
        # These products come after the loop: before it, their operands would hold shared memory until it ends.
        x = tl.load(x_at + cx[None, :], mask=here, other=0)
        y = tl.load(y_at + cy[None, :], mask=here, other=0)
        for part in tl.static_range(2):
            if TURNED:
                matrix = tl.load(linear + part * Y * OUT + co[None, :] * Y + cy[:, None])
            else:
                matrix = tl.load(linear + part * Y * OUT + cy[:, None] * OUT + co[None, :])
            total = tl.dot(y, matrix, total, input_precision=PRECISION)
        if not TURNED:
            total += tl.load(small + X + 1 + co)[None, :]
        if TURNED or HAS_Z:
            along = tl.zeros([T, X], tl.float32)
            if SLOTS > 0:
                square = tl.load(linear + 2 * Y * OUT + cx[:, None] * X + cx[None, :])
                along = tl.dot(x, square, along, input_precision=PRECISION)
            z1 = tl.load(small + cx)[None, :]
            if TURNED:
                along = 2 * along + z1
                if HAS_G:
                    along *= tl.load(g_ptr + at, mask=r < n, other=0)[:, None]
                total += along
            else:
                z = tl.sum(x.to(tl.float32) * (along + z1), 1) + tl.load(small + X)
                if EXACT:
                    z += tl.load(z_ptr + at, mask=r < n, other=0)
                tl.store(z_ptr + at, z * scaled, mask=r < n)
        if EXACT:
            total += tl.load(exact_ptr + at[:, None] * OUT + co[None, :], mask=here, other=0)
        total *= scaled[:, None]
        tl.store(out_ptr + at[:, None] * OUT + co[None, :], total.to(out_ptr.dtype.element_ty), mask=here)

    return SimpleNamespace(
        prepare=prepare, query_moments=query_moments, finish_queries=finish_queries, turn=turn,
        exact_queries=exact_queries, exact_keys=exact_keys, add_rows=add_rows,
    )  # fmt: skip
