"""What is told of a request: its deltas, and how long each stage of it took.

It does not know when a request ends, nor what carries a delta to its reader.
"""

from __future__ import annotations

import time

from .request import Delta, FinishReason, Request, RequestError, Timings
from .runner import Drawn


def delta(
    request: Request,
    text: str,
    exact: str,
    *,
    drawn: Drawn | None = None,
    finish_reason: FinishReason | None = None,
    error: RequestError | None = None,
    first: bool = True,
) -> Delta:
    """The next delta of `request`: the token of `drawn`, if any. With a reason or an error it is the last one.

    `exact` is the server's exactness, which the last one tells.
    """
    return Delta(
        request_id=request.id,
        index=request.emitted,
        token_ids=() if drawn is None else (drawn.token,),
        text=text,
        num_input_tokens=request.prompt_len,
        logprobs=() if drawn is None or drawn.logprob is None else (drawn.logprob,),
        finish_reason=finish_reason,
        error=error,
        fingerprint=request.fingerprint if first else None,
        seed=request.seed if first else None,
        timings=None if finish_reason is None and error is None else _timings(request, exact),
    )


def _timings(request: Request, exact: str) -> Timings:
    now = time.monotonic()
    first = request.first_token_at or now
    admitted = request.admitted_at or first
    return Timings(
        queue=admitted - request.arrived_at,
        prefill=first - admitted,
        first_token=first - request.arrived_at,
        decode=now - first,
        cached_tokens=request.cached_tokens,
        preemptions=request.preemptions,
        exact=exact,
    )
