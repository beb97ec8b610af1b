"""Every exception and every clock, through the blocking and the asynchronous client: what is raised and what is left.

One body for both: a face asks, reads until it ends, and tells what came out and what stayed behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from tokenstream import AsyncClient, Client, Timeout, errors
from tokenstream.errors import TokenstreamError
from unit.scripted_triton import WAIT, Script, ScriptedTriton, failure, final_mark, token

TEXTS, IDS = ("Once", " upon"), (100, 101)  # what has come when an answer breaks in its middle
NAME = "the-request"


@dataclass(slots=True)
class Heard:
    """What a caller saw: the chunks, the exceptions of two attempts to read on, and the threads or tasks left over."""

    texts: list[str] = field(default_factory=list)
    raised: list[BaseException] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


Face = Callable[..., Heard]


def blocking(urls: Sequence[str], *, leave: bool = False, **options: Any) -> Heard:
    """Ask with `Client`; with `leave` cancel behind the first chunk."""
    heard, before = Heard(), set(threading.enumerate())
    with Client(urls, **options) as client:
        try:
            with client.stream("x", request_id=NAME) as stream:
                for _ in range(2):
                    try:
                        for chunk in stream:
                            heard.texts.append(chunk.text)
                            if leave:
                                stream.cancel()
                    except TokenstreamError as error:
                        heard.raised.append(error)
        except TokenstreamError as error:  # it could not even begin
            heard.raised += [error, error]
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("tokenstream"):
            thread.join(WAIT)
            heard.left += [thread.name] if thread.is_alive() else []
    return heard


def asynchronous(urls: Sequence[str], *, leave: bool = False, **options: Any) -> Heard:
    """The same with `AsyncClient`."""
    heard = Heard()

    async def ask(client: AsyncClient) -> None:
        async with client.stream("x", request_id=NAME) as stream:
            for _ in range(2):
                try:
                    async for chunk in stream:
                        heard.texts.append(chunk.text)
                        if leave:
                            stream.cancel()
                except TokenstreamError as error:
                    heard.raised.append(error)

    async def main() -> None:
        async with asyncio.timeout(WAIT), AsyncClient(urls, **options) as client:
            try:
                await ask(client)
            except TokenstreamError as error:
                heard.raised += [error, error]
        others = asyncio.all_tasks() - {asyncio.current_task()}
        _, late = await asyncio.wait(others, timeout=1) if others else ((), ())
        heard.left += [task.get_name() for task in late]

    asyncio.run(main())
    return heard


faces = pytest.mark.parametrize("face", [blocking, asynchronous])


def assert_told(heard: Heard, kind: type[TokenstreamError], texts: Sequence[str], words: str) -> TokenstreamError:
    """One exception, said again when it is asked again: its kind, its line, what had come; and nothing of gRPC's."""
    error, again = heard.raised
    assert isinstance(error, TokenstreamError)
    assert type(error) is kind, traceback.format_exception(error)
    assert again is error
    assert heard.texts == list(texts)
    assert (error.text, tuple(error.token_ids)) == ("".join(texts), IDS[: len(texts)])
    assert error.request_id == NAME
    assert str(error) == error.message
    assert words in error.message
    assert error.message.isprintable(), "it is one line"
    for cause in chain(error):
        assert not isinstance(cause, grpc.RpcError)
    shown = "".join(traceback.format_exception(error))
    for inner in ("RpcError", "Rendezvous", "grpc_status", "debug_error_string", "asyncio.exceptions"):
        assert inner not in shown
    assert heard.left == []
    return error


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and all that a traceback would show with it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextlib.contextmanager
def served(script: Script) -> Iterator[ScriptedTriton]:
    """A server whose every call has ended behind the block."""
    server = ScriptedTriton(script)
    try:
        yield server
        for call in server.calls:
            assert call.over.wait(WAIT), "a stream was left open"
    finally:
        server.close()


