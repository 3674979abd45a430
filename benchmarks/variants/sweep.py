"""Measures kernel variants against a device copy of the same bytes: python sweep.py [--groups plain,ahead] [--only PATTERN].

Every group runs in its own process under a time limit (a wrong barrier can hang a kernel), compiles in parallel, then
takes its turn on the device. Each variant is checked against float64 on some rows, its output poisoned with NaN first.
"""
import argparse, fcntl, fnmatch, json, multiprocessing as mp, os, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = [(8192, 128256), (16384, 32000), (8192, 151936), (4096, 262144)]
LOCK = "/tmp/sweep.lock"


def variants(group):
    out = []
    if group == "plain":
        def p(U, W, rev, k=0, ev=("evict_last", "evict_first"), st=".cs", ent=0, probe=0, tag=""):
            name = f"plain U{U} W{W} {'rev' if rev else 'fwd'} {'grid' + str(k) if k else 'row'}{tag}"
            out.append((name, dict(kind="plain", U=U, W=W, REV=rev, k=k, EV1=ev[0], EV2=ev[1], ST=st, ENT=ent, PROBE=probe)))
        p(1, 16, 0); p(1, 32, 0); p(2, 16, 0); p(1, 16, 1); p(1, 32, 1); p(2, 16, 1); p(2, 32, 1); p(4, 16, 1); p(4, 8, 1)
        p(4, 32, 1); p(4, 32, 0)
        p(1, 32, 1, 1); p(2, 32, 1, 1); p(4, 32, 1, 1); p(4, 16, 1, 1); p(2, 32, 0, 1)
        p(1, 16, 1, 2); p(2, 16, 1, 2); p(4, 16, 1, 2); p(2, 16, 0, 2); p(4, 8, 1, 2); p(4, 8, 1, 3); p(4, 8, 1, 4); p(2, 8, 1, 4)
        p(2, 32, 1, 1, ("", ""), tag=" ev=-"); p(2, 32, 1, 1, ("", "evict_first"), tag=" ev=-/first")
        p(2, 32, 1, 1, ("evict_last", ""), tag=" ev=last/-"); p(2, 32, 1, 1, st=".cg", tag=" st=cg"); p(2, 32, 1, 1, st="", tag=" st=-")
        p(2, 32, 1, 1, st=".wt", tag=" st=wt")
        p(2, 16, 1, 2, ("", ""), tag=" ev=-"); p(1, 16, 1, 0, ("", ""), tag=" ev=-"); p(2, 16, 1, 0, ("", ""), tag=" ev=-")
        p(2, 32, 1, 1, probe=1, tag=" no-exp"); p(1, 16, 0, probe=1, tag=" no-exp")
        p(2, 32, 1, 1, ent=1, tag=" +entropy"); p(2, 16, 1, ent=1, tag=" +entropy"); p(1, 16, 0, ent=1, tag=" +entropy")
    if group == "kd":
        for U, W, rev, k in ((1, 16, 0, 0), (1, 16, 1, 0), (1, 32, 1, 0), (1, 32, 1, 1), (2, 16, 1, 1), (2, 16, 1, 0), (1, 16, 1, 2), (2, 8, 1, 2), (2, 8, 1, 3)):
            out.append((f"kd plain U{U} W{W} {'rev' if rev else 'fwd'} {'grid' + str(k) if k else 'row'}",
                        dict(kind="kd", U=U, W=W, REV=rev, k=k, EV1="evict_last", EV2="evict_first", ST=".cs")))
        for U, W, k in ((2, 16, 0), (4, 16, 0), (4, 8, 0), (4, 8, 8), (4, 16, 4), (2, 32, 2)):
            out.append((f"stats U{U} W{W} {'grid' + str(k) if k else 'row'}", dict(kind="plain", U=U, W=W, REV=0, k=k, EV1="evict_first", EV2="", ST="", ENT=0, PROBE=0, WRITE=0)))
        for U, W in ((1, 8), (2, 8), (4, 8), (1, 16), (2, 16), (4, 4), (8, 4)):
            out.append((f"write U{U} W{W}", dict(kind="write", U=U, W=W, EV="evict_first", ST=".cs")))
    if group == "split":
        def sp(P, U, W, D=0, st=".cs", evs="", ev=("evict_last", "evict_first"), ent=0, regs=None, tag=""):
            name = f"split P{P} U{U} W{W} D{D}" + (f" regs{regs}" if regs else "") + tag
            out.append((name, dict(kind="split", P=P, U=U, W=W, D=D, EV1=ev[0], EV2=ev[1], ST=st, EVS=evs, ENT=ent, regs=regs)))
        for P in (1, 2, 4, 8, 16):
            sp(P, 2, 16)
        for U, W in ((4, 16), (2, 32), (2, 8), (4, 8), (1, 16), (4, 4)):
            for P in (1, 2, 4, 8):
                sp(P, U, W)
        for P in (1, 4, 8):
            sp(P, 2, 16, 1); sp(P, 2, 16, 2); sp(P, 2, 16, st="", evs="evict_first", tag=" st=first"); sp(P, 2, 16, ev=("", "evict_first"), tag=" ev=-/first")
            sp(P, 2, 16, ev=("", ""), tag=" ev=-"); sp(P, 2, 16, regs=32)
        for P in (1, 2, 4, 8):
            for U, W, regs in ((2, 16, None), (2, 16, 32), (1, 16, None), (1, 16, 32), (2, 8, None), (2, 8, 32), (4, 8, None)):
                sp(P, U, W, ent=1, regs=regs, tag=" +entropy")
    if group == "poll1":                                      # compiled, never run yet
        for P in (2, 4, 8):
            for U, W, ent in ((2, 16, 0), (4, 16, 0), (4, 8, 0), (2, 8, 0), (2, 16, 1), (4, 8, 1)):
                out.append((f"split P{P} U{U} W{W} D0 one poller{' +entropy' if ent else ''}",
                            dict(kind="split", P=P, U=U, W=W, D=0, EV1="evict_last", EV2="evict_first", ST=".cs", EVS="", ENT=ent, regs=None, ONE=1)))
            for U, W in ((1, 16), (4, 8), (2, 8)):
                out.append((f"kd split P{P} U{U} W{W} D0 one poller",
                            dict(kind="splitkd", P=P, U=U, W=W, D=0, EV1="evict_last", EV2="evict_first", ST=".cs", EVS="", regs=None, ONE=1)))
    if group == "splitkd":
        for P in (1, 2, 4, 8, 16):
            for U, W, D, regs in ((1, 16, 0, None), (1, 16, 2, None), (2, 16, 0, None), (2, 16, 2, None), (2, 8, 0, None), (2, 8, 2, None), (1, 16, 0, 32), (4, 8, 0, None), (1, 8, 0, None)):
                out.append((f"kd split P{P} U{U} W{W} D{D}" + (f" regs{regs}" if regs else ""),
                            dict(kind="splitkd", P=P, U=U, W=W, D=D, EV1="evict_last", EV2="evict_first", ST=".cs", EVS="", regs=regs)))
    if group == "again":
        def ag(U, W, D, st, evs, ent=0, regs=None):
            out.append((f"ahead U{U} W{W} row D{D}{' st=first' if evs else ''}{f' regs{regs}' if regs else ''}{' +entropy' if ent else ''}",
                        dict(kind="ahead", U=U, W=W, k=0, PF=0, D=D, EV1="evict_last", EV2="evict_first", ST=st, EVS=evs, ENT=ent, regs=regs)))
        ag(4, 32, 0, ".cs", ""); ag(4, 32, 1, ".cs", ""); ag(4, 32, 1, "", "evict_first"); ag(2, 16, 0, ".cs", ""); ag(2, 16, 0, "", "evict_first"); ag(2, 32, 4, ".cs", "")
        for regs in (None, 32, 40):
            ag(2, 16, 0, ".cs", "", 1, regs); ag(1, 16, 0, ".cs", "", 1, regs)
        for U, S, W, K in ((4, 6, 16, 2), (4, 13, 8, 5), (4, 13, 8, 6), (4, 13, 8, 7)):
            out.append((f"ringk-tma U{U} S{S} W{W} K{K} grid1", dict(kind="ringk", TMA=1, U=U, S=S, W=W, K=K, k=1, SKEW=0, ST=".cs", ENT=0)))
        for U, W in ((2, 16), (4, 8)):
            out.append((f"stats U{U} W{W} row", dict(kind="plain", U=U, W=W, REV=0, k=0, EV1="evict_first", EV2="", ST="", ENT=0, PROBE=0, WRITE=0)))
        out.append(("write U4 W4", dict(kind="write", U=4, W=4, EV="evict_first", ST=".cs")))
    if group == "kd2":
        for U, W, k, D in ((2, 32, 0, 0), (2, 32, 1, 0), (4, 16, 0, 0), (4, 16, 1, 0), (2, 16, 0, 2), (2, 16, 0, 4), (2, 32, 0, 2), (2, 32, 0, 4), (1, 32, 0, 4),
                           (4, 16, 0, 2), (4, 8, 0, 0), (1, 16, 0, 8), (4, 32, 0, 0), (4, 32, 0, 2), (3, 16, 0, 0)):
            if U != 3:
                out.append((f"kd plain U{U} W{W} rev {'grid' + str(k) if k else 'row'} D{D}",
                            dict(kind="kd", U=U, W=W, REV=1, k=k, EV1="evict_last", EV2="evict_first", ST=".cs", D=D)))
    if group == "ahead":
        def a(U, W, k, PF, D, st=".cs", evs="", ev=("evict_last", "evict_first"), ent=0, tag=""):
            name = f"ahead U{U} W{W} {'grid' + str(k) if k else 'row'} PF{PF} D{D}{tag}"
            out.append((name, dict(kind="ahead", U=U, W=W, k=k, PF=PF, D=D, EV1=ev[0], EV2=ev[1], ST=st, EVS=evs, ENT=ent)))
        for k in (0, 1):
            for D in (0, 1, 2):
                a(4, 32, k, 0, D)
            for D in (0, 2, 4):
                a(2, 32, k, 1, D)
            for D in (0, 2):
                a(4, 32, k, 1, D)
            for D in (0, 2, 4):
                a(4, 16, k, 1, D)
            for D in (0, 1, 2):
                a(8, 16, k, 0, D)
            a(8, 16, k, 1, 0); a(8, 16, k, 1, 1); a(16, 8, k, 0, 0); a(16, 8, k, 0, 2); a(8, 8, k, 1, 0); a(8, 8, k, 1, 4)
            a(2, 32, k, 0, 4); a(2, 32, k, 0, 2)
        a(2, 16, 0, 1, 0); a(2, 16, 0, 1, 2); a(2, 16, 0, 0, 2); a(2, 16, 0, 0, 4); a(4, 16, 2, 0, 2); a(2, 16, 2, 0, 2); a(2, 16, 2, 1, 2); a(2, 16, 4, 0, 2); a(1, 16, 4, 0, 2)
        a(1, 16, 4, 1, 2)
        for k in (0, 1):
            a(4, 32, k, 0, 1, ev=("", "evict_first"), tag=" ev=-/first"); a(4, 32, k, 0, 1, ev=("", ""), tag=" ev=-")
            a(4, 32, k, 0, 1, st="", evs="evict_first", tag=" st=first"); a(4, 32, k, 0, 1, st="", tag=" st=-")
            a(4, 32, k, 0, 1, ent=1, tag=" +entropy")
        a(2, 16, 0, 0, 0, ent=1, tag=" +entropy"); a(2, 16, 0, 0, 0)
    if group == "ringk":
        def rk(tma, U, S, W, K, k=1, skew=0, ent=0, tag=""):
            name = f"ringk-{'tma' if tma else 'cpa'} U{U} S{S} W{W} K{K} grid{k}" + (f" skew{skew}" if skew else "") + tag
            out.append((name, dict(kind="ringk", TMA=tma, U=U, S=S, W=W, K=K, k=k, SKEW=skew, ST=".cs", ENT=ent)))
        for K in (0, 3, 4, 6, 7):
            rk(1, 2, 13, 16, K)
        for K in (3, 4, 6):
            rk(1, 4, 13, 8, K)
        rk(1, 4, 6, 16, 2); rk(1, 4, 6, 16, 3); rk(1, 2, 13, 16, 3, skew=8000); rk(1, 2, 13, 16, 6, skew=8000); rk(1, 4, 6, 8, 0, 2); rk(1, 4, 6, 8, 2, 2); rk(1, 2, 13, 16, 3, ent=1, tag=" +entropy")
        rk(0, 2, 13, 16, 3); rk(0, 2, 13, 16, 6); rk(0, 4, 13, 8, 3); rk(0, 4, 6, 16, 2); rk(0, 4, 6, 8, 0, 2)
    if group in ("tma", "cpa"):
        def r(B, S, W, k=1, extra=0, skew=0, ent=0, tag=""):
            name = f"ring-{group} B{B} S{S} W{W} grid{k}" + (f" R+{extra}" if extra else "") + (f" skew{skew}" if skew else "") + tag
            out.append((name, dict(kind="ring", TMA=int(group == "tma"), B=B, S=S, W=W, k=k, extra=extra, SKEW=skew, ST=".cs", ENT=ent)))
        r(8192, 13, 16); r(16384, 6, 16); r(8192, 6, 8, 2); r(8192, 13, 32); r(16384, 6, 32)
        if group == "tma":
            r(8192, 13, 16, extra=2); r(8192, 13, 16, extra=5); r(8192, 13, 16, skew=8000); r(4096, 13, 8, 2); r(8192, 6, 16, 2)
            r(8192, 13, 8); r(4096, 26, 16); r(8192, 4, 8, 3); r(8192, 13, 16, ent=1, tag=" +entropy")
    return out


