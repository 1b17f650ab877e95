"""One sandbox on every node of a cluster: nothing is lost, nothing is answered twice, and what the cluster breaks is never an outcome."""

import asyncio
import concurrent.futures
import dataclasses
import random
import signal
import sys
import threading
import time
import types

import pytest
from cluster_stand_in import LIMIT_S, ClusterStandIn, printed

from marl_llm.games.programs import program_runner
from marl_llm.tools import ClusterSandbox, FailureKind, InfrastructureError, Limits, SandboxError, Submission, judge_calls
from marl_llm.tools.results import Failure
from marl_llm.tools.sandbox import Execution, Level, NodeLost, cluster, default_sandbox, on_ray, using
from marl_llm.tools.waiting import Clock


def codes(count):
    return [f"print({number})" for number in range(count)]


def failed(kind):
    return Execution(None, Failure(kind, "the node said so"), 0.0)


def test_jobs_of_a_lost_node_are_run_elsewhere_and_each_of_64_is_answered_once():
    nodes, draw, notes = ClusterStandIn({"a": 3, "b": 4}), random.Random(0), []
    with ClusterSandbox(nodes, note=notes.append) as sandbox:
        futures = [sandbox.submit(Submission(code, environment=n % 3)) for n, code in enumerate(codes(64))]
        nodes.until(lambda: len(nodes.workers[1].open()) == 4)
        lost = [request.code for request, _ in nodes.workers[1].open()]
        for number in range(64):
            if number == 0:
                nodes.kill("b")
            nodes.until(nodes.open)
            draw.choice(nodes.open()).answer()
        answers = [future.result(LIMIT_S) for future in futures]
        assert [answer.stdout for answer in answers] == codes(64)
        assert [request.code for request, _ in nodes.workers[1].asked] == lost
        assert {request.code for request, _ in nodes.workers[0].asked} == set(codes(64))
        assert len(nodes.workers[0].asked) == 64
        assert nodes.most == {"a": 3, "b": 4}
        assert [answer.attempts for answer in answers] == [2 if code in lost else 1 for code in codes(64)]
        figures = sandbox.metrics()
        assert (figures["sandbox/submitted"], figures["sandbox/done"], figures["sandbox/failed"]) == (64, 64, 0)
        assert (figures["sandbox/retried"], figures["sandbox/nodes_lost"], figures["sandbox/nodes"]) == (4, 1, 1)
        assert any("lost node b: its machine was taken away; 4 programs" in note for note in notes)


def test_an_answer_that_comes_from_a_node_that_was_given_up_is_dropped():
    nodes = ClusterStandIn({"a": 2})
    with ClusterSandbox(nodes) as sandbox:
        first, second = (sandbox.submit(Submission(code)) for code in codes(2))
        nodes.until(lambda: len(nodes.workers[0].open()) == 2)
        (_, lost), (_, late) = nodes.workers[0].open()
        lost.set_exception(NodeLost("the actor died"))
        nodes.until(lambda: len(nodes.workers) == 2 and len(nodes.workers[1].open()) == 2)  # started anew on the same node
        assert nodes.workers[0].stopped
        late.set_result(printed("late"))
        nodes.workers[1].answer()
        nodes.workers[1].answer()
        assert [first.result(LIMIT_S).stdout, second.result(LIMIT_S).stdout] == codes(2)
        assert sandbox.metrics()["sandbox/done"] == 2


def test_a_job_is_given_to_three_nodes_and_then_fails():
    nodes = ClusterStandIn(dict.fromkeys("abcd", 1))
    with ClusterSandbox(nodes) as sandbox:
        job = sandbox.submit(Submission("print(1)"))
        for _ in range(3):
            nodes.until(nodes.open)
            nodes.kill(nodes.open()[0].node)
        done = job.result(LIMIT_S)
        assert done.failure.kind is FailureKind.UNAVAILABLE
        assert done.failure.message == "3 nodes gave no outcome; the last: node c: its machine was taken away"
        assert done.attempts == 3
        assert sum(len(worker.asked) for worker in nodes.workers) == 3
        assert list(nodes.there) == ["d"]


