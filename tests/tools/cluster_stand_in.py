"""A cluster in this process, for `ClusterSandbox`: nodes that are given jobs, answer when a test says so, and die."""

import concurrent.futures
import threading
import time

from marl_llm.tools.sandbox import Execution, Level, NodeLost, Program, SandboxError

LIMIT_S = 60.0  # for what must happen; nothing waits for it to pass


def printed(text: str) -> Execution:
    """A program that ran and printed `text`."""
    return Execution(Program(text.encode(), b"", 0), None, 0.0, level=Level.NAMESPACES)


class NodeStandIn:
    """The sandbox of a node. `asked`: (request, future of its answer), in the order of arrival."""

    def __init__(self, cluster: "ClusterStandIn", node: str):
        self.cluster, self.node, self.asked, self.stopped = cluster, node, [], False
        self.started: concurrent.futures.Future = concurrent.futures.Future()

    def ready(self):
        return self.started

    def submit(self, request):
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self.cluster.changed:
            self.asked.append((request, future))
            self.cluster.most[self.node] = max(self.cluster.most.get(self.node, 0), len(self.open()))
            self.cluster.changed.notify_all()
        if self.node not in self.cluster.there:
            future.set_exception(NodeLost("it is dead"))
        return future

    def open(self):
        """What has no answer yet."""
        return [(request, future) for request, future in self.asked if not future.done()]

    def answer(self, execution=None):
        """The oldest job that has no answer is answered; by default it prints its own code."""
        request, future = self.open()[0]
        future.set_result(execution or printed(request.code))

    def stop(self):
        self.stopped = True


class ClusterStandIn:
    """Nodes: name -> executions at a time. `weak`: those without a fence. `dead`: those that are listed, and do not start."""

    def __init__(self, nodes: dict[str, int], weak: tuple[str, ...] = (), dead: tuple[str, ...] = ()):
        self.there, self.weak, self.dead = dict(nodes), weak, dead
        self.workers: list[NodeStandIn] = []
        self.most: dict[str, int] = {}  # node -> most jobs that it had at a time
        self.changed = threading.Condition()
        self.closed = False

    def nodes(self):
        return dict(self.there)

    def start(self, node, slots):
        worker = NodeStandIn(self, node)
        with self.changed:
            self.workers.append(worker)
            self.changed.notify_all()
        if node in self.weak:
            worker.started.set_exception(SandboxError("this machine does not give NAMESPACES"))
        elif node in self.dead:
            worker.started.set_exception(NodeLost("no actor starts"))
        else:
            worker.started.set_result(int(Level.NAMESPACES))
        return worker

    def close(self):
        self.closed = True

    def until(self, condition):
        """Waits until the condition holds."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, "it did not come about"
            with self.changed:
                self.changed.wait(0.01)

    def open(self):
        """Workers with a job that has no answer."""
        return [worker for worker in self.workers if worker.open()]

    def kill(self, node):
        """The node is gone: all that was asked of it fails."""
        del self.there[node]
        for worker in self.workers:
            if worker.node == node:
                for _, future in worker.open():
                    future.set_exception(NodeLost("its machine was taken away"))
