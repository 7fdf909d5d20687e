# Step 3: definitions that move. Runs inside restructure.py.
def reexport(path, module, names):
    "The names that were moved and that `path` itself still needs are imported by move_py."

for src, dst, names, doc in MOVES:
    if src == "mpiddp/ddp/model_check.py":   # all that the reducer imports from there
        names = sorted({n.strip() for p in under("cython/reducer", "mpiddp/reducer", suffixes={".pyx", ".py"})
                 for m in re.finditer(r"from mpiddp\.verification import (?:\(([^)]*)\)|([^\n]*))", read(p))
                 for n in (m[1] or m[2]).replace("\n", " ").split(",") if n.strip()})
    if src == "mpiddp/rendezvous/world.py":   # what exists of the candidates
        have = {n for ns, _ in py_parts(read(src))[3] for n in ns}
        if "mpi_world.py" in dst: names = [n for n in names if n in have]
    if src == "mpiddp/ddp/python_hook.py":
        names = sorted(set(names) | {n.strip() for p in under("cython/reducer", "mpiddp/reducer", suffixes={".pyx", ".py"})
                 for m in re.finditer(r"from mpiddp\.python_hook import (?:\(([^)]*)\)|([^\n]*))", read(p))
                 for n in (m[1] or m[2]).replace("\n", " ").split(",") if n.strip()})
    move_py(src, dst, names, doc, RELOC, flat(src))

# init_by_name + split_group + installing monitored_barrier -> rendezvous.patches
names = [n for ns, _ in py_parts(read("mpiddp/process_group/monitored_barrier.py"))[3] for n in ns if n in ("install", "_with_mpiddp")]
t = read("mpiddp/process_group/monitored_barrier.py")

# the reducer's data apart from its flow
STATE_METHODS = ["__init__", "__dealloc__", "_find_views", "_reset_counting", "take", "copy_in", "wait_for",
    "contribute_old", "_is_old", "copy_out", "_after_reduction", "was_used", "set_divisor"]
src, dst = "cython/reducer/reducer.pyx", "cython/reducer/state.pyx"
head, blocks = cy_blocks(read(src))
out, state = [], None
for name, text in blocks:
    if name != "Reducer": out.append(text); continue
    chead, methods = cls_methods(text)
    have = dict(methods)
    for n in STATE_METHODS:
        if n not in have: fail(f"{src}: no method {n}")
    mine, theirs = [], []
    init = have["__init__"]
    signature, _, body = init.partition("):\n")
    data, mark, flow = body.partition("        self._build_buckets(assign_buckets(None))\n")
    if not mark: fail(f"{src}: __init__ no longer builds buckets by _build_buckets(assign_buckets(None))")
    loop = "" if "cdef Py_ssize_t index" not in data else "        cdef Py_ssize_t index\n"
    for n, x in methods:
        if n == "__init__":
            mine.append(signature + "):\n" + data.rstrip("\n") + "\n\n")
            theirs.append("    def __init__(self, *arguments, **settings):\n" + loop +
                "        ReducerState.__init__(self, *arguments, **settings)\n" +
                "        self._build_buckets(self.assign_buckets(None))\n" +
                re.sub(r"\bcount\b", "len(self.parameters)", flow).rstrip("\n") + "\n\n")
        elif n in STATE_METHODS: mine.append(x)
        else: theirs.append(x)
    args = re.search(r"    Args:\n(?:.|\n)*?(?=\n    Raises|\n    \"\"\")", chead)
    STATE_DOC = f'''cdef class ReducerState:
    """The parameters, buckets and counts of one reducer, and what is done with one parameter.

    Not collective.

{args[0].rstrip() if args else ""}
    """

'''
    state = STATE_DOC + "".join(mine)
    chead = chead.replace("cdef class Reducer:", "cdef class Reducer(ReducerState):")
    chead = re.sub(r"    Args:\n(?:.|\n)*?(?=\n    Raises|\n    \"\"\")", "    Args:\n        arguments, settings: those of `ReducerState`.\n", chead)
    out.append(chead + "".join(theirs))
