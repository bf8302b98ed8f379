"""Drafters that know what the target will say, so that tests can force acceptance where they want it; a test of distributions."""

import torch
from scipy.stats import chi2
from transformers.generation.candidate_generator import CandidateGenerator

import assistgen
from assistgen import Speculator
from assistgen.drafters.base import Draft, Drafter
from assistgen.drafters.draft_model import DraftModelDrafter

from .tiny import VOCAB


class OracleGenerator(CandidateGenerator):
    """
    Drafts the known continuation, `depth` tokens at a time; `right(position)` says where it tells the truth.

    Args:
        truth: `(1, length)` ids, prompt included.
    """

    requires_model_outputs = False

    def __init__(self, truth, depth=6, right=lambda position: True):
        self.truth = truth[0].tolist()
        self.depth = depth
        self.right = right
        self.matches = []

    def get_candidates(self, input_ids, **kwargs):
        length = input_ids.shape[1]
        draft = self.truth[length : length + self.depth]
        draft = [token if self.right(length + i) else (token + 1) % 70 + 2 for i, token in enumerate(draft)]
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1) if draft else input_ids, None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.matches.append(num_matches)


class OracleDrafter(Drafter):
    """The same for a batch: `truths[row]` is the row's continuation, or `None` for a row that gets wrong drafts."""

    name = "oracle"
    constant_depth = True

    def __init__(self, truths, depth=5):
        self.truths = truths
        self.depth = depth

    def begin(self, rows):
        self.said = [1 for _ in rows]  # the first token is out

    def propose(self, rows, max_tokens, plan):
        drafts = []
        for row, room in zip(rows, max_tokens, strict=True):
            truth, depth = self.truths[row], min(self.depth, room)
            drafts.append(Draft([3] * depth if truth is None else truth[self.said[row] : self.said[row] + depth], self.name))
        return drafts

    def commit(self, row, tokens):
        self.said[row] += len(tokens)


class OracleSpeculator(Speculator):
    def __init__(self, truths, depth=5):
        super().__init__("ngram")
        self.truths, self.depth = truths, depth

    def drafter(self, *call):
        return OracleDrafter(self.truths, self.depth)


#        0
#    1   2   3
#   4 5  6 7
#  8     9
PARENTS = [-1, -1, -1, 0, 0, 1, 1, 3, 5]


class OracleTrees(Drafter):
    """Trees of the shape `PARENTS` in which one path tells the truth: to each of the leaves in turn. Chains where no tree is taken."""

    name = "oracle"
    constant_depth = True
    leaves = (8, 7, 4, 6, 2)

    def __init__(self, truth):
        self.truth, self.rounds = truth, 0

    def begin(self, rows):
        self.said = 1

    def propose(self, rows, max_tokens, plan):
        coming = self.truth[self.said : self.said + max_tokens[0]]
        if not plan.takes_trees:
            return [Draft(coming[:3], self.name)]
        draft = Draft([-1] * len(PARENTS), self.name, parents=PARENTS)
        for node, token in zip(draft.path(self.leaves[self.rounds % len(self.leaves)]), coming, strict=False):
            draft.tokens[node] = token
        self.rounds += 1
        wrong = iter(range(2, VOCAB))
        for node, token in enumerate(draft.tokens):
            draft.tokens[node] = token if token >= 0 else next(other for other in wrong if other not in self.truth)
        return [draft.cut(max_tokens[0])]

    def commit(self, row, tokens):
        self.said += len(tokens)


class TreeSpeculator(Speculator):
    def __init__(self, truth):
        super().__init__("suffix")
        self.truth = truth

    def drafter(self, *call):
        return OracleTrees(self.truth)


def constant(**keys):
    """The n-gram drafter with every draft verified, so that a test doesn't depend on measured times."""
    return {"method": "ngram", "depth": "constant", **keys}


def draft_blindly(monkeypatch, looks=False):
    """Draft models as on a device where a look at a token makes the host wait."""
    init = DraftModelDrafter.__init__

    def blind(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self._looks = looks

    monkeypatch.setattr(DraftModelDrafter, "__init__", blind)


def count_pairs(model, ids, speculator, kwargs, at, calls):
    """Accepted tokens of so many calls, and histograms, `(2, 100)`, of the tokens `at` and behind it, below 10: plainly and by ours."""
    counts, accepted = torch.zeros(2, 100), 0
    for _ in range(calls):
        output = assistgen.generate(model, ids, **kwargs, speculation=speculator, return_dict_in_generate=True)
        accepted += output.speculation.num_accepted_tokens
        for side, sequences in enumerate((model.generate(ids, **kwargs), output.sequences)):
            for a, b in sequences[:, at : at + 2].tolist():
                counts[side, a * 10 + b] += 1
    return accepted, counts


def assert_same_distribution(counts):
    """
    Two histograms, `(2, bins)`, of as many draws: a two-sample chi-squared test at a level of 1e-5 (one false alarm in 100,000 runs of a
    test), rare bins pooled.
    """
    seen = counts.sum(0) >= 16
    pooled = torch.cat([counts[:, seen], counts[:, ~seen].sum(1, keepdim=True)], dim=1)
    expected = pooled.sum(0) / 2
    keep = expected > 0
    statistic = float(((pooled[:, keep] - expected[keep]) ** 2 / expected[keep]).sum())
    assert statistic < chi2.ppf(1 - 1e-5, df=int(keep.sum()) - 1)
