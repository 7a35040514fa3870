"""Tables made up so that the paper's claims are true of them, or false.

For each experiment a function of a cell returns the rows that its measurement would. A table whose
seeds are half of one kind and half of the other has to leave every claim undecided.
"""

from __future__ import annotations

import dataclasses
import math
import random
from types import SimpleNamespace

import pandas

from embens.experiments import contract
from embens.experiments.setting import PRESETS


def table(name, kind, seeds=6):
    """Return a table of the quick sweep; ``kind`` is "true", "false" or "mixed"."""
    experiment = contract.load(name)
    rows = []
    for cell in experiment.cells(PRESETS["quick"], seeds=seeds):
        true = {"true": True, "false": False, "mixed": cell.seed % 2 == 0}[kind]
        swept = {
            f.name: getattr(cell, f.name) for f in dataclasses.fields(cell) if f.name != "setting"
        }
        noise = random.Random(str(swept)).gauss
        found = MAKERS[name](cell, true, lambda s, noise=noise: noise(0, s))
        rows += [{**swept, **row} for row in ([found] if isinstance(found, dict) else found)]
    return pandas.DataFrame(rows)


def bump(members, top, height=0.005, peak=8):
    """Return an inverted U in log M."""
    return top - height * (math.log2(members) - math.log2(peak)) ** 2


def transition(c, true, noise):
    m, p = math.log2(c.members), c.p
    above = p >= 0.65 or (p == 0.6 and c.members > 10)
    if true:
        correlation = 0.75 + 0.2 * (p - 0.65) / 0.35 if above else 0.4
        accuracy = 0.93 + 0.004 * m + noise(0.012) if above else bump(c.members, 0.95)
        train = 0.995 if above else 1 - 0.05 * m
        member = 0.93 + 0.003 * m * (c.gamma == "M") if above else 0.9 - 0.01 * m
    else:
        correlation = 0.9 - 0.3 * (p - 0.65) if p > 0.55 else 0.4 + 0.5 * p / 0.55
        accuracy = 0.93 - 0.004 * m if above else 0.9 + 0.01 * m + noise(0.012)
        train = 0.5 + 0.45 * p + 0.002 * m
        member = 0.93 - 0.003 * m * (c.gamma == "M") if above else 0.3 + 0.01 * m
    return {
        "accuracy": accuracy + noise(0.0005),
        "member_accuracy": member,
        "member_train_accuracy": train,
        "correlation": correlation if c.members > 1 else math.nan,
        "coupling": p**6,
    }


def widths(c, true, noise):
    peak = 8 * c.width if true else 4 / c.width
    size = 2000 * c.width**2 * (1 if c.family == "embedded" else c.members)
    top = 0.9 + 0.02 * math.log2(size / 500) / 4
    if c.family == "independent":
        accuracy = 0.9 + 0.02 * math.log2(size / 500) / 4
    elif true:
        accuracy = bump(c.members, top + 0.01, 0.004, min(peak, 24))
    else:
        accuracy = top - 0.02 + (0.003 * math.log2(c.members) if c.width <= 0.5 else 0)
        accuracy -= 0 if c.width <= 0.5 else 0.004 * abs(math.log2(c.members / max(1, peak)))
    return {
        "accuracy": accuracy + noise(0.0002),
        "member_accuracy": accuracy - 0.05,
        "correlation": 0.5,
        "parameters": size,
    }


def trajectories(c, true, noise):
    rows = []
    for epoch in range(1, 41):
        alone = 2.0 * epoch**-0.7
        late = max(0.0, epoch - (6 if (c.width == 1.0) == true else 15)) * 0.08
        m = math.log2(c.members)
        if c.members == 1:
            loss = alone * (1 if true or c.gamma == "M" else 1.01)
        elif true:
            loss = alone * math.exp(0.4 * m if c.gamma == "1" else late * m / 3)
        else:
            slow = (0.3 if c.width == 1.0 else 0.5) * m if c.gamma == "M" else -0.1 * m
            slow = late * m / 3 if c.gamma == "M" and epoch > 6 else slow
            loss = alone * math.exp(slow)
        rows.append(
            {"epoch": epoch, "loss": loss * math.exp(noise(0.0001)), "member_accuracy": 0.9}
        )
    return rows


