"""Ranks of other nodes that have ended, nodes that are off or cut off: the job ends.

The ranks of one machine pretend to be on several nodes, except in TestHosts.
"""

import contextlib
import gc
import os
import re
import socket
import struct
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import left_alone
import patience
import pytest
import torch.distributed as dist
from group_data import rank, size
from slurm_lab import Hosts, start_hosts

from mpiddp.diagnosis import travelling
from mpiddp.mpi import nodes
from mpiddp.rendezvous import world
from mpiddp.watch.ring_connections import Place

if TYPE_CHECKING:
    from mpiddp.watch.heartbeat import Heartbeat

# The node of each rank.
APART = [0, 1, 2, 3]
TOGETHER = [0, 1, 1, 1]

# What a rank waits for in these tests.
WAITS = "all_reduce(SUM) of float32 (3,) of group '0'"


marked = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@contextlib.contextmanager
def watching(place: list[int], roll_call: Any) -> Iterator["Heartbeat"]:
    """Let the ranks watch each other as if these were their nodes. Collective."""
    from mpiddp.watch.heartbeat import Heartbeat

    own, number = place[: size()], rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "ranks_of_node", lambda comm: comm.Split(own[number], number))
        heartbeat = Heartbeat(world.communicator(), roll_call, roll_call.answers)
    yield heartbeat
    dist.barrier()
    heartbeat.close()


