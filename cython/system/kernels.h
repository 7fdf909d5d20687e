/* SIMD loops over arrays of gradients: sum, mean, conversion. One table for each machine.
 *
 * mpiddp_available_kernels() lists the tables that this processor can run, the best
 * one last. All give the same bits, those of plain C, except that a NaN may be any
 * NaN: kernels_loops.h and kernels_variant.h are compiled once for each machine, and
 * only float16 needs instructions that compilers do not find by themselves.
 *
 * No loop here may reorder a sum, contract an addition and a multiplication or lose a
 * NaN: never compile this with -ffast-math, always with -ffp-contract=off. Sums are
 * divided: the mean is then the correctly rounded quotient, and equal operands give
 * back their own bits. They are multiplied by the reciprocal only where that is exact.
 */
#ifndef MPIDDP_KERNELS_H
#define MPIDDP_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels_values.h"

/* As ElementType in kernels.pxd. */
enum { MPIDDP_FLOAT32 = 0, MPIDDP_FLOAT64 = 1, MPIDDP_FLOAT16 = 2, MPIDDP_BFLOAT16 = 3 };

/* kernels.pxd says what each operation does. */
struct mpiddp_kernels {
    const char *name;
    void (*mean_in_place)(int, char *const *, size_t, size_t, size_t, double);
    void (*sum_to)(int, void *, char *const *, size_t, size_t, size_t);
    size_t (*spread_mean)(int, char *const *, size_t, size_t, size_t, const void *, double);
    void (*scaled_sum_to)(int, void *, char *const *, size_t, size_t, size_t, double);
    void (*spread_scaled_mean)(
        int, char *const *, size_t, size_t, size_t, const void *, const void *, double);
    void (*mean_to)(int, void *, char *const *, size_t, size_t, size_t, double);
    void (*scaled_sum_as_element)(int, void *, char *const *, size_t, size_t, size_t, double);
    int (*are_finite)(int, const void *, size_t);
    void (*replace_special)(int, void *, const void *, size_t);
    void (*convert)(int, int, void *, const void *, size_t);
};

/* How many sums a block holds: 4 or 8 KB; the L1 cache has 32 or more. */
#define MPIDDP_BLOCK ((size_t)1024)

enum mpiddp_role {
    MPIDDP_SUM,         /* of buffers, to an array of sums */
    MPIDDP_ADD,         /* buffers to such an array */
    MPIDDP_MEAN,        /* of buffers, to the same buffers */
    MPIDDP_STORE_MEAN   /* of an array of sums, to one buffer */
};

#if defined(__GNUC__)
#define MPIDDP_NOINLINE __attribute__((noinline, unused))
#else
#define MPIDDP_NOINLINE
#endif

/* Before a loop whose arrays never overlap: GCC only respects `restrict` on
 * arguments. */
#if defined(__GNUC__) && !defined(__clang__)
#define MPIDDP_INDEPENDENT _Pragma("GCC ivdep")
#else
#define MPIDDP_INDEPENDENT
#endif

MPIDDP_INLINE size_t mpiddp_element_bytes(int element)
{
    return element == MPIDDP_FLOAT32 ? 4 : element == MPIDDP_FLOAT64 ? 8 : 2;
}

/* Functions for better processors than the one that the compiler targets. Intel's
 * old compiler and NVIDIA's call themselves GNU without supporting all of this. */
#if defined(__x86_64__) && defined(__GNUC__) && defined(__has_attribute) \
    && !defined(__INTEL_COMPILER) && !defined(__PGI) && !defined(__NVCOMPILER)
#if __has_attribute(target)
#define MPIDDP_X86 1
#endif
#endif

#if defined(__aarch64__) && defined(__GNUC__) && defined(__ARM_NEON) && !defined(__NVCOMPILER)
#define MPIDDP_NEON 1
#endif

/* Note [State of the floating-point unit]
 * A kernel runs on whichever thread comes first, and must give the same bits on each:
 * subnormal numbers count and rounding is to nearest, whatever the thread's settings
 * are (torch.set_flush_denormal). Those are restored afterwards. */
#if defined(MPIDDP_X86)
#include <cpuid.h>
#include <immintrin.h>
typedef unsigned int mpiddp_float_state;

MPIDDP_INLINE mpiddp_float_state mpiddp_set_float_state(void)
{
    mpiddp_float_state before = _mm_getcsr();
    if ((before & 0xffc0u) != 0x1f80u)
        _mm_setcsr(0x1f80u);
    return before;
}

MPIDDP_INLINE void mpiddp_reset_float_state(mpiddp_float_state before)
{
    if ((before & 0xffc0u) != 0x1f80u)
        _mm_setcsr(before);
}
#elif defined(MPIDDP_NEON)
#include <arm_neon.h>
typedef uint64_t mpiddp_float_state;

MPIDDP_INLINE mpiddp_float_state mpiddp_set_float_state(void)
{
    mpiddp_float_state before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before) : : "memory");
    if (before != 0)
        __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return before;
}

MPIDDP_INLINE void mpiddp_reset_float_state(mpiddp_float_state before)
{
    if (before != 0)
        __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory");
}
#else
typedef int mpiddp_float_state;

MPIDDP_INLINE mpiddp_float_state mpiddp_set_float_state(void)
{
    return 0;
}

MPIDDP_INLINE void mpiddp_reset_float_state(mpiddp_float_state before)
{
    (void)before;
}
#endif

#define VARIANT plain
#define TARGET
#include "kernels_variant.h"

#if defined(MPIDDP_X86)
#include "kernels_x86.h"
#elif defined(MPIDDP_NEON)
#include "kernels_neon.h"
#endif

/* Every x86-64 has these stores. They are combined to whole lines before they leave the core, so
 * wider ones are no faster. */
static inline void mpiddp_copy_past_cache(void *to, const void *from, size_t bytes)
{
#if defined(MPIDDP_X86)
    char *out = (char *)to;
    const char *in = (const char *)from;
    size_t head = -(uintptr_t)out % 64;
    if (bytes >= 128) {
        memcpy(out, in, head);
        for (out += head, in += head, bytes -= head; bytes >= 64; bytes -= 64) {
            for (int i = 0; i < 4; i++)
                _mm_stream_si128((__m128i *)out + i, _mm_loadu_si128((const __m128i *)in + i));
            out += 64;
            in += 64;
        }
        /* Other threads must see them before what says that the copy is there. */
        _mm_sfence();
    }
    memcpy(out, in, bytes);
#else
    memcpy(to, from, bytes);
#endif
}

#define MPIDDP_MAX_KERNELS 3

/* Write the tables that this processor can run to `tables`, and return how many. */
static inline size_t mpiddp_available_kernels(const struct mpiddp_kernels **tables)
{
    size_t count = 0;
    tables[count++] = &mpiddp_kernels_of_plain;
#if defined(MPIDDP_X86)
    if (mpiddp_has_avx2())
        tables[count++] = &mpiddp_kernels_of_avx2;
    if (mpiddp_has_avx512())
        tables[count++] = &mpiddp_kernels_of_avx512;
#elif defined(MPIDDP_NEON)
    tables[count++] = &mpiddp_kernels_of_neon;
#endif
    return count;
}

#endif