m = re.match(r'"""(?:.|\n)*?"""\n', head)
imports = head[m.end():]
imports = re.sub(r"^from mpiddp\.bucket_building import .*\n", "", imports, flags=re.M)
names_up = ["_strided = torch.strided\n"]
write(dst, '''"""The data of a reducer: parameters, buckets, who is ready; and the way of one gradient in and out.

What decides when is reducer.pyx; what fills in for missing gradients, static_graph.pyx, unused.pyx
and joined.pyx, builds on this.
"""
''' + imports.rstrip("\n") + "\n\n" + "".join(names_up) + "\n\n" + state.rstrip("\n") + "\n")
t = head + "".join(out)
t = t.replace("_strided = torch.strided\n", "")
write(src, re.sub(r"\n{4,}", "\n\n\n", t).rstrip("\n") + "\n")
sub(src, r"^from mpiddp\.bucket cimport", "from mpiddpQQreducerQQstate cimport ParameterState, ReducerState\nfrom mpiddp.bucket cimport", 1)
# no circle any more: what was imported inside functions
t = read(src)
found = set(re.findall(r"^ +from mpiddp import (static_graph|unused_parameters|joined)\n", t, re.M))
t = re.sub(r"^ +from mpiddp import (?:static_graph|unused_parameters|joined)\n\n?", "", t, flags=re.M)
t = re.sub(r"(?<![\w.])unused_parameters\.(?=\w)", "unused_parameters.", t)
t = t.replace("from mpiddp import sparse_gradients\n", "from mpiddp import " + ", ".join(sorted(found | {"sparse_gradients"})) + "\n", 1)
write(src, t)
for n in ("ReducerState", "ParameterState"): RELOC[("reducer", n)] = "mpiddpQQreducerQQstate"
# the declarations
head, blocks = cy_blocks(read("cython/reducer/reducer.pxd"))
sblocks, rblocks = [], []
for name, text in blocks:
    if name == "Reducer":
        L = text.splitlines(keepends=True)
        attributes, smethods, rmethods = [], [], []
        # a method ends where its parentheses close
        i = 1
        while i < len(L):
            j = i; item = L[i]
            while item.count("(") > item.count(")"): j += 1; item += L[j]
            i = j + 1
            if not item.strip(): continue
            mm = re.match(r"    (?:cdef|cpdef)\s+[^(\n=]*?(\w+)\(", item.split("#")[0]) if "(" in item.split("#")[0] else None
            if mm: (smethods if mm[1] in STATE_METHODS else rmethods).append(item)
            else: attributes.append(item)
        sblocks.append("cdef class ReducerState:\n" + "".join(attributes) + "\n" + "".join(smethods))
        rblocks.append("cdef class Reducer(ReducerState):\n" + "".join(rmethods))
    elif name == "ParameterState" or name == "BucketView": sblocks.append(text.rstrip("\n") + "\n")
    else: rblocks.append(text.rstrip("\n") + "\n")
write("cython/reducer/state.pxd", head.rstrip("\n") + "\n\n\n" + "\n\n".join(sblocks))
write("cython/reducer/reducer.pxd", "from cpython.object cimport PyObject\n\nfrom mpiddpQQreducerQQstate cimport ReducerState\n" + "\n\n" + "\n\n".join(rblocks))
# the stubs
t = read("cython/reducer/reducer.pyi"); tree = ast.parse(t); L = t.splitlines(keepends=True)
spart, rpart = [], []
for n in tree.body:
    if isinstance(n, ast.ClassDef) and n.name == "Reducer":
        for b in n.body:
            text = "".join(L[(b.decorator_list[0].lineno if getattr(b, "decorator_list", []) else b.lineno)-1:b.end_lineno])
            mine = isinstance(b, ast.AnnAssign) or b.name in STATE_METHODS
            (spart if mine else rpart).append(text)
        rest = "".join(L[n.end_lineno:])
        first = "".join(L[:n.lineno-1])
