import sys; sys.path.insert(0,"../project"); 
import test_layout as t
t.ROOT=t.Path("../..").resolve(); print(*t.offences(t.ROOT),sep="\n")
