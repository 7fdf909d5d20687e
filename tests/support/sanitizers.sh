#!/usr/bin/env bash
# Compile the package with the sanitizers of addresses and of undefined behaviour, in a copy, and run
# tests on 2 ranks with them.
#
#     sanitizers.sh BIN [arguments of pytest]
#
# BIN is the bin folder of an environment of the Makefile. A report in which the package has a part is
# shown and is an error; those of other libraries alone are not ours. Not the sanitizer of threads:
# ranks crash in MPI_Init with it, on both MPIs.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
bin=$(realpath "$1")
shift

folder=$root/build/sanitizers/$(basename "$(dirname "$bin")")
runtime=$(gcc -print-file-name=libasan.so)
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
sanitize="-fsanitize=address,undefined -fno-omit-frame-pointer -g"
# After the flags of setup.py, of which it would take -O3: that takes longer than all tests.
cat >"$folder/mpicc" <<END
#!/bin/sh
exec "$bin/mpicc" "\$@" $sanitize -O1
END
chmod +x "$folder/mpicc"
(
    cd "$folder/source"
    MPICC=$folder/mpicc PATH=$bin:$PATH "$bin/python" -m pip install \
        --disable-pip-version-check --quiet --no-deps --no-build-isolation --upgrade \
        --target "$folder/site" .
)

# Python, torch and the MPI are not compiled with it: what they never free is not ours.
common=log_path=$folder/reports/report:exitcode=0
export ASAN_OPTIONS=$common:detect_leaks=0:detect_odr_violation=0:handle_segv=0
export UBSAN_OPTIONS=$common:print_stacktrace=1
export PYTHONPATH=$folder/site:$root/tests/support

cd tests/support
output=$folder/output
timeout -k 5 1500 "$bin/mpirun" -n 2 env LD_PRELOAD="$runtime" \
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
echo "no report of the sanitizers"
