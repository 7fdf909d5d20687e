# setup.py: rooms
p = "setup.py"
sub(p, r'^"""Compile cython/\*\.pyx into the package mpiddp', '"""Compile cython/ROOM/*.pyx into the package mpiddp')
sub(p, r"^PACKAGE = \"mpiddp\"\n", 'PACKAGE = "mpiddp"\nROOMS = sorted(path.parent.name for path in Path(PACKAGE).glob("*/__init__.py"))\n')
sub(p, r'''        package = Path\(self\.build_lib, PACKAGE\)
        for old in package\.glob\("\*"\):
            module = old\.name\.partition\("\."\)\[0\]
            if old\.suffix != "\.so" or not Path\(SOURCES, f"\{module\}\.pyx"\)\.exists\(\):
                old\.unlink\(\)
        super\(\)\.run\(\)
        for pattern in INTERFACES:
            for path in sorted\(SOURCES\.glob\(pattern\)\):
                self\.copy_file\(str\(path\), str\(package / path\.name\)\)
''', '''        package = Path(self.build_lib, PACKAGE)
        for old in package.rglob("*"):
            source = Path(SOURCES, old.relative_to(package).parent, old.name.partition(".")[0])
            if old.is_file() and (old.suffix != ".so" or not source.with_suffix(".pyx").exists()):
                old.unlink()
        super().run()
        for pattern in INTERFACES:
            for path in sorted(SOURCES.glob(f"*/{pattern}")):
                self.copy_file(str(path), str(package / path.relative_to(SOURCES)))
''')
sub(p, r'"""Compile every cython/\*\.pyx\."""', '"""Compile every cython/ROOM/*.pyx."""')
sub(p, r"# The modules cimport each other as mpiddp\.NAME, and Cython looks for those files in\n        # a folder of that name\. It must have an __init__: Cython prefers a folder that has\n        # one, and an older mpiddp may be installed\.",
  "# The modules cimport each other as mpiddp.ROOM.NAME, and Cython looks for those files\n        # in folders of these names. They must have an __init__: Cython prefers folders that\n        # have one, and an older mpiddp may be installed.")
sub(p, r'''        package\.mkdir\(parents=True\)
        package\.joinpath\("__init__\.pxd"\)\.touch\(\)
        for path in SOURCES\.glob\("\*\.pxd"\):
            package\.joinpath\(path\.name\)\.symlink_to\(path\.resolve\(\)\)
''', '''        for folder in (package, *(package / room for room in ROOMS)):
            folder.mkdir(parents=True)
            folder.joinpath("__init__.pxd").touch()
        for path in SOURCES.glob("*/*.pxd"):
            package.joinpath(path.relative_to(SOURCES)).symlink_to(path.resolve())
''')
sub(p, r'"""Return one extension for each cython/\*\.pyx\."""', '"""Return one extension for each cython/ROOM/*.pyx."""')
sub(p, r'SOURCES\.glob\("\*\.h"\)', 'SOURCES.glob("*/*.h")')
sub(p, r'f"\{PACKAGE\}\.\{path\.stem\}"', 'f"{PACKAGE}.{path.parent.name}.{path.stem}"')
sub(p, r'include_dirs=\[str\(SOURCES\)\]', 'include_dirs=[str(path.parent)]')
sub(p, r'sorted\(SOURCES\.glob\("\*\.pyx"\)\)', 'sorted(SOURCES.glob("*/*.pyx"))')
sub(p, r'packages=\[PACKAGE\]', 'packages=[PACKAGE, *(f"{PACKAGE}.{room}" for room in ROOMS)]')
