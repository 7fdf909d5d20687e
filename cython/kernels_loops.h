/* Template: the loops of one kind of element for one machine. No include guard.
 *
 * kernels_variant.h includes this once for each element type, with these defined:
 *   NAME(x)    the name of function x for this element and machine
 *   TARGET     the attribute that lets a function use the machine's instructions
 *   ELEMENT    the type of an element in the buffers
 *   SUM        the type in which elements are summed
 * and, where an element is not simply a SUM,
 *   LOAD(p), STORE(p, v)          one SUM from and to an element
 * and, where compilers make no good SIMD code of that,
 *   VECTOR     a type for LANES sums; then LOAD and STORE are for one of these
 *   LOAD_SUM(p), STORE_SUM(p, v)  a VECTOR from and to LANES sums
 *   ADD(v, w), MULTIPLY(v, sum), DIVIDE(v, sum)
 * No alignment is assumed beyond that of an element. A sum is made in the order of
 * the buffers, never in another one.
 */
#ifndef VECTOR
#define VECTOR SUM
#define LANES 1
#define LOAD_SUM(p) (*(p))
#define STORE_SUM(p, v) (*(p) = (v))
#define ADD(v, w) ((v) + (w))
#define MULTIPLY(v, sum) ((v) * (sum))
#define DIVIDE(v, sum) ((v) / (sum))
#endif
#ifndef LOAD
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#endif

/* Do what `role` says with LANES elements of one to four buffers. All arguments but the
 * pointers and the factor are constants once this is inlined. */
MPIDDP_INLINE TARGET void NAME(step)(
    enum mpiddp_role role, size_t ranks, int multiply, SUM factor,
    SUM *wide, ELEMENT *a, ELEMENT *b, ELEMENT *c, ELEMENT *d)
{
    VECTOR sum;
    if (role == MPIDDP_STORE_MEAN)
        sum = LOAD_SUM(wide);
    else if (role == MPIDDP_ADD)
        sum = ADD(LOAD_SUM(wide), LOAD(a));
    else
        sum = LOAD(a);
    if (ranks > 1)
        sum = ADD(sum, LOAD(b));
    if (ranks > 2)
        sum = ADD(sum, LOAD(c));
    if (ranks > 3)
        sum = ADD(sum, LOAD(d));
    if (role == MPIDDP_SUM || role == MPIDDP_ADD) {
        STORE_SUM(wide, sum);
        return;
    }
    sum = multiply ? MULTIPLY(sum, factor) : DIVIDE(sum, factor);
    STORE(a, sum);
    if (ranks > 1)
        STORE(b, sum);
    if (ranks > 2)
        STORE(c, sum);
    if (ranks > 3)
        STORE(d, sum);
}

/* The same for `count` elements. */
MPIDDP_INLINE TARGET void NAME(pass)(
    enum mpiddp_role role, size_t ranks, int multiply, SUM factor,
    SUM *wide_sum, char *const *buffers, size_t first, size_t count)
{
    SUM *restrict wide = wide_sum;
    ELEMENT *restrict a = (ELEMENT *)buffers[0] + first;
    ELEMENT *restrict b = (ELEMENT *)buffers[ranks > 1 ? 1 : 0] + first;
    ELEMENT *restrict c = (ELEMENT *)buffers[ranks > 2 ? 2 : 0] + first;
    ELEMENT *restrict d = (ELEMENT *)buffers[ranks > 3 ? 3 : 0] + first;
    size_t i;
    const size_t whole = count - count % LANES;
    MPIDDP_INDEPENDENT
    for (i = 0; i < whole; i += LANES)
        NAME(step)(role, ranks, multiply, factor, wide + i, a + i, b + i, c + i, d + i);
    if (i < count) {
        /* The same instructions for the last few, on copies with room for all lanes. */
        const int stores_sum = role == MPIDDP_SUM || role == MPIDDP_ADD;
        const size_t bytes = (count - i) * sizeof(ELEMENT);
        const size_t wide_bytes = (count - i) * sizeof(SUM);
        ELEMENT *last[4] = {a + i, b + i, c + i, d + i};
        ELEMENT rest[4][LANES] = {{0}};
        SUM wide_rest[LANES] = {0};
        size_t rank;
        if (role == MPIDDP_ADD || role == MPIDDP_STORE_MEAN)
            memcpy(wide_rest, wide + i, wide_bytes);
        for (rank = 0; rank < ranks && role != MPIDDP_STORE_MEAN; rank++)
            memcpy(rest[rank], last[rank], bytes);
        NAME(step)(role, ranks, multiply, factor, wide_rest, rest[0], rest[1], rest[2], rest[3]);
        for (rank = 0; rank < ranks && !stores_sum; rank++)
            memcpy(last[rank], rest[rank], bytes);
        if (stores_sum)
            memcpy(wide + i, wide_rest, wide_bytes);
    }
}

