"""What requests have answered, as text: the stream of each sequence, and the outputs made of them."""

from __future__ import annotations

from collections.abc import Container
from time import monotonic

from paged_jax.beam_search import Tokenizer
from paged_jax.outputs import CompletionOutput, RequestOutput, hypothesis_outputs, token_logprobs
from paged_jax.sequence import Request, Sequence
from paged_jax.text_stream import TextStream


class AnswerTexts:
    """A stream of text for each sequence that has begun, fed with its tokens.

    One that was lost is made anew from the sequence's tokens, so after a failure all are cleared.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._streams: dict[Sequence, TextStream] = {}

    def __len__(self) -> int:
        """Sequences whose text is kept."""
        return len(self._streams)

    def push(self, sequence: Sequence) -> None:
        """Give the text of a sequence the tokens that it lacks, and end it at a stop string."""
        stream = self._stream(sequence)
        params = sequence.request.params
        matched = None
        lacking = len(sequence.request.prompt_token_ids) + stream.num_tokens
        for token in sequence.token_ids[lacking:]:
            matched = matched or stream.push(token, may_stop=stream.num_tokens >= params.min_tokens)
        if sequence.is_finished and matched is None:
            matched = stream.finish()
        if matched is not None and sequence.finish_reason != "abort":
            sequence.finish("stop", monotonic())
            sequence.finish_reason, sequence.stop_reason = "stop", matched

    def output(self, request: Request) -> RequestOutput:
        """A request as it stands."""
        outputs: list[CompletionOutput] = []
        if request.beams is not None:
            if request.error is None:
                outputs = hypothesis_outputs(request.beams, request.sequences, self.tokenizer)
        else:
            for sequence in request.sequences:
                self.push(sequence)  # those of a step that failed may be missing
            outputs = [self._completion(sequence) for sequence in request.sequences]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=outputs,
            finished=request.is_finished,
            metrics=request.metrics,
            error=request.error,
        )

    def mend(self, request: Request) -> None:
        """After a step that failed or was interrupted anywhere: whoever has all tokens of its answer ends.

        Beams see to themselves.
        """
        if request.beams is None:
            for sequence in request.sequences:
                sequence.mend(monotonic())
                self.push(sequence)

    def keep_only(self, request_ids: Container[str]) -> None:
        """Drop the texts of all other requests."""
        for sequence in list(self._streams):
            if sequence.request.request_id not in request_ids:
                del self._streams[sequence]

    def clear(self) -> None:
        """Drop all."""
        self._streams.clear()

    def _stream(self, sequence: Sequence) -> TextStream:
        if sequence not in self._streams:
            params = sequence.request.params
            stream = TextStream(self.tokenizer, params.stop, params.include_stop_str_in_output)
            self._streams[sequence] = stream
        return self._streams[sequence]

    def _completion(self, sequence: Sequence) -> CompletionOutput:
        wanted = sequence.request.params.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = token_logprobs(sequence.logprobs, self.tokenizer, wanted)
        return CompletionOutput(
            index=sequence.index,
            text=self._stream(sequence).text,
            token_ids=sequence.output_token_ids,
            cumulative_logprob=None if wanted is None else sum(t.logprob for t in sequence.logprobs),
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
