/* The kernels for x86-64: AVX2 with F16C, and AVX-512.
 *
 * Note [Pairs of bfloat16 vectors]
 * To widen bfloat16 is to put zeros below it. The instructions that interleave two
 * vectors do that in one step, but separately in each 128 bits: the resulting pair has
 * its elements in another order. That does not matter to sums, and packing the pair
 * restores the order. Only loads and stores of sums have to restore it themselves.
 */

#define VARIANT avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define FLOAT16_VECTOR __m256
#define FLOAT16_LANES 8
#define FLOAT16_LOAD(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define FLOAT16_STORE(p, v) \
    _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define FLOAT16_LOAD_SUM(p) _mm256_loadu_ps(p)
#define FLOAT16_STORE_SUM(p, v) _mm256_storeu_ps(p, v)
#define FLOAT16_ADD(v, w) _mm256_add_ps(v, w)
#define FLOAT16_MULTIPLY(v, sum) _mm256_mul_ps(v, _mm256_set1_ps(sum))
#define FLOAT16_DIVIDE(v, sum) _mm256_div_ps(v, _mm256_set1_ps(sum))
#define BFLOAT16_VECTOR mpiddp_pair_avx2
#define BFLOAT16_LANES 16
#define BFLOAT16_LOAD(p) mpiddp_load_bfloat16_avx2(p)
#define BFLOAT16_STORE(p, v) mpiddp_store_bfloat16_avx2(p, v)
#define BFLOAT16_LOAD_SUM(p) mpiddp_load_pair_avx2(p)
#define BFLOAT16_STORE_SUM(p, v) mpiddp_store_pair_avx2(p, v)
#define BFLOAT16_ADD(v, w) mpiddp_add_pairs_avx2(v, w)
#define BFLOAT16_MULTIPLY(v, sum) mpiddp_multiply_pair_avx2(v, sum)
#define BFLOAT16_DIVIDE(v, sum) mpiddp_divide_pair_avx2(v, sum)
#define BFLOAT16_SPREAD(sum) mpiddp_spread_pair_avx2(sum)
#define BFLOAT16_DIVIDE_EACH(v, w) mpiddp_divide_pairs_avx2(v, w)
#define BFLOAT16_CHOOSE(s, v, w) mpiddp_choose_pair_avx2(s, v, w)

typedef struct {
    __m256 low, high;
} mpiddp_pair_avx2;

MPIDDP_INLINE TARGET mpiddp_pair_avx2 mpiddp_load_bfloat16_avx2(const uint16_t *p)
{
    const __m256i zero = _mm256_setzero_si256();
    const __m256i halves = _mm256_loadu_si256((const __m256i *)p);
    mpiddp_pair_avx2 pair;
    pair.low = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, halves));
    pair.high = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, halves));
    return pair;
}

/* The rounded numbers, in 32 bits each. */
MPIDDP_INLINE TARGET __m256i mpiddp_round_to_bfloat16_avx2(__m256 value)
{
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_add_epi32(bits, half);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    return _mm256_srli_epi32(
        _mm256_castps_si256(_mm256_blendv_ps(
            _mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan)),
        16);
}

MPIDDP_INLINE TARGET void mpiddp_store_bfloat16_avx2(uint16_t *p, mpiddp_pair_avx2 pair)
{
    _mm256_storeu_si256(
        (__m256i *)p, _mm256_packus_epi32(mpiddp_round_to_bfloat16_avx2(pair.low),
                                       mpiddp_round_to_bfloat16_avx2(pair.high)));
}

