from mpiddp.process_group.direct_way cimport DirectWay


cdef class DirectCalls(DirectWay):
    cdef object exchanged(
        self, object output, object input_, object output_splits, object input_splits, object opts)
