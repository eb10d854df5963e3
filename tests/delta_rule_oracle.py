#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Float64 oracle of deltarule: the delta rule with decay, the parts around it, and its splitting
over ranks, written in NumPy and sharing nothing with the library. The tests compare the
library with what it writes; it checks itself with `check`.

What is here (NumPy only, everything in float64 unless another dtype is passed in):

* token-by-token reference of GDN (scalar gate) and KDA (per-channel gate), with
  an independently written token-by-token adjoint;
* chunkwise (WY) forward and a fully explicit chunkwise backward, any chunk size;
* gate / beta / L2-norm / causal-conv+SiLU / gated-RMSNorm forward and backward;
* affine state summaries (S, M), gradient summaries (G), composition, application;
* packed-sequence metadata and an in-process simulation of the context-parallel
  protocols (p2p, allgather, grouped allgather + p2p, recursive doubling) and of the
  Ulysses all-to-all;
* whole GDN and KDA layers, forward and backward.

Command line
------------
  delta_rule_oracle.py check [--quick]       run every self check, print the errors
  delta_rule_oracle.py vectors KIND -o FILE  write test vectors (see --help)
  delta_rule_oracle.py batch FILE            the same for every line of arguments in FILE
  delta_rule_oracle.py show FILE             list the records of a vector file

Vector file format (little endian, no padding):
  8 bytes magic "DRORACL1"
  repeated records: u32 name length | name bytes (ASCII) | u32 rank |
                    rank x i64 dimensions | product(dims) x f64, C order
  A rank-0 record is one scalar.

