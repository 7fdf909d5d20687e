#!/usr/bin/env bash
# Compile the package with sanitizers of gcc, in a copy, and run tests on 2 ranks with them.
#
#     sanitizers.sh KIND BIN [arguments of pytest]
#
# KIND is `memory` (the sanitizers of addresses and of undefined behaviour) or `threads`. BIN is the bin
# folder of an environment of the Makefile. A report in which the package has a part is shown and is an
# error; those of other libraries alone are not ours.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
kind=$1
bin=$(realpath "$2")
shift 2

folder=$root/build/sanitizers/$kind/$(basename "$(dirname "$bin")")
reports=$folder/reports/report
case $kind in
memory)
    library=libasan.so
    sanitize="-fsanitize=address,undefined"
    # Python, torch and the MPI are not compiled with it: what they never free is not ours.
    export ASAN_OPTIONS=log_path=$reports:exitcode=0:detect_leaks=0:detect_odr_violation=0:handle_segv=0
    export UBSAN_OPTIONS=log_path=$reports:exitcode=0:print_stacktrace=1
    start=()
    ;;
threads)
    library=libtsan.so
    sanitize="-fsanitize=thread"
    # Of libraries that are not compiled with it, it sees how they synchronise, and not their other
    # accesses. A signal's handler of ours writes a file, which it would report.
    export TSAN_OPTIONS=log_path=$reports:exitcode=0:ignore_noninstrumented_modules=1
    TSAN_OPTIONS+=:report_signal_unsafe=0:detect_deadlocks=0:history_size=4
    # It needs addresses that are not random, and functions of memory that nobody else replaces; and
    # a place in memory that PMIx asks for is its own.
    export OMPI_MCA_memory=^patcher UCX_MEM_EVENTS=n PMIX_MCA_gds=hash
    start=(setarch -R)
    ;;
*)
    echo "sanitizers.sh: there is no kind $kind, only memory and threads" >&2
    exit 1
    ;;
esac
runtime=$(gcc -print-file-name=$library)
[[ -e $runtime ]] || {
    echo "sanitizers.sh: gcc has no $runtime (Debian: libgcc-12-dev has it)" >&2
    exit 1
}
rm -rf "$folder/reports"
mkdir -p "$folder/source" "$folder/reports"

# Only what has changed, so that only that is compiled again.
git ls-files -z --cached --others --exclude-standard -- \
    setup.py pyproject.toml README.md LICENSE mpiddp cython |
    while IFS= read -r -d '' file; do
        if [[ -e $file ]] && ! cmp -s "$file" "$folder/source/$file"; then
            mkdir -p "$folder/source/$(dirname "$file")"
            cp "$file" "$folder/source/$file"
        fi
    done
# After the flags of setup.py, of which it would take -O3: that takes longer than all tests.
for compiler in gcc "$bin/mpicc"; do
    cat >"$folder/$(basename "$compiler")" <<END
#!/bin/sh
exec "$compiler" "\$@" $sanitize -fno-omit-frame-pointer -g -O1
END
    chmod +x "$folder/$(basename "$compiler")"
done
(
    cd "$folder/source"
    CC=$folder/gcc MPICC=$folder/mpicc PATH=$bin:$PATH "$bin/python" -m pip install \
        --disable-pip-version-check --quiet --no-deps --no-build-isolation --upgrade \
        --target "$folder/site" .
)

export PYTHONPATH=$folder/site:$root/tests/support

cd tests/support
output=$folder/output
timeout -k 5 1500 "$bin/mpirun" -n 2 env LD_PRELOAD="$runtime" "${start[@]}" \
    "$bin/python" -m mpi4py -m pytest -c "$root/pyproject.toml" -q --color=no --with-mpi --only-mpi -m mpi "$@" |
    tee "$output" || true # a report ends a rank, and is shown below
grep -q " passed" "$output" || {
    cat "$folder"/reports/* >&2
    echo "sanitizers.sh: the tests did not run" >&2
    exit 1
}

found=$(grep -l "$folder/site\|mpiddp" "$folder"/reports/* 2>/dev/null || true)
if [[ -n $found ]]; then
    # shellcheck disable=SC2086
    head -n 60 $found
    echo "sanitizers.sh: $(wc -w <<<"$found") files of reports in $folder/reports" >&2
    exit 1
fi
echo "no report of the sanitizers ($kind)"
