"""Move the flat layout into rooms. Run from the root of a clean checkout of the flat layout.

    python3 /tmp/rooms/restructure.py

Steps: 1 check the table, 2 git mv, 3 move definitions, 4 rewrite imports and dotted names,
5 rename words, 6 particular edits, 7 overlay (new files), 8 tidy imports. Problems are listed
at the end; the exit status is 1 if there are any.
"""
import re, shutil, subprocess, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
from table import *
from lib import *
import lib

HERE = Path(__file__).parent
def git(*a): return subprocess.run(["git", *a], check=True, capture_output=True, text=True).stdout
tracked = git("ls-files").split("\n")

# ---- 1. the table
MODULES = {}
for room, names in PY.items():
    for flat, stem in names.items():
        MODULES[flat] = (room, stem)
for room, names in CY.items():
    for flat, stem in names.items():
        if flat in MODULES: fail(f"{flat} is in both halves")
        MODULES[flat] = (room, stem)
unknown = []
for f in tracked:
    p = Path(f)
    if p.parent == Path("mpiddp") and p.suffix == ".py" and p.stem not in STAY and p.stem not in MODULES: unknown.append(f)
    if p.parent == Path("cython") and p.suffix in (".pyx", ".pxd", ".pyi") and p.stem not in MODULES: unknown.append(f)
    if p.parent == Path("cython") and p.suffix == ".h" and p.name not in HEADERS: unknown.append(f)
MOVED_TESTS = {}
for room, names in TESTS.items():
    for n in names.split():
        old, _, new = n.partition("=")
        MOVED_TESTS[old] = f"{room}/{new or old}"
for f in tracked:
    p = Path(f)
    if p.parts and p.parts[0] == "tests" and len(p.parts) > 1 and p.parts[1] not in MOVED_TESTS and p.parts[1] not in TESTS_STAY:
        unknown.append(f)
if unknown:
    print("Not in the table (add them to /tmp/rooms/table.py):", *unknown, sep="\n  ")
    sys.exit(1)

# ---- 2. git mv
def mv(a, b):
    Path(b).parent.mkdir(parents=True, exist_ok=True)
    git("mv", a, b)
PATHS = {}   # old path -> new path, for text
for f in tracked:
    p = Path(f); new = None
    if p.parent == Path("mpiddp") and p.suffix == ".py" and p.stem in MODULES and p.stem not in STAY:
        new = "/".join(["mpiddp", *MODULES[p.stem]]) + ".py"
    elif p.parent == Path("cython") and p.suffix in (".pyx", ".pxd", ".pyi"):
        new = "/".join(["cython", *MODULES[p.stem]]) + p.suffix
    elif p.parent == Path("cython") and p.suffix == ".h":
        new = f"cython/{HEADERS[p.name]}/{p.name}"
    elif len(p.parts) == 2 and p.parts[0] == "tests" and p.name in MOVED_TESTS:
        new = "tests/" + MOVED_TESTS[p.name]
    if new: PATHS[f] = new; mv(f, new)
for d in ("simulated_gpu", "scripts"):
    if Path("tests", d).exists() and Path("tests", "support") :
        mv(f"tests/{d}", f"tests/support/{d}"); PATHS[f"tests/{d}"] = f"tests/support/{d}"
shutil.rmtree("tests/__pycache__", ignore_errors=True)

def under(*roots, suffixes):
    return sorted(str(p) for r in roots for p in Path(r).rglob("*") if p.suffix in suffixes and p.is_file() and "__pycache__" not in p.parts)

# ---- 3. definitions
RELOC = {}
flat_of = {v: k for k, v in MODULES.items()}
def flat(path):
    p = Path(path); return flat_of[(p.parts[1], p.stem)]
exec(read(HERE / "definitions.py"))