def test_without_a_node_jobs_are_failures_with_a_reason_and_a_node_that_comes_later_is_used():
    nodes = ClusterStandIn({"a": 1})
    with using(ClusterSandbox(nodes)) as sandbox:
        waiting = [sandbox.submit(Submission(code)) for code in codes(3)]
        nodes.until(nodes.open)
        nodes.kill("a")
        for future in waiting:
            done = future.result(LIMIT_S)
            assert done.failure.kind is FailureKind.UNAVAILABLE
            assert "its machine was taken away" in done.failure.message
            with pytest.raises(InfrastructureError):
                done.outcome()
        found = judge_calls("def f(): return 1", "f", [((), 1)])
        assert found.failure.message.startswith("no node of the cluster is left (node a: ")
        with pytest.raises(InfrastructureError):  # neither a pass nor a miss
            bool(found)
        assert not asyncio.run(program_runner()("print(1)", "")).ok
        nodes.there["b"] = 1
        job = sandbox.submit(Submission("print(7)"))
        nodes.until(nodes.open)
        nodes.workers[-1].answer()
        assert job.result(LIMIT_S).stdout == "print(7)"


def test_what_one_nodes_sandbox_breaks_is_tried_on_another_and_a_deadline_is_not():
    nodes = ClusterStandIn({"a": 1, "b": 1})
    with ClusterSandbox(nodes) as sandbox:

        def play(*kinds):
            """A job whose nodes answer so, one after the other, and then with what it printed; the nodes that it came to."""
            job, came = sandbox.submit(Submission("print(1)")), []
            for kind in kinds:
                nodes.until(nodes.open)
                came.append(nodes.open()[0])
                came[-1].answer(failed(kind) if kind else None)
                nodes.until(lambda: job.done() or any(worker is not came[-1] for worker in nodes.open()))
            return job.result(LIMIT_S), came

        done, (first, second) = play(FailureKind.CRASH, None)
        assert done.stdout == "print(1)"
        assert first is not second
        assert not first.stopped
        assert play(FailureKind.CRASH, FailureKind.CRASH)[0].failure.kind is FailureKind.CRASH  # there is no third node
        assert play(FailureKind.DEADLINE)[0].failure.kind is FailureKind.DEADLINE
        done, (first, second) = play(FailureKind.UNAVAILABLE, None)
        assert done.stdout == "print(1)"
        assert first.stopped  # a sandbox that is closed would answer every job so, and at once
        assert not second.stopped


def test_nodes_that_say_nothing_are_given_up(monkeypatch):
    monkeypatch.setattr(cluster, "SILENCE_S", 0.05)
    nodes = ClusterStandIn({"a": 1})
    with ClusterSandbox(nodes) as sandbox:
        done = sandbox.submit(Submission("print(1)", limits=Limits(timeout_s=0.05))).result(LIMIT_S)
        assert done.failure.message == "3 nodes gave no outcome; the last: node a: it did not answer in time"
        assert [worker.stopped for worker in nodes.workers[:3]] == [True] * 3


def test_a_deadline_counts_the_queue_and_the_callers_clock_stands_still_there():
    nodes = ClusterStandIn({"a": 1})
    with ClusterSandbox(nodes) as sandbox:
        clock = Clock()
        first = sandbox.submit(Submission("print(1)", deadline_s=100.0))
        nodes.until(nodes.open)
        assert 0 < nodes.workers[0].open()[0][0].deadline_s <= 100.0
        with clock.use():
            second = sandbox.submit(Submission("print(2)", deadline_s=0.05))
            third = sandbox.submit(Submission("print(3)"))
        done = second.result(LIMIT_S)
        assert done.failure == Failure(FailureKind.DEADLINE, "the deadline passed in the queue")
        before = clock.elapsed()
        assert before == clock.elapsed()
        third.cancel()
        nodes.workers[0].answer()
        assert first.result(LIMIT_S).queued_s <= first.result(LIMIT_S).seconds
        last = sandbox.submit(Submission("print(4)"))
        nodes.until(nodes.open)
        assert nodes.workers[0].open()[0][0].code == "print(4)"  # what was cancelled, and what was late, is not run
        assert clock.elapsed() >= before
        nodes.workers[0].answer()
        assert last.result(LIMIT_S).ok