spart.append("    def describe_bucket(self, bucket: Bucket) -> str: ...\n    def last_moments(self) -> list[float]: ...\n")
first_state = re.sub(r"^from mpiddp\.python_hook import .*\n", "", first, flags=re.M)
body = "".join(spart)
body = re.sub(r"python_hook: .*", "python_hook: Any", body)
write("cython/reducer/state.pyi", first_state + "class ReducerState:\n" + body)
write("cython/reducer/reducer.pyi", "from collections.abc import Sequence\n\nimport torch\n\nfrom mpiddpQQreducerQQstate import ReducerState\n\nclass Reducer(ReducerState):\n" + "".join(rpart) + rest)
for p in ("static_graph", "unused", "joined"):
    for s in (".pyx", ".pyi"):
        sub(f"cython/reducer/{p}{s}", r"\bReducer\b", "ReducerState")
for p in ("building", "sparse"):
    sub(f"mpiddp/reducer/{p}.py", r"\b(Wrapper)?Reducer\b", "ReducerState")
    sub(f"mpiddp/reducer/{p}.py", r"mpiddp\.(wrapper_)?reducer import", "mpiddp.reducer import")
sub("mpiddp/reducer/errors.py", r"\bReducer\b", "ReducerState", optional=True)
# what describes the state goes with it
t = read("mpiddp/ddp/torch_reducer.py")
state_methods = ""
for n in ("describe_bucket", "last_moments"):
    m = re.search(rf"^    def {n}\(.*?(?=^    (?:def|@|#)|\Z)", t, re.M | re.S)
    if not m: fail(f"mpiddp/ddp/torch_reducer.py: no {n}"); continue
    t = t.replace(m[0], "")
    body = re.sub(r"^    def (\w+)\(([^)]*)\) -> [^:]*:", lambda x: f"    def {x[1]}({re.sub(r': *[^,)]+', '', x[2])}):", m[0])
    state_methods += body
write("mpiddp/ddp/torch_reducer.py", t)
t = read(dst)
write(dst, t.rstrip("\n") + "\n\n" + state_methods.rstrip("\n") + "\n")

# engine: who makes progress apart from the classes
ENGINE_OUT = ["NAP_SHORTEST", "NAP_LONGEST", "NAP_LIMIT", "NAPS_TO_WAKING", "SPIN_BEFORE_SLEEP", "ALERT", "SLICE_NANOSECONDS",
    "advance_works", "step_channels", "enqueue", "engine_thread", "relax", "drive", "work_is_done", "SIGNAL_CHECK"]
src, dst = "cython/engine/engine.pyx", "cython/engine/progress.pyx"
head, blocks = cy_blocks(read(src))
note = re.search(r"\nNote \[Who makes progress\]\n(?:.|\n)*?(?=\n\nNote \[|\n\"\"\")", head)
if not note: fail(f"{src}: no Note [Who makes progress]")
have = {n for ns, _ in blocks for n in ns.split(",")}
move_cy(src, dst, [n for n in ENGINE_OUT if n in have], '"""Move the jobs of all channels along: on the engine\'s thread, or on one that waits.\n' + (note[0] if note else "") + '\n"""\n', {}, "engine")
if note: write(src, read(src).replace(note[0], "\nNote [Who makes progress] is in progress.pyx.\n", 1))

# the names that engine.pxd handed on come from where they are
text = read("cython/engine/engine.pxd")
for m in re.finditer(r"^from mpiddp\.(\w+) cimport \(([^)]*)\)|^from mpiddp\.(\w+) cimport ([^(\n]*)$", text, re.M):
    for n in (m[2] or m[4]).replace("\n", " ").split(","):
        if n.strip(): RELOC[("engine", n.strip())] = final(m[1] or m[3], MODULES)
