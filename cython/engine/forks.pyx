"""Processes that a rank has forked: what they must not do, and how they end.

Note [Forked children]
~~~~~~~~~~~~~~~~~~~~~~
A child of fork() has a copy of its parent's MPI state: connections, shared memory, requests. It
must not call MPI: a call would act in the parent's name, or wait for threads and locks that only
the parent has. So in a child
* whatever leads to MPI raises an error that says so (`check`), before it takes a lock: a thread of
  the parent may have held it at the moment of the fork;
* the engine takes no step;
* gradients in shared memory are the child's own, see Note [Memory in forked children];
* the interpreter ends without MPI_Finalize. mpi4py calls it from Py_AtExit, where a child would
  wait for ever, and the parent's job with it. Py_AtExit functions run in reverse order, so ours
  runs before mpi4py's and ends the process, when all of Python is done.

Note [Exit status of a child]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A Py_AtExit function is not told the exit status. After an uncaught exception, which
`sys.last_value` shows, it is 1. After SystemExit it is the attribute `code`, which the interpreter
reads when no frame is left; nobody else reads it then. In children, and only there, we watch for
that. Children of multiprocessing end by os._exit and never get here.
"""

import atexit
import os
import sys

from cpython.object cimport PyObject

from mpiddp.mpi.errors cimport check_errno
from mpiddp.system.posix cimport pthread_atfork


cdef extern from "Python.h":
    PyObject *PyEval_GetFrame()
    int Py_AtExit(void (*)() noexcept nogil)
    PyObject *PyExc_SystemExit
    ctypedef object (*GetAttribute "getattrofunc")(object, object)

cdef extern from *:
    """
    #include <signal.h>
    #include <stdio.h>
    #include <unistd.h>

    #define mpiddp_get_attribute(type) (((PyTypeObject *)(type))->tp_getattro)
    #define mpiddp_set_attribute(type, function) \
        (((PyTypeObject *)(type))->tp_getattro = (getattrofunc)(function))

    /* Before Python 3.12 sys.exit raises no object that has a `code`. This one does. */
    static PyObject *mpiddp_exit(PyObject *module, PyObject *const *args, Py_ssize_t count)
    {
        PyObject *error = PyObject_CallFunctionObjArgs(
            PyExc_SystemExit, count > 0 ? args[0] : NULL, NULL);
        if (error != NULL) {
            PyErr_SetObject(PyExc_SystemExit, error);
            Py_DECREF(error);
        }
        return NULL;
    }

    static void mpiddp_let_exit_make_object(PyObject *exit)
    {
        PyMethodDef *definition;
        if (PY_VERSION_HEX >= 0x030C0000 || !PyCFunction_Check(exit))
            return;
        definition = ((PyCFunctionObject *)exit)->m_ml;
        if (definition->ml_flags == METH_FASTCALL)
            definition->ml_meth = (PyCFunction)(void (*)(void))mpiddp_exit;
    }

    /* End as the interpreter does after an uncaught KeyboardInterrupt. */
    static inline void mpiddp_interrupt(void) { signal(SIGINT, SIG_DFL); raise(SIGINT); }
    static inline void mpiddp_end(int status) { fflush(NULL); _exit(status); }
    """
    GetAttribute get_attribute "mpiddp_get_attribute"(object)
    void set_attribute "mpiddp_set_attribute"(object, GetAttribute)
    void let_exit_make_object "mpiddp_let_exit_make_object"(object)
    void interrupt "mpiddp_interrupt"() noexcept nogil
    void end "mpiddp_end"(int) noexcept nogil


cdef int claimed = 0
cdef int child = 0
cdef int status = 0
cdef bint interrupted = False
cdef int origin_rank = 0
cdef int origin_size = 0
# The function object itself, which other modules may have imported.
_exit = sys.exit
cdef GetAttribute plain_getattr = get_attribute(SystemExit)


cdef int is_child() noexcept nogil:
    """Return whether this process was forked from one that uses MPI."""
    return child


cdef void note_fork() noexcept nogil:
    global child
    child = claimed


cdef void end_child() noexcept nogil:
    """End a child before mpi4py would finalise MPI, see Note [Forked children]."""
    if child:
        if interrupted:
            interrupt()
        end(status)


cdef object getattr_noting_code(object error, object name):
    """Read an attribute of a SystemExit; note its code if the interpreter reads it."""
    global status, interrupted
    value = plain_getattr(error, name)
    if PyEval_GetFrame() == NULL and name == "code":
        interrupted = False
        status = 0 if value is None else value & 0xFF if isinstance(value, int) else 1
    return value


def _watch_exit():
    """Note the exit status with which the interpreter of a forked process ends."""
    before = getattr(sys, "last_value", None)

    def note_failure():
        global status, interrupted
        error = getattr(sys, "last_value", None)
        if error is not before and not status:
            status = 1
            interrupted = isinstance(error, KeyboardInterrupt)

    if child:
        kinds = [SystemExit]
        for kind in kinds:
            kinds += kind.__subclasses__()
            if get_attribute(kind) == plain_getattr:
                set_attribute(kind, getattr_noting_code)
        let_exit_make_object(_exit)
        atexit.register(note_failure)


def claim(int rank, int size):
    """Claim MPI for this process: processes that it forks must not use it.

    Not collective. May be called again.

    Args:
        rank: of this process in its world, for errors.
        size: of the world.

    Raises:
        OSError: no memory.
    """
    global claimed, origin_rank, origin_size
    origin_rank = rank
    origin_size = size
    if claimed:
        return
    check_errno(pthread_atfork(NULL, NULL, note_fork), "pthread_atfork")
    # If no place is free, mpi4py found none either, and has said so.
    Py_AtExit(end_child)
    os.register_at_fork(after_in_child=_watch_exit)
    claimed = True


def forked():
    """Return whether this process was forked from a rank. Not collective."""
    return bool(child)


def check(str what not None):
    """Raise if this process was forked from a rank. Not collective.

    Args:
        what: the operation that was called, for the error.

    Raises:
        RuntimeError: it was.
    """
    if child:
        raise RuntimeError(
            f"{what} was called in a process that was forked from rank {origin_rank} of "
            f"{origin_size}: MPI works in the process of the rank only. A forked process may "
            f"compute with the module itself (`wrapped.module`) and tell its parent the result."
        )