def launcher(v, x, y, g, lab, o, T, V, sms):
    """Builds the call that runs variant v; None where the shape does not take it."""
    import torch, kernels as K
    w, zw, cw, kw = 0.75, 1e-2, 0.25, 0.5
    kind = v["kind"]
    if kind == "plain":
        grid = (min(T, sms * v["k"]) if v["k"] else T,)
        return lambda: K.plain[grid](x, g, lab, o, w, zw, cw, T, V, U=v["U"], W=v["W"], REV=v["REV"], PERSIST=int(v["k"] > 0), EV1=v["EV1"],
                                     EV2=v["EV2"], ST=v["ST"], ENT=v["ENT"], PROBE=v["PROBE"], WRITE=v.get("WRITE", 1), num_warps=v["W"])
    if kind == "kd":
        grid = (min(T, sms * v["k"]) if v["k"] else T,)
        return lambda: K.plain_kd[grid](x, y, g, lab, o, w, zw, kw, T, V, U=v["U"], W=v["W"], REV=v["REV"], PERSIST=int(v["k"] > 0),
                                        EV1=v["EV1"], EV2=v["EV2"], ST=v["ST"], D=v.get("D", 0), num_warps=v["W"])
    if kind in ("split", "splitkd"):
        P = v["P"]
        C = -(-V // (P * 64)) * 64
        words = torch.zeros(T * P * (3 if kind == "splitkd" else 1 + v["ENT"]), dtype=torch.long, device=x.device)

        def call():
            if P > 1:
                words.zero_()
            opts = dict(num_warps=v["W"], maxnreg=v["regs"]) if v["regs"] else dict(num_warps=v["W"])
            if kind == "split":
                K.split[(T * P,)](x, g, lab, o, words, w, zw, cw, T, V, C, P=P, U=v["U"], W=v["W"], D=v["D"], EV1=v["EV1"], EV2=v["EV2"], ST=v["ST"],
                                  EVS=v["EVS"], ENT=v["ENT"], ONE=v.get("ONE", 0), **opts)
            else:
                K.split_kd[(T * P,)](x, y, g, lab, o, words, w, zw, kw, T, V, C, P=P, U=v["U"], W=v["W"], D=v["D"], EV1=v["EV1"], EV2=v["EV2"],
                                     ST=v["ST"], EVS=v["EVS"], ONE=v.get("ONE", 0), **opts)
        return call
    if kind == "ahead":
        grid = (min(T, sms * v["k"]) if v["k"] else T,)
        return lambda: K.ahead[grid](x, g, lab, o, w, zw, cw, T, V, U=v["U"], W=v["W"], PERSIST=int(v["k"] > 0), PF=v["PF"], D=v["D"], EV1=v["EV1"],
                                     EV2=v["EV2"], ST=v["ST"], EVS=v["EVS"], ENT=v["ENT"], num_warps=v["W"], **({"maxnreg": v["regs"]} if v.get("regs") else {}))
    if kind == "write":
        B = v["U"] * v["W"] * 256
        return lambda: K.writer[(-(-V // B), T)](x, g, lab, o, w, zw, T, V, U=v["U"], W=v["W"], EV=v["EV"], ST=v["ST"], num_warps=v["W"])
    S = v["S"]
    B = v["B"] if kind == "ring" else v["U"] * v["W"] * 256
    n = -(-V // B)
    if kind == "ring":
        R = min(n, max(0, n - S) + (v["extra"] if n > S else 0))
    else:
        R = max(0, n - S - v["K"])
        if n < v["K"]:
            return None
    src = x
    if v["TMA"]:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
        from triton.experimental.gluon.language import NVMMASharedLayout
        lay = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
        src = TensorDescriptor(x, [T, V // 64, 64], [V, 64, 1], [1, B // 64, 64], lay)
    if kind == "ringk":
        return lambda: K.ringk[(min(T, sms * v["k"]),)](src, g, lab, o, x, w, zw, cw, T, V, n, R, U=v["U"], S=S, W=v["W"], K=v["K"], TMA=v["TMA"],
                                                        SKEW=v["SKEW"], ST=v["ST"], ENT=v["ENT"], num_warps=v["W"])
    return lambda: K.ring[(min(T, sms * v["k"]),)](src, g, lab, o, x, w, zw, cw, T, V, n, R, B=B, S=S, W=v["W"], TMA=v["TMA"], SKEW=v["SKEW"],
                                                   ST=v["ST"], ENT=v["ENT"], num_warps=v["W"])


def prepare(job):
    name, v = job
    try:
        import torch
        T, V = 16, 128256
        x = torch.randn(T, V, device="cuda").bfloat16()
        o = torch.zeros(3 * T, device="cuda")
        launcher(v, x, x, torch.empty_like(x), torch.zeros(T, dtype=torch.long, device="cuda"), o, T, V, 132)()
        torch.cuda.synchronize()
        return name, None
    except Exception as e:
        return name, f"{type(e).__name__}: {str(e)[-300:]}"


def reference(x, y, lab, rows, ent, kd):
    import torch
    w, zw, cw, kw = 0.75, 1e-2, 0.25, 0.5
    xd = x[rows].double()
    lp = xd.log_softmax(1)
    p = lp.exp()
    lse = xd.logsumexp(1)
    lpl = lp.gather(1, lab[rows][:, None])[:, 0]
    A = w * (1 + 2 * zw * lse)
    third = None
    if ent:
        third = -(p * lp).sum(1)
        g = p * (A[:, None] + cw / 0.6931471805599453 * (third[:, None] + lp))    # cw multiplies log2 p in the kernel
    elif kd:
        lq = y[rows].double().log_softmax(1)
        third = (lq.exp() * (lq - lp)).sum(1)
        g = p * (A + kw)[:, None] - kw * lq.exp()
    else:
        g = p * A[:, None]
    g[torch.arange(len(rows)), lab[rows]] -= w
    return lpl, lse, third, g


def child(group, only, limit):
    t0 = time.time()
    sys.path.insert(0, HERE)
    jobs = [j for j in variants(group) if fnmatch.fnmatch(j[0], only)]
    import torch, kernels, triton                             # before the fork, no device touched
    bad = {}
    lock = open(LOCK, "w")
    fcntl.flock(lock, fcntl.LOCK_SH)                          # nothing is measured while anything is being prepared
    pool = mp.get_context("fork").Pool(min(9, len(jobs)))
    futs = [(j, pool.apply_async(prepare, (j,))) for j in jobs]
    for j, f in futs:
        try:
            name, err = f.get(timeout=max(1, 75 - (time.time() - t0)))
        except mp.TimeoutError:
            name, err = j[0], "timed out in its first run"
        if err:
            bad[name] = err
            print(json.dumps(dict(group=group, name=name, error=err)), flush=True)
    pool.terminate()
    print(f"# {group}: prepared in {time.time() - t0:.1f}s", file=sys.stderr, flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
    t1 = time.time()
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def timed(f, reps=9, warm=2):
        for _ in range(warm):
            f()
        ev = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
        for a, b in ev:
            a.record(); f(); b.record()
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) for a, b in ev)[reps // 2]

    for T, V in SHAPES:
        torch.manual_seed(T + V)
        x = torch.empty(T, V, dtype=torch.bfloat16, device="cuda").normal_(0, 3)
        y = torch.empty_like(x).normal_(0, 3) if group in ("kd", "kd2", "splitkd", "poll1") else x
        g = torch.empty_like(x)
        lab = torch.randint(0, V, (T,), device="cuda")
        lab[0], lab[1] = 0, V - 1
        rows = [0, 1, 131, 132, 133, T // 2, T - 2, T - 1]
        o = torch.zeros(3 * T, device="cuda")
        copy = timed(lambda: g.copy_(x), 25, 15)
        print(json.dumps(dict(group=group, name="copy", T=T, V=V, ms=copy, gbs=4e-6 * T * V / copy)), flush=True)
        refs, firsts = {}, {}
        every = torch.cat([x[i:i + 1024].float().logsumexp(1) for i in range(0, T, 1024)])
        for name, v in jobs:
            if name in bad or time.time() - t1 > limit:
                continue
            rec = dict(group=group, name=name, T=T, V=V)
            try:
                f = launcher(v, x, y, g, lab, o, T, V, sms)
                if f is None:
                    continue
                ent, kd = int(v.get("ENT", 0)), int(v["kind"] in ("kd", "splitkd"))
                if (ent, kd) not in refs:
                    refs[ent, kd] = reference(x, y, lab, rows, ent, kd)
                lpl, lse, third, gr = refs[ent, kd]
                g.fill_(float("nan"))
                if v["kind"] != "write":
                    o.fill_(float("nan"))
                f()
                torch.cuda.synchronize()
                if not v.get("PROBE"):
                    if v.get("WRITE", 1):
                        rec["unwritten"] = int(torch.isnan(g).any())
                        d = (g[rows].double() - gr).abs()
                        rec["gerr"] = float((d / (gr.abs() + 1e-9)).max()) if not (ent or kd) else float((d / (gr.abs() + 1e-6 * gr.abs().amax(1, keepdim=True))).max())
                    if v["kind"] != "write":
                        rec["serr"] = max(float((o[:T][rows].double() - lpl).abs().max()), float((o[T:2 * T][rows].double() - lse).abs().max()))
                        if third is not None:
                            rec["serr"] = max(rec["serr"], float((o[2 * T:][rows].double() - third).abs().max()))
                rec["ms"] = timed(f)
                if v["kind"] != "write" and not v.get("PROBE"):     # every row, after the timed launches: a race would show
                    rec["serr"] = max(rec["serr"], float((o[T:2 * T] - every).abs().max()))
                    if v.get("WRITE", 1):
                        key = (ent, kd)
                        if key not in firsts:
                            firsts[key] = g.clone()
                        a, b = g.view(-1), firsts[key].view(-1)
                        for c0 in range(0, a.numel(), 2**28):
                            p, q = a[c0:c0 + 2**28].float(), b[c0:c0 + 2**28].float()
                            rec["off"] = max(rec.get("off", 0), int(((p - q).abs() > 0.008 * q.abs() + (1e-9 if not (ent or kd) else 1e-6)).sum()))
                rec["ratio"] = rec["ms"] / copy
            except Exception as e:
                rec["error"] = f"{type(e).__name__}: {str(e)[-200:]}"
                bad[name] = rec["error"]
            print(json.dumps(rec), flush=True)
        copy2 = timed(lambda: g.copy_(x), 15, 5)
        print(json.dumps(dict(group=group, name="copy again", T=T, V=V, ms=copy2)), flush=True)
        del x, y, g, refs, firsts
    print(f"# {group}: measured in {time.time() - t1:.1f}s", file=sys.stderr, flush=True)


def once(patterns, T=2112, V=128256):
    sys.path.insert(0, HERE)
    import torch
    x = torch.empty(T, V, dtype=torch.bfloat16, device="cuda").normal_(0, 3)
    g, lab, o = torch.empty_like(x), torch.zeros(T, dtype=torch.long, device="cuda"), torch.zeros(3 * T, device="cuda")
    for pat in patterns:
        for group in ("plain", "tma", "cpa", "kd", "kd2", "ahead", "ringk", "split", "splitkd"):
            for name, v in variants(group):
                if name == pat:
                    launcher(v, x, x, g, lab, o, T, V, 132)()
                    torch.cuda.synchronize()
                    print("ran", name, flush=True)


def table(records):
    errors = {}
    rows = {}
    for r in records:
        if "error" in r:
            errors[r["name"]] = r["error"]
        elif "ms" in r:
            rows.setdefault((r["group"], r["name"]), {})[r["T"], r["V"]] = r
    print(f"{'variant':44s}" + "".join(f"{f'{T}x{V}':>24s}" for T, V in SHAPES) + "   max error: grad (rel), scalars")
    print(f"{'':44s}" + "      ms  ratio   GB/s   " * len(SHAPES))
    for (grp, name), d in rows.items():
        cells, ge, se, un = "", 0.0, 0.0, 0
        for s in SHAPES:
            r = d.get(s)
            if not r:
                cells += f"{'-':>24s}"
                continue
            gbs = 4e-6 * s[0] * s[1] / r["ms"]
            cells += f"{r['ms']:9.3f}{r.get('ratio', 1):7.3f}{gbs:7.0f} "
            a, b = r.get("gerr", 0.0), r.get("serr", 0.0)
            ge, se, un = (a if not (a <= ge or ge != ge) else ge), (b if not (b <= se or se != se) else se), un | r.get("unwritten", 0)
        print(f"{name[:44]:44s}{cells}  {ge:.1e} {se:.1e}{' UNWRITTEN' if un else ''}{' DIFFERS' if any(r.get('off') for r in d.values()) else ''}")
    for n, e in errors.items():
        print(f"FAILED {n}: {e[-160:]!r}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--groups", default="plain,ahead,split,tma,cpa,ringk,kd,kd2,splitkd,again")
    ap.add_argument("--only", default="*")
    ap.add_argument("--child")
    ap.add_argument("--once", help="run the variants matching these comma-separated patterns once, for a profiler")
    ap.add_argument("--limit", type=float, default=40, help="seconds of measuring per group")
    ap.add_argument("--total", type=float, default=200, help="seconds for everything")
    a = ap.parse_args()
    if a.child:
        return child(a.child, a.only, a.limit)
    if a.once:
        return once(a.once.split(","))
    t0 = time.time()
    groups = a.groups.split(",")
    procs = []
    for i, gname in enumerate(groups):
        f = open(f"/tmp/sweep.{gname}.jsonl", "w")
        procs.append(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", gname, "--only", a.only, "--limit", str(a.limit)],
                                      stdout=f, start_new_session=True))
    for p in procs:
        try:
            p.wait(timeout=max(1, a.total - (time.time() - t0)))
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, 9)
            print("killed a group that ran past the limit", file=sys.stderr)
    records = []
    for gname in groups:
        for line in open(f"/tmp/sweep.{gname}.jsonl"):
            try:
                records.append(json.loads(line))
            except ValueError:
                pass
    out = os.environ.get("SWEEP_OUT")
    if out:
        with open(os.path.join(out, "records.jsonl"), "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in records)
    table(records)


if __name__ == "__main__":
    main()