RELOC[("engine", "element_bytes")] = "mpiddpQQsystemQQkernels"
sub("cython/engine/engine.pxd", r"^cdef size_t element_bytes\(.*\n", "")
sub("cython/engine/engine.pyx", r"^cdef size_t element_bytes\((?:.|\n)*?(?=\n\n\n)", "")
t = read("cython/system/kernels.pxd")
write("cython/system/kernels.pxd", t.rstrip("\n") + '''


cdef inline size_t element_bytes(ElementType element) noexcept nogil:
    if element == ELEMENT_FLOAT32:
        return 4
    if element == ELEMENT_FLOAT64:
        return 8
    return 2
''')
# declarations of progress.pyx: what engine.pxd declared of it, and what engine.pyx calls
t = read("cython/engine/engine.pxd")
declared = []
for n in ("work_is_done", "enqueue"):
    m = re.search(rf"(?:^#[^\n]*\n)*^cdef [^\n]*\b{n}\([^\n]*\n", t, re.M)
    if not m: fail(f"cython/engine/engine.pxd: no {n}"); continue
    declared.append(m[0]); t = t.replace(m[0], "")
write("cython/engine/engine.pxd", t.rstrip("\n") + "\n")
body = read("cython/engine/progress.pyx")
for n in ("step_channels", "engine_thread", "drive"):
    m = re.search(rf"^cdef [^\n(]*\b{n}\((?:[^)]|\n)*?\) noexcept nogil:\n(?:    \"\"\"([^\n]*?)\"\"\"\n)?", body, re.M)
    if n == "engine_thread": m = re.search(r"^cdef void \*engine_thread\(void \*argument\) noexcept nogil:\n()", body, re.M)
    if not m: fail(f"progress.pyx: no {n}"); continue
    declared.append((f"# {m[1]}\n" if m[1] else "") + m[0].split(":\n")[0] + "\n")
write("cython/engine/progress.pxd", '''from mpiddp.queues cimport ChannelState, EngineState, Work

# How long a waiter in MPI goes without looking for signals, in seconds.
cdef double SIGNAL_CHECK

''' + "".join(declared))
write("cython/engine/progress.pyi", "# Nothing here is for Python.\n")
sub("cython/engine/progress.pyx", r"^from mpiddp\.queues cimport fail\n", """from mpiddp.queues cimport (
    ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_FAILED, ADVANCE_PENDING, Advance, Transport, fail,
)
""")
t = read("cython/engine/engine.pyx")
here = [n for n in ENGINE_OUT if re.search(rf"(?<![\w.]){n}\b", cy_blocks(t)[0] and "".join(x for _, x in cy_blocks(t)[1]))]
t = re.sub(r"^from mpiddp\.queues cimport fail\n", "from mpiddp.queues cimport fail\nfrom mpiddpQQengineQQprogress cimport " + ", ".join(sorted(here)) + "\n", t, flags=re.M)
write("cython/engine/engine.pyx", t)
RELOC[("engine", "work_is_done")] = RELOC[("engine", "enqueue")] = "mpiddpQQengineQQprogress"

