cdef enum:
    # Steps that ranks compare at a time.
    WINDOW = 25


cdef class StepTimes:
    cdef readonly long long steps       # that have ended
    cdef double last_end
    # In seconds: of the last step, and of all. `between`: from the last reduction to the forward.
    cdef double step, between, forward, backward, communication, exposed
    cdef double all_steps, all_between, all_forward, all_backward, all_communication, all_exposed
    cdef readonly long long idle_steps  # those in which this rank had no gradients
    cdef long long told_steps           # that had ended, with inputs, when `numbers` was called,
    cdef double[6] told                 # and the seconds of all of them, in the order of `totals`
    cdef float[WINDOW] waits
    cdef int place                      # in the page that other processes see; -1: none

    cdef void note(
        self, int source, double forward_began, double backward_began, double communication_began,
        double backward_ended, double ended
    ) noexcept