def pretended(answers: bool = False, threaded: bool = True) -> Any:
    """Return a roll call in which the others answer or not."""
    return SimpleNamespace(threaded=threaded, answers=lambda rank: answers, lost=set())


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wait for all ranks, and return why the job would have been ended."""
    from mpiddp.watch import heartbeat

    reasons: list[str] = []
    monkeypatch.setattr(heartbeat, "waits_for", lambda ranks, at_least=0: WAITS)
    monkeypatch.setattr(heartbeat, "end_job", lambda rank, loss, waits: reasons.append(loss))
    for name in ("_GRACE", "_FOR_ITS_NODE", "_STAGGER"):
        monkeypatch.setattr(heartbeat, name, 0.0)
    return reasons


def peers(heartbeat: "Heartbeat") -> list[int]:
    return [link.place.rank for link in heartbeat._links]


def sockets() -> int:
    """Return how many are open. Another thread may write a file of the flight recorder."""
    gc.collect()  # other tests have left some
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return found


def look_until_noticed(heartbeat: "Heartbeat", reasons: list[str]) -> None:
    deadline = time.monotonic() + 30
    while not reasons:
        heartbeat.look()
        assert time.monotonic() < deadline
        time.sleep(0.01)


class TestRing:
    pytestmark = marked

    @pytest.mark.essential
    def test_each_node_watches_those_beside_it(self) -> None:
        before = sockets()
        for _ in range(3):
            with watching(APART, pretended()) as heartbeat:
                beside = [(rank() + 1) % size(), (rank() - 1) % size()]
                assert peers(heartbeat) == (beside if size() > 2 else beside[:1])
                assert heartbeat.problem == ""
            with watching(TOGETHER, pretended()) as heartbeat:
                assert peers(heartbeat) == ([[1], [0], [], []][rank()])
            assert sockets() == before

    def test_who_leaves_properly_is_not_missed(self, ended: list[str]) -> None:
        with watching(APART, pretended()) as heartbeat:
            if rank() == 0:
                heartbeat.close()
            dist.barrier()
            heartbeat.look()
            heartbeat.look()
        assert ended == []

    def test_a_closed_connection_is_the_end_of_a_rank(self, ended: list[str]) -> None:
        with watching(APART, pretended(answers=True)) as heartbeat:
            if rank() == 0:
                heartbeat._forget()  # as the system closes it
            elif rank() in (1, size() - 1):
                look_until_noticed(heartbeat, ended)
                who = rf"rank 0 \(process \d+ on {re.escape(socket.gethostname())}\) has ended: "
                assert re.match(rf"{who}its connection has closed$", ended[0])
        assert bool(ended) == (rank() in (1, size() - 1))

    @pytest.mark.parametrize("answers", [False, True])
    def test_another_fault_is_a_suspicion(self, ended: list[str], answers: bool) -> None:
        with watching(TOGETHER, pretended(answers)) as heartbeat:
            if rank() == 0:
                for link in heartbeat._links:
                    reset = struct.pack("ii", 1, 0)
                    link.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                heartbeat._forget()
            dist.barrier()
            if rank() == 1 and not answers:
                look_until_noticed(heartbeat, ended)
                assert re.search(
                    r" \(rank 0; rank 0 is process \d+\) has not answered for 60 s: ", ended[0]
                )
            heartbeat.look()
        assert bool(ended) == (rank() == 1 and not answers)

    def test_a_rank_that_lives_answers(self) -> None:
        """By MPI, whatever has become of its connections."""
        assert world._world is not None
        roll_call = world._world.roll_call
        answers: list[bool] = []

        def ask() -> None:
            answers.append(roll_call.answers((rank() + 1) % size()))

        roll_call.watches.append(ask)
        deadline = time.monotonic() + 20
        while not answers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        roll_call.watches.remove(ask)
        dist.barrier()
        assert all(answers)

    def test_others_go_on_where_they_can(self, ended: list[str]) -> None:
        calls: list[int] = []
        with watching(APART, pretended()) as heartbeat:
            heartbeat.on_loss = lambda: calls.append(1)
            if rank() == 0:
                heartbeat._forget()
            dist.barrier()
            missed = rank() in (1, size() - 1)
            deadline = time.monotonic() + 30
            while missed and not calls and time.monotonic() < deadline:
                heartbeat.look()
                time.sleep(0.01)
            heartbeat.look()
        assert len(calls) == missed
        assert ended == []

    def test_a_forked_process_leaves_the_connections_alone(self, ended: list[str]) -> None:
        with watching(APART, pretended()) as heartbeat:
            open_ones = [link.connection.fileno() for link in heartbeat._links]
            child = os.fork()
            if child == 0:
                still_open = [one for one in open_ones if os.path.exists(f"/proc/self/fd/{one}")]
                heartbeat.close()
                os._exit(bool(still_open))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            dist.barrier()
            heartbeat.look()
            assert len(heartbeat._links) == len(open_ones)
        assert ended == []

    def test_none_where_one_cannot_connect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from mpiddp.watch import ring_connections

        monkeypatch.setattr(ring_connections, "_PATIENCE", patience.enough(0.5))
        before = sockets()
        if rank() == 0:
            monkeypatch.setattr(ring_connections, "listen", refuse)
        with watching(APART, pretended()) as heartbeat:
            assert peers(heartbeat) == []
            assert heartbeat.problem == "rank 0 cannot listen: [Errno 13] not here"
        monkeypatch.undo()
        monkeypatch.setattr(ring_connections, "_PATIENCE", patience.enough(0.5))
        if rank() == 0:
            monkeypatch.setattr(ring_connections, "_dial", refuse)
        with watching(APART, pretended()) as heartbeat:
            assert peers(heartbeat) == []
            assert heartbeat.problem.startswith("rank 0 (")
            assert heartbeat.problem.endswith("): [Errno 13] not here")
            assert " has no connection with rank 1 (" in heartbeat.problem
        assert sockets() == before

    def test_none_where_it_is_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with watching(APART, pretended(threaded=False)) as heartbeat:
            assert peers(heartbeat) == []
        assert heartbeat.problem == "there is no thread"
        monkeypatch.setenv("MPIDDP_HEARTBEAT_SECONDS", "none")
        with watching(APART, pretended()) as heartbeat:
            assert peers(heartbeat) == []
        assert heartbeat.problem == "MPIDDP_HEARTBEAT_SECONDS is none"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ranks whose ends this one says at once."""
    from mpiddp.watch import node_ends

    ranks: list[int] = []

    def words(place: Any) -> str:
        ranks.append(place.rank)
        return f"this is a test, and rank {place.rank} lives"

    monkeypatch.setattr(node_ends, "closed_words", words)
    return ranks


