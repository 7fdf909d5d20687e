"""The numbers of a report, and what it advises, for traces that were made up."""

import gzip
import json

import numpy as np
import pytest
from made_traces import MadeJob, always

from mpiddp.report import advice, bucket_times, parts, reductions, summary, trace_files
from mpiddp.report.__main__ import main
from mpiddp.tracing import merging

pytestmark = pytest.mark.once


def summarize(folder, **job):
    return summary.summarize(trace_files.read(MadeJob(**job).write(folder)))


def said(made):
    """Return all advice, as one text."""
    return "\n".join(f"{f.text} -> {f.remedy}" for f in advice.findings(made))


def slower(rank, since, milliseconds, other=20):
    return lambda r, step: other + (milliseconds if r == rank and step >= since else 0)


@pytest.mark.smoke
class TestParts:
    def test_even_ranks(self, tmp_path):
        """The last of 4 buckets travels for 1 ms when backward is over; the others are hidden."""
        made = summarize(tmp_path, ranks=4, steps=10)
        expected = {
            parts.DATA: 1,
            parts.FORWARD: 10,
            parts.BACKWARD: 20,
            parts.EXPOSED: 1,
            parts.WAITING: 0,
            parts.OPTIMIZER: 2,
        }
        for part in parts.NAMES:
            assert made.mean[part] == pytest.approx(expected.get(part, 0), abs=0.01), part
        assert made.step == pytest.approx(34, abs=0.01)
        assert (made.hidden, made.exposed) == pytest.approx((3, 1), abs=0.01)
        assert made.hidden_share == pytest.approx(0.75, abs=0.01)

    def test_every_moment_has_a_part(self, tmp_path):
        odd = lambda r, step: 3 + (r * 7 + step * 5) % 11  # noqa: E731
        made = summarize(tmp_path, ranks=5, forward=odd, data=odd, backward=odd, loss=odd, travel=2)
        np.testing.assert_allclose(
            made.steps.times.sum(axis=2), made.steps.durations, rtol=1e-4, atol=0.01
        )

    def test_waiting_is_until_the_last_rank_has_launched(self, tmp_path):
        made = summarize(tmp_path, ranks=3, backward=lambda r, step: 20 + 5 * r)
        waits = made.by_rank[:, parts.WAITING]
        assert waits == pytest.approx([10, 5, 0], abs=0.01)
        assert made.by_rank[:, parts.EXPOSED] == pytest.approx([1, 1, 1], abs=0.01)
        late = made.steps.reductions.late.mean(axis=1) / 1e3
        assert late == pytest.approx([0, 5, 10], abs=0.01)

    def test_less_than_the_clocks_error_is_no_wait(self, tmp_path):
        backward = lambda r, step: 20 + 0.3 * r  # noqa: E731
        made = summarize(tmp_path / "a", ranks=2, backward=backward, clock_error=0.2)
        assert made.mean[parts.WAITING] == 0
        made = summarize(tmp_path / "b", ranks=2, backward=backward, clock_error=0.1)
        assert made.by_rank[:, parts.WAITING] == pytest.approx([0.3, 0], abs=0.01)

    def test_loss_checkpoints_and_collectives(self, tmp_path):
        def more(rank, step):
            yield "checkpoint", "user_annotation", 10, 2
            yield "all_reduce(SUM)", "collective", 12, 3
            # Behind the forward: it costs nothing.
            yield "broadcast", "collective", 1, 3

        made = summarize(tmp_path, loss=always(6), more=more)
        assert made.mean[parts.CHECKPOINT] == pytest.approx(2, abs=0.01)
        assert made.mean[parts.COLLECTIVES] == pytest.approx(3, abs=0.01)
        assert made.mean[parts.LOSS] == pytest.approx(1, abs=0.01)
        assert "all_reduce(SUM)" in said(made)

    def test_what_only_some_ranks_have_is_left_out(self, tmp_path):
        MadeJob(ranks=2, steps=6).write(tmp_path, only=[0])
        MadeJob(ranks=2, steps=9).write(tmp_path, only=[1])
        made = summary.summarize(trace_files.read(tmp_path))
        assert list(made.steps.numbers) == [2, 3, 4, 5, 6]
        assert "3 steps are left out" in said(made)


