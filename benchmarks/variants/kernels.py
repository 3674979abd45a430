"""Kernel variants measured by sweep.py: cross-entropy + z-loss value and gradient, one row a program."""
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as cpa
from triton.experimental.gluon.language.nvidia.hopper import tma, mbarrier

L2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1.0e30)


@triton.jit
def ex2(x, PROBE: tl.constexpr = 0):
    if PROBE:
        return x * 0.001 + 1.0
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                         pack=1)


@triton.jit
def _step(x, m, s, h, ENT: tl.constexpr, PROBE: tl.constexpr):
    mx = tl.max(tl.max(x, 2), 1) * L2E
    mn = tl.maximum(m, mx)
    d = x * L2E - mn[:, None, None]
    e = ex2(d, PROBE)
    sc = ex2(m - mn)
    if ENT:
        h = sc * (h + s * (m - mn)) + tl.sum(tl.sum(e * d, 2), 1)
    s = s * sc + tl.sum(tl.sum(e, 2), 1)
    return mn, s, h


@triton.jit
def plain(x_ptr, g_ptr, lab_ptr, out_ptr, w, zw, cw, T, V, U: tl.constexpr, W: tl.constexpr, REV: tl.constexpr,
          PERSIST: tl.constexpr, EV1: tl.constexpr, EV2: tl.constexpr, ST: tl.constexpr, ENT: tl.constexpr,
          PROBE: tl.constexpr, WRITE: tl.constexpr = 1):
    N: tl.constexpr = 32 * W
    B: tl.constexpr = U * N * 8
    offs = (tl.arange(0, U)[None, :, None] * (N * 8) + tl.arange(0, N)[:, None, None] * 8
            + tl.arange(0, 8)[None, None, :])
    nfull = V // B
    pid = tl.program_id(0)
    if PERSIST:
        step = tl.num_programs(0)
        stop = T
    else:
        step = 1
        stop = pid + 1
    for row in range(pid, stop, step):
        xr = x_ptr + row.to(tl.int64) * V
        gr = g_ptr + row.to(tl.int64) * V
        m = tl.full([N], LOW, tl.float32)
        s = tl.zeros([N], tl.float32)
        h = tl.zeros([N], tl.float32)
        lab = tl.load(lab_ptr + row)
        xl = tl.load(xr + lab).to(tl.float32)
        for t in range(nfull):
            x = tl.load(xr + t * B + offs, eviction_policy=EV1).to(tl.float32)
            m, s, h = _step(x, m, s, h, ENT, PROBE)
        if nfull * B < V:
            x = tl.load(xr + nfull * B + offs, mask=nfull * B + offs < V, other=LOW,
                        eviction_policy=EV1).to(tl.float32)
            m, s, h = _step(x, m, s, h, ENT, PROBE)
        M = tl.max(m, 0)
        sc = ex2(m - M)
        S = tl.sum(s * sc, 0)
        lse2 = M + tl.log2(S)
        lse = lse2 * LN2
        A = w * (1.0 + 2.0 * zw * lse)
        if ENT:
            H = tl.sum(sc * (h + s * (m - M)), 0)
            ent = lse2 - (H / S + M)
            tl.store(out_ptr + 2 * T + row, ent * LN2)
            A = A + cw * ent
        tl.store(out_ptr + row, xl - lse)
        tl.store(out_ptr + T + row, lse)
        if WRITE:
            if nfull * B < V:
                x = tl.load(xr + nfull * B + offs, mask=nfull * B + offs < V, other=0.0, eviction_policy=EV2)
                d = x.to(tl.float32) * L2E - lse2
                if ENT:
                    g = ex2(d, PROBE) * (A + cw * d)
                else:
                    g = ex2(d, PROBE) * A
                tl.store(gr + nfull * B + offs, g.to(g_ptr.dtype.element_ty), mask=nfull * B + offs < V,
                         cache_modifier=ST)
            for t in range(nfull):
                if REV:
                    c = (nfull - 1 - t) * B
                else:
                    c = t * B
                x = tl.load(xr + c + offs, eviction_policy=EV2)
                d = x.to(tl.float32) * L2E - lse2
                if ENT:
                    g = ex2(d, PROBE) * (A + cw * d)
                else:
                    g = ex2(d, PROBE) * A
                tl.store(gr + c + offs, g.to(g_ptr.dtype.element_ty), cache_modifier=ST)
            tl.debug_barrier()
            dl = xl * L2E - lse2
            if ENT:
                gl_ = ex2(dl) * (A + cw * dl) - w
            else:
                gl_ = ex2(dl) * A - w
            tl.store(gr + lab, gl_.to(g_ptr.dtype.element_ty))


@triton.jit
def writer(x_ptr, g_ptr, lab_ptr, out_ptr, w, zw, T, V, U: tl.constexpr, W: tl.constexpr, EV: tl.constexpr,
           ST: tl.constexpr):
    N: tl.constexpr = 32 * W
    B: tl.constexpr = U * N * 8
    row = tl.program_id(1)
    offs = (tl.program_id(0) * B + tl.arange(0, U)[None, :, None] * (N * 8) + tl.arange(0, N)[:, None, None] * 8
            + tl.arange(0, 8)[None, None, :])
    xr = x_ptr + row.to(tl.int64) * V
    x = tl.load(xr + offs, mask=offs < V, other=0.0, eviction_policy=EV)
    lse = tl.load(out_ptr + T + row)
    lab = tl.load(lab_ptr + row)
    A = w * (1.0 + 2.0 * zw * lse)
    g = ex2(x.to(tl.float32) * L2E - lse * L2E) * A
    g = tl.where(offs == lab, g - w, g)
    tl.store(g_ptr + row.to(tl.int64) * V + offs, g.to(g_ptr.dtype.element_ty), mask=offs < V, cache_modifier=ST)