Layouts: activations are token first, [B, T, heads, dim].  H is the number of
query/key heads, HV the number of value heads; value head j reads query/key head
j // (HV // H).  States are [N, HV, K, V], N = B for dense input and the number of
documents for packed input.  g is the natural-log decay, [B, T, HV] (GDN) or
[B, T, HV, K] (KDA).
"""
from __future__ import annotations

import argparse
import struct
import sys
from bisect import bisect_left, bisect_right

import numpy as np

LN2 = 0.6931471805599453
MAGIC = b"DRORACL1"


# --------------------------------------------------------------------------- #
# pointwise pieces.  All forward pieces also accept complex input, so that the
# complex-step derivative can be used on them.
# --------------------------------------------------------------------------- #
def sigmoid(x):
    """Logistic function, stable for real input and analytic for complex input."""
    if np.iscomplexobj(x):
        return 1.0 / (1.0 + np.exp(-x))
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def softplus(x):
    """log(1 + e^x)."""
    return np.log(1.0 + np.exp(x)) if np.iscomplexobj(x) else np.logaddexp(x * 0.0, x)


def silu(x):
    return x * sigmoid(x)


def silu_bwd(x, dy):
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


def l2norm(x, eps=1e-6):
    """y = x * rstd, rstd = (sum x^2 + eps)^-1/2 over the last axis."""
    rstd = 1.0 / np.sqrt((x * x).sum(-1, keepdims=True) + eps)
    return x * rstd, rstd


def l2norm_bwd(y, rstd, dy):
    """Exact for every eps: only y and rstd are needed, not x."""
    return rstd * (dy - y * (y * dy).sum(-1, keepdims=True))


def gate_softplus(x, a_log, bias):
    """g = -exp(a) * softplus(x + bias).  x [..., HV] or [..., HV, K]."""
    return -_per_head(np.exp(a_log), x) * softplus(x + _bias(bias, x))


def gate_softplus_bwd(x, a_log, bias, dg):
    z = x + _bias(bias, x)
    ea = _per_head(np.exp(a_log), x)
    dx = -ea * sigmoid(z) * dg
    da = _sum_to_heads(dg * (-ea * softplus(z)), x)
    return dx, da, _sum_bias(dx, bias)


def gate_lower_bound(x, a_log, bias, lower_bound):
    """g = lower_bound * sigmoid(exp(a) * (x + bias)), so g is in (lower_bound, 0)."""
    return lower_bound * sigmoid(_per_head(np.exp(a_log), x) * (x + _bias(bias, x)))


def gate_lower_bound_bwd(x, a_log, bias, lower_bound, dg):
    ea = _per_head(np.exp(a_log), x)
    z = ea * (x + _bias(bias, x))
    s = sigmoid(z)
    dz = dg * lower_bound * s * (1.0 - s)
    dx = dz * ea
    return dx, _sum_to_heads(dz * z, x), _sum_bias(dx, bias)


def _per_head(a, x):
    return a if x.ndim == 3 else a[:, None]


def _bias(bias, x):
    return bias if x.ndim == 3 else bias.reshape(x.shape[-2], x.shape[-1])


def _sum_to_heads(t, x):
    return t.sum((0, 1)) if x.ndim == 3 else t.sum((0, 1, 3))


def _sum_bias(dx, bias):
    return dx.sum((0, 1)).reshape(np.shape(bias))


def beta_sigmoid_bwd(beta, dbeta):
    return dbeta * beta * (1.0 - beta)


def rmsnorm_gated(x, gate, weight, eps, activation):
    """Per-head RMSNorm then an output gate: y = x*rstd*weight*act(gate)."""
    rstd = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    act = sigmoid(gate) if activation == "sigmoid" else silu(gate)
    return x * rstd * weight * act


def rmsnorm_gated_bwd(x, gate, weight, eps, activation, dy):
    rstd = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    xn = x * rstd
    if activation == "sigmoid":
        act = sigmoid(gate)
        dact = act * (1.0 - act)
    else:
        act = silu(gate)
        dact = silu_bwd(gate, np.ones_like(gate))
    dgate = dy * xn * weight * dact
    dweight = (dy * xn * act).sum(tuple(range(x.ndim - 1)))
    dxn = dy * weight * act
    dx = rstd * (dxn - xn * (dxn * xn).mean(-1, keepdims=True))
    return dx, dgate, dweight


# --------------------------------------------------------------------------- #
# token-by-token reference
# --------------------------------------------------------------------------- #
def default_scale(q, scale):
    return q.shape[-1] ** -0.5 if scale is None else scale


def expand_heads(x, hv):
    return np.repeat(x, hv // x.shape[2], axis=2)


def reduce_heads(dx, h):
    b, t, hv = dx.shape[:3]
    return dx.reshape(b, t, h, hv // h, *dx.shape[3:]).sum(3)


def gate4(g):
    """View the gate as [B, T, HV, 1 or K]."""
    return g[..., None] if g.ndim == 3 else g


def recurrent_forward(q, k, v, g, beta, *, scale=None, h0=None, keep=False):
    """The definition.  Returns (o, final state[, all states])."""
    scale = default_scale(q, scale)
    hv, dv = v.shape[2:]
    qe, ke, ge = expand_heads(q, hv), expand_heads(k, hv), gate4(g)
    dt = np.result_type(q, k, v, g, beta, *(() if h0 is None else (h0,)))
    b, t, dk = q.shape[0], q.shape[1], q.shape[3]
    state = np.zeros((b, hv, dk, dv), dt) if h0 is None else h0.astype(dt)
    out = np.zeros((b, t, hv, dv), dt)
    states = [state]
    for i in range(t):
        decayed = state * np.exp(ge[:, i])[..., None]
        residual = v[:, i] - (ke[:, i][..., None] * decayed).sum(-2)
        state = decayed + ke[:, i][..., None] * (beta[:, i][..., None] * residual)[..., None, :]
        out[:, i] = scale * (qe[:, i][..., None] * state).sum(-2)
        if keep:
            states.append(state)
    return (out, state, states) if keep else (out, state)


def recurrent_backward(q, k, v, g, beta, do, *, scale=None, h0=None, dht=None):
    """Token-by-token adjoint, written from the recurrence only."""
    scale = default_scale(q, scale)
    h, hv = q.shape[2], v.shape[2]
    qe, ke, ge = expand_heads(q, hv), expand_heads(k, hv), gate4(g)
    _, _, states = recurrent_forward(q, k, v, g, beta, scale=scale, h0=h0, keep=True)
    ds = np.zeros_like(states[0]) if dht is None else dht.astype(states[0].dtype)
    dq, dk = np.zeros_like(qe), np.zeros_like(ke)
    dv, dg, db = np.zeros_like(v), np.zeros_like(ge), np.zeros_like(beta)
    for i in range(q.shape[1] - 1, -1, -1):
        prev, cur = states[i], states[i + 1]
        decayed = prev * np.exp(ge[:, i])[..., None]
        residual = v[:, i] - (ke[:, i][..., None] * decayed).sum(-2)
        ds = ds + scale * qe[:, i][..., None] * do[:, i][..., None, :]
        dq[:, i] = scale * (cur * do[:, i][..., None, :]).sum(-1)
        e = (ds * ke[:, i][..., None]).sum(-2)
        db[:, i] = (e * residual).sum(-1)
        dr = beta[:, i][..., None] * e
        dv[:, i] = dr
        dk[:, i] = (ds * (beta[:, i][..., None] * residual)[..., None, :]).sum(-1)
        dk[:, i] -= (decayed * dr[..., None, :]).sum(-1)
        dd = ds - ke[:, i][..., None] * dr[..., None, :]
        dgi = (dd * decayed).sum(-1)
        dg[:, i] = dgi if g.ndim == 4 else dgi.sum(-1, keepdims=True)
        ds = dd * np.exp(ge[:, i])[..., None]
    return dict(dq=reduce_heads(dq, h), dk=reduce_heads(dk, h), dv=dv,
                dg=dg if g.ndim == 4 else dg[..., 0], dbeta=db, dh0=ds)


# --------------------------------------------------------------------------- #
# chunkwise forward and backward, staged the way context parallelism needs it:
#   prepare -> [summary, exchange] -> run_states -> output
#   local_dv -> [gradient_summary, exchange] -> run_dhu -> finish
# --------------------------------------------------------------------------- #
class Chunk:
    """Everything one chunk owns.  Shapes: [B, HV, c, ...], states [B, HV, K, V]."""


def unit_lower_inverse(low):
    """(I + low)^-1 for strictly lower low, by forward substitution."""
    c = low.shape[-1]
    inv = np.zeros_like(low)
    for i in range(c):
        inv[..., i, i] = 1.0
        if i:
            inv[..., i, :i] = -(low[..., i, None, :i] @ inv[..., :i, :i])[..., 0, :]
    return inv


def prepare(q, k, v, g, beta, chunk, scale=None):
    """State-independent part of every chunk."""
    scale = default_scale(q, scale)
    hv = v.shape[2]
    t = q.shape[1]
    hm = lambda x: np.ascontiguousarray(np.moveaxis(x, 2, 1))  # token first -> head major
    qe, ke, ve, ge = hm(expand_heads(q, hv)), hm(expand_heads(k, hv)), hm(v), hm(gate4(g))
    be = hm(beta[..., None])
    chunks = []
    for s in range(0, t, chunk):
        e = min(s + chunk, t)
        x = Chunk()
        x.span, x.scale, x.heads = (s, e), scale, q.shape[2]
        x.scalar_gate = g.ndim == 3
        x.q, x.k, x.v, x.b = qe[:, :, s:e], ke[:, :, s:e], ve[:, :, s:e], be[:, :, s:e]
        x.G = np.cumsum(ge[:, :, s:e], axis=2)
        x.Gl = x.G[:, :, -1:]                                # [B,HV,1,Kg]
        c = e - s
        x.incl = np.tril(np.ones((c, c), bool))
        x.strict = np.tril(np.ones((c, c), bool), -1)
        # exp(G_i - G_j) only where i >= j: the mask comes before the exponential
        diff = x.G[:, :, :, None] - x.G[:, :, None]
        x.E = np.where(x.incl[..., None], np.exp(np.where(x.incl[..., None], diff, 0.0)), 0.0)
        x.kk = _pair(x.k, x.k, x.E)
        x.L = np.where(x.strict, x.b * x.kk, 0.0)
        x.A = unit_lower_inverse(x.L)
        x.kbar = x.k * np.exp(x.G)                           # k_i * exp(G_i)
        x.khat = x.k * np.exp(x.Gl - x.G)                    # k_i * exp(G_last - G_i)
        x.qbar = x.q * np.exp(x.G)
        x.W = x.A @ (x.b * x.kbar)
        x.U = x.A @ (x.b * x.v)
        x.P = scale * _pair(x.q, x.k, x.E)                   # lower triangular incl. diagonal
        chunks.append(x)
    return chunks


def _pair(a, b, e):
    """sum_d a[i,d] b[j,d] e[i,j,d]; e may have one channel (scalar gate)."""
    if e.shape[-1] == 1:
        return (a @ np.swapaxes(b, -1, -2)) * e[..., 0]
    return np.einsum("...id,...jd,...ijd->...ij", a, b, e)


def _mix(m, b, e):
    """out[i,d] = sum_j m[i,j] b[j,d] e[i,j,d]."""
    if e.shape[-1] == 1:
        return (m * e[..., 0]) @ b
    return np.einsum("...ij,...jd,...ijd->...id", m, b, e)


def _mix_t(m, a, e):
    """out[j,d] = sum_i m[i,j] a[i,d] e[i,j,d]."""
    if e.shape[-1] == 1:
        return np.swapaxes(m * e[..., 0], -1, -2) @ a
    return np.einsum("...ij,...id,...ijd->...jd", m, a, e)


def T_(x):
    return np.swapaxes(x, -1, -2)


def summary(chunks):
    """(S, M) of the segment: exit = M @ entry + S."""
    x0 = chunks[0]
    lead, dk, dv = x0.k.shape[:2], x0.k.shape[-1], x0.v.shape[-1]
    s = np.zeros(lead + (dk, dv), x0.k.dtype)
    m = np.broadcast_to(np.eye(dk, dtype=x0.k.dtype), lead + (dk, dk)).copy()
    for x in chunks:
        decay = T_(np.exp(x.Gl))                             # [.., Kg, 1]
        s = decay * s + T_(x.khat) @ (x.U - x.W @ s)
        m = decay * m - T_(x.khat) @ (x.W @ m)
    return s, m


def run_states(chunks, h0=None):
    x0 = chunks[0]
    h = np.zeros(x0.k.shape[:2] + (x0.k.shape[-1], x0.v.shape[-1]), x0.k.dtype) if h0 is None else h0
    for x in chunks:
        x.H = h
        x.Vn = x.U - x.W @ h
        h = T_(np.exp(x.Gl)) * h + T_(x.khat) @ x.Vn
    return h


def output(chunks):
    parts = [x.scale * (x.qbar @ x.H) + x.P @ x.Vn for x in chunks]
    return np.moveaxis(np.concatenate(parts, axis=2), 1, 2)


def local_dv(chunks, do):
    """State-independent part of the gradient of Vn: P^T do."""
    for x in chunks:
        s, e = x.span
        x.do = np.moveaxis(do[:, s:e], 2, 1)
        x.dv_local = T_(x.P) @ x.do


def gradient_summary(chunks):
    """G: gradient of the entry state when the exit-state gradient is zero."""
    return _dhu(chunks, None, store=False)


def run_dhu(chunks, dht=None):
    """Reverse state recurrence; stores dHn (exit) and dVn per chunk; returns dh0."""
    return _dhu(chunks, dht, store=True)


def _dhu(chunks, dht, store):
    x0 = chunks[0]
    dh = np.zeros(x0.k.shape[:2] + (x0.k.shape[-1], x0.v.shape[-1]), x0.k.dtype) if dht is None else dht
    for x in reversed(chunks):
        dvn = x.dv_local + x.khat @ dh
        if store:
            x.dHn, x.dVn = dh, dvn
        # the signed chunk update is formed first, then added once to the decayed state
        dh = T_(np.exp(x.Gl)) * dh + (x.scale * (T_(x.qbar) @ x.do) - T_(x.W) @ dvn)
    return dh


def finish(chunks):
    """Gradients of q, k, v, g (natural log), beta for one segment, token first."""
    outs = dict(dq=[], dk=[], dv=[], dg=[], dbeta=[])
    for x in chunks:
        eG = np.exp(x.G)
        dP = np.where(x.incl, x.do @ T_(x.Vn), 0.0)
        dqbar = x.scale * (x.do @ T_(x.H))
        dkhat = x.Vn @ T_(x.dHn)
        dW = -(x.dVn @ T_(x.H))
        # (1) intra-chunk attention P
        dq_i = x.scale * _mix(dP, x.k, x.E)
        dk_i = x.scale * _mix_t(dP, x.q, x.E)
        # (2) WY representation
        dkbar, dv, db, dL = wy_backward(x, dW, x.dVn)
        kx = _mix(dL, x.k, x.E)                              # sum_j dL_ij k_j e^{Gi-Gj}
        ky = _mix_t(dL, x.b * x.k, x.E)                      # sum_i dL_ij b_i k_i e^{Gi-Gj}
        db = db + (kx * x.k).sum(-1, keepdims=True)
        dq = dq_i + dqbar * eG
        dk = dk_i + dkhat * np.exp(x.Gl - x.G) + dkbar * eG + x.b * kx + ky
        dG = (x.q * dq_i - x.k * dk_i + x.qbar * dqbar + x.kbar * dkbar - x.khat * dkhat
              + x.b * x.k * kx - x.k * ky)
        last = (x.khat * dkhat).sum(2) + (np.exp(x.Gl[:, :, 0])[..., None] * x.H * x.dHn).sum(-1)
        if x.scalar_gate:
            dG, last = dG.sum(-1, keepdims=True), last.sum(-1, keepdims=True)
        dG[:, :, -1] += last
        dg = np.cumsum(dG[:, :, ::-1], axis=2)[:, :, ::-1]   # reverse cumulative sum in the chunk
        for name, val in (("dq", dq), ("dk", dk), ("dv", dv), ("dg", dg), ("dbeta", db)):
            outs[name].append(val)
    h = chunks[0].heads
    res = {n: np.moveaxis(np.concatenate(p, axis=2), 1, 2) for n, p in outs.items()}
    res["dq"], res["dk"] = reduce_heads(res["dq"], h), reduce_heads(res["dk"], h)
    res["dbeta"] = res["dbeta"][..., 0]
    if chunks[0].scalar_gate:
        res["dg"] = res["dg"][..., 0]
    return res


def wy_backward(x, dW, dU):
    """Through W = A(b*kbar), U = A(b*v), A = (I+L)^-1.  Returns dkbar, dv, dbeta, dL."""
    dkb, dvb = T_(x.A) @ dW, T_(x.A) @ dU
    dA = np.where(x.strict, dW @ T_(x.b * x.kbar) + dU @ T_(x.b * x.v), 0.0)
    dL = np.where(x.strict, -(T_(x.A) @ dA @ T_(x.A)), 0.0)
    db = (dkb * x.kbar).sum(-1, keepdims=True) + (dvb * x.v).sum(-1, keepdims=True)
    return x.b * dkb, x.b * dvb, db, dL


def prepare_wy_repr_bwd_scalar(k, v, beta, G, A, dw, du):
    """The scalar-gate WY backward in one piece, one chunk.

    k [c,K], v [c,V], beta [c], G [c] (cumulative natural log), A [c,c], dw [c,K], du [c,V].
    Returns dk, dv, dbeta and the part of dG that comes through the WY factors.
    """
    eg = np.exp(G)
    kbg = k * (beta * eg)[:, None]
    dA = dw @ kbg.T + du @ (v * beta[:, None]).T
    dkbg = A.T @ dw
    dk = dkbg * (eg * beta)[:, None]
    db = (dkbg * k * eg[:, None]).sum(1)
    dG = (dkbg * kbg).sum(1)
    dvb = A.T @ du
    dv = dvb * beta[:, None]
    db = db + (dvb * v).sum(1)
    strict = np.tril(np.ones_like(A, bool), -1)
    dA = np.where(strict, dA, 0.0)
    dA = np.where(strict, -(A.T @ (dA @ A.T)), 0.0)
    gate = np.exp(np.where(strict, G[:, None] - G[None, :], 0.0))
    dA = dA * gate
    dkb = dA @ k
    db = db + (dkb * k).sum(1)
    dk = dk + dkb * beta[:, None] + dA.T @ (k * beta[:, None])
    prod = dA * (beta[:, None] * (k @ k.T))
    dG = dG + prod.sum(1) - prod.sum(0)
    return dk, dv, db, dG


def chunk_forward(q, k, v, g, beta, *, chunk=64, scale=None, h0=None):
    chunks = prepare(q, k, v, g, beta, chunk, scale)
    ht = run_states(chunks, h0)
    return output(chunks), ht, chunks


def chunk_backward(chunks, do, dht=None):
    local_dv(chunks, do)
    dh0 = run_dhu(chunks, dht)
    res = finish(chunks)
    res["dh0"] = dh0
    return res


# --------------------------------------------------------------------------- #
# packed documents
# --------------------------------------------------------------------------- #
class PackedInfo:
    """One contiguous token interval of a stream of documents."""

    def __init__(self, global_offsets, start, end):
        off = tuple(global_offsets)
        if len(off) < 2 or off[0] != 0 or any(a >= b for a, b in zip(off, off[1:])):
            raise ValueError("offsets must start at zero and be strictly increasing")
        if not 0 <= start < end <= off[-1]:
            raise ValueError("interval must be nonempty and covered by the offsets")
        self.offsets, self.start, self.end = off, start, end
        self.local = (0, *(x - start for x in off if start < x < end), end - start)

    length = property(lambda s: s.end - s.start)
    count = property(lambda s: len(s.local) - 1)
    continues_previous = property(lambda s: s.start not in s.offsets)
    continues_next = property(lambda s: s.end not in s.offsets)
    transfer_active = property(lambda s: s.count == 1 and s.continues_previous)
    head = property(lambda s: (0, s.local[1]))
    tail = property(lambda s: (s.local[-2], s.length))

    @property
    def preceding_sample_tokens(self):
        return self.start - self.offsets[bisect_right(self.offsets, self.start) - 1]

    @property
    def following_document_end(self):
        return self.offsets[bisect_left(self.offsets, self.end)]

    def ulysses(self, degree, local_rank):
        s = self.start - local_rank * self.length
        return PackedInfo(self.offsets, s, s + degree * self.length)

    def plan(self, chunk):
        """(cu_seqlens, chunk_indices, chunk_offsets)."""
        n = [-(-(b - a) // chunk) for a, b in zip(self.local, self.local[1:])]
        return (self.local, [(i, c) for i, m in enumerate(n) for c in range(m)],
                tuple(np.concatenate(([0], np.cumsum(n))).tolist()))


def packed_forward(q, k, v, g, beta, offsets, *, chunk=64, scale=None, h0=None):
    """Independent documents in one [1, T, ...] stream; h0 is [N, HV, K, V]."""
    outs, finals, segs = [], [], []
    for i, (s, e) in enumerate(zip(offsets, offsets[1:])):
        o, ht, ch = chunk_forward(q[:, s:e], k[:, s:e], v[:, s:e], g[:, s:e], beta[:, s:e],
                                  chunk=chunk, scale=scale, h0=None if h0 is None else h0[i:i + 1])
        outs.append(o), finals.append(ht), segs.append(ch)
    return np.concatenate(outs, 1), np.concatenate(finals, 0), segs


def packed_backward(segs, do, offsets, dht=None):
    parts = []
    for i, (s, e) in enumerate(zip(offsets, offsets[1:])):
        parts.append(chunk_backward(segs[i], do[:, s:e], None if dht is None else dht[i:i + 1]))
    res = {n: np.concatenate([p[n] for p in parts], 1) for n in ("dq", "dk", "dv", "dg", "dbeta")}
    res["dh0"] = np.concatenate([p["dh0"] for p in parts], 0)
    return res


# --------------------------------------------------------------------------- #
# boundary protocols, simulated over lists indexed by rank
# --------------------------------------------------------------------------- #
class Trace:
    """Counts messages (src, dst, floats)."""

    def __init__(self):
        self.messages = []

    def send(self, src, dst, *arrays):
        self.messages.append((src, dst, int(sum(a.size for a in arrays))))
        return arrays[0] if len(arrays) == 1 else arrays


def affine_compose(first, second):
    """second after first."""
    (s1, m1), (s2, m2) = first, second
    return m2 @ s1 + s2, m2 @ m1


def exchange_p2p(s, m, links, forward, trace):
    """Wavefront.  links[r] says whether rank r's exit is connected to rank r+1's entry.

    forward: s = S, m = M (None if the exit does not depend on the entry), result = entry states.
    backward: s = G, m = M again, result = exit-state gradients.
    """
    n = len(s)
    got = [None] * n
    order = range(n - 1) if forward else range(n - 1, 0, -1)
    for r in order:
        if not links[r if forward else r - 1]:
            continue
        if m[r] is None or got[r] is None:
            payload = s[r]
        else:
            payload = (m[r] if forward else T_(m[r])) @ got[r] + s[r]
        dst = r + 1 if forward else r - 1
        got[dst] = trace.send(r, dst, payload)
    return got


def exchange_allgather(s, m, forward, trace):
    n = len(s)
    for src in range(n):
        for dst in range(n):
            if src != dst:
                trace.send(src, dst, s[src], m[src])
    got = []
    for r in range(n):
        acc = np.zeros_like(s[r])
        for j in (range(r) if forward else range(n - 1, r, -1)):
            acc = (m[j] if forward else T_(m[j])) @ acc + s[j]
        got.append(acc)
    return got


def exchange_grouped(s, m, width, forward, trace):
    """Gather inside consecutive groups, relay the group exit between group owners."""
    n = len(s)
    blocks = n // width
    got = [None] * n
    entry = [None] * blocks
    for b in (range(blocks) if forward else range(blocks - 1, -1, -1)):
        base = b * width
        owner = base + width - 1
        incoming = np.zeros_like(s[0]) if entry[b] is None else entry[b]
        if entry[b] is not None:
            for j in range(width - 1):
                trace.send(owner, base + j, incoming)       # broadcast of the group entry
        for j in range(width):
            for i in range(width):
                if i != j:
                    trace.send(base + i, base + j, s[base + i], m[base + i])
        acc = incoming
        for i in (range(width) if forward else range(width - 1, -1, -1)):
            got[base + i] = acc
            acc = (m[base + i] if forward else T_(m[base + i])) @ acc + s[base + i]
        nxt = b + 1 if forward else b - 1
        if 0 <= nxt < blocks:
            entry[nxt] = trace.send(owner, nxt * width + width - 1, acc)
    return got


def rd_distances(n):
    return [1 << i for i in range((n - 1).bit_length())]


def exchange_rd_forward(s, m, trace):
    """Inclusive scan by recursive doubling, then a shift by one.  Returns entries and M caches."""
    n = len(s)
    s, m = list(s), list(m)
    cache = [[] for _ in range(n)]
    dist = rd_distances(n)
    for d in dist:
        final = d == dist[-1]
        inbox = {}
        for r in range(n - d):
            inbox[r + d] = trace.send(r, r + d, s[r]) if final else trace.send(r, r + d, s[r], m[r])
        for r in range(d, n):
            cache[r].append(m[r])
            if final:
                s[r] = m[r] @ inbox[r] + s[r]
            else:
                rs, rm = inbox[r]
                s[r], m[r] = m[r] @ rs + s[r], m[r] @ rm
    got = [np.zeros_like(s[0])] + [trace.send(r - 1, r, s[r - 1]) for r in range(1, n)]
    return got, cache


def exchange_rd_backward(gsum, cache, trace):
    """Exact transpose of the forward schedule; result = exit-state gradients."""
    n = len(gsum)
    adj = [trace.send(r + 1, r, gsum[r + 1]) for r in range(n - 1)] + [np.zeros_like(gsum[0])]
    cache = [list(c) for c in cache]
    for d in reversed(rd_distances(n)):
        inbox = {r - d: trace.send(r, r - d, T_(cache[r].pop()) @ adj[r]) for r in range(d, n)}
        adj = [adj[r] + inbox[r] if r in inbox else adj[r] for r in range(n)]
    return adj


def cp_simulate(q, k, v, g, beta, do, cuts, offsets=None, *, chunk=64, scale=None,
                protocol="p2p", width=2):
    """Forward and backward over ranks that own tokens cuts[r]..cuts[r+1].

    Global entry state and global exit-state gradient are zero, as in training.
    Dense input: offsets None (any batch).  Packed: batch one.
    """
    n = len(cuts) - 1
    total = q.shape[1]
    info = [PackedInfo((0, total) if offsets is None else offsets, cuts[r], cuts[r + 1]) for r in range(n)]
    sl = lambda x, a, b: x[:, a:b]
    segs = []
    for r, p in enumerate(info):
        row = []
        for a, b in zip(p.local, p.local[1:]):
            a, b = a + p.start, b + p.start
            row.append(prepare(sl(q, a, b), sl(k, a, b), sl(v, a, b), sl(g, a, b), sl(beta, a, b), chunk, scale))
        segs.append(row)
    links = [info[r].continues_next for r in range(n)]
    ft, bt = Trace(), Trace()
    # ---- forward boundary
    s, m = [], []
    for r, p in enumerate(info):
        tail_s, tail_m = summary(segs[r][-1])
        s.append(tail_s)
        m.append(tail_m if p.transfer_active else np.zeros_like(tail_m))
    m_opt = [m[r] if info[r].transfer_active else None for r in range(n)]
    cache = None
    if protocol == "p2p":
        entry = exchange_p2p(s, m_opt, links, True, ft)
    elif protocol == "allgather":
        entry = exchange_allgather(s, m, True, ft)
    elif protocol == "grouped":
        entry = exchange_grouped(s, m, width, True, ft)
    else:
        entry, cache = exchange_rd_forward(s, m, ft)
    outs = []
    for r, p in enumerate(info):
        for i, ch in enumerate(segs[r]):
            run_states(ch, entry[r] if i == 0 and p.continues_previous else None)
            outs.append(output(ch))
    # ---- backward boundary
    gs = []
    for r, p in enumerate(info):
        for i, ch in enumerate(segs[r]):
            a = p.start + p.local[i]
            local_dv(ch, do[:, a:a + p.local[i + 1] - p.local[i]])
        head_g = gradient_summary(segs[r][0])
        gs.append(head_g if p.continues_previous else np.zeros_like(head_g))
    if protocol == "p2p":
        exit_g = exchange_p2p(gs, m_opt, links, False, bt)
    elif protocol == "allgather":
        exit_g = exchange_allgather(gs, m, False, bt)
    elif protocol == "grouped":
        exit_g = exchange_grouped(gs, m, width, False, bt)
    else:
        exit_g = exchange_rd_backward(gs, cache, bt)
    parts = []
    for r, p in enumerate(info):
        for i, ch in enumerate(segs[r]):
            run_dhu(ch, exit_g[r] if i == p.count - 1 and p.continues_next else None)
            parts.append(finish(ch))
    grads = {x: np.concatenate([p[x] for p in parts], 1) for x in ("dq", "dk", "dv", "dg", "dbeta")}
    return np.concatenate(outs, 1), grads, ft, bt, dict(S=s, M=m, entry=entry, G=gs, exit_grad=exit_g)


def ulysses_all_to_all(shards, split_dim, concat_dim):
    """shards[r] is rank r's local array.  Result[r] concatenates, in source-rank order along
    concat_dim, every source's r-th slice of split_dim."""
    n = len(shards)
    pieces = [np.split(x, n, axis=split_dim) for x in shards]
    return [np.concatenate([pieces[src][dst] for src in range(n)], axis=concat_dim) for dst in range(n)]


