"""Triton kernels of gradients: sums over queries, rows that read a state, and the exact blocks of causal gradients.

Tiles, slots and layouts are those of `kernels`. A tile of rows or keys never crosses a block of `per_state` tokens.
Every address is masked, or inside its tensor because a size is a multiple of the tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from functools import lru_cache
from types import SimpleNamespace

from depthgauge.fast_attention.triton.kernels import TILE, slots


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
