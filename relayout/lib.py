"""Tools of restructure.py: move definitions between files, rewrite imports, rename words."""
import ast, re, subprocess, sys
from pathlib import Path

Q = "QQ"            # stands for a dot in names that are final already
problems = []

def fail(text):
    problems.append(text); print("PROBLEM:", text)

def read(p): return Path(p).read_text()
def write(p, t):
    p = Path(p); p.parent.mkdir(parents=True, exist_ok=True); p.write_text(t)

def sub(path, pattern, new, count=None, flags=re.M, optional=False):
    """Regex-replace in a file; a pattern that does not match is a problem."""
    if not Path(path).exists():
        if not optional: fail(f"{path}: missing")
        return
    t = read(path)
    t2, n = re.subn(pattern, new, t, flags=flags)
    if n == 0 and not optional: fail(f"{path}: no match for {pattern!r}")
    if count is not None and n not in (0, count): fail(f"{path}: {n} matches for {pattern!r}, not {count}")
    if n: write(path, t2)

def word(path, old, new, optional=False):
    sub(path, rf"(?<![\w.]){re.escape(old)}\b" if not old.startswith(".") else rf"\{old}\b", new, optional=optional)

# ---- Python definitions

def _lines(t): return t.splitlines(keepends=True)

def py_parts(t):
    """Return (docstring text, import lines, type-checking lines, [(names, text)])."""
    tree = ast.parse(t); L = _lines(t)
    body = tree.body
    i = 0; doc = ""; end = 0
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
        end = body[0].end_lineno; doc = "".join(L[:end]); i = 1
    imports, checking = [], []
    while i < len(body):
        n = body[i]
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            imports.append("".join(L[end:n.end_lineno])); end = n.end_lineno
        elif isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING" and not n.orelse and all(isinstance(b,(ast.Import,ast.ImportFrom)) for b in n.body):
            for b in n.body: checking.append("".join(L[b.lineno-1:b.end_lineno]))
            end = n.end_lineno
        else: break
        i += 1
    blocks = []
    for n in body[i:]:
        first = min([n.lineno] + [d.lineno for d in getattr(n, "decorator_list", [])])
        names = []
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)): names = [n.name]
        elif isinstance(n, ast.Assign):
            for tg in n.targets:
                names += [e.id for e in (tg.elts if isinstance(tg, ast.Tuple) else [tg]) if isinstance(e, ast.Name)]
        elif isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name): names = [n.target.id]
        blocks.append((names, "".join(L[end:n.end_lineno])))
        end = n.end_lineno
    tail = "".join(L[end:])
    if tail.strip(): blocks.append(([], tail))
    return doc, imports, checking, blocks

def py_join(doc, imports, checking, blocks):
    t = doc.rstrip("\n") + "\n\n" if doc else ""
    t += "".join(imports).strip("\n") + "\n"
    if checking:
        t += "\nif TYPE_CHECKING:\n" + "".join(checking).rstrip("\n") + "\n"
    t += "".join(text for _, text in blocks)
    return re.sub(r"\n{4,}", "\n\n\n", t).rstrip("\n") + "\n"

def used(name, text):
    """Whether code uses a name: not a comment, docstring or message."""
    import textwrap
    try: tree = ast.parse(textwrap.dedent(text))
    except SyntaxError: return re.search(rf"(?<![\w.]){re.escape(name)}\b", text) is not None
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and n.id == name: return True
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value == name: return False
    return False