MPIDDP_INLINE TARGET mpiddp_pair_avx2 mpiddp_add_pairs_avx2(
    mpiddp_pair_avx2 a, mpiddp_pair_avx2 b)
{
    a.low = _mm256_add_ps(a.low, b.low);
    a.high = _mm256_add_ps(a.high, b.high);
    return a;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx2 mpiddp_multiply_pair_avx2(
    mpiddp_pair_avx2 pair, float factor)
{
    pair.low = _mm256_mul_ps(pair.low, _mm256_set1_ps(factor));
    pair.high = _mm256_mul_ps(pair.high, _mm256_set1_ps(factor));
    return pair;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx2 mpiddp_divide_pair_avx2(
    mpiddp_pair_avx2 pair, float divisor)
{
    pair.low = _mm256_div_ps(pair.low, _mm256_set1_ps(divisor));
    pair.high = _mm256_div_ps(pair.high, _mm256_set1_ps(divisor));
    return pair;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx2 mpiddp_spread_pair_avx2(float sum)
{
    mpiddp_pair_avx2 pair;
    pair.low = pair.high = _mm256_set1_ps(sum);
    return pair;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx2 mpiddp_divide_pairs_avx2(
    mpiddp_pair_avx2 a, mpiddp_pair_avx2 b)
{
    a.low = _mm256_div_ps(a.low, b.low);
    a.high = _mm256_div_ps(a.high, b.high);
    return a;
}

MPIDDP_INLINE TARGET __m256 mpiddp_choose_avx2(__m256 sum, __m256 v, __m256 w)
{
    /* Zero times the sum is NaN where the sum is not finite. */
    const __m256 zero = _mm256_mul_ps(sum, _mm256_setzero_ps());
    return _mm256_blendv_ps(v, w, _mm256_cmp_ps(zero, zero, _CMP_UNORD_Q));
}

MPIDDP_INLINE TARGET mpiddp_pair_avx2 mpiddp_choose_pair_avx2(
    mpiddp_pair_avx2 sum, mpiddp_pair_avx2 v, mpiddp_pair_avx2 w)
{
    v.low = mpiddp_choose_avx2(sum.low, v.low, w.low);
    v.high = mpiddp_choose_avx2(sum.high, v.high, w.high);
    return v;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx2 mpiddp_load_pair_avx2(const float *p)
{
    const __m256 first = _mm256_loadu_ps(p), second = _mm256_loadu_ps(p + 8);
    mpiddp_pair_avx2 pair;
    pair.low = _mm256_permute2f128_ps(first, second, 0x20);
    pair.high = _mm256_permute2f128_ps(first, second, 0x31);
    return pair;
}

MPIDDP_INLINE TARGET void mpiddp_store_pair_avx2(float *p, mpiddp_pair_avx2 pair)
{
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(pair.low, pair.high, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(pair.low, pair.high, 0x31));
}

#include "kernels_variant.h"

#define VARIANT avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))
#define FLOAT16_VECTOR __m512
#define FLOAT16_LANES 16
#define FLOAT16_LOAD(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define FLOAT16_STORE(p, v) \
    _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define FLOAT16_LOAD_SUM(p) _mm512_loadu_ps(p)
#define FLOAT16_STORE_SUM(p, v) _mm512_storeu_ps(p, v)
#define FLOAT16_ADD(v, w) _mm512_add_ps(v, w)
#define FLOAT16_MULTIPLY(v, sum) _mm512_mul_ps(v, _mm512_set1_ps(sum))
#define FLOAT16_DIVIDE(v, sum) _mm512_div_ps(v, _mm512_set1_ps(sum))
#define BFLOAT16_VECTOR mpiddp_pair_avx512
#define BFLOAT16_LANES 32
#define BFLOAT16_LOAD(p) mpiddp_load_bfloat16_avx512(p)
#define BFLOAT16_STORE(p, v) mpiddp_store_bfloat16_avx512(p, v)
#define BFLOAT16_LOAD_SUM(p) mpiddp_load_pair_avx512(p)
#define BFLOAT16_STORE_SUM(p, v) mpiddp_store_pair_avx512(p, v)
#define BFLOAT16_ADD(v, w) mpiddp_add_pairs_avx512(v, w)
#define BFLOAT16_MULTIPLY(v, sum) mpiddp_multiply_pair_avx512(v, sum)
#define BFLOAT16_DIVIDE(v, sum) mpiddp_divide_pair_avx512(v, sum)
#define BFLOAT16_SPREAD(sum) mpiddp_spread_pair_avx512(sum)
#define BFLOAT16_DIVIDE_EACH(v, w) mpiddp_divide_pairs_avx512(v, w)
#define BFLOAT16_CHOOSE(s, v, w) mpiddp_choose_pair_avx512(s, v, w)

typedef struct {
    __m512 low, high;
} mpiddp_pair_avx512;

MPIDDP_INLINE TARGET mpiddp_pair_avx512 mpiddp_load_bfloat16_avx512(const uint16_t *p)
{
    const __m512i zero = _mm512_setzero_si512();
    const __m512i halves = _mm512_loadu_si512((const __m512i *)p);
    mpiddp_pair_avx512 pair;
    pair.low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, halves));
    pair.high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, halves));
    return pair;
}

/* The rounded numbers, in 32 bits each. */
MPIDDP_INLINE TARGET __m512i mpiddp_round_to_bfloat16_avx512(__m512 value)
{
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_add_epi32(bits, half);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16);
}