class TestBuckets:
    def causes(self, made):
        sums = sum(times.exposed for times in made.buckets.values())
        return {name: sums[why] / 1e3 / 4 / 19 for why, name in bucket_times.CAUSES.items()}

    def test_filled_late(self, tmp_path):
        made = summarize(tmp_path, travel=4)
        found = self.causes(made)
        assert found["filled late"] == pytest.approx(4, abs=0.01)
        assert found["wire full"] == pytest.approx(0, abs=0.01)
        assert "bucket 3 (4.0 MiB), 4.0 ms" in said(made)

    def test_wire_full(self, tmp_path):
        """From 5 ms of backward on 4 buckets of 8 ms: the end is at 37, 17 late, 8 of it alone."""
        made = summarize(tmp_path, travel=8)
        assert self.causes(made) == pytest.approx(
            {"filled late": 8, "wire full": 9, "engine late": 0}, abs=0.01
        )
        text = said(made)
        assert "53 % of it since buckets queue: 16.0 MiB take 32.0 ms" in text
        assert "mpiddp.compression.bf16" in text

    @pytest.mark.parametrize("travel", [4, 8], ids=["filled late", "wire full"])
    def test_no_16_bits_for_who_sends_them(self, tmp_path, travel):
        text = said(summarize(tmp_path, travel=travel, dtype="bfloat16"))
        assert "sent as bfloat16 already" in text
        assert "compression" not in text

    @pytest.mark.parametrize("chunks", [True, False])
    def test_engine_late(self, tmp_path, chunks):
        """The first bucket is sent 17 ms after its launch, which is 2 ms after backward."""
        made = summarize(tmp_path, idle=17, chunks=chunks)
        found = self.causes(made)
        assert found["filled late"] == pytest.approx(1, abs=0.01)
        assert found["engine late"] == pytest.approx(5, abs=0.01)
        assert "ready travelled late or slowly" in said(made)

    def test_the_first_chunk_alone_tells(self):
        """No bucket travelled after backward; 4 ms of the 5 that one took it was not sent."""
        row = lambda value: np.array([[value]], "f4")  # noqa: E731
        one = reductions.Travels(
            0, np.array([[0]], "i4"), row(1), row(-2), row(-2), row(3), late=row(4)
        )
        (times,) = bucket_times.sum_up([one]).values()
        assert times.exposed == pytest.approx([0, 0, 3])

    @pytest.mark.parametrize(
        ("first", "late", "causes"),
        [(1, 0, [4, 7, 0]), (1, 4, [4, 3, 4]), (8, 0, [4, 0, 7])],
        ids=["full wire", "first chunk late", "slower while backward runs"],
    )
    def test_the_engine_is_late_only_if_buckets_are_slower_then(self, first, late, causes):
        """Of 3 equal buckets the second takes 16 ms until after backward, and the third 5."""
        row = lambda *values: np.array([values], "f4")  # noqa: E731
        turn, reduced = row(-20, -10, 6), row(first - 20, 6, 11)
        numbers, launched = np.array([[0, 1, 2]], "i4"), row(-20, -10, -1)
        one = reductions.Travels(
            0, numbers, row(1, 1, 1), launched, turn, reduced, late=row(0, late, 0)
        )
        found = sum(times.exposed for times in bucket_times.sum_up([one]).values())
        assert found == pytest.approx(causes)

    def test_one_bucket(self, tmp_path):
        made = summarize(tmp_path, buckets=1, travel=5, bucket_bytes=8 << 20)
        assert "all gradients are in one bucket (8.0 MiB)" in said(made)
        assert "bucket_cap_mb=2," not in said(made)
        assert "bucket_cap_mb=2" in said(made)

    def test_causes_add_up(self, tmp_path):
        made = summarize(tmp_path, travel=7, idle=3, backward=lambda r, step: 15 + (r * step) % 7)
        assert sum(self.causes(made).values()) == pytest.approx(made.exposed, abs=0.01)

    def test_messages_on_one_node(self, tmp_path):
        made = summarize(tmp_path / "a", to_a_node=4, travel=5, chunks=True)
        assert "though all ranks are on one node" in said(made)
        made = summarize(tmp_path / "b", to_a_node=2, travel=5, chunks=True)
        assert "though all ranks are on one node" not in said(made)

    def test_many_small_ones(self, tmp_path):
        made = summarize(tmp_path, buckets=16, bucket_bytes=32 << 10, travel=2)
        assert "there are 16 buckets of 32 KiB in the mean" in said(made)