def rank_major_pack(parts, degree):
    """[x0 | x1 | ...] -> [x0_0 x1_0 .. | x0_1 x1_1 .. | ...] on the last axis."""
    cols = [np.split(p, degree, axis=-1) for p in parts]
    return np.concatenate([np.concatenate([c[r] for c in cols], -1) for r in range(degree)], -1)


# --------------------------------------------------------------------------- #
# causal depthwise convolution + SiLU
# --------------------------------------------------------------------------- #
def conv_pre(x, w, bias=None, offsets=None, history=None, dilation=1):
    """Preactivation.  x [B,T,C], w [C,W] (w[:, W-1] multiplies the current token).

    offsets: document starts; taps never cross a document start.  history [B,h,C]: tokens
    that precede x in the first document (h may be anything, also zero).
    """
    b, t, c = x.shape
    wd = w.shape[1]
    h = 0 if history is None else history.shape[1]
    ext = x if h == 0 else np.concatenate((history, x), 1)
    doc = _doc_start(t, offsets, h)
    y = np.zeros((b, t, c), np.result_type(ext, w))
    for j in range(wd):
        back = (wd - 1 - j) * dilation
        for i in range(t):
            src = i + h - back
            if src >= doc[i]:
                y[:, i] += w[:, j] * ext[:, src]
    return y if bias is None else y + bias