# ---- 4. imports and dotted names
def one_file(path):
    t = old = read(path)
    aliases = {}
    t = rewrite_imports(t, MODULES, RELOC, aliases)
    # one-line programs in strings
    def inline(m):
        n = m[2]
        if n not in MODULES: return m[0]
        room, stem = MODULES[n]
        if stem != n: aliases[n] = stem
        return f"from mpiddp{Q}{room} {m[1]} {stem}"
    t = re.sub(r"from mpiddp (c?import) (\w+)(?=[;\"'\\])", inline, t)
    # dotted names, in code and prose
    def dotted(m):
        n = m[1]
        if n in ("__main__",): return m[0]
        if n not in MODULES: return m[0]
        rest = re.match(r"\.(\w+)", t2[m.end():])
        if rest and (n, rest[1]) in RELOC: return RELOC[(n, rest[1])]
        return final(n, MODULES)
    t2 = t
    t = re.sub(r"\bmpiddp\.(\w+)\b(?!\()", dotted, t)
    for a, b in sorted(aliases.items(), key=lambda x: "." not in x[0]):
        if "." in a:
            x, _, y = a.partition("."); bx = b.partition(".")[0]
            t = re.sub(rf"(?<![\w.\"'/`]){x}\.{y}\b", b, t)
            t = re.sub(rf"(setattr\(){x}(, [\"']{y}[\"'])", rf"\1{bx}\2", t)
            continue
        t = re.sub(rf"(?<![\w.\"'/`]){a}\.(?=[a-zA-Z_])", f"{b}.", t)
        t = re.sub(rf"(setattr\(\s*){a}\b", rf"\1{b}", t)
        if "_" in a: t = re.sub(rf"(?<![\w.\"'/`]){a}(?=[,)])(?!\w)", b, t)
    t = t.replace(Q, ".")
    if t != old: write(path, t)
CODE = under("mpiddp", "cython", "tests", "benchmarks", "examples", suffixes={".py", ".pyx", ".pxd", ".pyi"})
for path in CODE: one_file(path)

# paths and file names in text
TEXT = under("mpiddp", "cython", "tests", "benchmarks", "examples", "slurm", suffixes={".py", ".pyx", ".pxd", ".pyi", ".md", ".sh", ".sbatch", ".h", ".c", ".txt"}) + \
    [f for f in ("Makefile", ".ci/run", "CONTRIBUTING.md", "MANIFEST.in", "pyproject.toml", "constraints.txt", "README.md", "setup.py") if Path(f).exists()] + \
    under("docs", suffixes={".md", ".py", ".toml"})
for path in TEXT:
    t = old = read(path)
    for a, b in sorted(PATHS.items(), key=lambda x: -len(x[0])):
        t = re.sub(rf"(?<![\w/]){re.escape(a)}(?![\w.]*\w/)(?!\w)", b, t)
    for n, (room, stem) in MODULES.items():
        if n != stem and n != "__main__" and ("_" in n or not path.startswith("tests")):
            t = re.sub(rf"(?<![\w/.]){n}\.(pyx|pxd|py|pyi)\b", rf"{stem}.\1", t)
            if path.endswith((".py", ".pyx", ".pxd")) and "_" in n and n not in ("process_group", "comm_hooks", "mixed_precision"): t = re.sub(rf"`{n}`", f"`{stem}`", t)
    if t != old: write(path, t)

# ---- 5. words
def rename(pairs, *roots, suffixes={".py", ".pyx", ".pxd", ".pyi"}, files=None):
    for path in files or under(*roots, suffixes=suffixes):
        if not Path(path).exists(): fail(f"{path}: missing"); continue
        t = old = read(path)
        for a, b in pairs.items():
            t = re.sub(rf"(?<!\w){a}(?!\w)" if not a.startswith("\\") else a, b, t)
        if t != old: write(path, t)
exec(read(HERE / "renames.py"))

# ---- 6. particular edits
exec(read(HERE / "edits.py"))

# ---- 7. overlay
for p in sorted((HERE / "overlay").rglob("*")):
    if p.is_file() and "__pycache__" not in p.parts:
        to = p.relative_to(HERE / "overlay"); to.parent.mkdir(parents=True, exist_ok=True); shutil.copy(p, to)

# ---- 8. tidy: unused and unsorted imports
exec(read(HERE / "mkrooms.py"))
ruff = next((v for v in (".venv/bin/ruff", "/work/w-rooms/.venv/bin/ruff") if Path(v).exists()), "ruff")
subprocess.run([ruff, "check", "-q", "--fix", "--exit-zero", "--select", "F401,I001", "mpiddp", "tests", "benchmarks"], check=False, stdout=subprocess.DEVNULL)
for path in under("mpiddp", suffixes={".py"}):
    t = read(path); t2 = re.sub(r"\nif TYPE_CHECKING:\n    pass\n", "\n", t)
    if t2 != t: write(path, re.sub(r"\n{4,}", "\n\n\n", t2))
