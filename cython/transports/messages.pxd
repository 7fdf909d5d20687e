from mpiddp.engine.interface cimport Transport
from mpiddp.transports.wire cimport Wire, WireState


cdef struct MessageState:
    Transport transport             # first: the engine's pointer is a pointer to this
    WireState *wire


cdef class MessageTransport:
    cdef MessageState state
    cdef readonly Wire wire