def _doc_start(t, offsets, h):
    """First usable extended index for every output token."""
    if offsets is None:
        offsets = (0, t)
    doc = np.empty(t, int)
    for n, (s, e) in enumerate(zip(offsets, offsets[1:])):
        doc[s:e] = 0 if n == 0 else s + h
    return doc


def conv_silu(x, w, bias=None, **kw):
    return silu(conv_pre(x, w, bias, **kw))


def conv_silu_bwd(x, w, bias, dy, offsets=None, history=None, dilation=1):
    """Returns dx, dw, dbias, dhistory."""
    b, t, c = x.shape
    wd = w.shape[1]
    h = 0 if history is None else history.shape[1]
    ext = x if h == 0 else np.concatenate((history, x), 1)
    pre = conv_pre(x, w, bias, offsets=offsets, history=history, dilation=dilation)
    dp = silu_bwd(pre, dy)
    doc = _doc_start(t, offsets, h)
    dext, dw = np.zeros_like(ext), np.zeros_like(w)
    for j in range(wd):
        back = (wd - 1 - j) * dilation
        for i in range(t):
            src = i + h - back
            if src >= doc[i]:
                dext[:, src] += w[:, j] * dp[:, i]
                dw[:, j] += (dp[:, i] * ext[:, src]).sum(0)
    return dext[:, h:], dw, dp.sum((0, 1)), dext[:, :h]


# --------------------------------------------------------------------------- #
# layers
# --------------------------------------------------------------------------- #
def lin(x, w):
    return x @ w.T


def lin_bwd(x, w, dy):
    return dy @ w, np.tensordot(dy, x, axes=((0, 1), (0, 1)))


def gdn_layer_params(rng, d, h, hv, k, v, width, bias=True):
    kd, vd = h * k, hv * v
    cd = 2 * kd + vd
    p = dict(in_proj_qkv=rng.normal(0, .5, (cd, d)), in_proj_z=rng.normal(0, .5, (vd, d)),
             in_proj_b=rng.normal(0, .5, (hv, d)), in_proj_a=rng.normal(0, .5, (hv, d)),
             conv_weight=rng.normal(0, .5, (cd, width)), A_log=rng.uniform(-1, 1, hv),
             dt_bias=rng.normal(0, .5, hv), norm=rng.uniform(.5, 1.5, v),
             out_proj=rng.normal(0, .5, (d, vd)))
    if bias:
        p["conv_bias"] = rng.normal(0, .3, cd)
    return p


def gdn_layer(x, p, dims, *, mask=None, offsets=None, core="recurrent", chunk=64, eps=1e-6, keep=None):
    """Qwen3.5-style GDN layer.  dims = (H, HV, K, V)."""
    h, hv, k, v = dims
    b, t, _ = x.shape
    kd = h * k
    xm = x if mask is None else x * mask[..., None]
    mixed, z = lin(xm, p["in_proj_qkv"]), lin(xm, p["in_proj_z"])
    bl, al = lin(xm, p["in_proj_b"]), lin(xm, p["in_proj_a"])
    act = conv_silu(mixed, p["conv_weight"], p.get("conv_bias"), offsets=offsets)
    q = act[..., :kd].reshape(b, t, h, k)
    kk = act[..., kd:2 * kd].reshape(b, t, h, k)
    vv = act[..., 2 * kd:].reshape(b, t, hv, v)
    qn, qr = l2norm(q)
    kn, kr = l2norm(kk)
    beta = sigmoid(bl)
    g = gate_softplus(al, p["A_log"], p["dt_bias"])
    if core == "recurrent":
        off = (0, t) if offsets is None else offsets
        o = np.concatenate([recurrent_forward(qn[:, s:e], kn[:, s:e], vv[:, s:e], g[:, s:e], beta[:, s:e])[0]
                            for s, e in zip(off, off[1:])], 1)
        segs = None
    else:
        o, _, segs = packed_forward(qn, kn, vv, g, beta, (0, t) if offsets is None else offsets, chunk=chunk)
    zz = z.reshape(b, t, hv, v)
    y = rmsnorm_gated(o, zz, p["norm"], eps, "silu").reshape(b, t, hv * v)
    if keep is not None:
        keep.update(xm=xm, mixed=mixed, al=al, q=qn, qr=qr, k=kn, kr=kr, beta=beta, segs=segs, o=o, z=zz, y=y)
    return lin(y, p["out_proj"])


def gdn_layer_bwd(x, p, dims, dy, *, mask=None, offsets=None, chunk=64, eps=1e-6):
    h, hv, k, v = dims
    b, t, _ = x.shape
    c = {}
    gdn_layer(x, p, dims, mask=mask, offsets=offsets, core="chunk", chunk=chunk, eps=eps, keep=c)
    gr = {}
    dn, gr["out_proj"] = lin_bwd(c["y"], p["out_proj"], dy)
    do, dz, gr["norm"] = rmsnorm_gated_bwd(c["o"], c["z"], p["norm"], eps, "silu", dn.reshape(b, t, hv, v))
    r = packed_backward(c["segs"], do, (0, t) if offsets is None else offsets)
    dq = l2norm_bwd(c["q"], c["qr"], r["dq"]).reshape(b, t, h * k)
    dk = l2norm_bwd(c["k"], c["kr"], r["dk"]).reshape(b, t, h * k)
    dact = np.concatenate((dq, dk, r["dv"].reshape(b, t, hv * v)), -1)
    dal, gr["A_log"], gr["dt_bias"] = gate_softplus_bwd(c["al"], p["A_log"], p["dt_bias"], r["dg"])
    dbl = beta_sigmoid_bwd(c["beta"], r["dbeta"])
    dmixed, gr["conv_weight"], dcb, _ = conv_silu_bwd(c["mixed"], p["conv_weight"], p.get("conv_bias"), dact,
                                                      offsets=offsets)
    if "conv_bias" in p:
        gr["conv_bias"] = dcb
    dx = 0
    for name, d in (("in_proj_qkv", dmixed), ("in_proj_z", dz.reshape(b, t, -1)), ("in_proj_b", dbl), ("in_proj_a", dal)):
        part, gr[name] = lin_bwd(c["xm"], p[name], d)
        dx = dx + part
    return dx if mask is None else dx * mask[..., None], gr