class TestSaidAtOnce:
    """See Note [Whose end was first]."""

    pytestmark = marked

    def wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def knows(self, heartbeat: "Heartbeat") -> bool:
        return not heartbeat._links or (heartbeat._ends is not None and heartbeat._ends._told)

    @pytest.mark.essential
    def test_a_rank_that_ends(self, said: list[int]) -> None:
        with watching(APART, pretended()) as heartbeat:
            if rank() == 0:
                heartbeat._forget()  # as the system closes it
            self.wait(lambda: self.knows(heartbeat))
            everyone = world.communicator().allgather(list(said))
        told = [each for ranks in everyone for each in ranks]
        assert set(told) == {0}
        assert everyone[size() - 1] == [0] or everyone[1] == [0]

    def test_nobody_is_named_when_the_bell_has_sounded(self, said: list[int]) -> None:
        with watching(APART, pretended()) as heartbeat:
            if rank() == 0:
                heartbeat.say_nothing()
            self.wait(lambda: self.knows(heartbeat))
            dist.barrier()
            if rank() == 0:
                heartbeat._forget()
            elif rank() in (1, size() - 1):
                self.wait(lambda: any(link.closed for link in heartbeat._links))
        assert said == []

    @pytest.mark.mpi(min_size=3)
    def test_every_rank_of_a_node_sounds_it(self, said: list[int]) -> None:
        with watching(TOGETHER, pretended()) as heartbeat:
            if rank() == 2:
                assert heartbeat._links == []
                heartbeat.say_nothing()
            self.wait(lambda: self.knows(heartbeat))
        assert said == []


