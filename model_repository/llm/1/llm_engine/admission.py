"""The way of a request into the engine: it is checked, gets the engine's fields, and its resumed answer is replayed.

All of it may run on any thread, for different requests at once. What does not fit is a RequestError naming the field.
It does not know who waits for a seat, nor how tokens are computed.
"""

from __future__ import annotations

import secrets

from .fit import fingerprint, fit, hidden_stops
from .loading import LoadedModel
from .request import FinishReason, Request, RequestError, SamplingParams
from .text import TextStream, backend


class Admission:
    """Admits requests to one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._backend = backend(loaded.tokenizer)

    def admit(self, request: Request) -> FinishReason | None:
        """Check a request and fill in the engine's fields; return a reason if its resumed answer has ended already."""
        loaded = self._loaded
        fit(request, loaded.tokenizer, loaded.config.max_context, loaded.vocab_size, loaded.embedding_size)
        request.fingerprint = fingerprint(loaded.digest, request.prompt_ids)
        if request.resume_fingerprint not in (None, request.fingerprint):
            raise RequestError(
                f"resume_mismatch: this server's answer has fingerprint {request.fingerprint}, "
                f"got {request.resume_fingerprint[:64]!r}"
            )
        request.seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        request.prompt_len = len(request.prompt_ids)
        request.tokens = [*request.prompt_ids, *request.resume_token_ids]
        request.text = TextStream(
            loaded.tokenizer,
            request.prompt_ids,
            request.params,
            backend=self._backend,
            hidden_stops=hidden_stops(loaded.tokenizer, request.params),
        )
        return self._replay(request)

    def ends(self, params: SamplingParams, token: int) -> bool:
        """Whether an answer ends with this token."""
        return token in params.stop_token_ids or (not params.ignore_eos and token in self._loaded.eos_token_ids)

    def _replay(self, request: Request) -> FinishReason | None:
        """Bring the text state to where the resumed tokens left it."""
        request.emitted = len(request.resume_token_ids)
        for index, token in enumerate(request.resume_token_ids):
            ends = self.ends(request.params, token)
            request.text.push(token, is_end=ends)
            if ends or request.text.stopped:
                request.emitted = index + 1
                return FinishReason.STOP
        if len(request.tokens) < request.max_total:
            return None
        request.text.flush()
        return FinishReason.STOP if request.text.stopped else FinishReason.LENGTH
