"""Fits the step law `seconds = a*steps + b*batch + c*KV tokens + d*prompt tokens` to what steps took. Pure.

The runtime fits it to the steps that it tries at its start, the operator to windows of running pods. Equations are
divided by their seconds, so errors are relative; of them only sums are kept. Coefficients are never negative: with
four of them, non-negative least squares is solved exactly by trying every set of non-zero ones, 15 small systems.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

from busload_runtime.contract import StepLaw

_RIDGE = 1e-6
_WORTH = 0.99
"""A further non-zero coefficient must lower the error by more than 1%: b and c are nearly collinear."""

Gram = Sequence[Sequence[float]]
"""4 x 4: sums of products of two columns, each divided by the seconds of its equation."""
Moment = Sequence[float]
"""4: sums of a column divided by the seconds of its equation."""


def fit(steps: Iterable[tuple[Sequence[float], float]]) -> StepLaw | None:
    """The law of steps, each given as (1, batch, KV tokens, prompt tokens) and its seconds; None without any."""
    gram, moment, weight = [[0.0] * 4 for _ in range(4)], [0.0] * 4, 0.0
    for work, seconds in steps:
        row = [value / seconds for value in work]
        for i in range(4):
            moment[i] += row[i]
            for j in range(4):
                gram[i][j] += row[i] * row[j]
        weight += 1.0
    found = least_squares(gram, moment, weight)
    return None if found is None else StepLaw(*found[1])


def least_squares(gram: Gram, moment: Moment, weight: float) -> tuple[float, tuple[float, ...]] | None:
    """(root mean square of the relative error, coefficients) of so many equations; None when nothing can be said."""
    scale = scales(gram)
    best: tuple[float, tuple[float, ...]] | None = None
    for size in range(1, 5):
        solved = (_non_negative(gram, moment, active, scale) for active in itertools.combinations(range(4), size))
        errors = [(_error(gram, moment, weight, theta), theta) for theta in solved if theta is not None]
        if errors and (best is None or min(errors)[0] < _WORTH * best[0]):
            best = min(errors)
    return best


def scales(gram: Gram) -> list[float]:
    """Lengths of the columns, by which `solve` divides to stay well conditioned."""
    return [math.sqrt(gram[i][i]) or 1.0 for i in range(4)]


def solve(
    gram: Gram, right: Sequence[float], active: Sequence[int], scale: Sequence[float]
) -> tuple[float, ...] | None:
    """x with gram*x = right in the active unknowns, 0 elsewhere; None when the system is singular."""
    if any(gram[i][i] == 0 for i in active):
        return None
    matrix = [
        [gram[i][j] / (scale[i] * scale[j]) + (_RIDGE if i == j else 0.0) for j in active] + [right[i] / scale[i]]
        for i in active
    ]
    size = len(active)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(matrix[r][column]))
        if abs(matrix[pivot][column]) < 1e-12:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for r in range(size):
            if r != column:
                factor = matrix[r][column] / matrix[column][column]
                matrix[r] = [x - factor * y for x, y in zip(matrix[r], matrix[column], strict=True)]
    solution = [matrix[k][size] / matrix[k][k] for k in range(size)]
    theta = [0.0] * 4
    for k, i in enumerate(active):
        theta[i] = solution[k] / scale[i]
    return tuple(theta)


def _non_negative(
    gram: Gram, moment: Moment, active: Sequence[int], scale: Sequence[float]
) -> tuple[float, ...] | None:
    """Least squares with only these unknowns non-zero; None when one comes out negative or the system is singular."""
    theta = solve(gram, moment, active, scale)
    return None if theta is None or min(theta) < 0 else theta


def _error(gram: Gram, moment: Moment, weight: float, theta: Sequence[float]) -> float:
    square = weight
    for i in range(4):
        square -= 2 * theta[i] * moment[i]
        for j in range(4):
            square += theta[i] * theta[j] * gram[i][j]
    return math.sqrt(max(square, 0.0) / weight)