def test_a_node_is_asked_for_all_that_a_submission_says_with_its_limits_and_the_time_that_is_left():
    own, usual = Limits(timeout_s=7.0, memory_mb=99), Limits(timeout_s=3.0)
    about = dict(stdin="in", profile="numpy", seed=5, calls=b"{}")
    nodes = ClusterStandIn({"a": 9})
    with ClusterSandbox(nodes, usual) as sandbox:
        given = [Submission("one", **about, environment="e", limits=own, deadline_s=50.0), Submission("two", **about)]
        futures = [sandbox.submit(request) for request in given]
        nodes.until(lambda: len(nodes.workers[0].asked) == 2)
        first, second = (request for request, _ in nodes.workers[0].asked)
        assert 0 < first.deadline_s < 50.0
        assert dataclasses.replace(first, deadline_s=None) == Submission("one", **about, limits=own)
        assert second == Submission("two", **about, limits=usual)
        for _ in futures:
            nodes.workers[0].answer()
        assert all(future.result(LIMIT_S).ok for future in futures)


def test_the_node_with_the_largest_share_of_room_comes_next_and_environments_take_turns():
    nodes = ClusterStandIn({"a": 2, "b": 4})
    with ClusterSandbox(nodes) as sandbox:
        for number, code in enumerate(codes(3)):
            sandbox.submit(Submission(code))
            nodes.until(lambda count=number + 1: sum(len(worker.asked) for worker in nodes.workers) == count)
        assert [len(worker.asked) for worker in nodes.workers] == [1, 2]  # a half is free of each by now
    nodes = ClusterStandIn({"a": 1})
    with ClusterSandbox(nodes) as sandbox:
        futures = [sandbox.submit(Submission(code, environment=code[0])) for code in ("large0", "large1", "large2", "small")]
        for _ in futures:
            nodes.until(nodes.open)
            nodes.workers[0].answer()
        assert [future.result(LIMIT_S).ok for future in futures] == [True] * 4
        assert [request.code for request, _ in nodes.workers[0].asked] == ["large0", "large1", "small", "large2"]


def test_a_clusters_level_is_its_weakest_nodes():
    class Mixed(ClusterStandIn):
        def start(self, node, slots):
            worker = super().start(node, slots)
            worker.started = concurrent.futures.Future()
            worker.started.set_result(int(Level.LANDLOCK if node == "b" else Level.NAMESPACES))
            return worker

    notes = []
    with ClusterSandbox(Mixed({"a": 1, "b": 2}), note=notes.append) as sandbox:
        assert sandbox.level is Level.LANDLOCK
        assert sandbox.metrics()["sandbox/level"] == Level.LANDLOCK
    assert notes == ["tools: node a runs 1 programs at a time", "tools: node b runs 2 programs at a time"]


def test_attempts_and_queues_of_all_nodes_are_added_and_a_retry_waits_for_another_node():
    nodes = ClusterStandIn({"a": 1, "b": 1})
    with ClusterSandbox(nodes) as sandbox:
        first, second = (sandbox.submit(Submission(code)) for code in codes(2))
        nodes.until(lambda: len(nodes.open()) == 2)
        nodes.workers[0].answer(dataclasses.replace(failed(FailureKind.CRASH), attempts=3))
        nodes.until(lambda: sandbox.metrics()["sandbox/retried"] == 1)
        assert sandbox.metrics()["sandbox/waiting"] == 1
        assert not nodes.workers[0].open()  # it has been there
        nodes.workers[1].answer()
        nodes.until(nodes.workers[1].open)
        nodes.workers[1].answer(dataclasses.replace(printed("print(0)"), attempts=2, queued_s=50.0))
        done = first.result(LIMIT_S)
        assert (done.stdout, done.attempts, second.result(LIMIT_S).attempts) == ("print(0)", 5, 1)
        assert 50.0 <= done.queued_s < 50.0 + LIMIT_S
        assert 0 <= second.result().queued_s <= second.result().seconds


