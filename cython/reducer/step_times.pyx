"""How long the parts of a module's steps take: forward, backward, and what communication adds.

A step ends when its gradients are reduced, and the next one begins there. What comes before its
forward is `between`: the optimizer, the next batch, logging, and passes that are not reduced.
`exposed` is the time from the end of a rank's own backward to the end of the reduction: it waits
for nothing else then.
"""

from libc.math cimport NAN


# For Python.
COMPARED = WINDOW


cdef class StepTimes:
    """The times of one module's steps, on this rank. Not collective."""

    cdef void note(
        self, double forward_began, double backward_began, double communication_began,
        double backward_ended, double ended
    ) noexcept:
        """Note a step that has ended.

        A rank without inputs, in join(), has no backward of its own in the step.
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

    def last_waits(self):
        """Return the exposed seconds of the last COMPARED steps, in a list. Not collective.

        They are in order if the number of steps can be divided by COMPARED. NaN: a step in which
        this rank had no inputs.
        """
        return [self.waits[index] for index in range(WINDOW)]