def move_py(src, dst, names, doc, reloc, flat, closure=True):
    sdoc, simp, schk, sblocks = py_parts(read(src))
    have = {n for ns, _ in sblocks for n in ns}
    for n in names:
        if n not in have: fail(f"{src}: no {n} to move to {dst}")
    moving = {n for n in names if n in have}
    while closure:
        text = "".join(x for ns, x in sblocks if moving & set(ns))
        more = {n for ns, x in sblocks for n in ns if n not in moving and n.startswith("_") and used(n, text)}
        if not more: break
        moving |= more
    # what nobody else needs keeps private, what stays needs an import back
    mblocks = [(ns, x) for ns, x in sblocks if moving & set(ns)]
    rest = [(ns, x) for ns, x in sblocks if not moving & set(ns) ]
    rest = [([], re.sub(rf'\n\s*"({"|".join(moving)})",', "", x)) if ns == ["__all__"] else (ns, x) for ns, x in rest] if any(ns==["__all__"] for ns,_ in rest) else rest
    rtext = "".join(x for _, x in rest)
    mtext = "".join(x for _, x in mblocks)
    up = [n for ns, _ in rest for n in ns if used(n, mtext) and n != "__all__"]
    if up: fail(f"{dst}: what was moved from {src} uses {up}, which stays there")
    module = Q.join(Path(dst).with_suffix("").parts).replace("cython"+Q, "mpiddp"+Q)
    back = [n for n in moving if used(n, rtext)]
    if back: simp = simp + [f"from {module} import {', '.join(sorted(back))}\n"]
    write(src, py_join(sdoc, simp, schk, rest))
    if Path(dst).exists():
        ddoc, dimp, dchk, dblocks = py_parts(read(dst))
        dimp = dimp + ["\n"] + [x for x in simp if not x.startswith(f"from {module} ")]
        dchk = dchk + [x for x in schk if x not in dchk]
        write(dst, py_join(ddoc, dimp, dchk, dblocks + mblocks))
    else:
        imp = [x for x in simp if not x.startswith(f"from {module} ")]
        write(dst, py_join(f'"""{doc}"""\n', imp, schk, mblocks))
    for n in moving: reloc[(flat, n)] = module

# ---- Cython definitions

def cy_blocks(t):
    """Return (head, [(name, text)]) of top-level definitions; comments above belong to them."""
    L = _lines(t); i = 0; blocks = []; start = None
    heads = []
    in_str = False; depth = 0
    for k, l in enumerate(L):
        col0 = l[:1] not in (" ", "\t", "\n", "#", ")", "]", "}", "") and not in_str and depth <= 0
        if col0: heads.append(k)
        q = l.count('"""')
        if q % 2: in_str = not in_str
        if not in_str and q == 0:
            depth += l.count("(") + l.count("[") - l.count(")") - l.count("]")
    out = []; 
    # header: docstring, imports, cimports
    def kind(k):
        l = L[k]
        if re.match(r'(from\s.*\bc?import\b|c?import\b|""")', l): return "head"
        return "def"
    defs = [k for k in heads if kind(k) == "def"]
    merged = []
    for k in defs:
        if merged and L[merged[-1]].startswith("@") and all(L[j].startswith("@") for j in range(merged[-1], k)):
            continue
        merged.append(k)
    starts = []
    for k in merged:
        s = k
        while s > 0 and (L[s-1].startswith("#")): s -= 1
        starts.append((s, k))
    if not starts: return t, []
    head = "".join(L[:starts[0][0]])
    for j, (s, k) in enumerate(starts):
        e = starts[j+1][0] if j+1 < len(starts) else len(L)
        m = None
        for x in range(k, e):
            if not L[x].startswith("@"):
                l = L[x]
                m = re.match(r"(?:cdef|cpdef)\s+(?:class|struct|enum|union)\s+(\w+)", l) or re.match(r"(?:class|def)\s+(\w+)", l) or \
                    re.match(r"(?:cdef|cpdef)\s+.*?(\w+)\s*(?:\(|=|$)", l) or re.match(r"(\w+)\s*(?::[^=]*)?=", l)
                break
        name = m.group(1) if m else ""
        if re.match(r"cdef enum:", L[k]):
            body = "".join(L[k:e]); mm = re.findall(r"^    (\w+)(?: =|$)", body, re.M); name = ",".join(mm)
        blocks.append((name, "".join(L[s:e])))
    return head, blocks

def move_cy(src, dst, names, head, reloc, flat):
    """Move definitions from src to dst (new unless it exists); head: text of a new dst."""
    shead, sblocks = cy_blocks(read(src))
    have = {n for ns, _ in sblocks for n in ns.split(",")}
    for n in names:
        if n not in have: fail(f"{src}: no {n} to move to {dst}")
    moving = [(n, x) for n, x in sblocks if set(n.split(",")) & set(names)]
    rest = [(n, x) for n, x in sblocks if not set(n.split(",")) & set(names)]
    tidy = lambda t: re.sub(r"\n{4,}", "\n\n\n", t).rstrip("\n") + "\n"
    write(src, tidy(shead + "".join(x for _, x in rest)))
    body = "".join(x for _, x in moving)
    if Path(dst).exists(): write(dst, tidy(read(dst).rstrip("\n") + "\n\n\n" + body))
    else:
        m = re.match(r'("""(?:.|\n)*?"""\n|(?:#.*\n)+)', shead)
        imports = shead[m.end():] if m else shead
        write(dst, tidy(head.rstrip("\n") + "\n\n" + imports.strip("\n") + "\n\n\n" + body))
    module = Q.join(Path(dst).with_suffix("").parts).replace("cython"+Q, "mpiddp"+Q)
    for n, _ in moving:
        for one in n.split(","): reloc[(flat, one)] = module

