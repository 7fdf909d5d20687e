#!/usr/bin/env bash
# Compile for 64-bit Arm, and let ranks meet in memory there, under qemu.
#
#   tests/support/arm.sh BIN [FOLDER]
#
# BIN: of an environment with MPICH, whose launcher starts the ranks. With FOLDER nothing is compiled:
# the wheel for Arm in it is used (make wheel ARCH=aarch64). Needs Debian, and of it
# qemu-user-static, gcc-aarch64-linux-gnu and binutils-aarch64-linux-gnu. Python, MPICH, mpi4py and
# numpy for Arm lie outside of the clone, and nothing of the system is changed.
#
# qemu shows whether the compiled code is right, kernels with NEON among it. It does not reorder
# loads and stores as an Arm core may, so the instructions are looked at as well: what Note [Rounds
# in memory] wants to release and acquire must do so.
set -euo pipefail
cd "$(dirname "$0")/../.."

bin=$(realpath "$1") of_wheel=${2:-}
folder=${XDG_CACHE_HOME:-$HOME/.cache}/mpiddp/arm
root=$folder/root wheels=$folder/wheels
modules=build/arm/mpiddp
arm=aarch64-linux-gnu

for tool in qemu-aarch64-static $arm-gcc $arm-objdump; do
    if ! command -v $tool >/dev/null; then
        echo "arm.sh: no $tool: apt install qemu-user-static gcc-$arm binutils-$arm" >&2
        exit 1
    fi
done

# Into a folder of its own: the system's package lists stay as they are.
if [ ! -e "$folder/.made" ]; then
    state=$folder/apt
    mkdir -p "$state"/{state/lists/partial,cache/archives/partial,packages} "$root" "$wheels"
    touch "$state/status"
    apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64
        -o "Dir::State=$state/state" -o "Dir::State::status=$state/status"
        -o "Dir::Cache=$state/cache" -o APT::Sandbox::User=root)
    "${apt[@]}" update
    (cd "$state/packages" && "${apt[@]}" download libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 \
        libffi8 libssl3 libbz2-1.0 liblzma5 libuuid1 \
        python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
    for package in "$state"/packages/*.deb; do
        dpkg -x "$package" "$root"
    done
    "$bin/python" -m pip --disable-pip-version-check --quiet download --no-deps --dest "$wheels" \
        --only-binary=:all: --python-version 3.11 --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 numpy mpi4py mpich
    for wheel in "$wheels"/*.whl; do
        "$bin/python" -m zipfile -e "$wheel" "$folder/site"
    done
    touch "$folder/.made"
fi
mpi=$(echo "$folder"/site/mpich-*.data/data)

rm -rf build/arm && mkdir -p build/arm
if [[ -n $of_wheel ]]; then
    "$bin/python" -m zipfile -e "$of_wheel"/mpiddp-*-cp311-*aarch64.whl build/arm
else
    # The C files do not depend on the machine.
    generated=$(ls -td build/python-*/cython-*/cython | head -n 1)
    cp -r mpiddp build/arm/
    include=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    folders=$(find cython -mindepth 1 -maxdepth 1 -type d -printf '-I%p ')
    export arm generated modules include folders
    compile() {
        local name=${1#"$generated"/}
        # shellcheck disable=SC2086
        $arm-gcc -std=gnu11 -O3 -fno-math-errno -ffp-contract=off -pthread -shared -fPIC -w \
            -I"$include" -Icython $folders "$1" \
            -o "$modules/${name%.c}.cpython-311-aarch64-linux-gnu.so"
    }
    export -f compile
    find "$generated" -name '*.c' | xargs -P "$(nproc)" -I{} bash -c 'compile {}'
    $arm-gcc -std=gnu11 -O2 -shared -fPIC -I"$mpi/include" cython/mpi/binary_interface.c \
        -o "$modules/mpi/calls-mpich.so"
fi

# A round is begun by a store that releases, and looked at by a load that acquires.
while read -r module instruction; do
    if ! $arm-objdump -d "$modules/$module".*.so | grep -w "$instruction" >/dev/null; then
        echo "arm.sh: no $instruction in $module, where ranks meet" >&2
        exit 1
    fi
done <<EOF
collectives/memory_jobs stlr
transports/shared ldar
EOF

cat >build/arm/python <<EOF
#!/bin/sh
exec qemu-aarch64-static -L $root -E LD_LIBRARY_PATH=$mpi/lib -E PYTHONPATH=$folder/site \\
    -E MPI4PY_LIBMPI=$mpi/lib/libmpi.so.12 $root/usr/bin/python3.11 "\$@"
EOF
chmod +x build/arm/python
export MPIR_CVAR_CH4_CMA_ENABLE=0 # qemu cannot read another process's memory
for ranks in 2 3 4; do
    timeout -k 5 400 "$bin/mpiexec" -n $ranks build/arm/python tests/scripts/memory_on_arm.py \
        "$PWD/build/arm/mpiddp"
done