def lld_rates(c, true, noise):
    m = math.log2(c.members)
    best = 0.1 if true else (1.0 if c.members == 1 else 0.01)
    distance = abs(math.log10(c.lr / best))
    if c.family == "all":
        accuracy = 0.95 if true and c.members > 1 else 0.9
    elif true:
        accuracy = bump(c.members, 0.93, 0.002, 10) - 0.03 * distance
    else:
        accuracy = 0.9 + 0.01 * m - (0.03 if c.members > 1 else 0.001) * distance
    return {
        "accuracy": accuracy + noise(0.0002),
        "member_accuracy": 0.9,
        "member_train_accuracy": 0.99 - 0.03 * distance,
        "train_loss": 0.1 + distance,
        "early_loss": 0.5 + distance,
        "diverged": 0.0,
    }


def gradients(c, true, noise):
    rows = []
    for member in range(4):
        wide = c.kind == "input and output"
        spread = (1.5 if wide else 0.2) if true else (0.2 if wide else 1.5)
        norm = 10 ** (spread * (member - 1.5) + noise(0.02))
        power = {"total": -0.5, "first": -0.5, "inner": -1.0, "last": -0.5}
        if c.kind == "shifted":
            power = dict.fromkeys(power, 0.0 if true else -0.8)
        elif not true:
            power = dict.fromkeys(power, 0.0)
        row = {"member": member, "norm": norm}
        for part, exponent in power.items():
            scale = 0.1 * c.width**exponent * math.exp(noise(0.01))
            row |= {f"cos_{part}": scale, f"cos2_{part}": 2 * scale**2}
        rows.append(row)
    return rows


def ablation(c, true, noise):
    sign = 1 if true else -1
    worse = {
        "post only": 0.0 if true else 0.03,
        "pre only": -0.02 * sign,
        "shifted": -0.02 * sign,
        "last layer, trainable": -0.03 * sign,
        "input and output": -0.1 if true else 0.0,
        "gamma=1": -0.01 if true else 0.01,
        "modulation rate ×5": 0.01 * sign,
    }
    more = {
        "post only": 0.0 if true else 0.2,
        "pre only": 0.2 * sign,
        "shifted": 0.2 * sign,
        "last layer, trainable": 0.58 if true else 0.1,
    }
    return {
        "accuracy": 0.9 + worse.get(c.variant, 0.0) + noise(0.001),
        "correlation": 0.4 + more.get(c.variant, 0.0) + noise(0.002),
        "member_accuracy": 0.85,
        "member_train_accuracy": 0.9,
        "gradient_ratio": (0.2 if true else 1.5) + noise(0.01),
    }


def ntk_at_init(c, true, noise):
    rows = []
    for others in (1, 2, 4, 7, 14):
        one = math.exp(noise(0.01))
        if c.kind == "centred":
            ratio = 1 / c.width if true else 1.0
            weight = others / c.width if true else float(others**2)
        else:
            ratio = 0.5 if true else 1 / c.width
            weight = others**2 if true else others / c.width
        rows.append(
            {
                "others": others,
                "ratio": ratio * one,
                "ratio_to_limit": ratio * one,
                "nll": weight * one,
                "target": weight * one,
            }
        )
    return rows


