"""What goes back to Triton: one response per token, and exactly one FINAL for every request.

`Replies` owns the streams of live requests and the one thread that sends; anybody may put what is to be sent into it.
It does not know how tokens are made, nor how requests are read.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from wire import Call

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LONGEST_MESSAGE = 800  # characters of an error; it may quote what a client sent, which may be megabytes
_NOT_IN_A_TAIL = re.compile(r"[^A-Za-z0-9._:@/+-]")  # of an id: it could not be told from the tail's other parts
log = logging.getLogger("tokenstream")
request_log = logging.getLogger("tokenstream.requests")  # lines of JSON, without anything before them


@dataclass(slots=True)
class Stream:
    """One request on Triton's side. `lock` keeps a cancel poll and the FINAL response apart."""

    sender: Any
    call: Call
    arrived_at: float = field(default_factory=time.monotonic)
    tokens: int = 0
    waiting: list[Any] = field(default_factory=list)  # deltas of a request that is answered with one response
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    cancelled: bool = False
    mute: bool = False  # Triton cannot be asked about it

    def left(self) -> bool:
        """Ask Triton whether the client has gone: true once, and never asked behind FINAL, which would crash it."""
        with self.lock:
            if self.closed or self.cancelled or self.mute:
                return False
            try:
                self.cancelled = bool(self.sender.is_cancelled())
            except Exception:
                log.exception("whether the client of request %r has gone is not asked again", self.call.request_id)
                self.mute = True
            return self.cancelled


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer that needs no engine: an operation's result, or a refusal."""

    stream: Stream
    tensors: list[Any]
    error: Any = None


class Replies:
    """The sender. `merge` tokens at most go into one response; `cancel` is told a key whose stream cannot go on.

    `first_token` is told the seconds from a request's arrival until Triton has its first token. `streams` holds the
    live ones by the engine's request id; whoever submits a request enters its stream before.
    """

    def __init__(
        self,
        merge: int,
        cancel: Callable[[str], None],
        first_token: Callable[[float], None],
        *,
        log_prompts: bool = False,
    ) -> None:
        self.streams: dict[str, Stream] = {}
        self._merge = merge
        self._cancel = cancel
        self._first_token = first_token
        self._log_prompts = log_prompts
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Send what was put before, and end the thread."""
        self._outbox.put(None)
        self._thread.join(timeout)

    def put(self, item: Reply | list[Any]) -> None:
        """Have a reply, or a list of the engine's deltas, sent. Any thread."""
        self._outbox.put(item)

    def _run(self) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                if isinstance(item, Reply):
                    self._finish(item.stream, item.tensors, item.error)  # raises nothing
                else:
                    item.sort(key=_goes_on)
                    for deltas in [[delta] for delta in item] if self._merge == 1 else self._merged(item):
                        self._send_or_end(deltas)
            except Exception:  # one response that cannot be sent must not silence all other streams
                log.exception("a response could not be sent")

    def _merged(self, deltas: list[Any]) -> Iterable[list[Any]]:
        """Deltas by request, at most `merge` tokens each, with all that waits in the outbox."""
        by_request: dict[str, list[list[Any]]] = {}
        while True:
            for delta in deltas:
                runs = by_request.setdefault(delta.request_id, [[]])
                if sum(len(d.token_ids) for d in runs[-1]) >= self._merge:
                    runs.append([])
                runs[-1].append(delta)
            try:
                deltas = self._outbox.get_nowait()
            except Empty:
                break
            if not isinstance(deltas, list):
                self._outbox.put(deltas)
                break
        return [run for runs in by_request.values() for run in runs]

    def _send_or_end(self, deltas: list[Any]) -> None:
        """Send deltas of one request; if that fails, end it with an error: without FINAL its client would hang."""
        key = deltas[0].request_id
        stream = self.streams.get(key)
        if stream is None:  # it was ended here before
            return
        own_fault = True  # until it is Triton that has to send it
        try:
            begins, tensors = self._take(stream, deltas)
            own_fault = False
            self._send(stream, deltas[-1], tensors, begins=begins)
        except Exception as error:
            log.exception("a response of request %r could not be sent", stream.call.request_id)
            self.streams.pop(key, None)
            self._finish(stream, [], internal(error, own_fault=own_fault))
            self._cancel(key)

    def _take(self, stream: Stream, deltas: list[Any]) -> tuple[bool, list[Any]]:
        """Take consecutive deltas of one request; return whether they begin its answer, and what to send now."""
        last, new = deltas[-1], sum(len(delta.token_ids) for delta in deltas)
        begins = new > 0 and stream.tokens == 0
        stream.tokens += new
        if not stream.call.stream:
            stream.waiting.extend(deltas)
            deltas = stream.waiting
        due = last.error is None and (last.terminal or stream.call.stream)
        return begins, _tensors(stream.call, deltas) if due else []

    def _send(self, stream: Stream, last: Any, tensors: list[Any], *, begins: bool) -> None:
        """Send what is due for deltas of one request, the last of which is `last`."""
        if last.terminal:
            if begins:  # before it is sent: whoever sees that a request has ended finds it counted
                self._first_token(time.monotonic() - stream.arrived_at)
            del self.streams[last.request_id]
            self._finish(stream, tensors, last.error, last)
            return
        if stream.call.stream:
            stream.sender.send(pb_utils.InferenceResponse(tensors))
        if begins:
            self._first_token(time.monotonic() - stream.arrived_at)

    def _finish(self, stream: Stream, tensors: list[Any], error: Any, last: Any = None) -> None:
        """Send the last response with FINAL, or an error with FINAL in its place; and log the request. Raises nothing.

        A stream without FINAL would leave its client waiting for ever.
        """
        with stream.lock:
            stream.closed = True
        name = stream.call.request_id
        try:
            self._send_final(stream, tensors, error)
        except Exception as fault:
            log.exception("the last response of request %r could not be sent", name)
            error = internal(fault)
            try:
                self._send_final(stream, [], error)
            except Exception:
                log.exception("nor could an error be sent in its place")
        try:
            if request_log.isEnabledFor(logging.INFO):
                request_log.info("%s", json.dumps(self._line(stream, error, last)))
        except Exception:
            log.exception("request %r could not be logged", name)

    def _send_final(self, stream: Stream, tensors: list[Any], error: Any) -> None:
        failure = None
        if error is not None:
            name = _NOT_IN_A_TAIL.sub("_", stream.call.request_id)
            note = f"request={name} tokens={stream.tokens} code={error.code}"
            if error.retry_after is not None:
                note += f" retry_after={error.retry_after:.2f}"
            if error.own_fault:
                note += " fault=request"
            failure = pb_utils.TritonError(
                f"{_one_line(error.message)} [{note}]", getattr(pb_utils.TritonError, error.code)
            )
        stream.sender.send(pb_utils.InferenceResponse(tensors, failure), FINAL)

    def _line(self, stream: Stream, error: Any, last: Any) -> dict[str, Any]:
        """One finished request for the log. A prompt's text is in it only if the deployer asked for that."""
        call = stream.call
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": "request"}
        line |= {"id": call.request_id, "operation": call.operation.value}
        line["outcome"] = error.code if error else last.finish_reason if last else "answered"
        line["seconds"] = round(time.monotonic() - stream.arrived_at, 4)
        if last is not None:
            line |= {"prompt_tokens": last.num_input_tokens, "tokens": stream.tokens, "priority": call.priority}
            line |= {name: _rounded(value) for name, value in asdict(last.timings).items()}
        if error is not None:
            line["error"] = error.message[:LONGEST_MESSAGE] if self._log_prompts else _without_quotes(error.message)
        if self._log_prompts:
            line["prompt"] = call.text or call.messages or call.input_ids
        return line


