"""Translate cython/ROOM/*.pyx with Cython only; print the first error of each file."""
import sys, subprocess, shutil, os
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
v=Path("/tmp/rooms/view"); shutil.rmtree(v,ignore_errors=True)
src=Path("cython")
for r in [""]+[p.name for p in src.iterdir() if p.is_dir()]:
    (v/"mpiddp"/r).mkdir(parents=True,exist_ok=True); (v/"mpiddp"/r/"__init__.pxd").touch()
for p in src.glob("*/*.pxd"): (v/"mpiddp"/p.relative_to(src)).symlink_to(p.resolve())
for p in src.glob("*/*.pyx"): (v/"mpiddp"/p.relative_to(src)).symlink_to(p.resolve())
def one(p):
    r=subprocess.run([".venv/bin/cython","-3","-X","boundscheck=False","-I",str(v),"--module-name",f"mpiddp.{p.parent.name}.{p.stem}",str(v/"mpiddp"/p.relative_to(src)),"-o",f"/tmp/rooms/view/{p.parent.name}_{p.stem}.c"],capture_output=True,text=True)
    return p,r
files=[Path(a) for a in sys.argv[1:]] or sorted(src.glob("*/*.pyx"))
with ThreadPoolExecutor(2) as ex:
    for p,r in ex.map(one,files):
        if r.returncode or "warning" in r.stderr:
            errs=[l for l in r.stderr.splitlines() if ".pyx:" in l or ".pxd:" in l]
            print(p, *errs[:6], sep="\n   ")
print("checked",len(files))
