"""What an honest but curious server can learn from a client's answer: estimates of its label marginal p(y|s) (sec:privacy)."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedmix.core.privacy import project_to_simplex
from fedmix.errors import SettingError

Vector = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
# How long a mixed-integer programme may take.
MILP_SECONDS = 2.0
# A solution fits if it is off by less than this share of the points: rounding in float32 leaves that much.
FITS = 1e-4


def scipy_or_complain() -> Any:
    """SciPy; an error that says how to install it where it is missing."""
    try:
        import scipy.optimize
        import scipy.stats
    except ModuleNotFoundError as error:
        raise SettingError("fedmix audit needs SciPy; install it with: pip install 'fedmix[privacy]'.") from error
    return scipy


def from_bias(moved: Vector, rate: float, steps: float) -> Vector:
    """p(y=k|s) = (b_s - b)_k / (rate steps) + mean softmax of k, which a server that cannot know it takes for uniform.

    moved: b_s - b [classes], summed over experts. Exact after one full-batch step from a zero output layer.
    """
    estimate = torch.from_numpy(moved / (rate * steps) + 1 / len(moved))
    nearest: Vector = project_to_simplex(estimate).numpy()
    return nearest


def from_bias_normalised(moved: Vector) -> Vector:
    """The paper's estimate for several steps: the difference itself without its negative part, as a distribution."""
    return _distribution(np.clip(moved, 0, None))


def from_bias_size(moved: Vector) -> Vector:
    """How far each label's bias moved, in whichever direction, as a distribution.

    With label counts in front, the bias of a label that a client has hardly any points of hardly moves.
    """
    return _distribution(np.abs(moved))


def _distribution(sizes: Vector) -> Vector:
    """Sizes as shares of their sum; equal shares where all are zero."""
    total = sizes.sum()
    shares: Vector = sizes / total if total > 0 else np.full(len(sizes), 1 / len(sizes))
    return shares


def rows_changed(before: Vector, after: Vector) -> Mask:
    """Rows of phi [C, K] that came back changed: the values of c that the client holds."""
    changed: Mask = (before != after).any(axis=1)
    return changed


def from_posterior(q: Vector, phi: Vector, support: Mask) -> Vector:
    """p(c|s) from q(z|s) = sum_c p(c|s) q(z|c): least squares on the simplex over the rows in `support`. [K], [C, K] -> [C]

    Where several solutions are equally good, it is the one nearest to uniform.
    """
    optimize = scipy_or_complain().optimize
    if not support.any():
        support = np.ones_like(support)
    rows = phi[support]
    n, ridge, sum_to_one = len(rows), 1e-4, 1e3
    system = np.vstack([rows.T, np.full((1, n), sum_to_one), ridge * np.eye(n)])
    target = np.concatenate([q, [sum_to_one], np.full(n, ridge / n)])
    solution, _ = optimize.nnls(system, target)
    estimate = np.zeros(len(phi))
    estimate[support] = solution / solution.sum()
    return estimate


def whole_numbers(q: Vector, phi: Vector, support: Mask, n: int) -> Vector | None:
    """The same estimate, where N_s p(c|s) must be whole numbers; None: nothing fits, or nothing was found in time.

    They are at least 1 for every row in `support` and 0 elsewhere if that fits what was seen, else any whole numbers.
    """
    for rows, fewest in ((support, 1), (np.ones_like(support), 0)):
        solution = _programme(q, phi, rows, n, fewest)
        if solution is None:
            continue
        estimate, misfit = solution
        if misfit < FITS * n:
            return estimate
    return None


def _programme(q: Vector, phi: Vector, support: Mask, n: int, fewest: int) -> tuple[Vector, float] | None:
    """The whole n_c with the least misfit, the sum over k of |sum_c n_c q(z=k|c) - N_s q(z=k|s)|, and that misfit.

    It is a mixed-integer programme; None: it has no solution, or none was found in time. The variables are n_c of the rows
    that are held, then for each k a bound on its absolute value; `whole` is 1 for the former and 0 for the latter.
    """
    optimize = scipy_or_complain().optimize
    rows = phi[support]
    held, experts = rows.shape
    if not held or fewest * held > n:
        return None
    eye, whole = np.eye(experts), np.concatenate([np.ones(held), np.zeros(experts)])
    with _no_chatter():
        result = optimize.milp(
            1 - whole,
            constraints=[
                optimize.LinearConstraint(np.hstack([rows.T, -eye]), -np.inf, n * q),
                optimize.LinearConstraint(np.hstack([rows.T, eye]), n * q, np.inf),
                optimize.LinearConstraint(whole, n, n),
            ],
            integrality=whole,
            bounds=optimize.Bounds(fewest * whole, np.inf),
            options={"time_limit": MILP_SECONDS},
        )
    if result.x is None:
        return None
    estimate = np.zeros(len(phi))
    estimate[support] = np.round(result.x[:held]) / n
    return estimate, float(result.fun)


@contextmanager
def _no_chatter() -> Iterator[None]:
    """HiGHS writes to the process's standard output by itself, where only results belong."""
    sys.stdout.flush()
    before, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(nowhere)


def total_variation(p: Vector, q: Vector) -> float:
    """The distance of two distributions. 0: they are the same. 1: they have nothing in common."""
    return float(0.5 * np.abs(p - q).sum())


def rank_correlation(p: Vector, q: Vector) -> float | None:
    """Spearman's rank correlation; None where one of the two is constant, which has no ranks."""
    if np.ptp(p) == 0 or np.ptp(q) == 0:
        return None
    return float(scipy_or_complain().stats.spearmanr(p, q).statistic)