@pytest.mark.once
def test_the_first_end_is_named(said: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one beside it that ended because of it, though this rank speaks first of that."""
    from mpiddp.watch import node_ends

    monkeypatch.setattr(node_ends, "_PATIENCE_BEHIND", 60.0)
    (ahead, end_ahead), (behind, end_behind) = socket.socketpair(), socket.socketpair()
    reading, writing = os.pipe()
    bell: Any = SimpleNamespace(reading=reading, sound=lambda what: os.write(writing, what))
    links = [
        node_ends.Link(ahead, Place(5, 1, "node5", "", [5], 1, b""), 0.0, 0),
        node_ends.Link(behind, Place(3, 1, "node3", "", [3], 1, b""), 0.0, 1),
    ]
    watch = node_ends.NodeEnds(links, bell)
    for end, link in ((end_behind, links[1]), (end_ahead, links[0])):
        assert said == []
        end.close()
        deadline = time.monotonic() + 30
        while not link.lost:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    while not said:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    watch.stop()
    assert said == [3]
    for descriptor in (reading, writing):
        os.close(descriptor)
    for connection in (ahead, behind):
        connection.close()


def refuse(*args: object) -> socket.socket:
    raise PermissionError(13, "not here")


@pytest.mark.once
def test_strangers_are_turned_away() -> None:
    from mpiddp.system.entrance import Entrance, Proof
    from mpiddp.system.listening import listen
    from mpiddp.watch.ring_connections import _accept

    with contextlib.ExitStack() as opened:
        entrance = opened.enter_context(contextlib.closing(Entrance(listen("127.0.0.1"), b"z")))
        for said in (b"", b"x", b"y" * 100):
            stranger = socket.create_connection(("127.0.0.1", entrance.port))
            opened.enter_context(stranger).sendall(said)
        other = opened.enter_context(socket.create_connection(("127.0.0.1", entrance.port)))
        # The other end comes in while this one waits to be let in there.
        connection = _accept(entrance, time.monotonic() + 10, Proof(other, b"z"))
        opened.enter_context(connection)
        assert connection.getpeername() == other.getsockname()
        with pytest.raises(TimeoutError):
            _accept(entrance, time.monotonic() + 0.1, None)


@pytest.mark.once
def test_the_doctor_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_HEARTBEAT_SECONDS", raising=False)
    assert travelling.describe_heartbeat(1, "") == []
    (found,) = travelling.describe_heartbeat(2, "why")
    assert (found.grade, found.text) == ("warning", "heartbeat between the nodes: none: why")
    (found,) = travelling.describe_heartbeat(2, "")
    assert found.grade == "ok"
    assert "silent for 60 s (MPIDDP_H" in found.text


@pytest.mark.thorough
@pytest.mark.timeout(100)
def test_ends_the_job(tmp_path: Path) -> None:
    """Though a process that the dead rank has forked lives on."""
    done, seconds = left_alone.run(
        tmp_path,
        """
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            time.sleep(30)
            os._exit(0)
        if rank == 1:
            die(by_signal=True)
        dist.all_reduce(torch.ones(3))
        print("still here")
        """,
        before="""
        import mpi4py.MPI
        from mpiddp.mpi import nodes

        def no_descriptor(process, flags=0):
            raise OSError("as some sandboxes say")

        os.pidfd_open = no_descriptor
        nodes.ranks_of_node = lambda comm: comm.Split(comm.Get_rank())
        """,
    )
    assert "still here" not in done.stdout
    assert seconds < patience.enough(left_alone.AT_ONCE)
    said = (
        r"mpiddp: rank [02]: rank 1 \(process \d+ on \S+\) has ended: its connection has closed, "
        rf"and this rank waits for its part of {re.escape(WAITS)}\. The job ends"
    )
    assert re.search(said, done.stderr)


BEGINNING = """\
import os, sys, time
import torch
import torch.distributed as dist
import mpiddp

mpiddp.init_process_group()
rank = dist.get_rank()
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        time.sleep(4)  # it outlives a rank that is killed; SLURM here does not find it
    os._exit(0)
dist.barrier()
open(f"{__file__}.{rank}", "w").close()

def work(seconds):
    began, total = time.monotonic(), torch.zeros(3)
    while True:
        total.fill_(1)
        dist.all_reduce(total)
        assert total[0] == 3
        going_on = torch.tensor([time.monotonic() - began < seconds])
        dist.broadcast(going_on, src=0)
        if not going_on.item():
            break
        time.sleep(0.02)
"""


@pytest.fixture(scope="class")
def hosts() -> Iterator[Hosts]:
    with start_hosts(3) as made:
        yield made


@pytest.mark.slow  # three hosts, and SLURM's own waiting
class TestHosts:
    """One rank a node, and srun leaves the others alone when one dies.

    With Open MPI they are not, where SLURM's plugin for PMIx is the first to know.
    """

    pytestmark = pytest.mark.timeout(300)

    @pytest.fixture(autouse=True)
    def _as_before(self, hosts: Hosts) -> Iterator[None]:
        yield
        hosts.on_head("scancel", "--user=root")
        hosts.try_cluster("clear")
        hosts.cluster("up", "3", "--slurm", timeout=60)
        deadline = time.monotonic() + 100
        while hosts.on_head("sinfo", "-h", "-p", "batch", "-t", "idle", "-o", "%D") != "3":
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def start(
        self, hosts: Hosts, source: str, seconds: str
    ) -> "tuple[Future[CompletedProcess[str]], Path]":
        """Start a job, and return when its ranks work."""
        script = hosts.folder / f"heartbeat-{time.monotonic_ns()}.py"
        script.write_text(BEGINNING + textwrap.dedent(source))
        hosts.env["MPIDDP_HEARTBEAT_SECONDS"] = seconds
        pool = ThreadPoolExecutor(1)
        options = ["--kill-on-bad-exit=0"]
        job = pool.submit(hosts.srun, str(script), ranks=3, nodes=3, options=options, timeout=100)
        pool.shutdown(wait=False)
        deadline = time.monotonic() + 60
        while len(list(script.parent.glob(f"{script.name}.*"))) < 3:
            assert time.monotonic() < deadline
            assert not job.done()
            time.sleep(0.1)
        return job, script

    def seconds_until_ended(self, hosts: Hosts, script: Path, names: Sequence[str]) -> float:
        began = time.monotonic()
        for name in names:
            while hosts.try_cluster("run", name, "pgrep", "-f", str(script)).stdout:
                assert time.monotonic() - began < 60
                time.sleep(0.1)
        return time.monotonic() - began

    @pytest.mark.parametrize("fault", ["dead", "off", "cut off"])
    def test_ends_the_job(self, hosts: Hosts, fault: str) -> None:
        job, script = self.start(hosts, "work(100)", seconds="3")
        time.sleep(1)
        if fault == "dead":
            process = hosts.cluster("run", "node3", "pgrep", "-f", str(script)).split()[-2]
            hosts.cluster("run", "node3", "kill", "-KILL", process)
        elif fault == "off":
            hosts.cluster("off", "node3")
        else:
            hosts.cluster("link", "node3", "down")
        seconds = self.seconds_until_ended(hosts, script, ["node1", "node2"])
        if fault != "off":
            # Alone, Open MPI's MPI_Abort waits for SLURM until mpiddp ends the process.
            assert seconds + self.seconds_until_ended(hosts, script, ["node3"]) < 30
        done = job.result()
        assert done.returncode != 0
        if hosts.mpi == "Open MPI" and fault != "cut off":
            assert seconds < 20
            return
        assert seconds < (8 if fault != "cut off" else 14)
        # A node that is switched off in the lab still closes its connections; and MPICH itself may
        # fail on one of the others.
        who = r"rank \d \(process \d+ on node\d\) has ended: its connection has closed"
        if fault == "cut off":
            silent = "has not answered for 3 s: it is off, or cut off"
            who = rf"node3 \(rank 2; rank 2 is process \d+\) {silent}"
        what = r"(all_reduce|broadcast)\(\S+( \d)?\) of \S+ \(\d,\) of group '0'"
        said = (
            rf"mpiddp: rank [01]: {who}, and this rank waits for its part of {what}\. The job ends"
        )
        assert re.search(said, done.stderr)

    def test_messages_to_a_rank_that_has_ended(self, hosts: Hosts) -> None:
        """See Note [MPI that does not return]: MPICH may hold up all threads that call it."""
        source = """
            work(1)
            if dist.get_rank() == 2:
                os._exit(0)
            time.sleep(6)  # the process that it has forked keeps its connections for 4 s
            dist.send(torch.ones(3), 2)
            work(1)
            """
        job, script = self.start(hosts, source, seconds="3")
        assert self.seconds_until_ended(hosts, script, ["node1", "node2", "node3"]) < 30
        done = job.result()
        assert done.returncode != 0
        if hosts.mpi != "Open MPI":
            ended = r"rank 2 \(process \d+ on node3\) has ended: its connection has closed"
            waits = r"and this rank waits for its part of (send|all_reduce)"
            assert re.search(rf"mpiddp: rank [01]: {ended}, {waits}", done.stderr)

    def test_mpi_does_not_return(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody watches the other nodes here; so the job ends at the time limit."""
        if hosts.mpi == "Open MPI":
            pytest.skip("Open MPI sends nothing to a rank that has ended, and SLURM ends the job")
        source = """
            from datetime import timedelta
            mpiddp.destroy_process_group()
            mpiddp.init_process_group(timeout=timedelta(seconds=5))
            work(1)
            if dist.get_rank() == 2:
                os._exit(0)
            time.sleep(6)
            dist.send(torch.ones(3), 2)
            """
        monkeypatch.setitem(hosts.env, "MPIDDP_STALL_SECONDS", "3")
        job, script = self.start(hosts, source, seconds="none")
        assert self.seconds_until_ended(hosts, script, ["node1", "node2", "node3"]) < 50
        done = job.result()
        assert done.returncode != 0
        waits = r"mpiddp: rank [01]: MPI has not returned for \d+ s in or beside send of float32 "
        place = rf"\(this rank is now at {re.escape(str(script))}:\d+ in <module>\)"
        assert re.search(rf"{waits}.*{place}\. It goes on waiting", done.stderr)
        assert re.search(rf"{waits}.*The time limit of 5 s is over, and the job ends", done.stderr)

    def test_a_cable_may_be_cut_for_a_while(self, hosts: Hosts) -> None:
        """And ranks may end one after the other, with and without destroy_process_group."""
        job, _ = self.start(
            hosts,
            """
            work(6)
            mpiddp.destroy_process_group()
            mpiddp.init_process_group()
            work(0.1)
            time.sleep(2 * dist.get_rank())
            print("done", flush=True)
            """,
            seconds="20",
        )
        time.sleep(1)
        hosts.cluster("link", "node3", "down")
        time.sleep(2)
        hosts.cluster("link", "node3", "up")
        done = job.result()
        assert done.returncode == 0
        assert done.stdout.count("done") == 3
        assert "mpiddp:" not in done.stderr