def kda_layer_params(rng, d, h, hv, k, v, width, full_rank=True):
    p = dict(q_proj=rng.normal(0, .5, (h * k, d)), k_proj=rng.normal(0, .5, (h * k, d)),
             v_proj=rng.normal(0, .5, (hv * v, d)), q_conv=rng.normal(0, .5, (h * k, width)),
             k_conv=rng.normal(0, .5, (h * k, width)), v_conv=rng.normal(0, .5, (hv * v, width)),
             f_a_proj=rng.normal(0, .5, (k, d)), f_b_proj=rng.normal(0, .5, (hv * k, k)),
             b_proj=rng.normal(0, .5, (hv, d)), A_log=rng.uniform(-1, 1, hv),
             dt_bias=rng.normal(0, .5, hv * k), o_norm=rng.uniform(.5, 1.5, v),
             o_proj=rng.normal(0, .5, (d, hv * v)))
    if full_rank:
        p["g_proj"] = rng.normal(0, .5, (hv * v, d))
    else:
        p["g_a_proj"], p["g_b_proj"] = rng.normal(0, .5, (v, d)), rng.normal(0, .5, (hv * v, v))
    return p


def kda_layer(x, p, dims, *, lower_bound=-5.0, offsets=None, core="recurrent", chunk=64, eps=1e-6, keep=None):
    """Kimi-style KDA layer.  lower_bound None selects the softplus gate."""
    h, hv, k, v = dims
    b, t, _ = x.shape
    pq, pk, pv = lin(x, p["q_proj"]), lin(x, p["k_proj"]), lin(x, p["v_proj"])
    q = conv_silu(pq, p["q_conv"], offsets=offsets).reshape(b, t, h, k)
    kk = conv_silu(pk, p["k_conv"], offsets=offsets).reshape(b, t, h, k)
    vv = conv_silu(pv, p["v_conv"], offsets=offsets).reshape(b, t, hv, v)
    fa = lin(x, p["f_a_proj"])
    gl = lin(fa, p["f_b_proj"]).reshape(b, t, hv, k)
    bl = lin(x, p["b_proj"])
    ga = lin(x, p["g_a_proj"]) if "g_a_proj" in p else None
    og = (lin(x, p["g_proj"]) if ga is None else lin(ga, p["g_b_proj"])).reshape(b, t, hv, v)
    qn, qr = l2norm(q)
    kn, kr = l2norm(kk)
    beta = sigmoid(bl)
    g = (gate_softplus(gl, p["A_log"], p["dt_bias"]) if lower_bound is None
         else gate_lower_bound(gl, p["A_log"], p["dt_bias"], lower_bound))
    off = (0, t) if offsets is None else offsets
    if core == "recurrent":
        o = np.concatenate([recurrent_forward(qn[:, s:e], kn[:, s:e], vv[:, s:e], g[:, s:e], beta[:, s:e])[0]
                            for s, e in zip(off, off[1:])], 1)
        segs = None
    else:
        o, _, segs = packed_forward(qn, kn, vv, g, beta, off, chunk=chunk)
    y = rmsnorm_gated(o, og, p["o_norm"], eps, "sigmoid").reshape(b, t, hv * v)
    if keep is not None:
        keep.update(pq=pq, pk=pk, pv=pv, fa=fa, gl=gl, ga=ga, og=og, q=qn, qr=qr, k=kn, kr=kr,
                    beta=beta, segs=segs, o=o, y=y)
    return lin(y, p["o_proj"])


def kda_layer_bwd(x, p, dims, dy, *, lower_bound=-5.0, offsets=None, chunk=64, eps=1e-6):
    h, hv, k, v = dims
    b, t, _ = x.shape
    c, gr = {}, {}
    kda_layer(x, p, dims, lower_bound=lower_bound, offsets=offsets, core="chunk", chunk=chunk, eps=eps, keep=c)
    dn, gr["o_proj"] = lin_bwd(c["y"], p["o_proj"], dy)
    do, dog, gr["o_norm"] = rmsnorm_gated_bwd(c["o"], c["og"], p["o_norm"], eps, "sigmoid", dn.reshape(b, t, hv, v))
    r = packed_backward(c["segs"], do, (0, t) if offsets is None else offsets)
    dq = l2norm_bwd(c["q"], c["qr"], r["dq"]).reshape(b, t, -1)
    dk = l2norm_bwd(c["k"], c["kr"], r["dk"]).reshape(b, t, -1)
    if lower_bound is None:
        dgl, gr["A_log"], gr["dt_bias"] = gate_softplus_bwd(c["gl"], p["A_log"], p["dt_bias"], r["dg"])
    else:
        dgl, gr["A_log"], gr["dt_bias"] = gate_lower_bound_bwd(c["gl"], p["A_log"], p["dt_bias"], lower_bound, r["dg"])
    dpq, gr["q_conv"], _, _ = conv_silu_bwd(c["pq"], p["q_conv"], None, dq, offsets=offsets)
    dpk, gr["k_conv"], _, _ = conv_silu_bwd(c["pk"], p["k_conv"], None, dk, offsets=offsets)
    dpv, gr["v_conv"], _, _ = conv_silu_bwd(c["pv"], p["v_conv"], None, r["dv"].reshape(b, t, -1), offsets=offsets)
    dfa, gr["f_b_proj"] = lin_bwd(c["fa"], p["f_b_proj"], dgl.reshape(b, t, -1))
    todo = [("q_proj", dpq), ("k_proj", dpk), ("v_proj", dpv), ("f_a_proj", dfa),
            ("b_proj", beta_sigmoid_bwd(c["beta"], r["dbeta"]))]
    if c["ga"] is None:
        todo.append(("g_proj", dog.reshape(b, t, -1)))
    else:
        dga, gr["g_b_proj"] = lin_bwd(c["ga"], p["g_b_proj"], dog.reshape(b, t, -1))
        todo.append(("g_a_proj", dga))
    dx = 0
    for name, d in todo:
        part, gr[name] = lin_bwd(x, p[name], d)
        dx = dx + part
    return dx, gr


# --------------------------------------------------------------------------- #
# self checks
# --------------------------------------------------------------------------- #
def rel(a, b):
    """Largest absolute difference over the largest reference magnitude."""
    return float(np.max(np.abs(a - b)) / max(1e-300, np.max(np.abs(b))))


def make_inputs(rng, kind, b, t, h, hv, k, v, *, norm=True, decay=0.4, dtype=np.float64):
    q, kk, vv = rng.normal(size=(b, t, h, k)), rng.normal(size=(b, t, h, k)), rng.normal(size=(b, t, hv, v))
    if norm:
        q, kk = l2norm(q)[0], l2norm(kk)[0]
    g = -decay * rng.exponential(size=(b, t, hv) if kind == "gdn" else (b, t, hv, k))
    beta = sigmoid(rng.normal(size=(b, t, hv)))
    h0, dht = rng.normal(size=(b, hv, k, v)), rng.normal(size=(b, hv, k, v))
    do = rng.normal(size=(b, t, hv, v))
    return {n: a.astype(dtype) for n, a in dict(q=q, k=kk, v=vv, g=g, beta=beta, h0=h0, do=do, dht=dht).items()}


def numeric_gradients(fun, args, method):
    """fun(dict) -> real scalar (analytic).  Central differences or complex step, elementwise."""
    grads = {}
    for name, a in args.items():
        gr = np.zeros(a.shape)
        flat = gr.reshape(-1)
        for i in range(a.size):
            if method == "complex":
                z = a.astype(complex)
                z.reshape(-1)[i] += 1e-30j
                flat[i] = fun({**args, name: z}).imag / 1e-30
            else:
                step = 1e-5
                up, dn = a.copy(), a.copy()
                up.reshape(-1)[i] += step
                dn.reshape(-1)[i] -= step
                flat[i] = (fun({**args, name: up}) - fun({**args, name: dn})) / (2 * step)
        grads[name] = gr
    return grads


class Report:
    def __init__(self):
        self.bad = 0

    def line(self, what, err, tol):
        ok = err <= tol
        self.bad += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {what:<74s} {err:9.2e}  (limit {tol:.0e})")


