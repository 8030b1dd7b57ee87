"""Fifteen traceable losses with different operations, and data for them. They need torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import torch
    import torch.nn.functional as F  # noqa: N812  # what everybody calls it
except ImportError:  # pytest imports this file for doctests also without torch
    torch = F = None  # type: ignore[assignment]


def nll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def importance_sampling(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    return -(ratio * advantages).sum(), {"custom/ratio:mean": ratio.mean()}


def ppo(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = (logprobs - old).exp()
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    outside = (ratio != clipped).float().mean()
    return loss, {"custom/clipped/fraction:mean": outside}


def cispo(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old).detach().clamp(max=4.0)
    return -(ratio * logprobs * advantages).sum(), {}


def dro(logprobs: Any, old: Any, advantages: Any) -> Any:
    apart = logprobs - old
    return (0.05 / 2 * apart**2 - logprobs * advantages).sum(), {"custom/apart:sum": apart.abs().sum()}


def k3(logprobs: Any, reference: Any) -> Any:
    apart = reference - logprobs
    each = torch.expm1(apart) - apart
    return each.sum(), {"custom/kl:mean": each.mean(), "custom/kl.most:mean": each.max()}


def focal(logprobs: Any, weights: Any) -> Any:
    return -(((1 - logprobs.exp()) ** 2) * logprobs * weights).sum(), {}


def distilled(logprobs: Any, teacher: Any) -> Any:
    """Compute a loss with inputs of rank 2: several candidates for each token."""
    p = F.softmax(teacher, dim=-1)
    return -(p * logprobs).sum(dim=(0, 1)), {"custom/teacher_entropy:sum": torch.special.entr(p).sum()}


def smoothed(logprobs: Any) -> Any:
    count = logprobs.shape[1]
    return -(0.9 * logprobs[:, 0] + 0.1 * logprobs[:, 1:].sum(-1) / (count - 1)).sum(), {}


def preference(logprobs: Any, reference: Any, sign: Any) -> Any:
    """Compute a loss with a scalar input."""
    margin = 0.1 * sign * (logprobs.sum() - reference.sum())
    return -F.logsigmoid(margin), {"custom/margin:mean": margin}


def masked(logprobs: Any, mask: Any) -> Any:
    kept = torch.where(mask > 0, logprobs, torch.zeros_like(logprobs))
    lowest = logprobs.masked_fill(mask == 0, float("inf")).min()
    return -kept.sum() / mask.sum().clamp(min=1), {"custom/lowest:mean": lowest}


def neighbours(logprobs: Any, weights: Any) -> Any:
    """Compute a loss with slices, an ellipsis, and a tuple of tensors."""
    apart = logprobs[1:] - logprobs[:-1]
    both = torch.stack((apart, apart.flip(0)), dim=0)[..., ::2]
    loss = (both * both).mean() + 0.0 * weights.sum()
    return loss, {"custom/apart:mean": both.var(unbiased=False)}


def sequence_level(logprobs: Any, old: Any, advantages: Any) -> Any:
    mean = (logprobs - old).mean()
    ratio = mean.detach().exp() * torch.exp(logprobs - logprobs.detach())
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum(), {}


def rooted(logprobs: Any, weights: Any) -> Any:
    """Compute a loss with Python arithmetic, functions of `math`, and a dtype."""
    scale = 1 / math.sqrt(logprobs.shape[0])
    total = (logprobs.to(torch.float64) * weights.to(dtype=torch.float64)).sum() * scale
    total += 1e-3 * logprobs.square().sum()
    return -total.float(), {"custom/total:sum": total}


def limited(logprobs: Any, bound: Any) -> Any:
    """Compute a loss with an infinity and None as arguments."""
    held = torch.clamp(logprobs, min=None, max=-1e-3)
    held = torch.nan_to_num(held, nan=0.0, neginf=float("-inf"))
    over = F.relu(bound.reshape(-1, 1) - held.unsqueeze(0)).mean()
    return over + F.smooth_l1_loss(held, bound, beta=0.5), {
        "custom/over:mean": over,
        "custom/n:sum": (held < bound).sum(),
    }


RANKS: dict[Callable[..., Any], dict[str, int]] = {
    nll: {"logprobs": 1, "weights": 1},
    importance_sampling: {"logprobs": 1, "old": 1, "advantages": 1},
    ppo: {"logprobs": 1, "old": 1, "advantages": 1},
    cispo: {"logprobs": 1, "old": 1, "advantages": 1},
    dro: {"logprobs": 1, "old": 1, "advantages": 1},
    k3: {"logprobs": 1, "reference": 1},
    focal: {"logprobs": 1, "weights": 1},
    distilled: {"logprobs": 2, "teacher": 2},
    smoothed: {"logprobs": 2},
    preference: {"logprobs": 1, "reference": 1, "sign": 0},
    masked: {"logprobs": 1, "mask": 1},
    neighbours: {"logprobs": 1, "weights": 1},
    sequence_level: {"logprobs": 1, "old": 1, "advantages": 1},
    rooted: {"logprobs": 1, "weights": 1},
    limited: {"logprobs": 1, "bound": 1},
}


def inputs_for(ranks: dict[str, int], length: int, seed: int, width: int = 3) -> dict[str, Any]:
    """Return random float32 arrays of these ranks, with log-probabilities below 0."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, rank in ranks.items():
        values = rng.standard_normal((length, width)[:rank]).astype(np.float32)
        if name in ("logprobs", "old", "reference", "bound"):
            values = -np.abs(values) - np.float32(0.1)
        made[name] = (
            (values > 0).astype(np.float32) if name == "mask" else np.asarray(values, dtype=np.float32)
        )
    return made
