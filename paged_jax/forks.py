"""How a request comes to several sequences: samples fork off a prompt, and beams off those before them.

Forking takes no block and copies none: a fork's table holds the same blocks, and whoever writes into a
shared, partly filled one first copies it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paged_jax.beam_search import Candidate
from paged_jax.block_table import BlockTable
from paged_jax.errors import ConstraintFailed
from paged_jax.queues import Queues
from paged_jax.schedule import RowScores
from paged_jax.sequence import Request, Sequence


class Forks:
    """Makes forks, and knows those whose rows on the device were not placed yet."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self._unplaced: list[Sequence] = []

    def take_unplaced(self) -> list[Sequence]:
        """The sequences that came since this was last called."""
        taken, self._unplaced = self._unplaced, []
        return taken

    def fork(self, sequence: Sequence) -> Sequence:
        """A sibling of a decoding sequence, in a row of its own; there is a free one."""
        request = sequence.request
        index = len(request.sequences)
        table = sequence.table.fork(f"{request.request_id}/{index}")
        sibling = _with_tokens_of(sequence, list(sequence.token_ids), index, table)
        sibling.row = self.queues.free_rows.pop()
        sibling.logprobs = list(sequence.logprobs)
        request.sequences.append(sibling)
        self._unplaced.append(sibling)
        return sibling

    def split(self, leader: Sequence) -> list[Sequence]:
        """The samples that were one with the first so far; its next token is the first that is sampled."""
        return [self.fork(leader) for _ in range(leader.request.num_unforked)]

    def advance_beams(self, request: Request, scores: RowScores, places: Seq[int], now: float) -> None:
        """Have a search choose what follows its beams, whose rows in the scores are at these places.

        A function of the user's that fails ends its own request alone.
        """
        search, beams = request.beams, request.sequences
        assert search is not None
        try:
            children = search.advance(beams, scores, places)
        except ConstraintFailed as error:
            request.error = error
            for beam in beams:
                beam.finish("abort", now)
            return
        if search.is_done:
            for beam in beams:
                beam.finish("stop", now)
            return
        logprobs = [
            search.logprobs_of(beams[child.parent], child, scores, places[child.parent]) for child in children
        ]
        request.sequences = self._replace(beams, children)
        for beam, own in zip(request.sequences, logprobs, strict=True):
            beam.logprobs = own

    def _replace(self, parents: list[Sequence], children: list[Candidate]) -> list[Sequence]:
        """The children as sequences. A parent's first one takes over its table and its row, others fork.

        The parents keep their tokens: after a failure amid all this they are what is computed again.
        """
        alive = {child.parent for child in children}
        for place, parent in enumerate(parents):
            if place not in alive:
                parent.table.release("beam dropped")
                self.queues.give_row_back(parent)
        beams = []
        for index, child in enumerate(children):
            parent = parents[child.parent]
            tokens = [*parent.token_ids, child.token]
            if parent.row is not None:
                beam = _with_tokens_of(parent, tokens, index, parent.table)
                beam.row, parent.row = parent.row, None
            else:
                owner = f"{parent.request.request_id}/{parent.num_output_tokens}.{index}"
                beam = _with_tokens_of(parent, tokens, index, parent.table.fork(owner))
                beam.row = self.queues.free_rows.pop()
            beam.sum_logprob = child.sum_logprob
            beams.append(beam)
        self._unplaced += beams
        return beams


def _with_tokens_of(sequence: Sequence, token_ids: list[int], index: int, table: BlockTable) -> Sequence:
    return Sequence(
        sequence.request,
        index,
        table,
        token_ids=token_ids,
        num_registered=sequence.num_registered,
        block_keys=list(sequence.block_keys),
    )