def _one_line(message: str) -> str:
    """An error's message as it is sent: the last guard, for whoever makes one quotes what a client sent."""
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + "..."
    return " ".join(message.encode(errors="replace").decode().splitlines())


def internal(error: Exception, *, own_fault: bool = False) -> Any:
    """An INTERNAL error for a client: the kind of what happened, without its text."""
    from llm_engine.request import Code, RequestError

    return RequestError(f"internal error: {type(error).__name__}", Code.INTERNAL, own_fault=own_fault)


def string(name: str, value: str) -> Any:
    """A STRING tensor of shape [1, 1]."""
    return pb_utils.Tensor(name, np.array([[value.encode()]], dtype=np.object_))


def int32(name: str, values: list[int]) -> Any:
    """An INT32 tensor of shape [1, n]."""
    return pb_utils.Tensor(name, np.array([values], dtype=np.int32))


def _goes_on(delta: Any) -> bool:
    """Whether an answer had begun before this; who has waited for a first token is served before the others."""
    return delta.fingerprint is None


def _tensors(call: Call, deltas: list[Any]) -> list[Any]:
    """Output tensors of one response; only what somebody asked for is built."""
    first, last = deltas[0], deltas[-1]
    wanted = call.outputs
    tokens = [token for delta in deltas for token in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    tensors = []
    if "text_output" in wanted:
        tensors.append(string("text_output", text if call.echo is None else call.echo + text))
    if "token_ids" in wanted:
        tensors.append(int32("token_ids", tokens))
    if "index" in wanted:
        tensors.append(int32("index", [first.index]))
    if "finish_reason" in wanted:
        tensors.append(string("finish_reason", last.finish_reason or ""))
    if "num_input_tokens" in wanted:
        tensors.append(int32("num_input_tokens", [last.num_input_tokens]))
    if "num_output_tokens" in wanted:
        tensors.append(int32("num_output_tokens", [len(tokens)]))
    if first.fingerprint is not None and "fingerprint" in wanted:
        tensors.append(string("fingerprint", first.fingerprint))
    if first.seed is not None and "seed" in wanted:
        tensors.append(pb_utils.Tensor("seed", np.array([[first.seed]], dtype=np.uint64)))
    if call.params.logprobs is not None and "logprobs" in wanted:
        found = [asdict(logprob) for delta in deltas for logprob in delta.logprobs]
        tensors.append(string("logprobs", json.dumps(found)))
    if last.timings is not None and "timings" in wanted:
        tensors.append(string("timings", json.dumps(asdict(last.timings))))
    return tensors


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _without_quotes(message: str) -> str:
    """An error without the values that it quotes, which may be a client's text."""
    return message.split("'")[0].split('"')[0][:200].rstrip(" ,:")