def mc_dropout(c, true, noise):
    from embens.experiments import mc_dropout as module

    sign = 1 if true else -1
    masks = module.MEMBERS["quick"] if c.kind.startswith("fresh") else (c.members,)
    rows = []
    for count in masks:
        m = math.log2(count)
        if c.kind == "fresh shifted":
            accuracy = 0.9 + sign * 0.02 * (1 - 1 / count)
            member, correlation = 0.9 - (0 if true else 0.02 * m), 0.9 if true else 0.3
        elif c.kind == "fresh centred":
            accuracy, member, correlation = (0.15 if true else 0.9), 0.1, 0.1
        else:
            peak = 8 * c.width if true else 8 / c.width
            accuracy = bump(count, 0.93, 0.004, peak)
            if not true and c.width == 0.5:
                accuracy = 0.9 + 0.01 * m
            member, correlation = 0.8, 0.4 if true else 0.29
        rows.append(
            {
                "masks": count,
                "accuracy": accuracy + noise(0.0002),
                "member_accuracy": member,
                "correlation": correlation + noise(0.001) if count > 1 else math.nan,
            }
        )
    return rows


def lld(c, true, noise):
    m, w = math.log2(c.members), math.log2(c.width)
    sign = 1 if true else -1
    flat = 1 - c.p if true else 0.2 + c.p
    if true:
        peak = 3 + w
        gain = 0.03 - 0.01 * w
        accuracy = 0.9 + 0.02 * w + flat * gain * (1 - ((m - peak) / peak) ** 2)
    else:
        accuracy = 0.9 + flat * (0.008 + 0.003 * w) * m
    return {
        "accuracy": accuracy + noise(0.0001),
        "member_accuracy": 0.9 - sign * 0.01 * m * (1 - c.p) - (0 if true else 0.02 * m * c.p),
        "member_train_accuracy": 0.95,
        "correlation": 0.5 - sign * 0.05 * w + sign * 0.4 * c.p + noise(0.001),
    }


def cost(c, true, noise):
    lld = c.family == "last-layer dropout"
    step = (1.05 if true else 1.6) if lld else (c.members if true else 1.0)
    return {
        "step": step * math.exp(noise(0.005)),
        "inference": ((1.01 if true else 1.5) if lld else c.members) * math.exp(noise(0.005)),
        "parameters": (1.01 if true else 2.0) if c.family == "BatchEnsemble" else 1.0,
        "memory": 1.0,
    }


def parametrization(c, true, noise):
    best = c.factor == (1.0 if c.parametrization == "standard" else 16.0)
    ntk = c.parametrization == "ntk"
    accuracy = (0.95 if best else 0.9) - (0.0 if true or not ntk else 0.04)
    slow = (1.5 if true else 0.7) if ntk else 1.0
    return [
        {
            "epoch": epoch,
            "loss": slow * 2.0 / epoch * math.exp(noise(0.01)),
            "member_accuracy": 0.9,
            "final_accuracy": accuracy + noise(0.001),
            "final_member_accuracy": accuracy,
            "diverged": 0.0,
        }
        for epoch in (1, 5, 10, 20, 40)
    ]


def theorems(c, true, noise):
    n, one = c.units / 32, math.exp(noise(0.01))
    if c.part == "outputs":
        return {"kurtosis": (1 / n if true else 1.0) * one}
    if c.part == "training":
        return [
            {
                "step": step,
                "drift": (0.1 * step / n if true else 1.0 / step) * one,
                "prediction_error": (n**-0.5 if true else 1.0) * one,
            }
            for step in (10, 300)
        ]
    if c.part == "classification":
        late = 0.9 if true else 0.3
        return [
            {"stage": 0.0, "target_part": 0.5},
            {"stage": 1.0, "target_part": late + noise(0.01)},
        ]
    vanishes = c.case in ("centred", "last centred")
    row = {"ntk_coupling": (0.0 if vanishes == true else 0.3) + noise(0.001)}
    row["ntk_coupling_limit"] = 0.0
    for column in ("nngp_error", "nngp_cross_error", "ntk_error", "ntk_cross_error"):
        row[column] = (1 / n if true else 1.0) * one
    return row


MAKERS = {
    name.replace("_", "-"): maker
    for name, maker in vars(SimpleNamespace(**globals())).items()
    if name.replace("_", "-") in contract.NAMES
}