/* These are functions of their own, so that no computation moves across the change of
 * the state of the floating-point unit in their callers. */
static MPIDDP_NOINLINE TARGET void NAME(sum_to)(
    SUM *out, char *const *buffers, size_t ranks, size_t first, size_t count)
{
    size_t n, rank;
    for (; count > 0; count -= n, first += n, out += n) {
        /* In blocks, so that the sum stays in the cache from one pass to the next. */
        n = ranks <= 4 || count < MPIDDP_BLOCK ? count : MPIDDP_BLOCK;
        if (ranks == 1)
            NAME(pass)(MPIDDP_SUM, 1, 0, 1, out, buffers, first, n);
        else if (ranks == 2)
            NAME(pass)(MPIDDP_SUM, 2, 0, 1, out, buffers, first, n);
        else if (ranks == 3)
            NAME(pass)(MPIDDP_SUM, 3, 0, 1, out, buffers, first, n);
        else
            NAME(pass)(MPIDDP_SUM, 4, 0, 1, out, buffers, first, n);
        for (rank = 4; rank + 4 <= ranks; rank += 4)
            NAME(pass)(MPIDDP_ADD, 4, 0, 1, out, buffers + rank, first, n);
        for (; rank < ranks; rank++)
            NAME(pass)(MPIDDP_ADD, 1, 0, 1, out, buffers + rank, first, n);
    }
}

static MPIDDP_NOINLINE TARGET void NAME(spread_mean)(
    char *const *buffers, size_t ranks, size_t first, size_t count, const SUM *sum,
    double divisor)
{
    const int multiply = mpiddp_is_power_of_two(divisor);
    const SUM factor = multiply ? 1 / (SUM)divisor : (SUM)divisor;
    size_t n, rank;
    for (; count > 0; count -= n, first += n, sum += n) {
        n = ranks == 1 || count < MPIDDP_BLOCK ? count : MPIDDP_BLOCK;
        if (multiply)
            NAME(pass)(MPIDDP_STORE_MEAN, 1, 1, factor, (SUM *)sum, buffers, first, n);
        else
            NAME(pass)(MPIDDP_STORE_MEAN, 1, 0, factor, (SUM *)sum, buffers, first, n);
        for (rank = 1; rank < ranks; rank++)
            memcpy((ELEMENT *)buffers[rank] + first, (ELEMENT *)buffers[0] + first,
                   n * sizeof(ELEMENT));
    }
}

static MPIDDP_NOINLINE TARGET void NAME(mean_in_place)(
    char *const *buffers, size_t ranks, size_t first, size_t count, double divisor)
{
    const int multiply = mpiddp_is_power_of_two(divisor);
    const SUM factor = multiply ? 1 / (SUM)divisor : (SUM)divisor;
    SUM wide[MPIDDP_BLOCK];
    size_t n;
    if (ranks == 2 && multiply)
        NAME(pass)(MPIDDP_MEAN, 2, 1, factor, wide, buffers, first, count);
    else if (ranks == 2)
        NAME(pass)(MPIDDP_MEAN, 2, 0, factor, wide, buffers, first, count);
    else if (ranks == 3 && multiply)
        NAME(pass)(MPIDDP_MEAN, 3, 1, factor, wide, buffers, first, count);
    else if (ranks == 3)
        NAME(pass)(MPIDDP_MEAN, 3, 0, factor, wide, buffers, first, count);
    else if (ranks == 4 && multiply)
        NAME(pass)(MPIDDP_MEAN, 4, 1, factor, wide, buffers, first, count);
    else if (ranks == 4)
        NAME(pass)(MPIDDP_MEAN, 4, 0, factor, wide, buffers, first, count);
    else
        for (; count > 0; count -= n, first += n) {
            n = count < MPIDDP_BLOCK ? count : MPIDDP_BLOCK;
            NAME(sum_to)(wide, buffers, ranks, first, n);
            NAME(spread_mean)(buffers, ranks, first, n, wide, divisor);
        }
}

#undef ELEMENT
#undef ELEMENT_NAME
#undef SUM
#undef VECTOR
#undef LANES
#undef LOAD
#undef STORE
#undef LOAD_SUM
#undef STORE_SUM
#undef ADD
#undef MULTIPLY
#undef DIVIDE