def check_core(rep, rng, quick):
    names = dict(q="dq", k="dk", v="dv", g="dg", beta="dbeta", h0="dh0")
    for kind in ("gdn", "kda"):
        x = make_inputs(rng, kind, 2, 11, 2, 4, 3, 5)
        args = {n: x[n] for n in names}

        def loss(a):
            o, ht = recurrent_forward(a["q"], a["k"], a["v"], a["g"], a["beta"], h0=a["h0"])
            return (o * x["do"]).sum() + (ht * x["dht"]).sum()

        refs = [("complex step", numeric_gradients(loss, args, "complex"), 1e-12)]
        if not quick:
            refs.append(("central differences", numeric_gradients(loss, args, "central"), 1e-7))
        tok = recurrent_backward(x["q"], x["k"], x["v"], x["g"], x["beta"], x["do"], h0=x["h0"], dht=x["dht"])
        for label, ref, tol in refs:
            rep.line(f"{kind}: token adjoint vs {label} (T=11, HV=2H, h0, dht)",
                     max(rel(tok[names[n]], ref[n]) for n in names), tol)
        o_ref, h_ref = recurrent_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], h0=x["h0"])
        for c in (1, 4, 7, 11, 64):
            o, ht, ch = chunk_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], chunk=c, h0=x["h0"])
            gr = chunk_backward(ch, x["do"], x["dht"])
            rep.line(f"{kind}: chunk C={c} output and final state vs recurrence", max(rel(o, o_ref), rel(ht, h_ref)), 1e-12)
            for label, ref, tol in refs:
                rep.line(f"{kind}: chunk C={c} dq dk dv dg dbeta dh0 vs {label}",
                         max(rel(gr[names[n]], ref[n]) for n in names), tol)
        b, t, h, hv, k, v = (1, 150, 1, 2, 32, 48) if quick else (1, 200, 2, 4, 128, 128)
        y = make_inputs(rng, kind, b, t, h, hv, k, v, decay=0.3)
        o, ht, ch = chunk_forward(y["q"], y["k"], y["v"], y["g"], y["beta"], chunk=64, h0=y["h0"])
        gr = chunk_backward(ch, y["do"], y["dht"])
        tok = recurrent_backward(y["q"], y["k"], y["v"], y["g"], y["beta"], y["do"], h0=y["h0"], dht=y["dht"])
        rep.line(f"{kind}: chunk C=64 T={t} H={h} HV={hv} K={k} V={v} gradients vs token adjoint",
                 max(rel(gr[n], tok[n]) for n in tok), 1e-10)
        # float32 arithmetic in the same formulas, for choosing tolerances
        f = {n: a.astype(np.float32) for n, a in y.items()}
        o32, h32, c32 = chunk_forward(f["q"], f["k"], f["v"], f["g"], f["beta"], chunk=64, h0=f["h0"])
        g32 = chunk_backward(c32, f["do"], f["dht"])
        rep.line(f"{kind}: same in float32, output/state", max(rel(o32, o), rel(h32, ht)), 1e-4)
        rep.line(f"{kind}: same in float32, gradients", max(rel(g32[n], gr[n]) for n in gr), 1e-3)

    # scalar-gate kernel form of the WY backward
    x = make_inputs(rng, "gdn", 1, 9, 1, 1, 4, 3)
    _, _, ch = chunk_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], chunk=9)
    c = ch[0]
    dw, du = rng.normal(size=(9, 4)), rng.normal(size=(9, 3))
    dk, dv, db, dG = prepare_wy_repr_bwd_scalar(c.k[0, 0], c.v[0, 0], c.b[0, 0, :, 0], c.G[0, 0, :, 0], c.A[0, 0], dw, du)

    def wy_loss(a):
        G = a["G"]
        low = np.tril(np.ones((9, 9)), -1) * a["b"][:, None] * (a["k"] @ a["k"].T) * np.exp(G[:, None] - G[None])
        A = np.linalg.inv(np.eye(9) + low)
        return ((A @ (a["k"] * (a["b"] * np.exp(G))[:, None])) * dw).sum() + ((A @ (a["v"] * a["b"][:, None])) * du).sum()

    wy_args = dict(k=c.k[0, 0], v=c.v[0, 0], b=c.b[0, 0, :, 0], G=c.G[0, 0, :, 0])
    num = numeric_gradients(wy_loss, wy_args, "complex")
    rep.line("gdn: scalar WY backward (dk dv dbeta dG) vs complex step",
             max(rel(dk, num["k"]), rel(dv, num["v"]), rel(db, num["b"]), rel(dG, num["G"])), 1e-12)
    # scalar gate is the per-channel gate with equal channels
    y = make_inputs(rng, "gdn", 1, 13, 2, 2, 4, 3)
    gk = np.repeat(y["g"][..., None], 4, -1)
    a = recurrent_backward(y["q"], y["k"], y["v"], y["g"], y["beta"], y["do"], h0=y["h0"])
    b_ = recurrent_backward(y["q"], y["k"], y["v"], gk, y["beta"], y["do"], h0=y["h0"])
    rep.line("GDN equals KDA with equal channels (dg summed over channels)",
             max(rel(a["dq"], b_["dq"]), rel(a["dg"], b_["dg"].sum(-1))), 1e-12)


def check_pointwise(rep, rng):
    for name, shape in (("gdn", (2, 5, 3)), ("kda", (2, 5, 3, 4))):
        x, w = rng.normal(size=shape), rng.normal(size=shape)
        a = rng.uniform(-1, 1, 3)
        bias = rng.normal(size=3 if name == "gdn" else 12)
        args = dict(x=x, a=a, bias=bias)
        num = numeric_gradients(lambda z: (gate_softplus(z["x"], z["a"], z["bias"]) * w).sum(), args, "complex")
        got = gate_softplus_bwd(x, a, bias, w)
        rep.line(f"{name} softplus gate backward", max(rel(p, num[n]) for p, n in zip(got, ("x", "a", "bias"))), 1e-12)
        num = numeric_gradients(lambda z: (gate_lower_bound(z["x"], z["a"], z["bias"], -5.0) * w).sum(), args, "complex")
        got = gate_lower_bound_bwd(x, a, bias, -5.0, w)
        rep.line(f"{name} lower-bounded gate backward", max(rel(p, num[n]) for p, n in zip(got, ("x", "a", "bias"))), 1e-12)
    x, w = rng.normal(size=(3, 4, 6)), rng.normal(size=(3, 4, 6))
    x[0, 0] = 0.0                                            # the eps branch
    num = numeric_gradients(lambda z: (l2norm(z["x"])[0] * w).sum(), dict(x=x), "complex")
    rep.line("l2norm backward from (y, rstd), includes a zero row", rel(l2norm_bwd(*l2norm(x), w), num["x"]), 1e-12)
    for act in ("sigmoid", "silu"):
        gate, wt = rng.normal(size=(3, 4, 6)), rng.normal(size=6)
        x1 = rng.normal(size=(3, 4, 6))
        num = numeric_gradients(lambda z: (rmsnorm_gated(z["x"], z["gate"], z["wt"], 1e-6, act) * w).sum(),
                                dict(x=x1, gate=gate, wt=wt), "complex")
        got = rmsnorm_gated_bwd(x1, gate, wt, 1e-6, act, w)
        rep.line(f"gated RMSNorm ({act}) backward", max(rel(p, num[n]) for p, n in zip(got, ("x", "gate", "wt"))), 1e-12)
    for dil in (1, 2):
        x, wt, bias = rng.normal(size=(1, 12, 3)), rng.normal(size=(3, 4)), rng.normal(size=3)
        hist, dy = rng.normal(size=(1, 2, 3)), rng.normal(size=(1, 12, 3))
        kw = dict(offsets=(0, 5, 6, 12), dilation=dil)
        num = numeric_gradients(lambda z: (conv_silu(z["x"], z["w"], z["b"], history=z["h"], **kw) * dy).sum(),
                                dict(x=x, w=wt, b=bias, h=hist), "complex")
        got = conv_silu_bwd(x, wt, bias, dy, history=hist, **kw)
        rep.line(f"packed conv+SiLU with history, dilation {dil}: dx dw db dhistory",
                 max(rel(p, num[n]) for p, n in zip(got, ("x", "w", "b", "h"))), 1e-12)


def check_summary(rep, rng):
    for kind in ("gdn", "kda"):
        x = make_inputs(rng, kind, 2, 23, 1, 2, 5, 3)
        ch = prepare(x["q"], x["k"], x["v"], x["g"], x["beta"], 4)
        s, m = summary(ch)
        _, ht = recurrent_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], h0=x["h0"])
        rep.line(f"{kind}: exit state = M h0 + S", rel(m @ x["h0"] + s, ht), 1e-12)
        cut = 9
        part = [summary(prepare(x["q"][:, a:b], x["k"][:, a:b], x["v"][:, a:b], x["g"][:, a:b], x["beta"][:, a:b], 4))
                for a, b in ((0, cut), (cut, 23))]
        cs, cm = affine_compose(*part)
        rep.line(f"{kind}: summary of a concatenation = composition", max(rel(cs, s), rel(cm, m)), 1e-12)
        local_dv(ch, x["do"])
        gsum = gradient_summary(ch)
        tok = recurrent_backward(x["q"], x["k"], x["v"], x["g"], x["beta"], x["do"], h0=x["h0"], dht=x["dht"])
        rep.line(f"{kind}: entry gradient = G + M^T dht, G independent of h0", rel(gsum + T_(m) @ x["dht"], tok["dh0"]), 1e-12)
        # padding tokens (k = v = q = 0, beta = 0, g = 0) are the neutral element
        z = {n: np.concatenate((x[n], np.zeros_like(x[n][:, :5])), 1) for n in ("q", "k", "v", "g", "beta", "do")}
        o, ht2, pc = chunk_forward(z["q"], z["k"], z["v"], z["g"], z["beta"], chunk=7, h0=x["h0"])
        gr = chunk_backward(pc, z["do"], x["dht"])
        o_ref, _ = recurrent_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], h0=x["h0"])
        s0, m0 = summary(prepare(*(z[n][:, 23:] for n in ("q", "k", "v", "g", "beta")), 4))
        rep.line(f"{kind}: zero padding changes nothing; its summary is (0, I)",
                 max(rel(o[:, :23], o_ref), rel(ht2, ht), rel(gr["dh0"], tok["dh0"]), float(np.abs(s0).max()),
                     float(np.abs(m0 - np.eye(5)).max()), *(rel(gr[n][:, :23], tok[n]) for n in ("dq", "dk", "dv", "dg", "dbeta"))), 1e-12)


