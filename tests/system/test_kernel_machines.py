"""The kernels compiled by other compilers and for other machines give the same bits.

A small C program runs all operations of all kernels that its processor has and prints a
checksum of each; foreign ones run under QEMU. What is not installed is skipped (Debian:
gcc-aarch64-linux-gnu or gcc-powerpc64le-linux-gnu, with libc6-dev-arm64-cross or
libc6-dev-ppc64el-cross, and qemu-user).
"""

import shutil
import subprocess
from pathlib import Path

import pytest

HEADERS = Path(__file__).parents[2] / "cython" / "system"

pytestmark = [pytest.mark.once, pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = r"""
#include <stdio.h>
#include "kernels.h"

enum { COUNT = 3 * 4099, RANKS = 9, TYPES = 4 };
static uint64_t memory[RANKS + 1][COUNT + 1], scaled[COUNT + 1];
static uint64_t hash, state;

static uint64_t draw(void)      /* xorshift */
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

/* Numbers near 1 and any bits at all; of 16-bit floats any bits, and the smallest ones. */
static void fill(int element, void *out, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = draw();
        float near = (float)(int64_t)bits * 0x1p-62f;
        if (element == MPIDDP_FLOAT32)
            ((uint32_t *)out)[i] = i % 3 ? mpiddp_float_bits(near) : (uint32_t)(bits >> 32);
        else if (element == MPIDDP_FLOAT64 && i % 3)
            ((double *)out)[i] = near;
        else if (element == MPIDDP_FLOAT64)
            ((uint64_t *)out)[i] = bits;
        else
            ((uint16_t *)out)[i] = (uint16_t)(i % 3 ? bits >> 48 : i / 3);
    }
}

/* All NaN count as the same. */
static void add(int element, const void *in, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t bits, infinity;
        if (element == MPIDDP_FLOAT32) {
            bits = ((const uint32_t *)in)[i];
            infinity = 0x7f800000u;
            bits = (bits & 0x7fffffffu) > infinity ? infinity + 1 : bits;
        } else if (element == MPIDDP_FLOAT64) {
            bits = ((const uint64_t *)in)[i];
            infinity = 0x7ff0000000000000u;
            bits = (bits & 0x7fffffffffffffffu) > infinity ? infinity + 1 : bits;
        } else {
            bits = ((const uint16_t *)in)[i];
            infinity = element == MPIDDP_FLOAT16 ? 0x7c00u : 0x7f80u;
            bits = (bits & 0x7fffu) > infinity ? infinity + 1 : bits;
        }
        hash = (hash ^ bits) * 0x100000001b3u;
    }
}

int main(void)
{
    const struct mpiddp_kernels *tables[MPIDDP_MAX_KERNELS];
    const double divisors[] = {1, 2, 3, 7, 16};
    const size_t available = mpiddp_available_kernels(tables);
    char *buffers[RANKS];
    for (size_t i = 0; i < RANKS; i++)
        buffers[i] = (char *)memory[i];
    for (size_t table = 0; table < available; table++) {
        const struct mpiddp_kernels *kernels = tables[table];
        hash = 0xcbf29ce484222325u;
        state = 88172645463325252u;
        for (int from = 0; from < TYPES; from++) {
            int wide = from == MPIDDP_FLOAT64 ? MPIDDP_FLOAT64 : MPIDDP_FLOAT32;
            for (int to = 0; to < TYPES; to++) {
                fill(from, memory[0], COUNT);
                kernels->convert(to, from, memory[1], memory[0], COUNT);
                add(to, memory[1], COUNT);
            }
            for (size_t ranks = 1; ranks <= RANKS; ranks++)
                for (size_t i = 0; i < sizeof divisors / sizeof *divisors; i++) {
                    size_t first = draw() % 18, count = COUNT - draw() % 40 - first;
                    for (size_t rank = 0; rank < ranks; rank++)
                        fill(from, buffers[rank], COUNT);
                    kernels->sum_to(from, memory[RANKS], buffers, ranks, first, count);
                    add(wide, memory[RANKS], count);
                    kernels->mean_in_place(from, buffers, ranks, first, count, divisors[i]);
                    for (size_t rank = 0; rank < ranks; rank++)
                        add(from, buffers[rank], COUNT);
                    kernels->scaled_sum_to(
                        from, scaled, buffers, ranks, first, count, divisors[i]);
                    add(wide, scaled, count);
                    fill(wide, memory[RANKS], COUNT);
                    hash ^= kernels->spread_mean(
                        from, buffers, ranks, first, count, memory[RANKS], divisors[i]);
                    for (size_t rank = 0; rank < ranks; rank++)
                        add(from, buffers[rank], COUNT);
                    kernels->spread_scaled_mean(
                        from, buffers, ranks, first, count, memory[RANKS], scaled, divisors[i]);
                    for (size_t rank = 0; rank < ranks; rank++)
                        add(from, buffers[rank], COUNT);
                }
        }
        printf("%s %016llx\n", kernels->name, (unsigned long long)hash);
    }
    return 0;
}
"""


def checksums(
    folder: Path, compiler: str, *options: str, emulator: str | None = None
) -> dict[str, str]:
    """Compile the program, without a warning, and return what each kernels' results come to."""
    for tool in (compiler, emulator):
        if tool is not None and shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    source = folder / "program.c"
    source.write_text(PROGRAM)
    program = folder / "program"
    # As in setup.py. Memory holds one type after another here, unlike in a bucket.
    flags = ["-std=gnu11", "-fno-math-errno", "-ffp-contract=off", "-fno-strict-aliasing"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = [compiler, *flags, *warnings, *options, f"-I{HEADERS}", source, "-o", program]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    start = [program] if emulator is None else [emulator, program]
    done = subprocess.run(start, capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the checksum of plain C on this machine, not optimised."""
    return checksums(tmp_path_factory.mktemp("expected"), "cc", "-O0")["plain"]


def test_here(tmp_path: Path, expected: str) -> None:
    assert set(checksums(tmp_path, "cc", "-O3").values()) == {expected}


def test_clang(tmp_path: Path, expected: str) -> None:
    clang = next((name for name in ("clang", "clang-14") if shutil.which(name)), "clang")
    assert set(checksums(tmp_path, clang, "-O3").values()) == {expected}


def test_arm(tmp_path: Path, expected: str) -> None:
    results = checksums(
        tmp_path, "aarch64-linux-gnu-gcc", "-O3", "-static", emulator="qemu-aarch64"
    )
    assert results == {"plain": expected, "neon": expected}


def test_power(tmp_path: Path, expected: str) -> None:
    results = checksums(
        tmp_path, "powerpc64le-linux-gnu-gcc", "-O3", "-static", emulator="qemu-ppc64le"
    )
    assert results == {"plain": expected}