@triton.jit
def _kstep(x, y, mx, sx, my, sy, k):
    nx = tl.maximum(mx, tl.max(tl.max(x, 2), 1) * L2E)
    ny = tl.maximum(my, tl.max(tl.max(y, 2), 1) * L2E)
    dx = x * L2E - nx[:, None, None]
    dy = y * L2E - ny[:, None, None]
    f = ex2(dy)
    cy = ex2(my - ny)
    k = cy * (k - sy * ((ny - my) - (nx - mx))) + tl.sum(tl.sum(f * (dy - dx), 2), 1)
    sx = sx * ex2(mx - nx) + tl.sum(tl.sum(ex2(dx), 2), 1)
    sy = sy * cy + tl.sum(tl.sum(f, 2), 1)
    return nx, sx, ny, sy, k


@triton.jit
def plain_kd(x_ptr, y_ptr, g_ptr, lab_ptr, out_ptr, w, zw, kw, T, V, U: tl.constexpr, W: tl.constexpr,
             REV: tl.constexpr, PERSIST: tl.constexpr, EV1: tl.constexpr, EV2: tl.constexpr, ST: tl.constexpr,
             D: tl.constexpr = 0):
    N: tl.constexpr = 32 * W
    B: tl.constexpr = U * N * 8
    offs = (tl.arange(0, U)[None, :, None] * (N * 8) + tl.arange(0, N)[:, None, None] * 8
            + tl.arange(0, 8)[None, None, :])
    nfull = V // B
    pid = tl.program_id(0)
    if PERSIST:
        step = tl.num_programs(0)
        stop = T
    else:
        step = 1
        stop = pid + 1
    for row in range(pid, stop, step):
        xr = x_ptr + row.to(tl.int64) * V
        yr = y_ptr + row.to(tl.int64) * V
        gr = g_ptr + row.to(tl.int64) * V
        mx = tl.full([N], LOW, tl.float32)
        my = tl.full([N], LOW, tl.float32)
        sx = tl.zeros([N], tl.float32)
        sy = tl.zeros([N], tl.float32)
        k = tl.zeros([N], tl.float32)
        lab = tl.load(lab_ptr + row)
        xl = tl.load(xr + lab).to(tl.float32)
        yl = tl.load(yr + lab).to(tl.float32)
        if D > 0:
            for i in range(D):
                if i < nfull:
                    _l2_prefetch(xr + i * B, B)
                    _l2_prefetch(yr + i * B, B)
        for t in range(nfull):
            if D > 0:
                if t + D < nfull:
                    _l2_prefetch(xr + (t + D) * B, B)
                    _l2_prefetch(yr + (t + D) * B, B)
            x = tl.load(xr + t * B + offs, eviction_policy=EV1)
            y = tl.load(yr + t * B + offs, eviction_policy=EV1)
            mx, sx, my, sy, k = _kstep(x.to(tl.float32), y.to(tl.float32), mx, sx, my, sy, k)
        if nfull * B < V:
            tm = nfull * B + offs < V
            x = tl.load(xr + nfull * B + offs, mask=tm, other=LOW, eviction_policy=EV1)
            y = tl.load(yr + nfull * B + offs, mask=tm, other=LOW, eviction_policy=EV1)
            mx, sx, my, sy, k = _kstep(x.to(tl.float32), y.to(tl.float32), mx, sx, my, sy, k)
        MX = tl.max(mx, 0)
        MY = tl.max(my, 0)
        SX = tl.sum(sx * ex2(mx - MX), 0)
        cy = ex2(my - MY)
        SY = tl.sum(sy * cy, 0)
        K = tl.sum(cy * (k - sy * ((MY - my) - (MX - mx))), 0)
        lx = MX + tl.log2(SX)
        ly = MY + tl.log2(SY)
        lse = lx * LN2
        A = w * (1.0 + 2.0 * zw * lse) + kw
        tl.store(out_ptr + row, xl - lse)
        tl.store(out_ptr + T + row, lse)
        tl.store(out_ptr + 2 * T + row, (K / SY - tl.log2(SY) + tl.log2(SX)) * LN2)
        if nfull * B < V:
            tm = nfull * B + offs < V
            x = tl.load(xr + nfull * B + offs, mask=tm, other=0.0, eviction_policy=EV2).to(tl.float32)
            y = tl.load(yr + nfull * B + offs, mask=tm, other=0.0, eviction_policy=EV2).to(tl.float32)
            g = ex2(x * L2E - lx) * A - ex2(y * L2E - ly) * kw
            tl.store(gr + nfull * B + offs, g.to(g_ptr.dtype.element_ty), mask=tm, cache_modifier=ST)
        for t in range(nfull):
            if REV:
                c = (nfull - 1 - t) * B
            else:
                c = t * B
            x = tl.load(xr + c + offs, eviction_policy=EV2).to(tl.float32)
            y = tl.load(yr + c + offs, eviction_policy=EV2).to(tl.float32)
            g = ex2(x * L2E - lx) * A - ex2(y * L2E - ly) * kw
            tl.store(gr + c + offs, g.to(g_ptr.dtype.element_ty), cache_modifier=ST)
        tl.debug_barrier()
        gg = ex2(xl * L2E - lx) * A - ex2(yl * L2E - ly) * kw - w
        tl.store(gr + lab, gg.to(g_ptr.dtype.element_ty))


