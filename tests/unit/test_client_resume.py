"""An answer that is cut, at every token and in every way: the caller sees one uninterrupted answer."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from tokenstream import (
    AsyncClient,
    Cancelled,
    Chunk,
    Client,
    Draining,
    IdleTimeout,
    IncompleteStream,
    InternalError,
    ResumeMismatch,
    Timeout,
)
from unit.scripted_triton import WAIT, Script, ScriptedTriton, answer, failure, final_mark, inputs, token

# Two tokens hold their text back, and two give more than their own: as bytes of one character, or a possible stop, do.
WORDS = ("Once", "", " upon a", " time", "", "", ", …", ".")
IDS = tuple(100 + index for index in range(len(WORDS)))


def error(text: str) -> Script:
    def cut(request, call) -> Iterator:
        yield failure(f"{text} [request={request.id} tokens=0 code={code}]" if (code := CODES.get(text)) else text)

    return cut


CODES = {"draining: the server is shutting down": "CANCELLED", "a step failed": "INTERNAL"}


def status(code: grpc.StatusCode, text: str) -> Script:
    def cut(request, call) -> Iterator:
        call.context.abort(code, text)
        yield

    return cut


def mute(request, call) -> Iterator:
    call.over.wait(WAIT)
    yield from ()


def mark(request, call) -> Iterator:
    yield final_mark()


def clean(request, call) -> Iterator:
    yield from ()


CUTS: dict[str, Script] = {
    "cut connection": status(grpc.StatusCode.UNAVAILABLE, "Socket closed"),
    "reset by a proxy": status(grpc.StatusCode.CANCELLED, "RST_STREAM closed stream"),
    "reset": status(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    "goaway": status(grpc.StatusCode.UNAVAILABLE, "GOAWAY received"),
    "server shuts down": status(grpc.StatusCode.UNAVAILABLE, "GRPC server is shutting down and has stopped"),
    "drain": error("draining: the server is shutting down"),
    "stub is dead": error("Stub process 'llm_0_0' is not healthy."),
    "step failed": error("a step failed"),
    "silence": mute,
    "mark without a reason": mark,
    "end without a reason": clean,
}
CLOCKS = Timeout(first_token=10.0, idle=0.3)  # the latter for those who fall silent


class Pair:
    """Two servers; the first one cuts fresh answers."""

    def __init__(self, cut: Script, at: int, *, second: Callable[..., Iterator] | None = None) -> None:
        self.first = ScriptedTriton(answer(*WORDS, cut=cut, at=at))
        self.second = ScriptedTriton(second or answer(*WORDS))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        self.first.close()
        self.second.close()


def read(urls: Sequence[str], **options: Any) -> tuple[list[Chunk], int]:
    with Client(urls, timeout=CLOCKS) as client, client.stream(messages=[{"role": "user"}], **options) as stream:
        return list(stream), stream.resumes


def read_async(urls: Sequence[str], **options: Any) -> tuple[list[Chunk], int]:
    async def read() -> tuple[list[Chunk], int]:
        async with (
            AsyncClient(urls, timeout=CLOCKS) as client,
            client.stream(messages=[{"role": "user"}], **options) as stream,
        ):
            return [chunk async for chunk in stream], stream.resumes

    return asyncio.run(read())


@pytest.mark.parametrize("reader", [read, read_async])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("at", range(1, len(WORDS)))
def test_an_answer_cut_anywhere_in_any_way_goes_on_as_if_nothing_had_been(at, cut, reader):
    with Pair(CUTS[cut], at) as servers:
        for urls in ([servers.first.url, servers.second.url], [servers.first.url]):
            chunks, resumes = reader(urls)
            assert [chunk.text for chunk in chunks] == list(WORDS)
            assert [chunk.index for chunk in chunks] == list(range(len(WORDS)))
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == IDS
            assert [chunk.finish_reason for chunk in chunks] == [None] * (len(WORDS) - 1) + ["stop"]
            assert resumes == 1
        assert len(servers.first.requests) == 3
        for fresh, rest in (
            (servers.first.requests[0], servers.second.requests[0]),
            (servers.first.requests[1], servers.first.requests[2]),
        ):
            begun, gone_on = inputs(fresh), inputs(rest)
            assert gone_on.pop("resume_token_ids") == list(IDS[:at])
            assert gone_on.pop("resume_fingerprint") == "print"
            assert gone_on == begun  # the same seed and template time among it
            assert (rest.id, "seed" in begun["sampling_parameters"]) == (fresh.id, True)


@pytest.mark.parametrize("reader", [read, read_async])
@pytest.mark.parametrize("cut", sorted(CUTS.keys() - {"silence"}))
def test_an_answer_cut_before_its_first_token_is_asked_for_again(cut, reader):
    with Pair(CUTS[cut], 0) as servers:
        chunks, resumes = reader([servers.first.url, servers.second.url])
        assert "".join(chunk.text for chunk in chunks) == "".join(WORDS)
        assert resumes == 0
        assert inputs(servers.second.requests[0]) == inputs(servers.first.requests[0])


@pytest.mark.parametrize("reader", [read, read_async])
def test_a_server_that_dies_in_mid_answer_is_followed_by_the_next(reader):
    def die(request, call) -> Iterator:
        servers.first._server.stop(0)
        call.over.wait(WAIT)
        yield from ()

    with Pair(die, 3) as servers:
        chunks, resumes = reader([servers.first.url, servers.second.url])
    assert [chunk.text for chunk in chunks] == list(WORDS)
    assert resumes == 1


@pytest.mark.parametrize("reader", [read, read_async])
def test_without_resume_the_break_is_raised_with_what_had_come(reader):
    for cut, kind in (("cut connection", IncompleteStream), ("drain", Draining), ("silence", IdleTimeout)):
        with Pair(CUTS[cut], 3) as servers:
            with pytest.raises(kind) as caught:
                reader([servers.first.url, servers.second.url], resume=False)
            assert (caught.value.text, caught.value.token_ids) == ("Once upon a", IDS[:3])
            assert servers.second.requests == []


@pytest.mark.parametrize("reader", [read, read_async])
@pytest.mark.parametrize("at", [0, 3])
def test_an_answer_that_fails_by_its_own_request_is_taken_up_by_nobody(at, reader):
    with Pair(error("the answer failed: KeyError [request=r tokens=3 code=INTERNAL fault=request]"), at) as servers:
        with pytest.raises(InternalError, match="the answer failed: KeyError") as caught:
            reader([servers.first.url, servers.second.url])
        assert caught.value.token_ids == IDS[:at]
        assert caught.value.own_fault
        assert [len(servers.first.requests), len(servers.second.requests)] == [1, 0]


@pytest.mark.parametrize("reader", [read, read_async])
def test_a_server_of_another_fingerprint_goes_on_only_at_best_effort(reader):
    with Pair(CUTS["drain"], 3, second=answer(*WORDS, fingerprint="other")) as servers:
        urls = [servers.first.url, servers.second.url]
        chunks, resumes = reader(urls, resume="best_effort")
        assert ([chunk.text for chunk in chunks], resumes) == (list(WORDS), 1)
        # The first one is the only one that may go on; it does, when the second has refused.
        chunks, resumes = reader(urls)
        assert ([chunk.text for chunk in chunks], resumes) == (list(WORDS), 1)
        assert [len(servers.first.requests), len(servers.second.requests)] == [3, 2]


@pytest.mark.parametrize("reader", [read, read_async])
def test_where_nobody_has_the_same_fingerprint_the_answer_stays_incomplete(reader):
    def changed(request, call) -> Iterator:
        servers.first.script = answer(*WORDS, fingerprint="new weights")
        yield from CUTS["cut connection"](request, call)

    with Pair(changed, 3) as servers:
        with pytest.raises(IncompleteStream, match="socket closed") as caught:
            reader([servers.first.url])
        assert isinstance(caught.value.__cause__, ResumeMismatch)
        assert caught.value.text == "Once upon a"


def test_a_server_that_says_nothing_of_fingerprints_is_not_trusted_to_go_on(serve):
    def script(request, call) -> Iterator:
        yield token(0, "a", 100)
        yield from CUTS["cut connection"](request, call)

    server, client = serve(script)
    with pytest.raises(IncompleteStream):
        client.generate("x")
    assert len(server.requests) == 1


def test_a_server_that_goes_on_under_another_fingerprint_unasked_is_found_out(serve):
    def script(request, call) -> Iterator:
        begun = len(inputs(request).get("resume_token_ids", []))
        yield token(begun, "a", 100, fingerprint=f"print {begun}")
        yield from CUTS["cut connection"](request, call)

    _, client = serve(script)
    with pytest.raises(IncompleteStream) as caught:
        client.generate("x")
    assert (caught.value.text, caught.value.token_ids) == ("a", (100,))


@pytest.mark.parametrize("reader", [read, read_async])
def test_an_answer_may_be_cut_many_times_but_not_more_often_than_allowed(reader):
    def script(request, call) -> Iterator:
        begun = len(inputs(request).get("resume_token_ids", []))
        yield token(begun, WORDS[begun], 100 + begun, fingerprint="print", final=begun == len(WORDS) - 1,
                    finish_reason="stop" if begun == len(WORDS) - 1 else "")  # fmt: skip
        if begun < len(WORDS) - 1:
            yield from CUTS["cut connection"](request, call)

    server = ScriptedTriton(script)
    chunks, resumes = reader([server.url], max_resumes=len(WORDS) - 1)
    assert ([chunk.text for chunk in chunks], resumes) == (list(WORDS), len(WORDS) - 1)
    with pytest.raises(IncompleteStream) as caught:
        reader([server.url], max_resumes=3)
    assert caught.value.token_ids == IDS[:4]
    server.close()


@pytest.mark.parametrize("seed", range(20))
def test_any_number_of_cuts_of_any_kind_among_three_servers_does_not_show(seed):
    draw = random.Random(seed)
    cuts = [cut for name, cut in CUTS.items() if name not in ("silence", "end without a reason")]

    def script(request, call) -> Iterator:
        begun = len(inputs(request).get("resume_token_ids", []))
        whole = answer(*WORDS)(request, call)
        stay = draw.randint(1, 3)
        yield from itertools.islice(whole, stay)
        if begun + stay < len(WORDS):
            yield from draw.choice(cuts)(request, call)

    servers = [ScriptedTriton(script) for _ in range(3)]
    chunks, resumes = read([server.url for server in servers], max_resumes=len(WORDS))
    assert [chunk.text for chunk in chunks] == list(WORDS)
    assert [chunk.index for chunk in chunks] == list(range(len(WORDS)))
    assert resumes == sum(len(server.requests) for server in servers) - 1 > 0
    for server in servers:
        server.close()


def test_the_break_is_raised_when_nobody_goes_on_and_says_what_was_tried(serve):
    def script(request, call) -> Iterator:
        if "resume_token_ids" in inputs(request):
            yield failure("Exceeds maximum queue size")
        else:
            yield from answer(*WORDS, cut=CUTS["cut connection"], at=3)(request, call)

    server, client = serve(script)
    with pytest.raises(IncompleteStream, match="socket closed") as caught:
        client.generate("x", retries=1)
    assert caught.value.text == "Once upon a"
    assert "maximum queue size" in caught.value.__notes__[0]
    assert len(server.requests) == 3  # the cut one, and two refusals with a pause between


@pytest.mark.parametrize("code", ["INVALID_ARG", "CANCELLED"])
def test_what_would_end_the_same_everywhere_is_not_taken_up(serve, code):
    def cut(request, call) -> Iterator:
        yield failure(f"it ran longer than it may [request=r tokens=3 code={code}]")

    server, client = serve(answer(*WORDS, cut=cut, at=3))
    with pytest.raises(Exception, match="longer than it may") as caught:
        client.generate("x")
    assert caught.value.text == "Once upon a"
    assert len(server.requests) == 1


def test_nonsense_in_mid_answer_is_not_taken_up(serve):
    def cut(request, call) -> Iterator:
        yield token(7, "?", 1)
        call.over.wait(WAIT)

    server, client = serve(answer(*WORDS, cut=cut, at=3))
    with pytest.raises(InternalError, match="token 7 where token 3 was due"):
        client.generate("x")
    assert server.calls[0].over.wait(WAIT)
    assert len(server.requests) == 1


def test_an_answer_whose_last_word_has_come_needs_no_mark(serve):
    def script(request, call) -> Iterator:
        yield token(0, "all", 100, fingerprint="print", finish_reason="stop")
        yield from CUTS["silence"](request, call)

    server, client = serve(script, timeout=CLOCKS)
    completion = client.generate("x")
    assert (completion.text, completion.finish_reason) == ("all", "stop")
    assert len(server.requests) == 1


def test_a_cancelled_stream_is_not_taken_up(serve):
    server, client = serve(answer(*WORDS, cut=CUTS["silence"], at=3))
    stream = client.stream("x")
    assert [next(stream).index for _ in range(3)] == [0, 1, 2]
    stream.cancel()
    with pytest.raises(Cancelled):
        next(stream)
    assert server.calls[0].over.wait(WAIT)
    assert len(server.requests) == 1


def test_usage_counts_every_token_once(serve):
    _, client = serve(answer(*WORDS, cut=CUTS["drain"], at=5))
    completion = client.generate("x")
    assert (completion.usage.input_tokens, completion.usage.output_tokens) == (7, len(WORDS))
    assert len(completion.stats.gaps) == len(WORDS) - 1
    assert completion.resumes == 1