class TestSlowRanks:
    def test_a_rank_that_becomes_slow(self, tmp_path):
        made = summarize(tmp_path, ranks=4, steps=30, backward=slower(2, 11, 12))
        (slow,) = made.slow
        assert (slow.rank, slow.host, slow.first, slow.to_the_end) == (2, "n1", 11, True)
        assert slow.cost / 1e3 == pytest.approx(12, abs=0.01)
        assert slow.longer == (parts.BACKWARD, pytest.approx(12000, abs=10))
        assert (
            "all wait for rank 2 on n1 since step 11: it was the last in 20 of 20 "
            "steps, and the others "
            "waited 12.0 ms"
        ) in said(made)

    def test_chance_does_not_begin_a_run_early(self, tmp_path):
        late = lambda r, step: 20 + (r == 2) * (3 * (step >= 7) + 20 * (step >= 11))  # noqa: E731
        (slow,) = summarize(tmp_path, ranks=4, steps=30, backward=late).slow
        assert (slow.first, slow.slowest) == (11, 20)

    @pytest.mark.parametrize(
        ("part", "name", "cure"),
        [
            ("data", "data loading", "num_workers"),
            ("forward", "forward", "mpiddp doctor"),
            ("loss", "between forward and backward", "less often"),
        ],
    )
    def test_what_takes_it_longer(self, tmp_path, part, name, cure):
        made = summarize(tmp_path, ranks=4, steps=15, **{part: slower(1, 1, 15, other=1)})
        text = said(made)
        assert f"Longer than with the others was {name}: by 15.0 ms" in text
        assert cure in text

    def test_a_slow_node(self, tmp_path):
        backward = lambda r, step: 20 + (8 if r // 2 == 1 and r % 2 == step % 2 else 0)  # noqa: E731
        made = summarize(tmp_path, ranks=8, steps=40, backward=backward)
        (slow,) = made.slow
        assert (slow.rank, slow.node, slow.host) == (None, 1, "n1")
        assert "all wait for node 1 (n1) since step 2" in said(made)

    def test_nobody_in_particular(self, tmp_path):
        backward = lambda r, step: 20 + (10 if r == (step * 7 + step // 3) % 5 else 0)  # noqa: E731
        made = summarize(tmp_path, ranks=5, to_a_node=5, steps=40, backward=backward)
        assert made.slow == []
        assert "for a slowest one that is another one in turn: 5 ranks" in said(made)

    def test_two_ranks_in_turn_are_chance(self, tmp_path):
        backward = lambda r, step: 20 + (4 if r == (step // 3) % 2 else 0)  # noqa: E731
        assert summarize(tmp_path, ranks=2, backward=backward).slow == []


class TestOtherAdvice:
    def test_nothing_to_say(self, tmp_path):
        text = said(summarize(tmp_path))
        assert text.startswith("nothing but computing takes much of a step")

    def test_data(self, tmp_path):
        made = summarize(tmp_path, data=always(15))
        assert "loading data takes 15.0 ms, 31 % of a step" in said(made)

    def test_optimizer(self, tmp_path):
        made = summarize(tmp_path / "a", optimizer=always(12))
        assert "the optimizer (SGD.step) takes 12.0 ms" in said(made)
        assert "saves 6.0 ms at most" in said(made)
        for name, job in {
            "b": {"to_a_node": 1},
            "c": {"facts": {"shared_parameters": True}},
        }.items():
            made = summarize(tmp_path / name, optimizer=always(12), **job)
            assert "the optimizer" not in said(made), job

    def test_threads(self, tmp_path):
        facts = {"threads": 4, "cores": [0, 1, 2, 3], "sockets": 1}
        made = summarize(tmp_path, facts=facts)
        assert "the 2 ranks on n0 have 8 threads (4 a rank) on 4 cores" in said(made)
        assert "OMP_NUM_THREADS=2" in said(made)

    def test_sockets(self, tmp_path):
        facts = {"threads": 8, "cores": list(range(8)), "sockets": 2}
        made = summarize(tmp_path, facts=facts, to_a_node=1)
        assert "has 8 threads on 2 sockets" in said(made)
        assert "--bind-to socket, OMP_NUM_THREADS=4" in said(made)

    def test_a_step_that_stands_out(self, tmp_path):
        forward = lambda r, step: 10 + (50 if (r, step) == (3, 7) else 0)  # noqa: E731
        (odd,) = summarize(tmp_path, forward=forward).odd
        assert (odd.number, odd.rank, odd.part) == (7, 3, parts.FORWARD)
        assert odd.more / 1e3 == pytest.approx(50, abs=0.01)


class TestFiles:
    def test_no_trace(self, tmp_path, capsys):
        assert main([str(tmp_path)]) == 1
        assert "holds no trace" in capsys.readouterr().err

    def test_one_step_is_too_few(self, tmp_path, capsys):
        MadeJob(steps=1).write(tmp_path)
        assert main([str(tmp_path)]) == 1
        assert "two backward passes of one module at least" in capsys.readouterr().err

    def test_a_broken_file_and_a_missing_one(self, tmp_path, capsys):
        MadeJob(ranks=4).write(tmp_path, only=[0, 1, 2])
        path = merging.path_of(tmp_path, 1)
        path.write_bytes(path.read_bytes()[:500])
        assert main([str(tmp_path)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "The file of rank 1 is left out" in text
        assert "1 of 4 ranks have left no file" in text
        assert text.startswith("2 ranks on 2 nodes, 19 steps (2 to 20), 34.0 ms each")

    def test_clocks_that_were_compared_once(self, tmp_path):
        clock = {"error_us": 1.0, "aligned_at_end": False}
        assert "compared at the beginning only" in said(summarize(tmp_path, facts={"clock": clock}))

    def test_json(self, tmp_path, capsys):
        MadeJob(ranks=3, steps=30, backward=slower(2, 11, 12)).write(tmp_path)
        assert main([str(tmp_path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["parts_ms"]["forward"] == pytest.approx(10, abs=0.01)
        assert told["slow"][0]["rank"] == 2
        assert told["slow"][0]["first_step"] == 11
        assert [bucket["bucket"] for bucket in told["buckets"]] == [0, 1, 2, 3]
        assert told["findings"][0]["grade"] == "warning"
        assert not (tmp_path / "report.html").exists()

    def test_a_name_that_is_no_rank(self, tmp_path):
        MadeJob().write(tmp_path)
        with gzip.open(tmp_path / "ranks" / "notes.json.gz", "wt") as file:
            file.write("nothing")
        assert len(trace_files.read(tmp_path).ranks) == 4
