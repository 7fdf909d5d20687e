#!/usr/bin/env bash
# Build an MPI that takes pointers into the memory of NVIDIA GPUs, from Debian's source package:
#
#     benchmarks/cuda_mpi.sh mpich PREFIX      # for the transports "device" and "ring"
#     benchmarks/cuda_mpi.sh openmpi PREFIX    # for "ring"
#     PATH=PREFIX/bin:$PATH make test-gpu PYTHON=...    # no MPI's wheel in build/wheels then
#
# It needs a C and a C++ compiler, CUDA's toolkit (for openmpi its headers are enough) and Debian's
# apt, or the upstream archive in $SOURCE; no GPU and no driver. What is called a second time goes
# on where it was interrupted. PREFIX has to stay where it is.
#
# CUDA=/usr/local/cuda  CUDA_ARCHITECTURE=90  JOBS=all cores  WORK=build/cuda-mpi  SOURCE=archive
#
# CUDA_ARCHITECTURE is that of the GPU (`nvidia-smi --query-gpu=compute_cap --format=csv`, without
# the point): MPICH's kernels for data types are compiled for that one alone, and only those for
# types that are not nested. All of them would take nvcc 20 minutes of one core, these take five.
# Leave CUDA where it is: libmpi looks for libcudart there.
#
# How far it has been run: both to their ends, with the compiler and headers of CUDA 13.0 from PyPI
# (nvidia-cuda-nvcc, -crt, -runtime, -cccl, nvidia-nvvm) and without a GPU; benchmarks/README.md has
# times, and what was run on them. Nothing has been on a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "cuda_mpi.sh: $*" >&2; exit 1; }

[ $# = 2 ] || die "usage: benchmarks/cuda_mpi.sh mpich|openmpi PREFIX"
mpi=$1
mkdir -p "$2"
prefix=$(realpath "$2")
CUDA=${CUDA:-/usr/local/cuda}
CUDA_ARCHITECTURE=${CUDA_ARCHITECTURE:-90}
JOBS=${JOBS:-$(nproc)}
WORK=${WORK:-build/cuda-mpi}
SOURCE=${SOURCE:-}
SUITE=bookworm
[ -f "$CUDA/include/cuda.h" ] || die "there are no headers of CUDA in $CUDA: set CUDA"
case $mpi in
    mpich | openmpi) ;;
    *) die "there is no $mpi: mpich or openmpi" ;;
esac
mkdir -p "$WORK"
WORK=$(realpath "$WORK")

# Put the upstream archive of a source package into $WORK, with lists of packages of its own.
fetch() {
    local keys=/usr/share/keyrings/debian-archive-keyring.gpg
    command -v apt-get >/dev/null || die "there is no apt-get: set SOURCE to the archive of $mpi"
    mkdir -p "$WORK/lists/partial"
    echo "deb-src [signed-by=$keys] http://deb.debian.org/debian $SUITE main" >"$WORK/sources.list"
    local options=(
        -o "Dir::Etc::SourceList=$WORK/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$WORK/lists"
    )
    apt-get "${options[@]}" update
    (cd "$WORK" && apt-get "${options[@]}" source --download-only "$mpi")
}

# Upstream's archive and not the patched package, which would need autotools.
if [ ! -f "$WORK/$mpi/configure" ]; then
    if [ -z "$SOURCE" ]; then
        fetch
        SOURCE=$(echo "$WORK/$mpi"_*.orig.tar.xz)
    fi
    rm -rf "$WORK/$mpi.new" && mkdir "$WORK/$mpi.new"
    tar -xf "$SOURCE" -C "$WORK/$mpi.new" --strip-components=1
    mv "$WORK/$mpi.new" "$WORK/$mpi"
fi

# MPICH links libcuda, which comes with the driver. One with the functions that it looks for stands
# in for it while MPICH is built; the driver's own has the same name.
make_driver_library() {
    mkdir -p "$WORK/driver"
    cat >"$WORK/driver/cuda.c" <<'END'
int cuMemGetAddressRange(void) { return 100; }
int cuMemGetAddressRange_v2(void) { return 100; }
int cuPointerGetAttribute(void) { return 100; }
END
    "${CC:-cc}" -shared -fPIC -Wl,-soname,libcuda.so.1 \
        -o "$WORK/driver/libcuda.so.1" "$WORK/driver/cuda.c"
    ln -sf libcuda.so.1 "$WORK/driver/libcuda.so"
}

