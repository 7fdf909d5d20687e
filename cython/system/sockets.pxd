# Sleep until a message comes, see Note [Woken by sockets].

# Whether there is a socket to listen to. Looks for new ones now and then.
cdef int has_sockets() noexcept nogil
# Sleep until something happens on a socket, another thread calls `interrupt`, or `seconds`, less
# than one, are over. Return whether it was a socket.
cdef int listen(double seconds) noexcept nogil
# End the `listen` of another thread, or the next one.
cdef void interrupt() noexcept nogil