# GPU staging: the memory apart from the transport
src, dst = "cython/transports/gpu_staging.pyx", "cython/transports/gpu_staged_memory.pyx"
STAGED = ["_kept", "_merged", "StagedBuckets", "StagedMemory", "_forget_kept", "ALIGNMENT"]
head = read(src)
note = re.search(r"\nNote \[Memory of a bucket that goes away\]\n(?:.|\n)*?(?=\n\nNote \[|\n\"\"\")", head)
move_cy(src, dst, STAGED, '"""What staged buckets are made of: memory on the GPU, pinned memory of the host, and events.\n' + (note[0] if note else "") + '\n"""\n', RELOC, "staging")
if note: write(src, read(src).replace("\n" + note[0], "", 1))
else: fail("gpu_staging.pyx: no Note [Memory of a bucket that goes away]")
t = read(dst)
m = re.search(r"(?:^#[^\n]*\n)*^cdef enum:\n(?:    [^\n]*\n)*?    ALIGNMENT = \d+\n", t, re.M)
if m: write(dst, re.sub(r"\n{4,}", "\n\n\n", t.replace(m[0], "")))
else: fail("gpu_staged_memory.pyx: no ALIGNMENT")
sub(src, r"^from mpiddp\.memory cimport", "from mpiddpQQtransportsQQgpu_staged_memory import _forget_kept\nfrom mpiddpQQtransportsQQgpu_staged_memory cimport (\n    ALIGNMENT, Piece, StagedBucket, StagedBuckets, StagedMemory,\n)\nfrom mpiddp.memory cimport", 1)
head, blocks = cy_blocks(read("cython/transports/gpu_staging.pxd"))
mine = [x for n, x in blocks if n in ("Piece", "StagedBucket", "StagedBuckets", "StagedMemory")]
rest = [x for n, x in blocks if n not in ("Piece", "StagedBucket", "StagedBuckets", "StagedMemory")]
write("cython/transports/gpu_staged_memory.pxd", head.rstrip("\n") + "\n\n\n" + (m[0] if m else "") + "\n\n" + "".join(mine).rstrip("\n") + "\n")
write("cython/transports/gpu_staging.pxd", head.rstrip("\n") + "\n\n\n" + "".join(rest).strip("\n") + "\n")
t = read("cython/transports/gpu_staging.pyi")
parts = re.split(r"(?=^class )", t, flags=re.M)
write("cython/transports/gpu_staged_memory.pyi", parts[0] + "".join(x for x in parts[1:] if re.match(r"class Staged", x)).rstrip("\n") + "\n")
write("cython/transports/gpu_staging.pyi", parts[0] + "".join(x for x in parts[1:] if not re.match(r"class Staged", x)).rstrip("\n") + "\n")
write(dst, re.sub(r"^from mpiddp\.system cimport .*\n", "from mpiddp.system cimport getpid\n", read(dst), flags=re.M))

# one file replaces functions of torch.distributed
dst = "mpiddp/rendezvous/patches.py"
DOC = """Functions of torch.distributed that take mpiddp: replaced where everybody finds them.

- ``init_process_group("mpiddp")`` gets rank, size and store from MPI. torch looks for ranks and
  addresses before it asks a backend for anything, and for "env://", its default, it wants
  MASTER_ADDR. So a call that names our backend is completed before torch sees it.
- ``split_group``: torch's own splits NCCL's communicators and refuses where there is no
  accelerator. For groups of mpiddp, the members of each part create their own group.
- ``monitored_barrier``: torch's own knows Gloo's groups only.
"""
first = True
for src, flatname in (("mpiddp/rendezvous/init_by_name.py", "init_by_name"), ("mpiddp/rendezvous/split_group.py", "split_group"), ("mpiddp/process_group/monitored_barrier.py", "monitored_barrier")):
    blocks = py_parts(read(src))[3]
    if flatname == "monitored_barrier": names = ["_with_mpiddp"]
    else: names = [n for ns, _ in blocks for n in ns if n not in ("install", "__all__")]
    move_py(src, dst, names, DOC, RELOC, flatname, closure=False)
    t = read(src)
    t = re.sub(r'^def install\(\) -> None:\n(?:    .*\n|\n)+?(?=\S|\Z)', "", t, flags=re.M)
    t = re.sub(r', "install"|"install", ', "", t)
    t = re.sub(rf"^from mpiddp{Q}rendezvous{Q}patches import .*\n", "", t, flags=re.M)
    write(src, re.sub(r"\n{4,}", "\n\n\n", t))
    if flatname != "monitored_barrier": git("rm", "-qf", src)
t = read(dst)
doc, imports, checking, blocks = py_parts(t)
install = '''

def install() -> None:
    """Let the functions of torch.distributed named above take mpiddp. Not collective.

    A completed ``init_process_group`` is collective over MPI.COMM_WORLD.
    """
    replace_function(dist.init_process_group, _completing)
    replace_function(dist.monitored_barrier, _with_mpiddp)
    replace_function(dist.split_group, _splitting)
'''
imports = [x for x in imports if "init_by_name" not in x and "split_group import" not in x]
write(dst, py_join(doc, imports, checking, [([], '\n__all__ = ["install"]\n')] + [([], install)] + blocks))
for f in ("init_by_name", "split_group", "monitored_barrier"): RELOC[(f, "install")] = "mpiddpQQrendezvousQQpatches"

