"""Write docs/explanation/rooms.md: the table is filled with the files that there are."""
from pathlib import Path
ROWS = [
 (0, "leaves", "what all may use; no folder of its own", ""),
 (1, "system", "the processor and the operating system: loops over gradients, threads, clocks, waiting", "leaves"),
 (1, "mpi", "which MPI it is, its errors, datatypes and nodes; ending a job", "leaves"),
 (1, "torch_internals", "what torch does not promise", "leaves"),
 (2, "gpu", "the runtime of CUDA and HIP; no MPI", "leaves, system"),
 (2, "engine", "ordered channels of jobs, progress, completion", "leaves, system, mpi"),
 (3, "transports", "how the bytes of buckets travel, and the choice", "leaves, system, mpi, torch_internals, gpu, engine"),
 (3, "collectives", "each operation of torch.distributed as a function on host tensors", "leaves, mpi, torch_internals, engine"),
 (4, "process_group", "torch's ProcessGroup: start, wait, diagnose", "leaves, system, mpi, torch_internals, gpu, engine, transports, collectives"),
 (5, "reducer", "gradients and buckets, once an iteration; never MPI", "leaves, system, torch_internals, gpu, engine, process_group (types)"),
 (5, "rendezvous", "the MPI world becomes torch's world; start and end", "leaves, system, mpi, torch_internals, gpu, engine, process_group"),
 (6, "ddp", "the wrapper, its arguments and hooks", "leaves, system, mpi, torch_internals, gpu, engine, transports, collectives, process_group, reducer"),
 (7, "runner", "`python -m mpiddp`", "leaves, mpi, torch_internals, process_group, rendezvous, ddp"),
 (8, "face", "what is public", "all"),
]
FACE = ["__init__", "__main__", "doctor"]
out = []
for floor, room, purpose, may in ROWS:
    if room == "leaves": py = sorted(p.stem for p in Path("mpiddp").glob("*.py") if p.stem not in FACE); cy = []
    elif room == "face": py, cy = FACE, []
    else:
        py = sorted(p.stem for p in Path("mpiddp", room).glob("*.py") if p.stem != "__init__")
        cy = sorted({p.stem for p in Path("cython", room).glob("*.p*")} | {p.name for p in Path("cython", room).glob("*.h")})
    files = ", ".join([f"**{n}**" for n in cy] + py)
    out.append(f"| {floor} {room} | {purpose} | {files} | {may or 'nothing'} |")
text = Path("/tmp/rooms/rooms_head.md").read_text().replace("TABLE", "\n".join(out))
Path("docs/explanation").mkdir(parents=True, exist_ok=True)
Path("docs/explanation/rooms.md").write_text(text)