@triton.jit
def _l2_prefetch(ptr, elements):
    """One thread asks the bulk engine to bring `elements` two-byte elements into L2."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }", "=r,l,r",
        [ptr.to(tl.int64), elements * 2], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _grad(x, lse2, A, cw, ENT: tl.constexpr):
    d = x.to(tl.float32) * L2E - lse2
    if ENT:
        return ex2(d) * (A + cw * d)
    else:
        return ex2(d) * A


@triton.jit
def ahead(x_ptr, g_ptr, lab_ptr, out_ptr, w, zw, cw, T, V, U: tl.constexpr, W: tl.constexpr, PERSIST: tl.constexpr,
          PF: tl.constexpr, D: tl.constexpr, EV1: tl.constexpr, EV2: tl.constexpr, ST: tl.constexpr, EVS: tl.constexpr,
          ENT: tl.constexpr):
    """`plain`, reversed, with loads ahead: PF a tile ahead in registers, D tiles ahead in L2 (across rows if PERSIST)."""
    N: tl.constexpr = 32 * W
    B: tl.constexpr = U * N * 8
    offs = (tl.arange(0, U)[None, :, None] * (N * 8) + tl.arange(0, N)[:, None, None] * 8
            + tl.arange(0, 8)[None, None, :])
    nfull = V // B
    edge = nfull * B
    pid = tl.program_id(0)
    if PERSIST:
        step = tl.num_programs(0)
        stop = T
    else:
        step = 1
        stop = pid + 1
    for row in range(pid, stop, step):
        xr = x_ptr + row.to(tl.int64) * V
        gr = g_ptr + row.to(tl.int64) * V
        if D > 0:
            if (not PERSIST) or row == pid:
                if edge < V:
                    _l2_prefetch(xr + edge, V - edge)
                for i in range(D):
                    if i < nfull:
                        _l2_prefetch(xr + i * B, B)
        m = tl.full([N], LOW, tl.float32)
        s = tl.zeros([N], tl.float32)
        h = tl.zeros([N], tl.float32)
        lab = tl.load(lab_ptr + row)
        xl = tl.load(xr + lab).to(tl.float32)
        if PF:
            cur = tl.load(xr + offs, mask=offs < edge, other=LOW, eviction_policy=EV1)
        if edge < V:
            x = tl.load(xr + edge + offs, mask=edge + offs < V, other=LOW, eviction_policy=EV1)
            m, s, h = _step(x.to(tl.float32), m, s, h, ENT, 0)
        if PF:
            for t in range(1, nfull):
                nxt = tl.load(xr + t * B + offs, eviction_policy=EV1)
                if D > 0:
                    if t + D < nfull:
                        _l2_prefetch(xr + (t + D) * B, B)
                m, s, h = _step(cur.to(tl.float32), m, s, h, ENT, 0)
                cur = nxt
            m, s, h = _step(cur.to(tl.float32), m, s, h, ENT, 0)
        else:
            for t in range(nfull):
                if D > 0:
                    if t + D < nfull:
                        _l2_prefetch(xr + (t + D) * B, B)
                x = tl.load(xr + t * B + offs, eviction_policy=EV1)
                m, s, h = _step(x.to(tl.float32), m, s, h, ENT, 0)
        M = tl.max(m, 0)
        sc = ex2(m - M)
        S = tl.sum(s * sc, 0)
        lse2 = M + tl.log2(S)
        lse = lse2 * LN2
        A = w * (1.0 + 2.0 * zw * lse)
        if ENT:
            H = tl.sum(sc * (h + s * (m - M)), 0)
            ent = lse2 - (H / S + M)
            tl.store(out_ptr + 2 * T + row, ent * LN2)
            A = A + cw * ent
        tl.store(out_ptr + row, xl - lse)
        tl.store(out_ptr + T + row, lse)
        if PERSIST and D > 0:
            more = row + step < T
            xn = xr + step.to(tl.int64) * V
            if more & (edge < V):
                _l2_prefetch(xn + edge, V - edge)
            if more & (nfull < D):
                for i in range(nfull):
                    _l2_prefetch(xn + i * B, B)
        if PF:
            for t in range(1, nfull):
                nxt = tl.load(xr + (nfull - 1 - t) * B + offs, eviction_policy=EV2)
                if PERSIST and D > 0:
                    if more & (t >= nfull - D) & (nfull >= D):
                        _l2_prefetch(xn + (t - nfull + D) * B, B)
                g = _grad(cur, lse2, A, cw, ENT)
                tl.store(gr + (nfull - t) * B + offs, g.to(g_ptr.dtype.element_ty), cache_modifier=ST, eviction_policy=EVS)
                cur = nxt
            if PERSIST and D > 0:
                if more & (nfull == D):
                    _l2_prefetch(xn, B)
            g = _grad(cur, lse2, A, cw, ENT)
            tl.store(gr + offs, g.to(g_ptr.dtype.element_ty), mask=offs < edge, cache_modifier=ST, eviction_policy=EVS)
        else:
            for t in range(nfull):
                if PERSIST and D > 0:
                    if more & (t >= nfull - D) & (nfull >= D):
                        _l2_prefetch(xn + (t - nfull + D) * B, B)
                x = tl.load(xr + (nfull - 1 - t) * B + offs, eviction_policy=EV2)
                g = _grad(x, lse2, A, cw, ENT)
                tl.store(gr + (nfull - 1 - t) * B + offs, g.to(g_ptr.dtype.element_ty), cache_modifier=ST, eviction_policy=EVS)
        if edge < V:
            x = tl.load(xr + edge + offs, mask=edge + offs < V, other=0.0, eviction_policy=EV2)
            g = _grad(x, lse2, A, cw, ENT)
            tl.store(gr + edge + offs, g.to(g_ptr.dtype.element_ty), mask=edge + offs < V, cache_modifier=ST, eviction_policy=EVS)
        tl.debug_barrier()
        gg = _grad(xl, lse2, A, cw, ENT) - w
        tl.store(gr + lab, gg.to(g_ptr.dtype.element_ty))


# ---- a row over P programs ------------------------------------------------------------------------------------------
# Each program takes C columns, publishes its (max, sum) as one 64-bit word that is its own flag (a sum is never zero),
# and polls its neighbours' words. P adjacent programs make a row; programs start in order, so a partner is resident or
# next. The words must be zero before the launch.


@triton.jit
def _pack(a, b):
    hi = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return hi | (b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _first(v):
    return (v >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _second(v):
    return v.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _await(ptr, v):
    while v == 0:
        v = tl.load(ptr, volatile=True)
    return v


@triton.jit
def _await_all(ptr, COUNT: tl.constexpr):
    """One thread polls COUNT words in turn; the others wait at the barrier. Unmeasured: see NOTES.md."""
    for p in tl.static_range(COUNT):
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .pred q; .reg .u32 t; .reg .b64 v; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE;"
            " AGAIN: ld.relaxed.gpu.global.b64 v, [$1]; setp.ne.b64 q, v, 0; @q bra DONE; nanosleep.u32 64; bra AGAIN;"
            " DONE: mov.u32 $0, 0; }", "=r,l", [(ptr + p).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def split(x_ptr, g_ptr, lab_ptr, out_ptr, part_ptr, w, zw, cw, T, V, C, P: tl.constexpr, U: tl.constexpr,
          W: tl.constexpr, D: tl.constexpr, EV1: tl.constexpr, EV2: tl.constexpr, ST: tl.constexpr,
          EVS: tl.constexpr, ENT: tl.constexpr, ONE: tl.constexpr = 0):
    N: tl.constexpr = 32 * W
    B: tl.constexpr = U * N * 8
    NW: tl.constexpr = 2 if ENT else 1
    offs = (tl.arange(0, U)[None, :, None] * (N * 8) + tl.arange(0, N)[:, None, None] * 8
            + tl.arange(0, 8)[None, None, :])
    row = tl.program_id(0) // P
    part = tl.program_id(0) % P
    lo = part * C
    hi = tl.minimum(V, lo + C)
    nfull = tl.maximum(hi - lo, 0) // B
    edge = lo + nfull * B
    xr = x_ptr + row.to(tl.int64) * V
    gr = g_ptr + row.to(tl.int64) * V
    if D > 0:
        for i in range(D):
            if i < nfull:
                _l2_prefetch(xr + lo + i * B, B)
    m = tl.full([N], LOW, tl.float32)
    s = tl.zeros([N], tl.float32)
    h = tl.zeros([N], tl.float32)
    lab = tl.load(lab_ptr + row)
    xl = tl.load(xr + lab).to(tl.float32)
    if edge < hi:
        x = tl.load(xr + edge + offs, mask=edge + offs < hi, other=LOW, eviction_policy=EV1)
        m, s, h = _step(x.to(tl.float32), m, s, h, ENT, 0)
    for t in range(nfull):
        if D > 0:
            if t + D < nfull:
                _l2_prefetch(xr + lo + (t + D) * B, B)
        x = tl.load(xr + lo + t * B + offs, eviction_policy=EV1)
        m, s, h = _step(x.to(tl.float32), m, s, h, ENT, 0)
    M = tl.max(m, 0)
    sc = ex2(m - M)
    S = tl.sum(s * sc, 0)
    if ENT:
        H = tl.sum(sc * (h + s * (m - M)), 0)
    if P > 1:
        word = part_ptr + row * (P * NW)
        tl.atomic_xchg(word + part, _pack(M, S), sem="relaxed", scope="gpu")
        if ENT:
            tl.atomic_xchg(word + P + part, _pack(H, 1.0 + 0.0 * H), sem="relaxed", scope="gpu")
        if ONE:
            _await_all(word, P * NW)
        vs = ()
        hs = ()
        for p in tl.static_range(P):
            vs = vs + (tl.load(word + p, volatile=True), )
        if ENT:
            for p in tl.static_range(P):
                hs = hs + (tl.load(word + P + p, volatile=True), )
        M = LOW
        for p in tl.static_range(P):
            v = _await(word + p, vs[p])
            vs = vs + (v, )
            M = tl.maximum(M, _first(v))
        S = 0.0
        H = 0.0
        for p in tl.static_range(P):
            mp = _first(vs[P + p])
            sp = _second(vs[P + p])
            cp = ex2(mp - M)
            S += sp * cp
            if ENT:
                hp = _first(_await(word + P + p, hs[p]))
                H += cp * (hp + sp * (mp - M))
    lse2 = M + tl.log2(S)
    lse = lse2 * LN2
    A = w * (1.0 + 2.0 * zw * lse)
    if ENT:
        ent = lse2 - (H / S + M)
        A = A + cw * ent
    if part == 0:
        tl.store(out_ptr + row, xl - lse)
        tl.store(out_ptr + T + row, lse)
        if ENT:
            tl.store(out_ptr + 2 * T + row, ent * LN2)
    for t in range(nfull):
        c = lo + (nfull - 1 - t) * B
        x = tl.load(xr + c + offs, eviction_policy=EV2)
        g = _grad(x, lse2, A, cw, ENT)
        tl.store(gr + c + offs, g.to(g_ptr.dtype.element_ty), cache_modifier=ST, eviction_policy=EVS)
    if edge < hi:
        x = tl.load(xr + edge + offs, mask=edge + offs < hi, other=0.0, eviction_policy=EV2)
        g = _grad(x, lse2, A, cw, ENT)
        tl.store(gr + edge + offs, g.to(g_ptr.dtype.element_ty), mask=edge + offs < hi, cache_modifier=ST,
                 eviction_policy=EVS)
    tl.debug_barrier()
    if (lab >= lo) & (lab < hi):
        gg = _grad(xl, lse2, A, cw, ENT) - w
        tl.store(gr + lab, gg.to(g_ptr.dtype.element_ty))


@triton.jit
def split_kd(x_ptr, y_ptr, g_ptr, lab_ptr, out_ptr, part_ptr, w, zw, kw, T, V, C, P: tl.constexpr, U: tl.constexpr,
             W: tl.constexpr, D: tl.constexpr, EV1: tl.constexpr, EV2: tl.constexpr, ST: tl.constexpr,
             EVS: tl.constexpr, ONE: tl.constexpr = 0):
    N: tl.constexpr = 32 * W
    B: tl.constexpr = U * N * 8
    offs = (tl.arange(0, U)[None, :, None] * (N * 8) + tl.arange(0, N)[:, None, None] * 8
            + tl.arange(0, 8)[None, None, :])
    row = tl.program_id(0) // P
    part = tl.program_id(0) % P
    lo = part * C
    hi = tl.minimum(V, lo + C)
    nfull = tl.maximum(hi - lo, 0) // B
    edge = lo + nfull * B
    xr = x_ptr + row.to(tl.int64) * V
    yr = y_ptr + row.to(tl.int64) * V
    gr = g_ptr + row.to(tl.int64) * V
    if D > 0:
        for i in range(D):
            if i < nfull:
                _l2_prefetch(xr + lo + i * B, B)
                _l2_prefetch(yr + lo + i * B, B)
    mx = tl.full([N], LOW, tl.float32)
    my = tl.full([N], LOW, tl.float32)
    sx = tl.zeros([N], tl.float32)
    sy = tl.zeros([N], tl.float32)
    k = tl.zeros([N], tl.float32)
    lab = tl.load(lab_ptr + row)
    xl = tl.load(xr + lab).to(tl.float32)
    yl = tl.load(yr + lab).to(tl.float32)
    if edge < hi:
        tm = edge + offs < hi
        x = tl.load(xr + edge + offs, mask=tm, other=LOW, eviction_policy=EV1)
        y = tl.load(yr + edge + offs, mask=tm, other=LOW, eviction_policy=EV1)
        mx, sx, my, sy, k = _kstep(x.to(tl.float32), y.to(tl.float32), mx, sx, my, sy, k)
    for t in range(nfull):
        if D > 0:
            if t + D < nfull:
                _l2_prefetch(xr + lo + (t + D) * B, B)
                _l2_prefetch(yr + lo + (t + D) * B, B)
        x = tl.load(xr + lo + t * B + offs, eviction_policy=EV1)
        y = tl.load(yr + lo + t * B + offs, eviction_policy=EV1)
        mx, sx, my, sy, k = _kstep(x.to(tl.float32), y.to(tl.float32), mx, sx, my, sy, k)
    MX = tl.max(mx, 0)
    MY = tl.max(my, 0)
    SX = tl.sum(sx * ex2(mx - MX), 0)
    cy = ex2(my - MY)
    SY = tl.sum(sy * cy, 0)
    K = tl.sum(cy * (k - sy * ((MY - my) - (MX - mx))), 0)
    if P > 1:
        word = part_ptr + row * (P * 3)
        tl.atomic_xchg(word + part, _pack(MX, SX), sem="relaxed", scope="gpu")
        tl.atomic_xchg(word + P + part, _pack(MY, SY), sem="relaxed", scope="gpu")
        tl.atomic_xchg(word + 2 * P + part, _pack(K, 1.0 + 0.0 * K), sem="relaxed", scope="gpu")
        if ONE:
            _await_all(word, 3 * P)
        vs = ()
        for p in tl.static_range(3 * P):
            vs = vs + (tl.load(word + p, volatile=True), )
        MX = LOW
        MY = LOW
        for p in tl.static_range(3 * P):
            v = _await(word + p, vs[p])
            vs = vs + (v, )
            if p < P:
                MX = tl.maximum(MX, _first(v))
            elif p < 2 * P:
                MY = tl.maximum(MY, _first(v))
        SX = 0.0
        SY = 0.0
        K = 0.0
        for p in tl.static_range(P):
            px = _first(vs[3 * P + p])
            py = _first(vs[4 * P + p])
            qy = _second(vs[4 * P + p])
            fy = ex2(py - MY)
            SX += _second(vs[3 * P + p]) * ex2(px - MX)
            SY += qy * fy
            K += fy * (_first(vs[5 * P + p]) - qy * ((MY - py) - (MX - px)))
    lx = MX + tl.log2(SX)
    ly = MY + tl.log2(SY)
    lse = lx * LN2
    A = w * (1.0 + 2.0 * zw * lse) + kw
    if part == 0:
        tl.store(out_ptr + row, xl - lse)
        tl.store(out_ptr + T + row, lse)
        tl.store(out_ptr + 2 * T + row, (K / SY - tl.log2(SY) + tl.log2(SX)) * LN2)
    for t in range(nfull):
        c = lo + (nfull - 1 - t) * B
        x = tl.load(xr + c + offs, eviction_policy=EV2).to(tl.float32)
        y = tl.load(yr + c + offs, eviction_policy=EV2).to(tl.float32)
        g = ex2(x * L2E - lx) * A - ex2(y * L2E - ly) * kw
        tl.store(gr + c + offs, g.to(g_ptr.dtype.element_ty), cache_modifier=ST, eviction_policy=EVS)
    if edge < hi:
        tm = edge + offs < hi
        x = tl.load(xr + edge + offs, mask=tm, other=0.0, eviction_policy=EV2).to(tl.float32)
        y = tl.load(yr + edge + offs, mask=tm, other=0.0, eviction_policy=EV2).to(tl.float32)
        g = ex2(x * L2E - lx) * A - ex2(y * L2E - ly) * kw
        tl.store(gr + edge + offs, g.to(g_ptr.dtype.element_ty), mask=tm, cache_modifier=ST, eviction_policy=EVS)
    tl.debug_barrier()
    if (lab >= lo) & (lab < hi):
        gg = ex2(xl * L2E - lx) * A - ex2(yl * L2E - ly) * kw - w
        tl.store(gr + lab, gg.to(g_ptr.dtype.element_ty))


# ---- the row in a ring of shared memory ----------------------------------------------------------------------------
# Ring positions of one row: q in [0, n) is tile q for the first sweep; q in [n, n+R) reads tile n+R-1-q again.
# The second sweep consumes positions R .. n+R-1, so each position is freed exactly once, in order.


@gluon.jit
def gex2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _gstep(x, valid, m, s, h, ENT: gl.constexpr):
    mn = gl.maximum(m, gl.where(valid, gl.max(x, 1) * L2E, m))
    d = x * L2E - gl.expand_dims(mn, 1)
    e = gex2(d)
    sc = gex2(m - mn)
    if ENT:
        h = sc * (h + s * (m - mn)) + gl.where(valid, gl.sum(e * d, 1), 0.0)
    s = s * sc + gl.where(valid, gl.sum(e, 1), 0.0)
    return mn, s, h


@gluon.jit(do_not_specialize=["n", "R"])
def ring(src, g_ptr, lab_ptr, out_ptr, x_ptr, w, zw, cw, T, V, n, R, B: gl.constexpr, S: gl.constexpr,
         W: gl.constexpr, TMA: gl.constexpr, SKEW: gl.constexpr, ST: gl.constexpr, ENT: gl.constexpr):
    NV: gl.constexpr = B // 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    LT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    vec = gl.arange(0, NV, LR) * 8
    inner = gl.arange(0, 8, gl.SliceLayout(0, L))
    offs = gl.expand_dims(vec, 1) + gl.expand_dims(inner, 0)
    pid = gl.program_id(0)
    step = gl.num_programs(0)
    if SKEW > 0:
        if pid % 2 == 1:
            zero = gl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [SKEW + pid * 0],
                                             dtype=gl.int32, is_pure=False, pack=1)
            pid = pid + zero
    if TMA:
        buf = gl.allocate_shared_memory(src.dtype, [S] + src.block_type.shape, src.layout)
        bars = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(S):
            mbarrier.init(bars.index(i), count=1)
    else:
        SL: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
        buf = gl.allocate_shared_memory(g_ptr.dtype.element_ty, [S, NV, 8], SL)
    Lq = n + R
    # prologue: the first S positions
    lrow = pid
    lq = 0
    for i in range(S):
        if TMA:
            bar = bars.index(i)
            mbarrier.expect(bar, B * 2, pred=lrow < T)
            tile = gl.where(lq < n, lq, n + R - 1 - lq)
            tma.async_copy_global_to_shared(src, [lrow, tile * (B // 64), 0], bar, buf.index(i), pred=lrow < T)
        else:
            tile = gl.where(lq < n, lq, n + R - 1 - lq)
            cols = tile * B + offs
            cpa.async_copy_global_to_shared(buf.index(i), src + lrow.to(gl.int64) * V + cols,
                                            mask=(cols < V) & (lrow < T))
            cpa.commit_group()
        lq += 1
        if lq == Lq:
            lq = 0
            lrow += step
    base = 0
    for row in range(pid, T, step):
        xr = x_ptr + row.to(gl.int64) * V
        gr = g_ptr + row.to(gl.int64) * V
        lab = gl.load(lab_ptr + row)
        xl = gl.load(xr + lab).to(gl.float32)
        m = gl.full([NV], LOW, gl.float32, LR)
        s = gl.full([NV], 0.0, gl.float32, LR)
        h = gl.full([NV], 0.0, gl.float32, LR)
        for j in range(n):
            pos = base + j
            slot = pos % S
            if TMA:
                mbarrier.wait(bars.index(slot), (pos // S) & 1)
                xs = gl.convert_layout(buf.index(slot).reshape([NV, 8]).load(L), L)
            else:
                cpa.wait_group(S - 1)
                xs = buf.index(slot).load(L)
            if j < R:
                tile = gl.where(lq < n, lq, n + R - 1 - lq)
                if TMA:
                    gl.thread_barrier()
                    bar = bars.index(slot)
                    mbarrier.expect(bar, B * 2, pred=lrow < T)
                    tma.async_copy_global_to_shared(src, [lrow, tile * (B // 64), 0], bar, buf.index(slot),
                                                    pred=lrow < T)
                else:
                    cols = tile * B + offs
                    cpa.async_copy_global_to_shared(buf.index(slot), src + lrow.to(gl.int64) * V + cols,
                                                    mask=(cols < V) & (lrow < T))
                lq += 1
                if lq == Lq:
                    lq = 0
                    lrow += step
            if not TMA:
                cpa.commit_group()
            m, s, h = _gstep(xs.to(gl.float32), j * B + vec < V, m, s, h, ENT)
        M = gl.max(m, 0)
        sc = gex2(m - M)
        SS = gl.sum(s * sc, 0)
        lse2 = M + gl.log2(SS)
        lse = lse2 * LN2
        A = w * (1.0 + 2.0 * zw * lse)
        if ENT:
            H = gl.sum(sc * (h + s * (m - M)), 0)
            ent = lse2 - (H / SS + M)
            gl.store(out_ptr + 2 * T + row, ent * LN2)
            A = A + cw * ent
        gl.store(out_ptr + row, xl - lse)
        gl.store(out_ptr + T + row, lse)
        for t in range(n):
            q = R + t
            pos = base + q
            slot = pos % S
            if TMA:
                mbarrier.wait(bars.index(slot), (pos // S) & 1)
                xs = gl.convert_layout(buf.index(slot).reshape([NV, 8]).load(L), L)
            else:
                cpa.wait_group(S - 1)
                xs = buf.index(slot).load(L)
            tile = gl.where(lq < n, lq, n + R - 1 - lq)
            if TMA:
                gl.thread_barrier()
                bar = bars.index(slot)
                mbarrier.expect(bar, B * 2, pred=lrow < T)
                tma.async_copy_global_to_shared(src, [lrow, tile * (B // 64), 0], bar, buf.index(slot), pred=lrow < T)
            else:
                cols = tile * B + offs
                cpa.async_copy_global_to_shared(buf.index(slot), src + lrow.to(gl.int64) * V + cols,
                                                mask=(cols < V) & (lrow < T))
                cpa.commit_group()
            lq += 1
            if lq == Lq:
                lq = 0
                lrow += step
            mine = gl.where(q < n, q, n + R - 1 - q)
            d = xs.to(gl.float32) * L2E - lse2
            if ENT:
                g = gex2(d) * (A + cw * d)
            else:
                g = gex2(d) * A
            cols2 = mine * B + offs
            gl.store(gr + cols2, g.to(g_ptr.dtype.element_ty), mask=cols2 < V, cache_modifier=ST)
        gl.thread_barrier()
        dl = xl * L2E - lse2
        if ENT:
            gg = gex2(dl) * (A + cw * dl) - w
        else:
            gg = gex2(dl) * A - w
        gl.store(gr + lab, gg.to(g_ptr.dtype.element_ty))
        base += Lq
    if not TMA:
        cpa.wait_group(0)


# ---- the same ring, part of the row kept in registers ---------------------------------------------------------------
# First sweep: tiles 0..R-1 are dropped (read again later), R..R+K-1 stay in registers, the rest stay in shared memory.


@gluon.jit
def _kstats(xs, valid, m, s, h, ENT: gl.constexpr):
    x = xs.to(gl.float32)
    mx = gl.max(gl.where(valid, gl.max(x, 2) * L2E, LOW), 0)
    mn = gl.maximum(m, mx)
    d = x * L2E - gl.expand_dims(gl.expand_dims(mn, 0), 2)
    e = gex2(d)
    sc = gex2(m - mn)
    if ENT:
        h = sc * (h + s * (m - mn)) + gl.sum(gl.where(valid, gl.sum(e * d, 2), 0.0), 0)
    s = s * sc + gl.sum(gl.where(valid, gl.sum(e, 2), 0.0), 0)
    return mn, s, h


@gluon.jit
def _kwrite(gr, cols, V, xs, lse2, A, cw, ST: gl.constexpr, ENT: gl.constexpr):
    d = xs.to(gl.float32) * L2E - lse2
    if ENT:
        g = gex2(d) * (A + cw * d)
    else:
        g = gex2(d) * A
    gl.store(gr + cols, g.to(gr.dtype.element_ty), mask=cols < V, cache_modifier=ST)


@gluon.jit
def _kfill(src, x_ptr, lrow, lq, T, V, n, R, step, slot, buf, bars, offs, B: gl.constexpr, TMA: gl.constexpr):
    """Loads the next ring position into `slot` and moves the cursor on."""
    tile = gl.where(lq < n, lq, n + R - 1 - lq)
    if TMA:
        bar = bars.index(slot)
        mbarrier.expect(bar, B * 2, pred=lrow < T)
        tma.async_copy_global_to_shared(src, [lrow, tile * (B // 64), 0], bar, buf.index(slot), pred=lrow < T)
    else:
        cols = tile * B + offs
        cpa.async_copy_global_to_shared(buf.index(slot), x_ptr + lrow.to(gl.int64) * V + cols, mask=(cols < V) & (lrow < T))
    lq += 1
    if lq == n + R:
        lq = 0
        lrow += step
    return lrow, lq


@gluon.jit
def _kread(buf, bars, pos, S: gl.constexpr, U: gl.constexpr, N: gl.constexpr, L: gl.constexpr, TMA: gl.constexpr):
    slot = pos % S
    if TMA:
        mbarrier.wait(bars.index(slot), (pos // S) & 1)
        return buf.index(slot).reshape([U, N, 8]).load(L)
    else:
        cpa.wait_group(S - 1)
        return buf.index(slot).load(L)


@gluon.jit(do_not_specialize=["n", "R"])
def ringk(src, g_ptr, lab_ptr, out_ptr, x_ptr, w, zw, cw, T, V, n, R, U: gl.constexpr, S: gl.constexpr,
          W: gl.constexpr, K: gl.constexpr, TMA: gl.constexpr, SKEW: gl.constexpr, ST: gl.constexpr,
          ENT: gl.constexpr):
    N: gl.constexpr = 32 * W
    B: gl.constexpr = U * N * 8
    L: gl.constexpr = gl.BlockedLayout([U, 1, 8], [1, 32, 1], [1, W, 1], [2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(2, L)
    LM: gl.constexpr = gl.SliceLayout(0, L2)
    col2 = (gl.expand_dims(gl.arange(0, U, gl.SliceLayout(1, L2)) * (N * 8), 1)
            + gl.expand_dims(gl.arange(0, N, LM) * 8, 0))
    inner = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, L))), 0), 0)
    offs = gl.expand_dims(col2, 2) + inner
    pid = gl.program_id(0)
    step = gl.num_programs(0)
    if SKEW > 0:
        if pid % 2 == 1:
            pid = pid + gl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [SKEW + pid * 0],
                                                  dtype=gl.int32, is_pure=False, pack=1)
    if TMA:
        buf = gl.allocate_shared_memory(src.dtype, [S] + src.block_type.shape, src.layout)
        bars = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
        for b0 in gl.static_range(S):
            mbarrier.init(bars.index(b0), count=1)
    else:
        buf = gl.allocate_shared_memory(g_ptr.dtype.element_ty, [S, U, N, 8], gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0]))
        bars = buf
    lrow = pid
    lq = 0
    for i in range(S):
        lrow, lq = _kfill(src, x_ptr, lrow, lq, T, V, n, R, step, i, buf, bars, offs, B, TMA)
        if not TMA:
            cpa.commit_group()
    base = 0
    for row in range(pid, T, step):
        xr = x_ptr + row.to(gl.int64) * V
        gr = g_ptr + row.to(gl.int64) * V
        lab = gl.load(lab_ptr + row)
        xl = gl.load(xr + lab).to(gl.float32)
        m = gl.full([N], LOW, gl.float32, LM)
        s = gl.full([N], 0.0, gl.float32, LM)
        h = gl.full([N], 0.0, gl.float32, LM)
        for j in range(R):
            xs = _kread(buf, bars, base + j, S, U, N, L, TMA)
            lrow, lq = _kfill(src, x_ptr, lrow, lq, T, V, n, R, step, (base + j) % S, buf, bars, offs, B, TMA)
            if not TMA:
                cpa.commit_group()
            m, s, h = _kstats(xs, j * B + col2 < V, m, s, h, ENT)
        kept = ()
        for k0 in gl.static_range(K):
            xk = _kread(buf, bars, base + R + k0, S, U, N, L, TMA)
            lrow, lq = _kfill(src, x_ptr, lrow, lq, T, V, n, R, step, (base + R + k0) % S, buf, bars, offs, B, TMA)
            if not TMA:
                cpa.commit_group()
            kept = kept + (xk, )
            m, s, h = _kstats(xk, (R + k0) * B + col2 < V, m, s, h, ENT)
        for j in range(R + K, n):
            xs = _kread(buf, bars, base + j, S, U, N, L, TMA)
            if not TMA:
                cpa.commit_group()
            m, s, h = _kstats(xs, j * B + col2 < V, m, s, h, ENT)
        M = gl.max(m, 0)
        sc = gex2(m - M)
        SS = gl.sum(s * sc, 0)
        lse2 = M + gl.log2(SS)
        lse = lse2 * LN2
        A = w * (1.0 + 2.0 * zw * lse)
        if ENT:
            H = gl.sum(sc * (h + s * (m - M)), 0)
            ent = lse2 - (H / SS + M)
            gl.store(out_ptr + 2 * T + row, ent * LN2)
            A = A + cw * ent
        gl.store(out_ptr + row, xl - lse)
        gl.store(out_ptr + T + row, lse)
        for q in range(R + K, n + R):
            xs = _kread(buf, bars, base + q, S, U, N, L, TMA)
            lrow, lq = _kfill(src, x_ptr, lrow, lq, T, V, n, R, step, (base + q) % S, buf, bars, offs, B, TMA)
            if not TMA:
                cpa.commit_group()
            _kwrite(gr, gl.where(q < n, q, n + R - 1 - q) * B + offs, V, xs, lse2, A, cw, ST, ENT)
        for k1 in gl.static_range(K):
            _kwrite(gr, (R + k1) * B + offs, V, kept[k1], lse2, A, cw, ST, ENT)
        gl.thread_barrier()
        dl = xl * L2E - lse2
        if ENT:
            gg = gex2(dl) * (A + cw * dl) - w
        else:
            gg = gex2(dl) * A - w
        gl.store(gr + lab, gg.to(g_ptr.dtype.element_ty))
        base += n + R
    if not TMA:
        cpa.wait_group(0)
