"""Covering sets: few combinations in which every two levels of any two factors meet."""

import itertools
import random


def pairwise(factors, seed=0, tries=60):
    """factors: {name: levels}. Returns a list of {name: level}; the same one for the same arguments."""
    rng = random.Random(seed)
    names = list(factors)
    uncovered = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def pairs(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}

    rows = []
    while uncovered:
        a, i, b, j = min(uncovered)
        candidates = []
        for _ in range(tries):
            row = {name: rng.randrange(len(factors[name])) for name in names}
            candidates.append(row | {a: i, b: j})
        best = max(candidates, key=lambda row: len(pairs(row) & uncovered))
        uncovered -= pairs(best)
        rows.append({name: factors[name][level] for name, level in best.items()})
    return rows