# uneven inputs apart from the wrapper
src, dst = "mpiddp/ddp/wrapper.py", "mpiddp/ddp/uneven_inputs.py"
JOIN = ["_check_global_requires_backward_grad_sync", "_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce", "_sync_final_model"]
t = read(src); taken = ""
for n in JOIN:
    m = re.search(rf"^    def {n}\(.*?(?=^    (?:def|@|#)|^\S)", t, re.M | re.S)
    if not m: fail(f"{src}: no {n}"); continue
    taken += m[0]; t = t.replace(m[0], "")
t = re.sub(r"    # Uneven inputs, see joined\.pyx\. The rest of join\(\) is torch's\.\n\n", "", t)
t = t.replace("class DistributedDataParallel(TorchWrapper):", "class DistributedDataParallel(UnevenInputs):")
t = t.replace("from mpiddp.torch_versions import TorchWrapper\n", "from mpiddpQQddpQQuneven_inputs import UnevenInputs\n")
write(src, t)
write(dst, '''"""The wrapper of a rank whose inputs have ended before the others': what join() asks of it.

See joined.pyx. The rest of join() is torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mpiddp import joined
from mpiddp.compilation import run_as_it_is
from mpiddp.torch_versions import TorchWrapper

if TYPE_CHECKING:
    from mpiddp.process_group import ProcessGroup
    from mpiddp.wrapper_reducer import WrapperReducer


@run_as_it_is
class UnevenInputs(TorchWrapper):
    """torch's wrapper, whose ranks may have different numbers of inputs. Collective."""

    process_group: ProcessGroup
    reducer: WrapperReducer  # type: ignore[assignment]  # answers to the same calls as torch's
    _divide_by_initial_world_size: bool

''' + taken.rstrip("\n") + "\n")

# communication hooks of the wrapper apart from it
src, dst = "mpiddp/ddp/wrapper.py", "mpiddp/ddp/hook_registration.py"
HOOKS = ["register_comm_hook", "_install_hook", "_install_copied_hooks", "_register_builtin_comm_hook"]
t = read(src); taken = ""
for n in HOOKS:
    m = re.search(rf"^    def {n}\(.*?(?=^    (?:def|@|#)|^\S)", t, re.M | re.S)
    if not m: fail(f"{src}: no {n}"); continue
    taken += m[0]; t = t.replace(m[0], "")
t = t.replace("class DistributedDataParallel(UnevenInputs):", "class DistributedDataParallel(HookRegistration, UnevenInputs):")
t = t.replace("from mpiddpQQddpQQuneven_inputs import UnevenInputs\n", "from mpiddpQQddpQQhook_registration import HookRegistration\nfrom mpiddpQQddpQQuneven_inputs import UnevenInputs\n")
write(src, t)
simp = "".join(py_parts(t)[1]).replace("from mpiddpQQddpQQhook_registration import HookRegistration\n", "").replace("from mpiddpQQddpQQuneven_inputs import UnevenInputs\n", "from mpiddp.torch_versions import TorchWrapper\n")
write(dst, '''"""The wrapper's communication hooks: registering one, and keeping it when the wrapper is copied."""
''' + simp.rstrip("\n") + '''

if TYPE_CHECKING:
    from mpiddp.logger import Logger
    from mpiddp.process_group import ProcessGroup
    from mpiddp.wrapper_reducer import WrapperReducer


@run_as_it_is
class HookRegistration(TorchWrapper):
    """torch's wrapper with hooks that our reducer calls, or does without Python. Collective."""

    process_group: ProcessGroup
    reducer: WrapperReducer  # type: ignore[assignment]  # answers to the same calls as torch's
    logger: Logger

''' + taken.rstrip("\n") + "\n")
