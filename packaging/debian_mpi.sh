#!/usr/bin/env bash
# Let an environment use one of Debian's MPIs: its programs, its library, and an mpi4py for it.
#
#   packaging/debian_mpi.sh BIN NAME CONSTRAINTS
#   packaging/debian_mpi.sh --install
#
# The second form installs the packages of both, as root. BIN is that of the environment, NAME is
# openmpi or mpich. Both may be installed in /usr, where only one of them has the plain names. mpi4py's wheel looks for the library beside Python, and takes the one
# of Open MPI there; Debian's MPICH has another name than the wheel needs, so mpi4py is compiled.
set -euo pipefail

if [[ ${1:-} == --install ]]; then
    export DEBIAN_FRONTEND=noninteractive
    packages=(openmpi-bin libopenmpi-dev mpich libmpich-dev)
    apt-get install -y -qq --no-install-recommends "${packages[@]}" ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${packages[@]}"; }
    exit
fi

bin=$1 name=$2 constraints=$3
case $name in
openmpi) packages="openmpi-bin libopenmpi-dev" ;;
mpich) packages="mpich libmpich-dev" ;;
*)
    echo "debian_mpi.sh: there is no Debian MPI $name, only openmpi and mpich" >&2
    exit 1
    ;;
esac
if ! command -v "mpicc.$name" "mpirun.$name" >/dev/null; then
    echo "Debian's MPI $name is not installed: apt-get install $packages" >&2
    exit 1
fi

for program in mpicc mpirun mpiexec; do
    printf '#!/bin/sh\nexec /usr/bin/%s.%s "$@"\n' $program "$name" >"$bin/$program"
    chmod +x "$bin/$program"
done
pip=("$bin/python" -m pip --disable-pip-version-check --quiet)
if [[ $name == openmpi ]]; then
    ln -sf "/usr/lib/$(gcc -print-multiarch)/libmpi.so.40" "$bin/../lib/libmpi.so.40"
    "${pip[@]}" install -c "$constraints" --no-deps mpi4py
else
    # Compiled once for all environments. Not in pip's cache, which mixes those of several MPIs.
    compiled=${XDG_CACHE_HOME:-$HOME/.cache}/mpiddp/mpi4py-for-debian-$name
    python=$("$bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    version=$(sed -n 's/^mpi4py==//p' "$constraints")
    if ! compgen -G "$compiled/mpi4py-$version-$python-*.whl" >/dev/null; then
        MPICC=$(realpath "$bin/mpicc") "${pip[@]}" wheel -c "$constraints" --no-deps --no-cache-dir \
            --no-binary=mpi4py -w "$compiled" mpi4py
    fi
    "${pip[@]}" install --force-reinstall --no-deps "$compiled/mpi4py-$version-$python"-*.whl
fi
