from mpiddp.engine.interface cimport ChannelState, EngineState, Job

# How often a waiting thread checks for signals, in seconds.
cdef double SIGNAL_CHECK

cdef int job_is_done(Job *job) noexcept nogil
# Put a job into a channel; its memory belongs to the engine until it is done.
cdef void enqueue(EngineState *state, ChannelState *channel, Job *job) noexcept nogil
# Take one step on every channel. The caller holds `progress_lock`.
cdef int step_channels(EngineState *state, int helping) noexcept nogil
cdef void *engine_thread(void *argument) noexcept nogil
# Whether sockets tell when messages come.
cdef int hears(EngineState *state) noexcept nogil
# End a nap of the engine's thread. The caller holds `channels_lock`.
cdef void wake_thread(EngineState *state) noexcept nogil
# Make progress until `job` is done, its channel failed, or `until` passed. `served`: the engine's
# thread moves the messages meanwhile.
cdef int drive(
    EngineState *state, ChannelState *channel, Job *job, double until, int served
) noexcept nogil