subprocess.run([ruff, "check", "-q", "--fix", "--exit-zero", "--select", "F401,I001", "mpiddp", "tests", "benchmarks"], check=False, stdout=subprocess.DEVNULL)

def reflow(path):
    """Wrap prose lines that became longer than 100."""
    L = read(path).split("\n"); i = 0; changed = False; inside = False
    while i < len(L):
        l = L[i]
        quotes = l.count('"""')
        was = inside
        if quotes % 2: inside = not inside
        if not (was or inside or quotes or l.lstrip().startswith("#")): i += 1; continue
        m = re.match(r"(\s*)(#+ )?", l)
        prose = m[2] or not re.search(r"[=(\[{]\s*$|^\s*(def|return|import|from|if|assert|cdef|cpdef|with|for)\b", l)
        if len(l) > 100 and prose and "http" not in l and " | " not in l:
            cut = l.rfind(" ", 0, 101)
            if cut > len(m[0]):
                rest = l[cut + 1:]; L[i] = l[:cut]; changed = True
                nxt = L[i + 1] if i + 1 < len(L) else ""
                prefix = m[1] + (m[2] or "")
                same = nxt.startswith(prefix) and nxt.strip() not in ("", "#") and not re.match(rf"{re.escape(prefix)}(\s|- |\"\"\"|Args|Raises|Returns)", nxt) and nxt[len(prefix):len(prefix)+1] != ""
                if same and not re.match(r"\s*(@|def|class|cdef|import|from)", nxt): L[i + 1] = prefix + rest + " " + nxt[len(prefix):]
                else: L.insert(i + 1, prefix + rest)
        i += 1
    if changed: write(path, "\n".join(L))
subprocess.run([ruff, "format", "-q", "mpiddp", "tests", "benchmarks", "cython"], check=False)
for path in under("mpiddp", "cython", "tests", "benchmarks", suffixes={".py", ".pyx", ".pxd"}): reflow(path)
subprocess.run([ruff, "check", "-q", "--fix", "--exit-zero", "--select", "F401,I001", "cython", "mpiddp", "tests", "benchmarks"], check=False, stdout=subprocess.DEVNULL)
subprocess.run([ruff, "format", "-q", "mpiddp", "tests", "benchmarks", "cython"], check=False, stdout=subprocess.DEVNULL)

def prune_cython(path):
    t = read(path)
    pat = re.compile(r"^from (?P<m>[\w.]+) (?P<k>c?import) (?:\((?P<p>[^)]*)\)|(?P<n>[^\n(]*))\n", re.M)
    body = pat.sub("", t)
    def one(m):
        names = [x.strip() for x in (m["p"] if m["p"] is not None else m["n"]).replace("\n", " ").split(",") if x.strip()]
        keep = [x for x in names if re.search(rf"(?<![\w.]){re.escape(x.split(' as ')[-1].strip())}\b", re.sub(r'""".*?"""|#[^\n]*', "", body, flags=re.S))]
        own = Path(path).with_suffix(".pyx")
        if path.endswith(".pxd") and own.exists():   # a .pyx sees what its .pxd cimports
            there = re.sub(r'""".*?"""|#[^\n]*', "", read(own), flags=re.S)
            keep = [x for x in names if x in keep or re.search(rf"(?<![\w.]){re.escape(x.split(' as ')[-1].strip())}\b", there)]
        if not keep: return ""
        if keep == names: return m[0]
        line = f"from {m['m']} {m['k']} {', '.join(keep)}\n"
        if len(line) > 100: line = f"from {m['m']} {m['k']} (\n" + "".join(f"    {x},\n" for x in keep) + ")\n"
        return line
    t2 = pat.sub(one, t)
    if t2 != t: write(path, re.sub(r"\n{4,}", "\n\n\n", t2))
for path in under("cython", suffixes={".pyx", ".pxd"}): prune_cython(path)

t = read("mpiddp/__init__.py"); mark = t.index("_check_loaded_library()\n") if "\n_check_loaded_library()\n" not in t else t.index("\n_check_loaded_library()\n")
late = re.sub(r"^(from [^\n#]*)$", r"\1  # noqa: E402", t[mark:], flags=re.M)
write("mpiddp/__init__.py", t[:mark] + late)
print(f"{len(problems)} problems"); [print(" ", p) for p in problems]
sys.exit(bool(problems))
