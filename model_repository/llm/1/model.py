"""Triton adapter: requests in, one response per token out. Everything else is `llm_engine`.

Four threads: Triton's (`execute`: parse, submit, wait for a free seat), the engine's, the sender (the only one that
sends) and the watcher (the only one that polls for cancellation). Every request gets exactly one FINAL, on its last
data response or on its error. It does not know how tokens are made.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from wire import Call, Operation, read_call

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CANCEL_POLL_SECONDS = 0.05
LONGEST_MESSAGE = 800  # characters of an error; it may quote what a client sent, which may be megabytes
log = logging.getLogger("tokenstream")


@dataclass(slots=True)
class _Stream:
    """One request on Triton's side. `lock` keeps a cancel poll and the FINAL response apart."""

    sender: Any
    call: Call
    tokens: int = 0
    waiting: list[Any] = field(default_factory=list)  # deltas of a request that is answered with one response
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Reply:
    """A whole answer that needs no engine: an operation's result, or a refusal."""

    stream: _Stream
    tensors: list[Any]
    error: Exception | None = None


class TritonPythonModel:
    """Called by Triton's Python backend; see its documentation for the contract of the three methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model; a fault is one line in the server's log that says what and how to cure it."""
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
        if int(np.__version__.split(".")[0]) >= 2:
            raise pb_utils.TritonModelException(
                f"numpy {np.__version__} crashes this server's Python backend on the first string; "
                f"install numpy<2 in the Python that tritonserver uses"
            )
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._merge_limit = int(parameters.pop("max_tokens_per_response", "1"))
        given = _device(args, config)  # before torch is imported
        from llm_engine.config import ConfigError, EngineConfig
        from llm_engine.engine import Engine

        try:
            self._engine = Engine(EngineConfig.from_parameters(parameters, **given))
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._ids = itertools.count()
        self._streams: dict[str, _Stream] = {}
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_all, name="sender", daemon=True),
            threading.Thread(target=self._watch, name="watcher", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        log.info("ready: %s", json.dumps(self._engine.info()))

    def execute(self, requests: list[Any]) -> None:
        """Submit each request, then return once another would find a seat: until then Triton's queue holds them."""
        for request in requests:
            self._accept(request)
            while not self._engine.wait_for_room(timeout=60.0):
                pass

    def finalize(self) -> None:
        """End what is live and stop the threads. Triton calls it only when no response sender lives any more."""
        self._engine.close()
        self._stopping.set()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(timeout=10.0)

    # --- Triton's thread --------------------------------------------------------------------------------------------

    def _accept(self, request: Any) -> None:
        from llm_engine.request import RequestError

        stream = _Stream(request.get_response_sender(), Call(request_id=request.request_id()))
        try:
            stream.call = read_call(request, self._engine.defaults)
            self._start(stream)
        except RequestError as error:
            self._outbox.put(_Reply(stream, [], error))
        except Exception as error:  # execute never raises: Triton would fail every request and show a traceback
            log.exception("a request could not be accepted")
            self._outbox.put(_Reply(stream, [], _internal(error)))

    def _start(self, stream: _Stream) -> None:
        from llm_engine.request import Request

        call, prompts = stream.call, self._engine.prompts
        if call.operation is Operation.INFO:
            return self._outbox.put(_Reply(stream, [_string("text_output", json.dumps(self._engine.info()))]))
        if call.operation is Operation.DETOKENIZE:
            text = prompts.decode("input_ids", call.input_ids)
            return self._outbox.put(_Reply(stream, [_string("text_output", text)]))
        if call.text is not None:
            ids = prompts.text("text_input", call.text)
        elif call.messages is not None:
            ids = prompts.messages("messages", call.messages, call.template_time)
        else:
            ids = call.input_ids
        if call.operation is Operation.TOKENIZE:
            return self._outbox.put(_Reply(stream, [_int32("token_ids", ids), _int32("num_input_tokens", [len(ids)])]))
        if not call.exclude_input:
            call.echo = call.text if call.text is not None else prompts.decode("input_ids", ids)
        key = str(next(self._ids))
        self._streams[key] = stream
        try:
            self._engine.submit(
                Request(
                    id=key,
                    prompt_ids=ids,
                    params=call.params,
                    resume_token_ids=call.resume_token_ids,
                    resume_fingerprint=call.resume_fingerprint,
                    priority=call.priority,
                    cache_salt=call.cache_salt,
                ),
                self._outbox.put,
            )
        except BaseException:
            del self._streams[key]
            raise
        return None

    # --- the sender's thread ----------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            try:
                if isinstance(item, _Reply):
                    self._finish(item.stream, item.tensors, item.error)
                else:
                    for deltas in [[delta] for delta in item] if self._merge_limit == 1 else self._merged(item):
                        self._send_or_end(deltas)
            except Exception:  # one response that cannot be sent must not silence all other streams
                log.exception("a response could not be sent")

    def _merged(self, deltas: list[Any]) -> Iterable[list[Any]]:
        """Deltas by request, at most `max_tokens_per_response` tokens each, with all that waits in the outbox."""
        by_request: dict[str, list[list[Any]]] = {}
        while True:
            for delta in deltas:
                runs = by_request.setdefault(delta.request_id, [[]])
                if sum(len(d.token_ids) for d in runs[-1]) >= self._merge_limit:
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
        stream = self._streams.get(key)
        if stream is None:  # it was ended here before
            return
        try:
            self._send(stream, deltas)
        except Exception as error:
            log.exception("a response of request %s could not be sent", stream.call.request_id)
            self._streams.pop(key, None)
            self._engine.cancel(key)
            self._finish(stream, [], _internal(error))

    def _send(self, stream: _Stream, deltas: list[Any]) -> None:
        """Send consecutive deltas of one request as one response; or keep them, for a request that wants one answer."""
        last = deltas[-1]
        stream.tokens += sum(len(delta.token_ids) for delta in deltas)
        if not stream.call.stream:
            stream.waiting.extend(deltas)
            deltas = stream.waiting
        if last.terminal:
            del self._streams[last.request_id]
            tensors = [] if last.error else _tensors(stream.call, deltas)
            self._finish(stream, tensors, last.error)
        elif stream.call.stream:
            stream.sender.send(pb_utils.InferenceResponse(_tensors(stream.call, deltas)))

    def _finish(self, stream: _Stream, tensors: list[Any], error: Any) -> None:
        """Send the last response with FINAL."""
        failure = None
        if error is not None:
            note = f"[request={stream.call.request_id} tokens={stream.tokens} code={error.code}]"
            message = error.message
            if len(message) > LONGEST_MESSAGE:
                message = message[:LONGEST_MESSAGE] + "..."
            failure = pb_utils.TritonError(f"{message} {note}", getattr(pb_utils.TritonError, error.code))
        with stream.lock:
            stream.closed = True
        stream.sender.send(pb_utils.InferenceResponse(tensors, failure), FINAL)

    # --- the watcher's thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(CANCEL_POLL_SECONDS):
            for key, stream in list(self._streams.items()):
                with stream.lock:  # asking after FINAL would crash the server
                    if stream.closed or stream.cancelled or not stream.sender.is_cancelled():
                        continue
                    stream.cancelled = True
                self._engine.cancel(key)


def _internal(error: Exception) -> Exception:
    from llm_engine.request import Code, RequestError

    return RequestError(f"internal error: {type(error).__name__}", Code.INTERNAL)


def _device(args: dict[str, str], config: dict[str, Any]) -> dict[str, Any]:
    """Choose the device from Triton's arguments; it must be visible to torch alone, so torch must not be loaded yet."""
    kind = args["model_instance_kind"]
    if kind == "GPU":
        os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]
        return {"device": "cuda"}
    if kind == "MODEL":
        import torch

        return {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    given: dict[str, Any] = {"device": "cpu"}
    instances = sum(g.get("count", 1) for g in config.get("instance_group", []) if g.get("kind") == "KIND_CPU")
    if instances > 1:
        given["cpu_share"] = instances
    return given


def _tensors(call: Call, deltas: list[Any]) -> list[Any]:
    """Output tensors of one response; only what somebody asked for is built."""
    first, last = deltas[0], deltas[-1]
    wanted = call.outputs
    tokens = [token for delta in deltas for token in delta.token_ids]
    text = "".join(delta.text for delta in deltas)
    tensors = []
    if "text_output" in wanted:
        tensors.append(_string("text_output", text if call.echo is None else call.echo + text))
    if "token_ids" in wanted:
        tensors.append(_int32("token_ids", tokens))
    if "index" in wanted:
        tensors.append(_int32("index", [first.index]))
    if "finish_reason" in wanted:
        tensors.append(_string("finish_reason", last.finish_reason or ""))
    if "num_input_tokens" in wanted:
        tensors.append(_int32("num_input_tokens", [last.num_input_tokens]))
    if "num_output_tokens" in wanted:
        tensors.append(_int32("num_output_tokens", [len(tokens)]))
    if first.fingerprint is not None and "fingerprint" in wanted:
        tensors.append(_string("fingerprint", first.fingerprint))
    if first.seed is not None and "seed" in wanted:
        tensors.append(pb_utils.Tensor("seed", np.array([[first.seed]], dtype=np.uint64)))
    if call.params.logprobs is not None and "logprobs" in wanted:
        found = [asdict(logprob) for delta in deltas for logprob in delta.logprobs]
        tensors.append(_string("logprobs", json.dumps(found)))
    if last.timings is not None and "timings" in wanted:
        tensors.append(_string("timings", json.dumps(asdict(last.timings))))
    return tensors


def _string(name: str, value: str) -> Any:
    return pb_utils.Tensor(name, np.array([[value.encode()]], dtype=np.object_))


def _int32(name: str, values: list[int]) -> Any:
    return pb_utils.Tensor(name, np.array([values], dtype=np.int32))
