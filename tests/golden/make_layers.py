#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes layer_*.bin: whole layers in float64, forward token by token straight from the formulas,
gradients by complex steps (exact to rounding, and blind to how any adjoint is derived).

    python3 make_layers.py [folder]

A file is the 8-byte magic DRORACL1, then records: u32 name length, name, u32 rank, i64 extents,
float64 data in C order, little endian. Inputs are rounded to float32 first, so that a float32
program reads exactly these. Parameters are records "param.<name>", their gradients "grad.<name>",
in the order of dr_layer_param. "config" holds the fields of CONFIG, in that order.
"""
import os
import struct
import sys

import numpy as np

CONFIG = ("kind", "hidden", "heads", "value_heads", "key_dim", "value_dim", "conv_width", "conv_bias",
          "gate", "lower_bound", "beta_scale", "gate_rank", "norm_eps")
GDN, KDA = 1, 2
SOFTPLUS, LOWER_BOUND = 4, 5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def conv_silu(x, weight, bias, past):
    """x [T,D], weight [D,1,W], past [D,W-1]: the tokens before the first, oldest first."""
    W, T = weight.shape[2], x.shape[0]
    line = np.concatenate([past.T, x], 0)
    p = sum(line[j:j + T] * weight[:, 0, j] for j in range(W)) + bias
    return p * sigmoid(p), line[T:].T


def delta_rule(q, k, v, g, beta, S):
    """q k [T,HV,K], v [T,HV,V], g [T,HV,K], beta [T,HV], S [HV,K,V]."""
    out = []
    for t in range(q.shape[0]):
        S = np.exp(g[t])[:, :, None] * S
        r = v[t] - np.einsum("hkv,hk->hv", S, k[t])
        S = S + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * r)
        out.append(np.einsum("hkv,hk->hv", S, q[t]) * q.shape[2] ** -0.5)
    return np.array(out).reshape(v.shape), S


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def sequence(c, a, x, conv_in, state_in):
    """One document of x [T,hidden]: y, conv_out, state_out."""
    T, H, HV, K, V = x.shape[0], c["heads"], c["value_heads"], c["key_dim"], c["value_dim"]
    p = {n[6:]: w for n, w in a.items() if n.startswith("param.")}
    zero = lambda n: p.get(n, 0)
    cuts = (H * K, 2 * H * K)
    if c["kind"] == GDN:
        qkv, conv_out = conv_silu(x @ p["in_proj_qkv.weight"].T, p["conv1d.weight"], zero("conv1d.bias"),
                                  conv_in)
        q, k, v = np.split(qkv, cuts, -1)
        raw = (x @ p["in_proj_a.weight"].T + p["dt_bias"])[:, :, None] * np.ones(K)
        logit, z = x @ p["in_proj_b.weight"].T, x @ p["in_proj_z.weight"].T
        gate = z * sigmoid(z)
        norm, last = p["norm.weight"], p["out_proj.weight"]
    else:
        parts = [conv_silu(x @ p[n + "_proj.weight"].T, p[n + "_conv1d.weight"], zero(n + "_conv1d.bias"),
                           past) for n, past in zip("qkv", np.split(conv_in, cuts, 0))]
        q, k, v = (y for y, _ in parts)
        conv_out = np.concatenate([s for _, s in parts], 0)
        pair = lambda n: (x @ p[n + "_proj.weight"].T if c["gate_rank"] == 0 else
                          x @ p[n + "_a_proj.weight"].T @ p[n + "_b_proj.weight"].T)
        raw = (pair("f") + p["dt_bias"]).reshape(T, HV, K)
        logit, gate = x @ p["b_proj.weight"].T, sigmoid(pair("g"))
        norm, last = p["o_norm.weight"], p["o_proj.weight"]
    ea = np.exp(p["A_log"])[:, None]
    g = -ea * np.log1p(np.exp(raw)) if c["gate"] == SOFTPLUS else c["lower_bound"] * sigmoid(ea * raw)
    grow = lambda y: np.repeat(unit(y.reshape(T, H, K)), HV // H, 1)
    o, state_out = delta_rule(grow(q), grow(k), v.reshape(T, HV, V), g, c["beta_scale"] * sigmoid(logit),
                              state_in)
    normed = o / np.sqrt((o * o).mean(-1, keepdims=True) + c["norm_eps"]) * norm
    return (normed * gate.reshape(T, HV, V)).reshape(T, HV * V) @ last.T, conv_out, state_out


def layer(c, a, offsets):
    """offsets None: each batch row is a document."""
    B, T, hidden = a["x"].shape
    spans = ([(b, 0, T) for b in range(B)] if offsets is None else
             [(0, s, e) for s, e in zip(offsets, offsets[1:])])
    y, convs, states = np.zeros((B, T, hidden), complex), [], []
    for n, (b, s, e) in enumerate(spans):
        y[b, s:e], conv, state = sequence(c, a, a["x"][b, s:e], a["conv_in"][n], a["state_in"][n])
        convs.append(conv)
        states.append(state)
    return y, np.array(convs), np.array(states)


def parameters(c, rng):
    H, HV, K, V, W, hidden = (c[n] for n in ("heads", "value_heads", "key_dim", "value_dim",
                                             "conv_width", "hidden"))
    HK, VD, R = H * K, HV * V, c["gate_rank"]
    D, normal = 2 * HK + VD, lambda *shape: rng.normal(0, .5, shape)
    p = {}
    if c["kind"] == GDN:
        p["in_proj_qkv.weight"], p["in_proj_z.weight"] = normal(D, hidden), normal(VD, hidden)
        p["in_proj_b.weight"], p["in_proj_a.weight"] = normal(HV, hidden), normal(HV, hidden)
        convs, decays, norm, out = [("conv1d", D)], HV, "norm.weight", "out_proj.weight"
    else:
        for n, width in (("q", HK), ("k", HK), ("v", VD)):
            p[n + "_proj.weight"] = normal(width, hidden)
        convs = [("q_conv1d", HK), ("k_conv1d", HK), ("v_conv1d", VD)]
        decays, norm, out = HV * K, "o_norm.weight", "o_proj.weight"
    for n, width in convs:
        p[n + ".weight"] = normal(width, 1, W)
        if c["conv_bias"]:
            p[n + ".bias"] = normal(width)
    if c["kind"] == KDA:
        for n, width in (("f", HV * K), ("b", HV), ("g", VD)):
            if n == "b" or R == 0:
                p[n + "_proj.weight"] = normal(width, hidden)
            else:
                p[n + "_a_proj.weight"], p[n + "_b_proj.weight"] = normal(R, hidden), normal(width, R)
    p["A_log"], p["dt_bias"] = rng.uniform(-1, 1, HV), normal(decays)
    p[norm], p[out] = rng.uniform(.5, 1.5, V), normal(hidden, VD)
    return {"param." + n: w for n, w in p.items()}


def gradients(f, inputs):
    out = {}
    for name, value in inputs.items():
        grad = np.zeros(value.shape)
        for i in range(value.size):
            moved = value.astype(complex)
            moved.reshape(-1)[i] += 1e-30j
            grad.reshape(-1)[i] = f({**inputs, name: moved}).imag / 1e-30
        out[("grad." + name[6:]) if name.startswith("param.") else "d_" + name] = grad
    return out


def case(seed, B, T, offsets=None, states=False, **fields):
    rng = np.random.default_rng(seed)
    c = {n: 0 for n in CONFIG} | {"beta_scale": 1} | fields
    c["norm_eps"] = 1e-6 if c["kind"] == GDN else 1e-5
    N = B if offsets is None else len(offsets) - 1
    D = 2 * c["heads"] * c["key_dim"] + c["value_heads"] * c["value_dim"]
    a = {"x": rng.normal(size=(B, T, c["hidden"])), **parameters(c, rng)}
    shapes = {"conv": (N, D, c["conv_width"] - 1), "state": (N, c["value_heads"], c["key_dim"], c["value_dim"])}
    single = lambda d: {n: v.astype(np.float32).astype(float) for n, v in d.items()}
    entry = {n + "_in": rng.normal(size=s) if states else np.zeros(s) for n, s in shapes.items()}
    a = single({**a, **entry})
    w = single({"dy": rng.normal(size=a["x"].shape),
                **{f"d_{n}_out": rng.normal(size=s) if states else np.zeros(s) for n, s in shapes.items()}})

    def loss(args):
        y, conv, state = layer(c, args, offsets)
        return (y * w["dy"]).sum() + (conv * w["d_conv_out"]).sum() + (state * w["d_state_out"]).sum()

    y, conv, state = layer(c, a, offsets)
    rec = {"config": [c[n] for n in CONFIG], "layout": [B, T], **a, **w, "y": y.real,
           **gradients(loss, a)}
    if offsets is not None:
        rec["offsets"] = offsets
    if states:
        rec |= {"conv_out": conv.real, "state_out": state.real}
    else:
        for n in ("conv_in", "state_in", "d_conv_in", "d_state_in", "d_conv_out", "d_state_out"):
            del rec[n]
    return rec


def write(path, records):
    with open(path, "wb") as f:
        f.write(b"DRORACL1")
        for name, value in records.items():
            a = np.array(value, "<f8", order="C")
            f.write(struct.pack("<I", len(name)) + name.encode() + struct.pack("<I", a.ndim))
            f.write(struct.pack(f"<{a.ndim}q", *a.shape) + a.tobytes())


CASES = {
    "gdn_dense": dict(seed=1, B=2, T=11, kind=GDN, hidden=10, heads=1, value_heads=2, key_dim=4,
                      value_dim=5, conv_width=4, gate=SOFTPLUS),
    "gdn_packed": dict(seed=2, B=1, T=19, offsets=(0, 3, 3, 4, 17), states=True, kind=GDN, hidden=7,
                       heads=2, value_heads=4, key_dim=3, value_dim=2, conv_width=4, conv_bias=1,
                       gate=SOFTPLUS, beta_scale=2),
    "kda_bounded": dict(seed=3, B=2, T=9, states=True, kind=KDA, hidden=6, heads=2, value_heads=2,
                        key_dim=3, value_dim=4, conv_width=3, conv_bias=1, gate=LOWER_BOUND,
                        lower_bound=-5),
    "kda_pair": dict(seed=4, B=1, T=18, offsets=(0, 5, 6, 6, 18), states=True, kind=KDA, hidden=8,
                     heads=1, value_heads=2, key_dim=5, value_dim=3, conv_width=4, gate=SOFTPLUS,
                     gate_rank=2),
    "kda_single_tap": dict(seed=5, B=1, T=8, kind=KDA, hidden=5, heads=1, value_heads=1, key_dim=4,
                           value_dim=4, conv_width=1, gate=LOWER_BOUND, lower_bound=-5, beta_scale=2),
}

if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    for case_name, fields in CASES.items():
        write(os.path.join(folder, f"layer_{case_name}.bin"), case(**fields))