def check_cp(rep, rng, quick):
    cases = [("dense, equal shards", None, (0, 8, 16, 24, 32, 40, 48), 2),
             ("dense, unequal shards", None, (0, 5, 6, 19, 30, 31, 45), 2),
             ("packed, long document over ranks, empty resets", (0, 3, 29, 31, 40, 48), (0, 8, 16, 24, 32, 40, 48), 1),
             ("packed, document ends on cuts", (0, 16, 24, 48), (0, 8, 16, 24, 32, 40, 48), 1),
             ("packed, many short documents", (0, 2, 3, 7, 8, 9, 15, 16, 17, 33, 34, 47, 48), (0, 8, 16, 24, 32, 40, 48), 1)]
    for kind in ("gdn", "kda"):
        for label, off, cuts, b in cases:
            x = make_inputs(rng, kind, b, cuts[-1], 1, 2, 4, 3)
            full = (0, cuts[-1]) if off is None else off
            o_ref, _, segs = packed_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], full, chunk=4)
            g_ref = packed_backward(segs, x["do"], full)
            rec = [recurrent_forward(x["q"][:, s:e], x["k"][:, s:e], x["v"][:, s:e], x["g"][:, s:e], x["beta"][:, s:e])[0]
                   for s, e in zip(full, full[1:])]
            err0 = rel(o_ref, np.concatenate(rec, 1))
            counts = {}
            worst = err0
            for proto, width in (("p2p", 1), ("allgather", 1), ("grouped", 2), ("grouped", 3), ("rd", 1)):
                o, gr, ft, bt, _ = cp_simulate(x["q"], x["k"], x["v"], x["g"], x["beta"], x["do"], cuts, off,
                                               chunk=4, protocol=proto, width=width)
                worst = max(worst, rel(o, o_ref), *(rel(gr[n], g_ref[n]) for n in gr))
                counts[proto + (str(width) if proto == "grouped" else "")] = (len(ft.messages), len(bt.messages))
            rep.line(f"{kind}: CP6 {label}: all protocols vs one process", worst, 1e-11)
            if kind == "gdn":
                print("      messages fwd/bwd: " + ", ".join(f"{n} {a}/{b_}" for n, (a, b_) in counts.items()))
    for n in (1, 2, 3, 4, 5, 7, 8, 13):
        s, m, g_ = ([rng.normal(size=(1, 1, 3, d)) for _ in range(n)] for d in (2, 3, 2))
        got, cache = exchange_rd_forward(s, m, Trace())
        back = exchange_rd_backward(g_, cache, Trace())
        ref_f, ref_b = exchange_allgather(s, m, True, Trace()), exchange_allgather(g_, m, False, Trace())
        rep.line(f"recursive doubling, {n} ranks: prefix and suffix vs ordered scan",
                 max(max(float(np.abs(a - b_).max()) for a, b_ in zip(got, ref_f)),
                     max(float(np.abs(a - b_).max()) for a, b_ in zip(back, ref_b)))
                 / max(1.0, max(float(np.abs(a).max()) for a in ref_f + ref_b)), 1e-12)
    # the wavefront never reads the transfer of the first or the last rank
    s, g_ = ([rng.normal(size=(1, 1, 3, 2)) for _ in range(5)] for _ in range(2))
    m = [rng.normal(size=(1, 1, 3, 3)) for _ in range(5)]
    ref = exchange_p2p(s, m, [True] * 5, True, Trace())[1:] + exchange_p2p(g_, m, [True] * 5, False, Trace())[:-1]
    bad = [m[0] * np.nan, *m[1:4], m[4] * np.nan]
    got = exchange_p2p(s, bad, [True] * 5, True, Trace())[1:] + exchange_p2p(g_, bad, [True] * 5, False, Trace())[:-1]
    rep.line("p2p: M of the first and of the last rank is never read", max(rel(a, b_) for a, b_ in zip(got, ref)), 0.0)
    # Ulysses rows of 2 consecutive ranks times a state chain of 3 rows
    for off in (None, (0, 3, 29, 31, 40, 48)):
        x = make_inputs(rng, "kda", 1, 48, 2, 4, 4, 3)
        full = (0, 48) if off is None else off
        o_ref, _, segs = packed_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], full, chunk=4)
        g_ref = packed_backward(segs, x["do"], full)
        worst = 0.0
        for u in range(2):
            hd = {n: (x[n][:, :, u:u + 1] if n in ("q", "k") else x[n][:, :, 2 * u:2 * u + 2])
                  for n in ("q", "k", "v", "g", "beta", "do")}
            o, gr, *_ = cp_simulate(*(hd[n] for n in ("q", "k", "v", "g", "beta", "do")), (0, 16, 32, 48), off,
                                    chunk=4, protocol="rd")
            hs = lambda n, a: a[:, :, u:u + 1] if n in ("dq", "dk") else a[:, :, 2 * u:2 * u + 2]
            worst = max(worst, rel(o, o_ref[:, :, 2 * u:2 * u + 2]), *(rel(gr[n], hs(n, g_ref[n])) for n in gr))
        for r in range(6):
            row = PackedInfo(full, 8 * r, 8 * r + 8).ulysses(2, r % 2)
            worst = max(worst, float((row.start, row.end) != (16 * (r // 2), 16 * (r // 2) + 16)))
        rep.line(f"Ulysses 2 x recursive doubling 3, {'packed' if off else 'dense'} KDA", worst, 1e-11)
    # GDN pure Ulysses: rank-major packing, one all-to-all, per-section convolution weights
    h, hv, kd_, vd_, deg = 2, 4, 3, 5, 2
    secs = [h * kd_, h * kd_, hv * vd_, hv, hv]
    whole = [rng.normal(size=(1, 8, n)) for n in secs]
    w = rng.normal(size=(sum(secs[:3]), 4))
    packed = [rank_major_pack([p[:, 4 * r:4 * r + 4] for p in whole], deg) for r in range(deg)]
    heads = ulysses_all_to_all(packed, 2, 1)
    y_full = conv_silu(np.concatenate(whole[:3], -1), w)
    err = 0.0
    for r in range(deg):
        loc = np.split(heads[r], np.cumsum([n // deg for n in secs])[:-1], axis=-1)
        err = max(err, *(float(np.abs(a - np.split(b_, deg, -1)[r]).max()) for a, b_ in zip(loc, whole)))
        wl = np.concatenate([np.split(part, deg, 0)[r] for part in np.split(w, np.cumsum(secs[:2]), axis=0)], 0)
        y = np.split(conv_silu(np.concatenate(loc[:3], -1), wl), np.cumsum([n // deg for n in secs[:2]]), axis=-1)
        ref = [np.split(part, deg, -1)[r] for part in np.split(y_full, np.cumsum(secs[:2]), axis=-1)]
        err = max(err, *(float(np.abs(a - b_).max()) for a, b_ in zip(y, ref)))
    rep.line("GDN Ulysses: packed q|k|v|b|a exchange and sliced convolution", err, 1e-14)
    # convolution halo over ranks
    off, cuts = (0, 3, 29, 31, 40, 48), (0, 8, 16, 24, 32, 40, 48)
    x, w, bias, dy = rng.normal(size=(1, 48, 3)), rng.normal(size=(3, 4)), rng.normal(size=3), rng.normal(size=(1, 48, 3))
    y_ref = conv_silu(x, w, bias, offsets=off)
    dx_ref, dw_ref, db_ref, _ = conv_silu_bwd(x, w, bias, dy, offsets=off)
    ys, dx, dw, db = [], np.zeros_like(x), 0, 0
    for a, b in zip(cuts, cuts[1:]):
        p = PackedInfo(off, a, b)
        n = min(w.shape[1] - 1, p.preceding_sample_tokens)
        hist = x[:, a - n:a]
        ys.append(conv_silu(x[:, a:b], w, bias, offsets=p.local, history=hist))
        d, w_, b_, dh = conv_silu_bwd(x[:, a:b], w, bias, dy[:, a:b], offsets=p.local, history=hist)
        dx[:, a:b] += d
        dx[:, a - n:a] += dh
        dw, db = dw + w_, db + b_
    rep.line("conv halo over 6 ranks, packed: y dx dw db", max(rel(np.concatenate(ys, 1), y_ref), rel(dx, dx_ref),
                                                            rel(dw, dw_ref), rel(db, db_ref)), 1e-12)
    # Ulysses: round trip and the value of one slice
    p, s, f = 4, 3, 8
    shards = [rng.normal(size=(2, s, f)) for _ in range(p)]
    heads = ulysses_all_to_all(shards, 2, 1)
    back = ulysses_all_to_all(heads, 1, 2)
    whole = np.concatenate(shards, 1)
    rep.line("Ulysses all-to-all: layout and round trip",
             max([float(np.abs(heads[r] - whole[..., r * 2:(r + 1) * 2]).max()) for r in range(p)]
                 + [float(np.abs(a - b).max()) for a, b in zip(back, shards)]), 0.0)


def check_layers(rep, rng):
    dims, d = (2, 4, 3, 5), 6
    x, dy = rng.normal(size=(1, 13, d)), rng.normal(size=(1, 13, d))
    mask = (np.arange(13) < 11).astype(float)[None]
    for off in (None, (0, 4, 5, 13)):
        p = gdn_layer_params(rng, d, *dims, 4)
        num = numeric_gradients(lambda a: (gdn_layer(a["x"], a, dims, mask=mask, offsets=off) * dy).sum(), dict(x=x, **p), "complex")
        dx, gr = gdn_layer_bwd(x, p, dims, dy, mask=mask, offsets=off, chunk=4)
        rep.line(f"GDN layer {'packed' if off else 'dense'}: dx and every parameter gradient",
                 max([rel(dx, num["x"])] + [rel(gr[n], num[n]) for n in p]), 1e-11)
        for lb, full in ((-5.0, True), (None, False)):
            p = kda_layer_params(rng, d, *dims, 4, full)
            num = numeric_gradients(lambda a: (kda_layer(a["x"], a, dims, lower_bound=lb, offsets=off) * dy).sum(),
                                    dict(x=x, **p), "complex")
            dx, gr = kda_layer_bwd(x, p, dims, dy, lower_bound=lb, offsets=off, chunk=4)
            rep.line(f"KDA layer {'packed' if off else 'dense'} lower_bound={lb}: dx and every parameter gradient",
                     max([rel(dx, num["x"])] + [rel(gr[n], num[n]) for n in p]), 1e-11)


def run_checks(quick):
    rng = np.random.default_rng(20240607)
    rep = Report()
    check_pointwise(rep, rng)
    check_core(rep, rng, quick)
    check_summary(rep, rng)
    check_cp(rep, rng, quick)
    check_layers(rep, rng)
    print("all checks passed" if rep.bad == 0 else f"{rep.bad} check(s) FAILED")
    return 1 if rep.bad else 0


# --------------------------------------------------------------------------- #
# vector files
# --------------------------------------------------------------------------- #
def write_vectors(path, records):
    with open(path, "wb") as fh:
        fh.write(MAGIC)
        for name, value in records.items():
            a = np.array(value, dtype="<f8", order="C")
            raw = name.encode("ascii")
            fh.write(struct.pack("<I", len(raw)) + raw + struct.pack("<I", a.ndim))
            fh.write(struct.pack(f"<{a.ndim}q", *a.shape) + a.tobytes())


def read_vectors(path):
    with open(path, "rb") as fh:
        data = fh.read()
    if data[:8] != MAGIC:
        raise ValueError("not a vector file")
    pos, out = 8, {}
    while pos < len(data):
        n, = struct.unpack_from("<I", data, pos)
        name = data[pos + 4:pos + 4 + n].decode("ascii")
        pos += 4 + n
        rank, = struct.unpack_from("<I", data, pos)
        dims = struct.unpack_from(f"<{rank}q", data, pos + 4)
        pos += 4 + 8 * rank
        count = int(np.prod(dims)) if rank else 1
        out[name] = np.frombuffer(data, "<f8", count, pos).reshape(dims)
        pos += 8 * count
    return out


def build_vectors(a):
    rng = np.random.default_rng(a.seed)
    off = tuple(int(s) for s in a.offsets.split(",")) if a.offsets else None
    rec = {}
    if a.kind in ("gdn", "kda"):
        n = 1 if off is None else len(off) - 1
        b = 1 if off else a.B
        x = make_inputs(rng, a.kind, b, a.T, a.H, a.HV, a.K, a.V, decay=a.decay)
        if off:
            x["h0"], x["dht"] = (rng.normal(size=(n, a.HV, a.K, a.V)) for _ in range(2))
        if a.float32_inputs:
            x = {k: v.astype(np.float32).astype(np.float64) for k, v in x.items()}
        h0, dht = (None, None) if a.no_state else (x["h0"], x["dht"])
        full = off or (0, a.T)
        scale = a.K ** -0.5 if a.scale is None else a.scale
        if off:
            o, ht, segs = packed_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], full, chunk=a.chunk, scale=scale, h0=h0)
            gr = packed_backward(segs, x["do"], full, dht)
        else:
            o, ht, ch = chunk_forward(x["q"], x["k"], x["v"], x["g"], x["beta"], chunk=a.chunk, scale=scale, h0=h0)
            gr = chunk_backward(ch, x["do"], dht)
            s, m = summary(ch)
            rec.update(S=s, M=m, G=gradient_summary(ch))
            if a.intermediates:
                for i, c in enumerate(ch):
                    for nm in ("G", "L", "A", "W", "U", "P", "H", "Vn", "dVn", "dHn"):
                        rec[f"chunk{i}.{nm}"] = getattr(c, nm)
        if a.no_state:
            x.pop("h0"), x.pop("dht"), gr.pop("dh0")
        rec = {**x, "o": o, "ht": ht, **gr, **rec, "scale": scale, "chunk": a.chunk, "offsets": full}
    elif a.kind in ("cp-gdn", "cp-kda"):
        cuts = tuple(int(s) for s in a.cuts.split(","))
        x = make_inputs(rng, a.kind[3:], 1 if off else a.B, cuts[-1], a.H, a.HV, a.K, a.V, decay=a.decay)
        o, gr, ft, bt, aux = cp_simulate(x["q"], x["k"], x["v"], x["g"], x["beta"], x["do"], cuts, off,
                                         chunk=a.chunk, scale=a.scale, protocol=a.protocol, width=a.width)
        x.pop("h0"), x.pop("dht")
        rec = {**x, "o": o, **gr, "cuts": cuts, "offsets": off or (0, cuts[-1]), "chunk": a.chunk,
               "messages_forward": np.array(ft.messages, float).reshape(-1, 3),
               "messages_backward": np.array(bt.messages, float).reshape(-1, 3)}
        for nm, vals in aux.items():
            for r, val in enumerate(vals):
                if val is not None:
                    rec[f"rank{r}.{nm}"] = val
    elif a.kind == "conv":
        c = a.H * a.K
        x, w = rng.normal(size=(1 if off else a.B, a.T, c)), rng.normal(size=(c, a.conv_width))
        bias, dy = rng.normal(size=c), rng.normal(size=x.shape)
        hist = rng.normal(size=(x.shape[0], a.history, c))
        kw = dict(offsets=off, history=hist, dilation=a.dilation)
        dx, dw, db, dh = conv_silu_bwd(x, w, bias, dy, **kw)
        rec = dict(x=x, w=w, bias=bias, history=hist, dy=dy, y=conv_silu(x, w, bias, **kw), dx=dx, dw=dw, dbias=db,
                   dhistory=dh, offsets=off or (0, a.T), dilation=a.dilation)
    elif a.kind == "gate":
        for nm, shape, nb in (("gdn", (a.B, a.T, a.HV), a.HV), ("kda", (a.B, a.T, a.HV, a.K), a.HV * a.K)):
            x, dg = rng.normal(size=shape), rng.normal(size=shape)
            al, bias = rng.uniform(-1, 1, a.HV), rng.normal(size=nb)
            rec.update({f"{nm}.x": x, f"{nm}.a_log": al, f"{nm}.bias": bias, f"{nm}.dg": dg})
            for label, y, bw in (("softplus", gate_softplus(x, al, bias), gate_softplus_bwd(x, al, bias, dg)),
                                 ("bounded", gate_lower_bound(x, al, bias, a.lower_bound),
                                  gate_lower_bound_bwd(x, al, bias, a.lower_bound, dg))):
                rec.update({f"{nm}.{label}.g": y, f"{nm}.{label}.dx": bw[0], f"{nm}.{label}.da_log": bw[1],
                            f"{nm}.{label}.dbias": bw[2]})
        rec["lower_bound"] = a.lower_bound
    else:
        dims = (a.H, a.HV, a.K, a.V)
        x, dy = (rng.normal(size=(1 if off else a.B, a.T, a.hidden)) for _ in range(2))
        if a.kind == "layer-gdn":
            p = gdn_layer_params(rng, a.hidden, *dims, a.conv_width)
            y = gdn_layer(x, p, dims, offsets=off)
            dx, gr = gdn_layer_bwd(x, p, dims, dy, offsets=off, chunk=a.chunk)
        else:
            p = kda_layer_params(rng, a.hidden, *dims, a.conv_width, not a.low_rank_gate)
            y = kda_layer(x, p, dims, lower_bound=a.lower_bound, offsets=off)
            dx, gr = kda_layer_bwd(x, p, dims, dy, lower_bound=a.lower_bound, offsets=off, chunk=a.chunk)
            rec["lower_bound"] = a.lower_bound
        rec.update(x=x, dy=dy, y=y, dx=dx, offsets=off or (0, a.T), dims=dims)
        rec.update({f"param.{n}": v for n, v in p.items()})
        rec.update({f"grad.{n}": v for n, v in gr.items()})
    return rec


def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="cmd", required=True)
    c = sub.add_parser("check", help="run every self check")
    c.add_argument("--quick", action="store_true")
    w = sub.add_parser("vectors", help="write test vectors")
    w.add_argument("kind", choices=["gdn", "kda", "cp-gdn", "cp-kda", "conv", "gate", "layer-gdn", "layer-kda"])
    w.add_argument("-o", "--out", required=True)
    for name, dflt in (("B", 1), ("T", 70), ("H", 1), ("HV", 2), ("K", 16), ("V", 16), ("chunk", 64), ("seed", 0),
                       ("conv-width", 4), ("dilation", 1), ("history", 0), ("hidden", 32), ("width", 2)):
        w.add_argument("--" + name, type=int, default=dflt)
    w.add_argument("--scale", type=float)
    w.add_argument("--decay", type=float, default=0.3, help="mean of -g")
    w.add_argument("--lower-bound", type=float, default=-5.0)
    w.add_argument("--offsets", help="document offsets, e.g. 0,5,70")
    w.add_argument("--cuts", default="0,16,32,48,64", help="rank boundaries for cp kinds")
    w.add_argument("--protocol", default="p2p", choices=["p2p", "allgather", "grouped", "rd"])
    w.add_argument("--no-state", action="store_true", help="no initial state and no final-state gradient")
    w.add_argument("--intermediates", action="store_true", help="also write per-chunk A, W, U, ...")
    w.add_argument("--float32-inputs", action="store_true", help="round the inputs to float32 first")
    w.add_argument("--low-rank-gate", action="store_true", help="KDA layer: g_a_proj, g_b_proj instead of g_proj")
    l = sub.add_parser("batch", help="write a vector file for every line of arguments")
    l.add_argument("file")
    s = sub.add_parser("show", help="list a vector file")
    s.add_argument("file")
    a = ap.parse_args(argv)
    if a.cmd == "batch":
        with open(a.file, encoding="ascii") as fh:
            return max([main(["vectors", *line.split()]) for line in fh if line.strip()], default=0)
    if a.cmd == "check":
        return run_checks(a.quick)
    if a.cmd == "show":
        for n, v in read_vectors(a.file).items():
            print(f"{n:<24s} {str(v.shape):<22s} |max| {np.abs(v).max() if v.size else 0:.6g}")
        return 0
    write_vectors(a.out, build_vectors(a))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:
        sys.exit(0)
