"""How long the parts of a module's steps take: forward, backward, and what communication adds.

A step ends when its gradients are reduced, and the next one begins there. What comes before its
forward is `between`: the optimizer, the next batch, logging, and passes that are not reduced.
`exposed` is the time from the end of a rank's own backward to the end of the reduction: it waits
for nothing else then.
"""

from libc.math cimport NAN

from mpiddp.flight_recorder.page cimport leave_place, show_comparison, show_step, take_place
from mpiddp.system.posix cimport now


# For Python.
COMPARED = WINDOW


cdef double hidden(double communication, double exposed) noexcept:
    """Return which part of the time of communication backward has hidden."""
    return max(1 - exposed / communication, 0.0) if communication else 0.0


cdef class StepTimes:
    """The times of one module's steps, on this rank. Not collective."""

    def __cinit__(self):
        self.place = -1

    def __dealloc__(self):
        if self.place >= 0:
            leave_place(self.place)

    cdef void note(
        self, int source, double forward_began, double backward_began, double communication_began,
        double backward_ended, double ended
    ) noexcept:
        """Note a step that has ended.

        A rank without inputs, in join(), has no backward of its own in the step.
        `source`: of the module's buckets in the flight recorder.
        """
        cdef bint had_inputs = backward_ended > self.last_end
        cdef double began = self.last_end if self.last_end else forward_began
        self.last_end = ended
        self.waits[self.steps % WINDOW] = <float>(ended - backward_ended) if had_inputs else NAN
        self.steps += 1
        if had_inputs:
            # Of two forwards before one backward, the second began after the first.
            self.step = ended - began
            self.between = max(forward_began - began, 0.0)
            self.forward = max(backward_began - forward_began, 0.0)
            self.backward = max(backward_ended - backward_began, 0.0)
            self.communication = max(ended - communication_began, 0.0)
            self.exposed = ended - backward_ended
            self.all_steps += self.step
            self.all_between += self.between
            self.all_forward += self.forward
            self.all_backward += self.backward
            self.all_communication += self.communication
            self.all_exposed += self.exposed
        else:
            self.idle_steps += 1
        if self.steps == 1:
            self.place = take_place()
        if self.place >= 0:
            show_step(self.place, source, ended, self.step, self.all_exposed)

    def show_comparison(self, last, double waited, double mean_step, world_ranks):
        """Show other processes of the node for whom the ranks have waited. Not collective.

        Args:
            last: for each step that was compared, which rank of the group was late; -1: none. An
                array of int64.
            waited: seconds that this rank has waited for the last one, in the mean.
            mean_step: seconds of a step of this rank, in the mean.
            world_ranks: the world rank of each of the group's ranks.
        """
        cdef const long long[::1] late = last
        cdef Py_ssize_t index, other, count, most = 0
        cdef long long slowest = -1
        if self.place < 0:
            return
        for index in range(len(late)):
            count = 0
            for other in range(len(late)):
                count += late[other] == late[index]
            if late[index] >= 0 and (
                count > most or (count == most and late[index] < slowest)
            ):
                slowest, most = late[index], count
        if slowest >= 0:
            slowest = world_ranks[slowest]
        show_comparison(self.place, slowest, most, len(late), waited, mean_step)

    def last(self):
        """Return the seconds of the last step. Not collective.

        Returns:
            The whole step, between, forward, backward, communication, and what of that is exposed.
        """
        return (
            self.step, self.between, self.forward, self.backward, self.communication, self.exposed)

    def totals(self):
        """Return the same of all steps together. Not collective."""
        return (
            self.all_steps, self.all_between, self.all_forward, self.all_backward,
            self.all_communication, self.all_exposed)

    def numbers(self):
        """Return the milliseconds of the last step, and the means since the last call, by name.

        Not collective. For `mpiddp.metrics`, which says what the names mean.
        """
        cdef double[6] since
        cdef long long had_inputs = self.steps - self.idle_steps
        cdef long long steps = had_inputs - self.told_steps
        cdef double per = 1e3 / steps if steps else 0.0
        cdef int index
        since[:] = [
            self.all_steps, self.all_between, self.all_forward, self.all_backward,
            self.all_communication, self.all_exposed]
        for index in range(6):
            since[index], self.told[index] = since[index] - self.told[index], since[index]
        self.told_steps = had_inputs
        return {
            "step": self.steps,
            "steps": steps,
            "step_ms": self.step * 1e3,
            "between_ms": self.between * 1e3,
            "forward_ms": self.forward * 1e3,
            "backward_ms": self.backward * 1e3,
            "exposed_ms": self.exposed * 1e3,
            "hidden_share": hidden(self.communication, self.exposed),
            "mean_step_ms": since[0] * per,
            "mean_between_ms": since[1] * per,
            "mean_forward_ms": since[2] * per,
            "mean_backward_ms": since[3] * per,
            "mean_exposed_ms": since[5] * per,
            "mean_hidden_share": hidden(since[4], since[5]),
        }

    def last_waits(self):
        """Return the exposed seconds of the last COMPARED steps, in a list. Not collective.

        They are in order if the number of steps can be divided by COMPARED. NaN: a step in which
        this rank had no inputs.
        """
        return [self.waits[index] for index in range(WINDOW)]


def seconds_per_show(long long count):
    """Return what it costs to show a step to other processes, measured over `count`.

    Not collective. For tests and benchmarks. 0 if all places are taken.
    """
    cdef int place = take_place()
    cdef long long _
    cdef double began = now()
    if place < 0:
        return 0.0
    for _ in range(count):
        show_step(place, 0, began, 0.01, 0.001)
    took = (now() - began) / count
    leave_place(place)
    return took