# Leave out what takes the compilers longest, and what only a machine for development has.
prepare_mpich() {
    [ -f prepared ] && return
    local backend lists=modules/yaksa/src/backend
    # Kernels for nested data types: gradients are of none. The lists of files stay the same, and
    # must stay as old as they are, or make would want automake.
    [ -f lists.tar ] || tar -cf lists.tar "$lists"/{seq,cuda}/pup/*.mk
    for backend in seq cuda; do
        (cd modules/yaksa && PYTHONPATH=maint:src/backend python3 \
            "src/backend/$backend/genpup.py" --pup-max-nesting=1)
    done
    tar -xf lists.tar
    local kinds='(hvector|blkhindx|hindexed|contig|resized)'
    find modules/yaksa/src/backend/{seq,cuda}/pup -regextype posix-extended \
        -regex ".*_pup_${kinds}_${kinds}_.*\.cu?" -exec truncate -s 0 {} +
    # Their tables name them all the same; without a kernel yaksa copies piece by piece.
    find modules/yaksa/src/backend/{seq,cuda}/pup -regextype posix-extended \
        -regex ".*_populate_pupfns_${kinds}_${kinds}\.c" \
        -exec sed -i -E 's/(seq|cuda)->(pack|unpack|name) = .*;/;/' {} +
    # Each kernel once, and not again for a static library; without a libtool on PATH.
    # shellcheck disable=SC2016
    sed -i 's|^CMD="${@} -o $NPIC_FILEPATH"|CMD="cp $PIC_FILEPATH $NPIC_FILEPATH"|
        s/^LIBTOOL_VERSION=.*/LIBTOOL_VERSION=libtool/' modules/yaksa/src/backend/cuda/cudalt.sh
    # The driver brings this name; the other one is often missing in containers.
    sed -i 's/"libcuda\.so"/"libcuda.so.1"/' src/mpl/src/gpu/mpl_gpu_cuda.c
    # A member that the struct has no more in CUDA 13.
    sed -i 's/struct cudaDeviceProp prop;/int mode;/
        s/cudaGetDeviceProperties(&prop, i)/cudaDeviceGetAttribute(\&mode, cudaDevAttrComputeMode, i)/
        s/prop\.computeMode/mode/' modules/yaksa/src/backend/cuda/hooks/yaksuri_cuda_init_hooks.c
    touch prepared
}

configure_mpich() {
    command -v "$CUDA/bin/nvcc" >/dev/null || die "there is no nvcc in $CUDA/bin"
    local providers=() provider
    for provider in psm psm2 verbs usnic gni bgq udp rxd shm mlx perf rstream mrail efa netdir \
        sockets; do
        providers+=("--disable-$provider")
    done
    ./configure --prefix="$prefix" --with-device=ch4:ofi --with-libfabric=embedded \
        --with-hwloc=embedded --enable-tcp --enable-rxm "${providers[@]}" \
        --with-cuda="$CUDA" --with-cuda-sm="$CUDA_ARCHITECTURE" \
        --disable-fortran --disable-cxx --disable-static --disable-doc \
        CFLAGS=-O2 LDFLAGS="-L$WORK/driver -L$CUDA/lib64 -Wl,-rpath,$CUDA/lib64"
}

# It looks for the driver at run time.
configure_openmpi() {
    ./configure --prefix="$prefix" --with-cuda="$CUDA" --enable-mpi-fortran=no --disable-oshmem \
        --disable-static --without-verbs --without-ucx --without-ofi \
        --without-psm2 --without-slurm --with-hwloc=internal --with-libevent=internal \
        --with-pmix=internal --enable-mca-no-build=io-romio321,coll-hcoll,btl-uct,btl-usnic \
        CFLAGS=-O2
}

cd "$WORK/$mpi"
if [ "$mpi" = mpich ]; then
    make_driver_library
    # Programs are linked, and those of configure run, without a driver.
    export LD_LIBRARY_PATH=$WORK/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    prepare_mpich
fi
[ -f configured ] || { "configure_$mpi"; touch configured; }
make -j "$JOBS"
make -j "$JOBS" install

# What can be said without a GPU.
symbol=MPIX_Query_cuda_support
[[ "$(nm -D --defined-only "$prefix/lib/libmpi.so")" =~ " "[TW]" "$symbol($|[[:space:]]) ]] ||
    die "no $symbol in libmpi"
echo "cuda_mpi.sh: $mpi with CUDA is in $prefix"