def cls_methods(text):
    """Split a class's text into (head, [(name, text)]) of its methods."""
    L = _lines(text); starts = []; in_str = False; depth = 0
    for k, l in enumerate(L):
        if not in_str and depth <= 0 and re.match(r"    (@|(?:cdef|cpdef|def)\s)", l) and k > 0:
            if not (starts and all(L[j].startswith("    @") for j in range(starts[-1], k))): starts.append(k)
        q = l.count('"""')
        if q % 2: in_str = not in_str
        if not in_str and q == 0: depth += l.count("(") + l.count("[") - l.count(")") - l.count("]")
    real = []
    for k in starts:
        s = k
        while L[s-1].startswith("    #") or (L[s-1] == "\n" and L[s-2].startswith("    # ") and not L[s-2].startswith("     ")): s -= 1
        real.append((s, k))
    head = "".join(L[:real[0][0]]) if real else text
    out = []
    for j, (s, k) in enumerate(real):
        e = real[j+1][0] if j+1 < len(real) else len(L)
        body = "".join(L[s:e]); sig = "".join(L[k:e])
        sig = re.sub(r"^(\s+@.*\n)+", "", sig)
        m = re.match(r"    def\s+(\w+)", sig) or re.match(r"    (?:cdef|cpdef)\s+[^(\n=]*?(\w+)\(", sig)
        out.append((m.group(1) if m else "", body))
    return head, out

# ---- imports

IMPORT = re.compile(r"^(?P<i>[ \t]*)from (?P<m>mpiddp[\w.]*) (?P<k>import|cimport) (?:\((?P<p>[^)]*)\)|(?P<n>[^\n(#]*))(?P<c>[ \t]*#[^\n]*)?$", re.M)

def final(flat, modules):
    room, stem = modules[flat]
    return Q.join(["mpiddp", room, stem])

ALIAS = {"transport": "transport_choice", "rendezvous": "world", "reduction": "single_all_reduce"}

def stored_names(t):
    """Names that a file binds: a module must not be imported under one of these."""
    try: tree = ast.parse(t)
    except SyntaxError: return set()
    out = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return out | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}

def rewrite_imports(t, modules, reloc, aliases, width=100):
    stored = stored_names(t); whole = t
    def one(m):
        ind, mod, kind = m["i"], m["m"], m["k"]
        names = [x.strip() for x in re.sub(r"#[^\n]*", "", m["p"] if m["p"] is not None else m["n"]).replace("\n", " ").split(",")]
        names = [x for x in names if x]
        groups = {}
        for x in names:
            name, _, as_ = x.partition(" as ")
            name = name.strip()
            if mod == "mpiddp":
                if name in modules:
                    room, stem = modules[name]
                    target, new = Q.join(["mpiddp", room]), stem
                    if not as_.strip():
                        if stem != name and stem in stored:
                            new = f"{stem} as {ALIAS.get(name, name)}"; aliases[name] = ALIAS.get(name, name)
                        elif stem != name: aliases[name] = stem
                        for (fl, nm), mod2 in reloc.items():
                            if fl == name and re.search(rf"(?<![\w.]){name}\.{nm}\b|setattr\({name}, [\"']{nm}[\"']", whole):
                                pkg, _, st = mod2.rpartition(Q)
                                groups.setdefault(pkg, []).append(st)
                                aliases[f"{name}.{nm}"] = f"{st}.{nm}"
                else: target, new = "mpiddp", name
            else:
                flat = mod[len("mpiddp."):]
                if (flat, name) in reloc: target, new = reloc[(flat, name)], name
                elif flat in modules: target, new = final(flat, modules), name
                else: target, new = mod, name
            groups.setdefault(target, []).append(new + (f" as {as_.strip()}" if as_.strip() else ""))
        out = []
        for target, ns in groups.items():
            line = f"{ind}from {target} {kind} {', '.join(ns)}{m['c'] or ''}"
            if len(line.replace(Q, ".")) > width:
                if ind == "" or True:
                    line = f"{ind}from {target} {kind} (\n" + "".join(f"{ind}    {x},\n" for x in ns) + f"{ind}){m['c'] or ''}"
            out.append(line)
        return "\n".join(out)
    return IMPORT.sub(one, t)