def test_a_node_that_did_not_start_is_left_alone_for_a_while_and_one_that_never_does_is_given_up(monkeypatch):
    nodes = ClusterStandIn({"a": 1, "b": 1}, dead=("b",))
    with ClusterSandbox(nodes) as sandbox:
        running = sandbox.submit(Submission("print(0)"))
        nodes.until(nodes.open)
        nodes.kill("a")
        assert running.result(LIMIT_S).failure.kind is FailureKind.UNAVAILABLE
        assert not sandbox.submit(Submission("print(1)")).result(LIMIT_S).ok
        assert [worker.node for worker in nodes.workers] == ["a", "b"]

    class Slow(ClusterStandIn):
        def start(self, node, slots):
            worker = super().start(node, slots)
            if node == "c":
                worker.started = concurrent.futures.Future()
            return worker

    nodes, notes = Slow({"a": 1}), []
    with ClusterSandbox(nodes, note=notes.append) as sandbox:
        monkeypatch.setattr(cluster, "START_LIMIT_S", 0.02)
        running = sandbox.submit(Submission("print(0)"))
        nodes.until(nodes.open)
        nodes.there["c"] = 1
        sandbox._next_look = 0.0
        waiting = sandbox.submit(Submission("print(1)"))
        nodes.until(lambda: any("lost node c: its sandbox did not start within 0.02 s" in note for note in notes))
        assert nodes.workers[1].stopped
        for future in (running, waiting):
            nodes.until(nodes.workers[0].open)
            nodes.workers[0].answer()
            assert future.result(LIMIT_S).ok


def test_a_job_may_run_for_its_own_limit_and_one_that_runs_past_its_deadline_was_in_no_queue(monkeypatch):
    monkeypatch.setattr(cluster, "SILENCE_S", 0.0)
    nodes = ClusterStandIn({"a": 2})
    with ClusterSandbox(nodes, Limits(timeout_s=LIMIT_S)) as sandbox:
        slow, late = sandbox.submit(Submission("print(0)")), sandbox.submit(Submission("print(1)", deadline_s=0.05))
        assert late.result(LIMIT_S).failure == Failure(FailureKind.DEADLINE, "the deadline passed")
        nodes.workers[0].answer()
        assert slow.result(LIMIT_S).ok
        assert sandbox.metrics()["sandbox/nodes_lost"] == 0


def test_whoever_asks_a_closed_cluster_does_not_stand_still():
    sandbox = ClusterSandbox(ClusterStandIn({"a": 1}))
    sandbox.close()
    clock = Clock()
    with clock.use(), pytest.raises(SandboxError, match="this sandbox is closed"):
        sandbox.submit(Submission("print(1)"))
    before = clock.elapsed()
    time.sleep(0.002)
    assert clock.elapsed() > before


def test_closing_fails_what_has_no_outcome_and_lets_go_of_the_cluster():
    nodes = ClusterStandIn({"a": 1})
    sandbox = ClusterSandbox(nodes)
    running, queued = (sandbox.submit(Submission(code)) for code in codes(2))
    nodes.until(nodes.open)
    sandbox.close()
    sandbox.close()
    for future in (running, queued):
        assert future.result(LIMIT_S).failure == Failure(FailureKind.UNAVAILABLE, "the sandbox was closed")
    nodes.workers[0].answer()  # too late
    assert running.result().failure
    assert nodes.workers[0].stopped
    assert nodes.closed
    with pytest.raises(SandboxError, match="this sandbox is closed"):
        sandbox.submit(Submission("print(1)"))


def test_a_fault_of_the_thread_leaves_nobody_waiting(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda told: seen.append(told.exc_type))
    nodes = ClusterStandIn({"a": 1})
    sandbox = ClusterSandbox(nodes)
    nodes.workers[0].submit = None
    assert sandbox.submit(Submission("print(1)")).result(LIMIT_S).failure.kind is FailureKind.UNAVAILABLE
    sandbox.close()
    assert seen == [TypeError]


def test_a_cluster_that_cannot_fence_programs_in_is_refused():
    for stand_in, why in (
        (ClusterStandIn({}), r"no node of the cluster can run programs: no node has a free CPU for tools"),
        (ClusterStandIn({"a": 1, "b": 1}, weak=("b",)), r"node b: this machine does not give NAMESPACES"),
        (ClusterStandIn({"a": 1}, dead=("a",)), r"no node of the cluster can run programs: node a: no actor starts"),
    ):
        with pytest.raises(SandboxError, match=why):
            ClusterSandbox(stand_in)
        assert stand_in.closed
    nodes = ClusterStandIn({"a": 1, "b": 1}, dead=("b",))
    with ClusterSandbox(nodes) as sandbox:
        assert sandbox.metrics()["sandbox/nodes"] == 1
        with pytest.raises(KeyError, match="no profile"):
            sandbox.submit(Submission("", profile="none"))


# ---- the few calls of Ray