MPIDDP_INLINE TARGET void mpiddp_store_bfloat16_avx512(uint16_t *p, mpiddp_pair_avx512 pair)
{
    _mm512_storeu_si512(
        (__m512i *)p, _mm512_packus_epi32(mpiddp_round_to_bfloat16_avx512(pair.low),
                                       mpiddp_round_to_bfloat16_avx512(pair.high)));
}

MPIDDP_INLINE TARGET mpiddp_pair_avx512 mpiddp_add_pairs_avx512(
    mpiddp_pair_avx512 a, mpiddp_pair_avx512 b)
{
    a.low = _mm512_add_ps(a.low, b.low);
    a.high = _mm512_add_ps(a.high, b.high);
    return a;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx512 mpiddp_multiply_pair_avx512(
    mpiddp_pair_avx512 pair, float factor)
{
    pair.low = _mm512_mul_ps(pair.low, _mm512_set1_ps(factor));
    pair.high = _mm512_mul_ps(pair.high, _mm512_set1_ps(factor));
    return pair;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx512 mpiddp_divide_pair_avx512(
    mpiddp_pair_avx512 pair, float divisor)
{
    pair.low = _mm512_div_ps(pair.low, _mm512_set1_ps(divisor));
    pair.high = _mm512_div_ps(pair.high, _mm512_set1_ps(divisor));
    return pair;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx512 mpiddp_spread_pair_avx512(float sum)
{
    mpiddp_pair_avx512 pair;
    pair.low = pair.high = _mm512_set1_ps(sum);
    return pair;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx512 mpiddp_divide_pairs_avx512(
    mpiddp_pair_avx512 a, mpiddp_pair_avx512 b)
{
    a.low = _mm512_div_ps(a.low, b.low);
    a.high = _mm512_div_ps(a.high, b.high);
    return a;
}

MPIDDP_INLINE TARGET __m512 mpiddp_choose_avx512(__m512 sum, __m512 v, __m512 w)
{
    /* Zero times the sum is NaN where the sum is not finite. */
    const __m512 zero = _mm512_mul_ps(sum, _mm512_setzero_ps());
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(zero, zero, _CMP_UNORD_Q), v, w);
}

MPIDDP_INLINE TARGET mpiddp_pair_avx512 mpiddp_choose_pair_avx512(
    mpiddp_pair_avx512 sum, mpiddp_pair_avx512 v, mpiddp_pair_avx512 w)
{
    v.low = mpiddp_choose_avx512(sum.low, v.low, w.low);
    v.high = mpiddp_choose_avx512(sum.high, v.high, w.high);
    return v;
}

MPIDDP_INLINE TARGET mpiddp_pair_avx512 mpiddp_load_pair_avx512(const float *p)
{
    const __m512i low = _mm512_setr_epi32(
        0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i high = _mm512_setr_epi32(
        4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const __m512 first = _mm512_loadu_ps(p), second = _mm512_loadu_ps(p + 16);
    mpiddp_pair_avx512 pair;
    pair.low = _mm512_permutex2var_ps(first, low, second);
    pair.high = _mm512_permutex2var_ps(first, high, second);
    return pair;
}

MPIDDP_INLINE TARGET void mpiddp_store_pair_avx512(float *p, mpiddp_pair_avx512 pair)
{
    const __m512i first = _mm512_setr_epi32(
        0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(
        8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(pair.low, first, pair.high));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(pair.low, second, pair.high));
}

#include "kernels_variant.h"

/* Which registers the operating system saves: bits of XCR0. */
#define MPIDDP_AVX_STATE 0x06u
#define MPIDDP_AVX512_STATE 0xe6u

static inline unsigned int mpiddp_saved_state(void)
{
    unsigned int eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return eax;
}

/* Not __builtin_cpu_supports: it does not know F16C in GCC 9 and 10, and says no to
 * everything where Clang comes with Zig's library. */
static inline int mpiddp_has_avx2(void)
{
    unsigned int eax, ebx, ecx, edx;
    if ((mpiddp_saved_state() & MPIDDP_AVX_STATE) != MPIDDP_AVX_STATE)
        return 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_F16C))
        return 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX2);
}

static inline int mpiddp_has_avx512(void)
{
    const unsigned int wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned int eax, ebx, ecx, edx;
    if ((mpiddp_saved_state() & MPIDDP_AVX512_STATE) != MPIDDP_AVX512_STATE)
        return 0;
    return mpiddp_has_avx2() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)
        && (ebx & wanted) == wanted;
}
