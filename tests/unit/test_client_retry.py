"""Who is asked, in which order, how often and behind which pauses, while no token has come."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tokenstream import (
    Client,
    ConnectionFailed,
    Draining,
    FirstTokenTimeout,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    ServerInfo,
    Timeout,
    TokenstreamError,
    TotalTimeout,
    Unauthorized,
    course,
)
from tokenstream.base import read_urls
from tokenstream.course import Budget, Course, Endpoints, Verdict, judge, pause_before
from tokenstream.errors import from_server
from tokenstream.transport import run
from unit.scripted_triton import WAIT, Script, ScriptedTriton, answer, failure, inputs, token

FULL = "Exceeds maximum queue size [request=r tokens=0 code=UNAVAILABLE]"
PASSING = {
    FULL: Overloaded,
    "draining: the server is shutting down [request=r tokens=0 code=UNAVAILABLE]": Draining,
    "Stub process 'llm_0_0' is not healthy.": NotReady,
    "a step failed [request=r tokens=0 code=INTERNAL]": TokenstreamError,
}
FINAL = {
    "top_p must be at most 1 [request=r tokens=0 code=INVALID_ARG]": InvalidRequest,
    "unexpected inference input 'x' for model 'llm'": InvalidRequest,
    "it ran longer than it may [request=r tokens=0 code=CANCELLED]": TokenstreamError,
    "the answer failed: KeyError [request=r tokens=0 code=INTERNAL fault=request]": InternalError,
}


def fails(times: int, message: str) -> Script:
    """A script that sends an error to so many requests and answers the others."""
    left = iter(range(times))

    def script(request, call) -> Iterator:
        if next(left, None) is None:
            yield from answer("a", "b")(request, call)
        else:
            yield failure(message)

    return script


def silent(request, call) -> Iterator:
    call.over.wait(WAIT)
    yield from ()


@pytest.fixture
def servers() -> Iterator[list[ScriptedTriton]]:
    """Three servers; each test gives them their scripts."""
    started = [ScriptedTriton(answer("a", "b")) for _ in range(3)]
    yield started
    for server in started:
        server.close()


def asked(servers: list[ScriptedTriton]) -> list[int]:
    return [len(server.requests) for server in servers]


def urls(servers: list[ScriptedTriton]) -> list[str]:
    return [server.url for server in servers]


@pytest.fixture
def nobody() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"127.0.0.1:{closed.getsockname()[1]}"


@pytest.mark.parametrize("message", PASSING)
def test_what_may_pass_is_asked_again_just_as_it_was(serve, message):
    server, client = serve(fails(2, message))
    assert client.generate(messages=[{"role": "user"}]).text == "ab"
    first, second, third = server.requests
    assert inputs(first) == inputs(second) == inputs(third)
    assert first.id == second.id == third.id


@pytest.mark.parametrize("message", PASSING)
def test_what_does_not_pass_is_raised_when_the_retries_are_used_up(serve, message):
    server, client = serve(fails(9, message), retries=1)
    with pytest.raises(PASSING[message]):
        client.generate("x")
    assert len(server.requests) == 2
    with pytest.raises(PASSING[message]):
        client.generate("x", retries=0)
    assert len(server.requests) == 3


@pytest.mark.parametrize("message", FINAL)
def test_what_would_be_refused_everywhere_is_asked_once(servers, message):
    servers[0].script = fails(9, message)
    with Client(urls(servers)) as client, pytest.raises(FINAL[message]):
        client.generate("x")
    assert asked(servers) == [1, 0, 0]


def test_who_is_not_let_in_is_not_let_in_the_second_time(servers):
    def script(request, call) -> Iterator:
        call.context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you")
        yield

    servers[0].script = script
    with Client(urls(servers)) as client, pytest.raises(Unauthorized, match="who are you"):
        client.generate("x")
    assert asked(servers) == [1, 0, 0]


def test_the_next_endpoint_is_asked_without_using_up_a_retry(servers, nobody):
    servers[0].script = fails(9, FULL)
    with Client([nobody, *urls(servers)], retries=0) as client:
        assert client.generate("x").text == "ab"
        assert asked(servers) == [1, 1, 0]
        assert client.generate("x").text == "ab"  # the first two are set aside
        assert asked(servers) == [1, 2, 0]


def test_every_endpoint_is_asked_again_before_giving_up(servers):
    for server in servers:
        server.script = fails(9, FULL)
    with Client(urls(servers), retries=2) as client, pytest.raises(Overloaded):
        client.generate("x")
    assert asked(servers) == [3, 3, 3]


def test_an_endpoint_that_knows_no_such_model_is_asked_once_and_the_next_one_answers(servers):
    servers[0].script = fails(9, "Request for unknown model: 'llm' has no available versions")
    with Client(urls(servers)) as client:
        assert client.generate("x").text == "ab"
        assert asked(servers) == [1, 1, 0]
    with Client(servers[0].url) as client, pytest.raises(ModelNotFound):
        client.generate("x")
    assert asked(servers) == [2, 1, 0]


def test_a_first_token_that_is_late_is_waited_for_elsewhere_but_not_behind_ones_own_back(servers):
    servers[0].script = silent
    with Client(urls(servers)[:2], timeout=Timeout(first_token=0.4)) as client:
        assert client.generate("x").text == "ab"
    assert servers[0].calls[0].over.wait(WAIT)
    with Client(servers[0].url, timeout=Timeout(first_token=0.4)) as client, pytest.raises(FirstTokenTimeout):
        client.generate("x")
    assert asked(servers) == [2, 1, 0]


def test_other_questions_go_to_the_next_endpoint_too(servers, nobody):
    servers[0].script = fails(9, FULL)

    def script(request, call) -> Iterator:
        yield token(0, '{"model": "tiny"}', final=True)

    servers[1].script = script
    with Client([nobody, *urls(servers)]) as client:
        assert client.info() == ServerInfo("tiny", "", "", {"model": "tiny"})
        assert client.models()[0].name == "llm"
        assert client.ready()


def test_no_endpoint_at_all_is_a_failed_connection(nobody):
    with Client(nobody, retries=1) as client:
        for ask in (lambda: client.stream("x"), lambda: client.tokenize("x"), client.models):
            with pytest.raises(ConnectionFailed, match="connection refused"):
                ask()


def test_a_server_that_comes_back_is_found_again():
    server = ScriptedTriton(answer("a"))
    with Client(server.url, retries=0) as client:
        client.generate("x")
        port = int(server.url.rpartition(":")[2])
        server.close()
        with pytest.raises(TokenstreamError):
            client.generate("x")
        again = ScriptedTriton(answer("b"), port=port)
        client.wait_until_ready(WAIT)
        assert client.generate("x").text == "b"
        again.close()


def test_the_total_clock_ends_the_asking(serve):
    server, client = serve(fails(10**6, FULL), timeout=Timeout(total=0.5))
    with pytest.raises((Overloaded, TotalTimeout)):
        client.generate("x", retries=10**6)
    assert len(server.requests) > 1


# --- the course by itself, with pauses that are only written down ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The course's clock, which stands still; `now` in seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(course, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Walk:
    """A course over endpoints a, b, c."""

    def __init__(self, retries: int, deadline: float | None = None, budget: Budget | None = None) -> None:
        self.pauses: list[float] = []
        self.endpoints = Endpoints(["a", "b", "c"])
        self.course = Course(
            self.endpoints, budget or Budget(), retries=retries, deadline=deadline, pause=self._write_down
        )

    async def _write_down(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def fails(self, error: TokenstreamError) -> str:
        """The endpoint that follows on one that raised `error`."""
        run(self.course.after(error))
        return self.course.endpoint


def full(retry_after: float | None = None) -> Overloaded:
    return Overloaded("full", code="UNAVAILABLE", retry_after=retry_after)


def test_a_course_goes_round_with_a_pause_between_rounds():
    walk = Walk(retries=1)
    assert [walk.course.endpoint, *(walk.fails(full()) for _ in range(5))] == list("abcabc")
    assert len(walk.pauses) == 1
    with pytest.raises(Overloaded):
        walk.fails(full())


def test_a_pause_is_as_long_as_the_server_asks_and_not_waited_for_without_bound():
    walk = Walk(retries=3)
    assert [walk.fails(full(2.0)) for _ in range(3)] == list("bca")
    assert 2.0 <= walk.pauses[0] <= 2.2
    walk.fails(full(3600.0))
    walk.fails(full(3600.0))
    with pytest.raises(Overloaded):
        walk.fails(full(3600.0))


def test_a_pause_where_nobody_listens_is_as_long_as_that_has_lasted_up_to_a_bound(clock):
    endpoints, pauses = Endpoints(["a"]), []
    for clock.now in (0.0, 0.25, 2.0, 60.0):
        pauses.append(endpoints.unreachable("a"))
    assert pauses == [0.0, 0.25, 2.0, 2.5]
    endpoints.reached("a")
    assert endpoints.unreachable("a") == 0.0


def test_a_round_waits_for_whoever_is_sooner_there_again():
    walk = Walk(retries=1)
    for error in (ConnectionFailed("refused"), ConnectionFailed("refused"), full(0.01)):
        walk.fails(error)
    assert walk.pauses[0] < 0.3


def test_a_pause_that_would_outlast_the_total_clock_is_not_begun():
    walk = Walk(retries=3, deadline=time.monotonic() + 1.0)
    walk.fails(full(2.0))
    walk.fails(full(2.0))
    with pytest.raises(Overloaded):
        walk.fails(full(2.0))
    assert walk.pauses == []


def test_pauses_are_spread_and_their_limit_doubles_up_to_a_bound():
    for earlier, most in ((0, 0.2), (1, 0.4), (3, 1.6), (20, 5.0)):
        drawn = [pause_before(earlier) for _ in range(200)]
        assert all(0 <= pause <= most for pause in drawn)
        assert max(drawn) > most / 2 > min(drawn)


def test_a_round_of_hopeless_endpoints_is_the_last():
    walk = Walk(retries=3)
    late = FirstTokenTimeout("late")
    assert [walk.fails(late), walk.fails(late)] == list("bc")
    with pytest.raises(FirstTokenTimeout):
        walk.fails(late)


def test_a_budget_paces_the_rounds_of_all_requests_and_fills_with_time(clock):
    budget = Budget()
    assert [budget.withdraw() for _ in range(100)] == [0.0] * 100
    waits = [budget.withdraw() for _ in range(20)]
    assert waits == pytest.approx([number / 20 for number in range(1, 21)])
    assert max(budget.withdraw() for _ in range(1000)) == pytest.approx(5.0)
    clock.now += 5.0
    assert budget.withdraw() == pytest.approx(0.05)
    clock.now += 3600.0
    assert [budget.withdraw() for _ in range(100)] == [0.0] * 100


def test_no_budget_takes_a_round_from_a_request(clock):
    budget = Budget()
    walks = [Walk(retries=10, budget=budget) for _ in range(50)]
    for _ in range(10):
        for walk in walks:
            assert [walk.fails(full()) for _ in range(3)] == list("bca")
    assert {len(walk.pauses) for walk in walks} == {10}
    assert max(max(walk.pauses) for walk in walks) > 5.0


def test_an_error_that_comes_of_the_budget_names_it(clock):
    budget = Budget()
    for _ in range(150):
        budget.withdraw()
    walk = Walk(retries=1, deadline=clock.now + 1.0, budget=budget)
    walk.fails(full())
    walk.fails(full())
    with pytest.raises(Overloaded, match=r"full; .* retry budget"):
        walk.fails(full())


def test_a_new_client_does_not_sit_out_the_pauses_of_another_that_failed(nobody):
    with Client(nobody, retries=0) as other, Client(nobody, retries=0) as client:
        with pytest.raises(ConnectionFailed):
            other.generate("x")
        server = ScriptedTriton(answer("a"), port=int(nobody.rpartition(":")[2]))
        assert client.generate("x").text == "a"
        server.close()


def test_a_client_that_has_failed_for_long_reaches_a_server_that_is_back_by_its_default_retries(nobody):
    with Client(nobody) as client:
        for _ in range(3):
            with pytest.raises(ConnectionFailed):
                client.generate("x")
        server = ScriptedTriton(answer("a"), port=int(nobody.rpartition(":")[2]))
        assert client.generate("x").text == "a"
        server.close()


def test_endpoints_keep_their_order_and_who_failed_longest_ago_comes_first_of_those_set_aside():
    endpoints = Endpoints(["a", "b", "c"])
    endpoints.set_aside("b", 30.0)
    endpoints.set_aside("a", 60.0)
    assert endpoints.in_order() == ["c", "b", "a"]
    endpoints.praise("a")
    assert endpoints.in_order() == ["a", "c", "b"]
    endpoints.set_aside("b", 0.0)
    assert endpoints.in_order() == ["a", "b", "c"]


def test_an_answer_that_is_not_understood_is_not_asked_for_again():
    assert judge(from_server("a step failed [code=INTERNAL]")) is Verdict.AGAIN
    assert judge(from_server("it failed [code=INTERNAL fault=request]")) is Verdict.STOP
    assert judge(InternalError("the server sent a malformed response")) is Verdict.STOP


def test_endpoints_are_read_from_a_list_or_from_a_text_with_commas(monkeypatch):
    assert read_urls("a:1, b:2,a:1") == ["a:1", "b:2"]
    assert read_urls(["a:1", "b:2"]) == ["a:1", "b:2"]
    monkeypatch.setenv("TOKENSTREAM_URL", "a:1,b:2")
    assert Client().url == "a:1,b:2"
    for wrong in ("a:1,,b:2", ["http://a:1"], []):
        with pytest.raises(ValueError, match="url"):
            read_urls(wrong)


@pytest.mark.parametrize(
    ("option", "value"), [("retries", -1), ("max_resumes", -1), ("resume", "always"), ("traceparent", "x")]
)
def test_an_option_that_means_nothing_is_refused_by_name(serve, option, value: Any):
    server, client = serve(answer("a"))
    with pytest.raises(ValueError, match=option):
        client.stream("x", **{option: value})
    assert server.requests == []