class RayStandIn(types.ModuleType):
    """The part of `ray` that is used: actors live in this process, in an event loop of their node's own thread."""

    def __init__(self, monkeypatch, nodes, problem=None):
        super().__init__("ray")
        self.listed = [{"NodeID": name, "Alive": alive, "Resources": resources} for name, alive, resources in nodes]
        self.problem, self.options, self.actors, self.inits, self.killed, self.left = problem, [], [], [], [], False
        strategies = types.ModuleType("ray.util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = types.SimpleNamespace
        for name, module in {"ray": self, "ray.util": types.ModuleType("ray.util"), strategies.__name__: strategies}.items():
            monkeypatch.setitem(sys.modules, name, module)

    def is_initialized(self):
        return False

    def init(self, **settings):
        self.inits.append(settings)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        if self.problem:
            raise ConnectionError(self.problem)

    def nodes(self):
        return self.listed

    def remote(self, **options):
        self.options.append(options)

        def made(kind):
            return types.SimpleNamespace(remote=lambda *given: self.actors.append(ActorStandIn(kind(*given))) or self.actors[-1])

        return made

    def kill(self, actor):
        self.killed.append(actor)

    def shutdown(self):
        self.left = True


class ActorStandIn:
    """Methods that answer with references, as Ray's do. `dead`: every one of them fails."""

    def __init__(self, thing):
        self.thing, self.dead = thing, False

    def __getattr__(self, name):
        def called(*given):
            if self.dead:
                raise RuntimeError("the actor\nis dead")
            with on_ray.concurrent.futures.ThreadPoolExecutor(1) as pool:
                done = pool.submit(asyncio.run, getattr(self.thing, name)(*given))
            return types.SimpleNamespace(future=lambda: done)

        return types.SimpleNamespace(remote=called)


def test_programs_run_through_the_calls_of_ray_and_a_dead_actor_loses_nothing(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    nodes = [("a", True, {"CPU": 2.0}), ("b", True, {"CPU": 5.0}), ("c", False, {"CPU": 9.0}), ("d", True, {"TPU": 4.0})]
    ray = RayStandIn(monkeypatch, nodes)
    with using(ClusterSandbox(on_ray.RayCluster(share=2), Limits(timeout_s=20.0))) as sandbox:
        assert signal.getsignal(signal.SIGTERM) is before  # a run that is told to stop has a handler of its own
        assert ray.inits[0]["address"] == "auto"
        assert [options["num_cpus"] for options in ray.options] == [1, 2]
        assert [options["scheduling_strategy"].node_id for options in ray.options] == ["a", "b"]
        assert default_sandbox() is sandbox
        found = judge_calls("def f(x): return 2 * x", "f", [((3,), 6), ((4,), 9)], 20.0)
        assert [case.state for case in found.outcome().cases] == ["passed", "wrong"]
        ray.actors[1].dead = True
        ray.listed.pop(1)
        found = sandbox.run_batch([Submission(code) for code in codes(4)])
        assert [one.stdout for one in found] == [f"{number}\n" for number in range(4)]
        assert sandbox.metrics()["sandbox/nodes_lost"] == 1
    assert ray.left
    assert ray.actors[0] in ray.killed
    assert default_sandbox() is not sandbox


def test_a_nodes_sandbox_that_is_closed_or_cannot_start_says_so_as_a_value(monkeypatch):
    node = on_ray.NodeSandbox(1, 3, Limits())
    level, problem = asyncio.run(node.start())
    assert (level, problem) == (3, "")
    asyncio.run(node.stop())
    assert asyncio.run(node.run(Submission("print(1)"))).failure.kind is FailureKind.UNAVAILABLE
    monkeypatch.setattr(on_ray, "Sandbox", lambda **_: (_ for _ in ()).throw(SandboxError("no namespaces here")))
    assert asyncio.run(on_ray.NodeSandbox(1, 3, Limits()).start()) == (0, "no namespaces here")


def test_no_ray_and_no_cluster_are_told_with_what_to_do(monkeypatch):
    RayStandIn(monkeypatch, [], problem="nobody\nlistens")
    with pytest.raises(SandboxError, match=r"no Ray cluster at '10\.0\.0\.1:6379' \(ConnectionError: nobody listens\): start one with"):
        on_ray.RayCluster("10.0.0.1:6379")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SandboxError, match=r"pip install 'marl_llm\[ray\]'"):
        on_ray.RayCluster()