@contextlib.contextmanager
def mute_port() -> Iterator[str]:
    """A port that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def says(text: str) -> Script:
    """An error on the stream, as the model or Triton words it."""

    def script(request: Any, call: Any) -> Iterator[Any]:
        yield failure(text.replace("<id>", request.id))

    return script


def status(code: str, details: str, **trailing: str) -> Script:
    """An RPC that ends with a status, as a proxy or gRPC itself does it."""

    def script(request: Any, call: Any) -> Iterator[Any]:
        call.context.set_trailing_metadata(tuple(trailing.items()))
        call.context.abort(grpc.StatusCode[code], details)
        yield

    return script


def only(message: Any) -> Script:
    """One more response of another kind, and the end."""
    return lambda request, call: iter([message])


def silent(request: Any, call: Any) -> Iterator[Any]:
    call.over.wait(WAIT)
    yield from ()


def endless(request: Any, call: Any) -> Iterator[Any]:
    for _ in range(2000):
        if call.over.wait(0.005):
            return
        yield token(2, "")  # no token, so that what has come stays the same


def behind(begun: int, end: Script) -> Script:
    """So many tokens, and then `end`."""

    def script(request: Any, call: Any) -> Iterator[Any]:
        for index in range(begun):
            yield token(index, TEXTS[index], IDS[index], fingerprint="print")
        yield from end(request, call)

    return script


# name: what the server does, the exception, and words of its line
ERRORS: dict[str, tuple[Script, type[TokenstreamError], str]] = {
    "invalid": (
        says("top_p must be at most 1 [request=<id> tokens=0 code=INVALID_ARG]"),
        errors.InvalidRequest,
        "top_p",
    ),
    "Triton's invalid": (says("unexpected inference input 'y' for model"), errors.InvalidRequest, "input 'y'"),
    "two lines": (says("no\n  such\tthing [request=<id> code=INVALID_ARG]"), errors.InvalidRequest, "no such thing"),
    "mismatch": (says("resume_mismatch: mine is b [code=INVALID_ARG]"), errors.ResumeMismatch, "mine is b"),
    "unknown model": (says("Request for unknown model: 'x' is not found"), errors.ModelNotFound, "'x'"),
    "not found": (status("NOT_FOUND", "no such model"), errors.ModelNotFound, "no such model"),
    "no credentials": (status("UNAUTHENTICATED", "who are you"), errors.Unauthorized, "who are you"),
    "wrong credentials": (status("PERMISSION_DENIED", "not you"), errors.Unauthorized, "not you"),
    "full": (says("the queue is full [request=<id> code=UNAVAILABLE retry_after=0.1]"), errors.Overloaded, "full"),
    "Triton's full": (says("[request id: <id>] Exceeds maximum queue size"), errors.Overloaded, "maximum queue size"),
    "late in the queue": (
        says("Request timeout expired [request=<id> code=UNAVAILABLE]"),
        errors.Overloaded,
        "expired",
    ),
    "a proxy's full": (status("RESOURCE_EXHAUSTED", "slow down"), errors.Overloaded, "slow down"),
    "a proxy's pause": (status("UNAVAILABLE", "limit", **{"retry-after": "0.1"}), errors.Overloaded, "limit"),
    "dead stub": (says("Stub process 'llm_0_0' is not healthy."), errors.NotReady, "is not healthy"),
    "not ready": (says("the model is not ready [request=<id> code=UNAVAILABLE]"), errors.NotReady, "not ready"),
    "drain": (says("draining: another one, please [request=<id> code=UNAVAILABLE]"), errors.Draining, "draining"),
    "drained": (says("draining: it took too long [request=<id> code=CANCELLED]"), errors.Draining, "draining"),
    "shutdown": (status("UNAVAILABLE", "GRPC server is shutting down"), errors.Draining, "shutting down"),
    "cancelled there": (says("it ran too long [request=<id> code=CANCELLED]"), errors.Cancelled, "ran too long"),
    "failed step": (
        says("the step failed: KeyError [request=<id> code=INTERNAL]"),
        errors.InternalError,
        "step failed",
    ),
    "garbage": (only(b"\xff\xff\xff"), errors.InternalError, "not Triton's"),
    "a gap": (only(token(7, "x", 7)), errors.InternalError, "token 7 where token"),
    "other words": (says("something else"), errors.ServerError, "something else"),
    "other status": (status("DATA_LOSS", "who knows"), errors.ServerError, "who knows"),
    "no Triton": (status("UNIMPLEMENTED", "Method not found!"), errors.ServerError, "no Triton server"),
    "cut": (status("UNAVAILABLE", "Socket closed"), errors.IncompleteStream, "socket closed"),
    "reset": (status("INTERNAL", "Received RST_STREAM with error code 2"), errors.IncompleteStream, "error code 2"),
    "a mark alone": (only(final_mark()), errors.IncompleteStream, "without a reason"),
    "no mark": (lambda request, call: iter(()), errors.IncompleteStream, "without a reason"),
}
ELSEWHERE = {errors.ConnectionFailed, errors.StreamTimeout, *errors.StreamTimeout.__subclasses__()}  # tested below


@faces
@pytest.mark.parametrize("begun", [0, 2])
@pytest.mark.parametrize("name", ERRORS)
def test_whatever_a_server_says_or_does_is_one_of_our_exceptions(face: Face, name: str, begun: int) -> None:
    end, kind, words = ERRORS[name]
    with served(behind(begun, end)) as server:
        error = assert_told(face([server.url], retries=0, resume=False), kind, TEXTS[:begun], words)
    assert len(server.requests) == 1
    if isinstance(error, errors.ServerError):
        assert error.retry_after == (0.1 if name in ("full", "a proxy's pause") else None)


@faces
@pytest.mark.parametrize("name", [name for name, (_, kind, _) in ERRORS.items() if kind is not errors.InternalError])
def test_what_remains_when_retries_and_resumes_are_used_up_is_as_plain(face: Face, name: str) -> None:
    end, kind, words = ERRORS[name]
    with served(behind(2, end)) as server:
        first = ScriptedTriton(behind(2, end))
        heard = face([first.url, server.url], retries=1, max_resumes=0)
        first.close()
    assert_told(heard, kind, TEXTS, words)


def test_the_tables_here_miss_no_exception() -> None:
    raised = {kind for _, kind, _ in ERRORS.values()}
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TokenstreamError)}
    assert kinds - raised - {TokenstreamError} == ELSEWHERE


@faces
def test_a_port_where_nobody_listens_is_a_failed_connection(face: Face) -> None:
    with mute_port() as closed:
        pass
    assert_told(
        face([closed], retries=1), errors.ConnectionFailed, (), f"cannot connect to {closed}: connection refused"
    )


@faces
@pytest.mark.parametrize("script", [silent, endless])
def test_a_request_cancelled_by_its_caller_says_so(face: Face, script: Script) -> None:
    with served(behind(1, script)) as server:
        assert_told(face([server.url], leave=True), errors.Cancelled, TEXTS[:1], "cancelled by this client")
        assert server.calls[0].over.wait(WAIT)
        assert server.calls[0].cancelled


LONG = {"connect": WAIT, "first_token": WAIT, "idle": WAIT, "total": None}


def clocks(**short: float) -> Timeout:
    """One clock that rings, and the others that do not."""
    return Timeout(**{**LONG, **short})


# which clock, behind how many tokens the server does what
CLOCKS: dict[str, tuple[dict[str, float], int, Script, type[TokenstreamError], str]] = {
    "first token": ({"first_token": 0.05}, 0, silent, errors.FirstTokenTimeout, "no first token within 0.05 s"),
    "idle": ({"idle": 0.05}, 2, silent, errors.IdleTimeout, "sent no token for 0.05 s"),
    "total, first token": ({"total": 0.2}, 0, silent, errors.TotalTimeout, "total time"),
    "total, idle": ({"total": 0.2}, 2, silent, errors.TotalTimeout, "total time"),
}


@faces
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", CLOCKS)
def test_every_clock_rings_as_itself_and_cancels_on_the_server(face: Face, name: str, resume: bool) -> None:
    short, begun, end, kind, words = CLOCKS[name]
    with served(behind(begun, end)) as server:
        heard = face([server.url], timeout=clocks(**short), retries=0, resume=resume, max_resumes=0)
        assert_told(heard, kind, TEXTS[:begun], words)
        for call in server.calls:
            assert call.over.wait(WAIT)
            assert call.cancelled


@faces
def test_the_total_clock_rings_in_an_answer_that_never_pauses(face: Face) -> None:
    with served(behind(2, endless)) as server:
        heard = face([server.url], timeout=clocks(total=0.3))
        heard.texts = [text for text in heard.texts if text]
        assert_told(heard, errors.TotalTimeout, TEXTS, "total time")


@faces
@pytest.mark.parametrize("retries", [0, 1])
def test_the_connect_clock_rings_on_a_port_that_says_nothing(face: Face, retries: int) -> None:
    with mute_port() as url:
        heard = face([url], timeout=clocks(connect=0.2), retries=retries)
    assert_told(heard, errors.ConnectTimeout, (), f"{url} did not answer")


@faces
def test_the_total_clock_ends_connecting_pauses_and_retries(face: Face) -> None:
    with mute_port() as url:
        heard = face([url], timeout=clocks(connect=0.1, total=0.35), retries=100)
    error = heard.raised[0]
    assert isinstance(
        error, errors.TotalTimeout | errors.ConnectTimeout
    )  # it may end in a pause that would be too long
    assert_told(heard, type(error), (), "")


@faces
def test_clocks_that_are_off_do_not_ring(face: Face) -> None:
    def slow(request: Any, call: Any) -> Iterator[Any]:
        call.over.wait(0.1)
        yield token(0, TEXTS[0], IDS[0])
        call.over.wait(0.1)
        yield token(1, TEXTS[1], IDS[1], final=True, finish_reason="stop")

    off = Timeout(connect=None, first_token=None, idle=None, total=None)
    with served(slow) as server:
        heard = face([server.url], timeout=off)
    assert (heard.texts, heard.raised, heard.left) == (list(TEXTS), [], [])
