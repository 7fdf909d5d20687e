from mpiddp.engine.interface cimport ChannelState, EngineState

# Take one step with what is in flight and what is queued; return how many chunks moved. The caller
# holds `progress_lock`.
cdef int move_chunks(EngineState *state, ChannelState *channel) noexcept nogil
