/* Template: the loops of one kind of element for one machine. No include guard.
 *
 * kernels_variant.h includes this once for each element type, with these defined:
 *   NAME(x)    the name of function x for this element and machine
 *   TARGET     the attribute that lets a function use the machine's instructions
 *   ELEMENT    the type of an element in the buffers
 *   SUM        the type in which elements are summed
 *   OVERFLOWS  whether a sum of finite elements may overflow; then
 *   BITS, OVERFLOW(sum)           an integer type, and one whose first bit says whether a
 *                                 SUM is infinite or NaN
 *   CHOOSE_SUM(s, v, w)           v where s is finite, else w
 *   ELEMENT_BITS, SPECIAL(e)      an unsigned type as large as an element, and one whose first
 *                                 bit says whether the element is infinite or NaN
 * and, where an element is not simply a SUM,
 *   LOAD(p), STORE(p, v)          one SUM from and to an element
 * and, where compilers make no good SIMD code of that,
 *   VECTOR     a type for LANES sums; then LOAD and STORE are for one of these
 *   LOAD_SUM(p), STORE_SUM(p, v)  a VECTOR from and to LANES sums
 *   ADD(v, w), MULTIPLY(v, sum), DIVIDE(v, sum), and where sums may overflow
 *   SPREAD(sum)                   a VECTOR of the same sum
 *   DIVIDE_EACH(v, w)
 *   CHOOSE(s, v, w)               v where s is finite, else w
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
#define SPREAD(sum) (sum)
#define DIVIDE_EACH(v, w) ((v) / (w))
#define CHOOSE(s, v, w) CHOOSE_SUM(s, v, w)
#endif
#ifndef LOAD
#define ELEMENT_IS_SUM
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#endif

/* Do what `role` says with LANES elements of one to four buffers. All arguments but the
 * pointers, the factor and the scale are constants once this is inlined. The factor is the
 * divisor, or its reciprocal if `multiply` is set. */
MPIDDP_INLINE TARGET void NAME(step)(
    enum mpiddp_role role, size_t ranks, int multiply, SUM factor, SUM scale,
    SUM *wide, ELEMENT *a, ELEMENT *b, ELEMENT *c, ELEMENT *d)
{
    VECTOR sum, mean;
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
    mean = multiply ? MULTIPLY(sum, factor) : DIVIDE(sum, factor);
#if OVERFLOWS
    if (role == MPIDDP_MEAN) {
        /* See Note [Sums that overflow]. No branch: memory is the limit anyway. */
        VECTOR scaled = MULTIPLY(LOAD(a), scale);
        if (ranks > 1)
            scaled = ADD(scaled, MULTIPLY(LOAD(b), scale));
        if (ranks > 2)
            scaled = ADD(scaled, MULTIPLY(LOAD(c), scale));
        if (ranks > 3)
            scaled = ADD(scaled, MULTIPLY(LOAD(d), scale));
        if (multiply)
            mean = CHOOSE(sum, mean, scaled);
        else
            mean = DIVIDE_EACH(
                CHOOSE(sum, sum, scaled), CHOOSE(sum, SPREAD(factor), SPREAD(factor * scale)));
    }
#else
    (void)scale;
#endif
    STORE(a, mean);
    if (ranks > 1)
        STORE(b, mean);
    if (ranks > 2)
        STORE(c, mean);
    if (ranks > 3)
        STORE(d, mean);
}

/* The same for `count` elements. */
MPIDDP_INLINE TARGET void NAME(pass)(
    enum mpiddp_role role, size_t ranks, int multiply, SUM factor, SUM scale,
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
        NAME(step)(
            role, ranks, multiply, factor, scale, wide + i, a + i, b + i, c + i, d + i);
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
        NAME(step)(
            role, ranks, multiply, factor, scale, wide_rest, rest[0], rest[1], rest[2], rest[3]);
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
            NAME(pass)(MPIDDP_SUM, 1, 0, 1, 1, out, buffers, first, n);
        else if (ranks == 2)
            NAME(pass)(MPIDDP_SUM, 2, 0, 1, 1, out, buffers, first, n);
        else if (ranks == 3)
            NAME(pass)(MPIDDP_SUM, 3, 0, 1, 1, out, buffers, first, n);
        else
            NAME(pass)(MPIDDP_SUM, 4, 0, 1, 1, out, buffers, first, n);
        for (rank = 4; rank + 4 <= ranks; rank += 4)
            NAME(pass)(MPIDDP_ADD, 4, 0, 1, 1, out, buffers + rank, first, n);
        for (; rank < ranks; rank++)
            NAME(pass)(MPIDDP_ADD, 1, 0, 1, 1, out, buffers + rank, first, n);
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
            NAME(pass)(MPIDDP_STORE_MEAN, 1, 1, factor, 1, (SUM *)sum, buffers, first, n);
        else
            NAME(pass)(MPIDDP_STORE_MEAN, 1, 0, factor, 1, (SUM *)sum, buffers, first, n);
        for (rank = 1; rank < ranks; rank++)
            memcpy((ELEMENT *)buffers[rank] + first, (ELEMENT *)buffers[0] + first,
                   n * sizeof(ELEMENT));
    }
}

#if OVERFLOWS
MPIDDP_INLINE TARGET int NAME(all_finite)(const SUM *sum, size_t count)
{
    BITS overflow = 0;
    size_t i;
    for (i = 0; i < count; i++)
        overflow |= OVERFLOW(sum[i]);
    return overflow >> (8 * sizeof overflow - 1) == 0;
}

/* As `spread_mean`, up to a block with a sum that is not finite; return how many. */
static MPIDDP_NOINLINE TARGET size_t NAME(spread_finite_mean)(
    char *const *buffers, size_t ranks, size_t first, size_t count, const SUM *sum,
    double divisor)
{
    size_t done, n;
    for (done = 0; done < count; done += n) {
        n = count - done < MPIDDP_BLOCK ? count - done : MPIDDP_BLOCK;
        if (!NAME(all_finite)(sum + done, n))
            return done;
        NAME(spread_mean)(buffers, ranks, first + done, n, sum + done, divisor);
    }
    return count;
}

/* The sum of buffers as `sum_to` makes it, of elements times the scale. */
static MPIDDP_NOINLINE TARGET void NAME(scaled_sum_to)(
    SUM *out, char *const *buffers, size_t ranks, size_t first, size_t count, double divisor)
{
    const SUM scale = (SUM)mpiddp_scale(divisor);
    SUM wide[MPIDDP_BLOCK];
    size_t n, i, rank;
    for (; count > 0; count -= n, first += n, out += n) {
        n = count < MPIDDP_BLOCK ? count : MPIDDP_BLOCK;
        for (rank = 0; rank < ranks; rank++) {
            NAME(sum_to)(wide, buffers + rank, 1, first, n);
            for (i = 0; i < n; i++)
                out[i] = rank == 0 ? wide[i] * scale : out[i] + wide[i] * scale;
        }
    }
}

/* As `spread_mean`, where some sums are not finite: there the scaled ones are used. */
static MPIDDP_NOINLINE TARGET void NAME(spread_scaled_mean)(
    char *const *buffers, size_t ranks, size_t first, size_t count, const SUM *sum,
    const SUM *scaled, double divisor)
{
    const SUM factor = (SUM)divisor, less = factor * (SUM)mpiddp_scale(divisor);
    SUM mean[MPIDDP_BLOCK];
    size_t n, i;
    for (; count > 0; count -= n, first += n, sum += n, scaled += n) {
        n = count < MPIDDP_BLOCK ? count : MPIDDP_BLOCK;
        for (i = 0; i < n; i++)
            mean[i] = CHOOSE_SUM(sum[i], sum[i], scaled[i]) / CHOOSE_SUM(sum[i], factor, less);
        NAME(spread_mean)(buffers, ranks, first, n, mean, 1);
    }
}
#endif

#ifdef ELEMENT_IS_SUM
/* The sum of one to four buffers, of which `out` may be one: each element is read before it is
 * written. */
MPIDDP_INLINE TARGET void NAME(plain_sum)(
    ELEMENT *out, char *const *buffers, size_t ranks, size_t first, size_t count)
{
    const ELEMENT *a = (const ELEMENT *)buffers[0] + first;
    const ELEMENT *b = (const ELEMENT *)buffers[ranks > 1 ? 1 : 0] + first;
    const ELEMENT *c = (const ELEMENT *)buffers[ranks > 2 ? 2 : 0] + first;
    const ELEMENT *d = (const ELEMENT *)buffers[ranks > 3 ? 3 : 0] + first;
    size_t i;
    MPIDDP_INDEPENDENT
    for (i = 0; i < count; i++)
        out[i] = ranks == 1   ? a[i]
                 : ranks == 2 ? a[i] + b[i]
                 : ranks == 3 ? a[i] + b[i] + c[i]
                              : a[i] + b[i] + c[i] + d[i];
}
#endif

static MPIDDP_NOINLINE TARGET void NAME(mean_to)(
    ELEMENT *out, char *const *buffers, size_t ranks, size_t first, size_t count, double divisor)
{
    SUM wide[MPIDDP_BLOCK];
    char *target = (char *)out;
    size_t done, n;
#ifdef ELEMENT_IS_SUM
    /* Nothing is divided, so Note [Sums that overflow] says the same of it. */
    if (divisor == 1 && ranks == 2) {
        NAME(plain_sum)(out, buffers, 2, first, count);
        return;
    }
    if (divisor == 1 && ranks == 3) {
        NAME(plain_sum)(out, buffers, 3, first, count);
        return;
    }
    if (divisor == 1 && ranks == 4) {
        NAME(plain_sum)(out, buffers, 4, first, count);
        return;
    }
#endif
    for (done = 0; done < count; done += n) {
        n = count - done < MPIDDP_BLOCK ? count - done : MPIDDP_BLOCK;
        NAME(sum_to)(wide, buffers, ranks, first + done, n);
#if OVERFLOWS
        if (!NAME(all_finite)(wide, n)) {
            SUM scaled[MPIDDP_BLOCK];
            NAME(scaled_sum_to)(scaled, buffers, ranks, first + done, n, divisor);
            NAME(spread_scaled_mean)(&target, 1, done, n, wide, scaled, divisor);
            continue;
        }
#endif
        NAME(spread_mean)(&target, 1, done, n, wide, divisor);
    }
}

static MPIDDP_NOINLINE TARGET void NAME(scaled_sum_as_element)(
    ELEMENT *out, char *const *buffers, size_t ranks, size_t first, size_t count, double divisor)
{
    SUM wide[MPIDDP_BLOCK];
    char *target = (char *)out;
    size_t done, n;
    for (done = 0; done < count; done += n) {
        n = count - done < MPIDDP_BLOCK ? count - done : MPIDDP_BLOCK;
#if OVERFLOWS
        NAME(scaled_sum_to)(wide, buffers, ranks, first + done, n, divisor);
        NAME(spread_mean)(&target, 1, done, n, wide, 1);
#else
        NAME(sum_to)(wide, buffers, ranks, first + done, n);
        NAME(spread_mean)(&target, 1, done, n, wide, 1 / mpiddp_scale(divisor));
#endif
    }
}

static MPIDDP_NOINLINE TARGET int NAME(are_finite)(const ELEMENT *array, size_t count)
{
    size_t done, n, i;
    for (done = 0; done < count; done += n) {
        ELEMENT_BITS special = 0;
        n = count - done < MPIDDP_BLOCK ? count - done : MPIDDP_BLOCK;
        for (i = 0; i < n; i++)
            special |= SPECIAL(array[done + i]);
        if (special >> (8 * sizeof special - 1))
            return 0;
    }
    return 1;
}

static MPIDDP_NOINLINE TARGET void NAME(replace_special)(
    ELEMENT *array, const ELEMENT *other, size_t count)
{
    size_t i;
    for (i = 0; i < count; i++) {
        const ELEMENT_BITS special = SPECIAL(array[i]);
        if (special >> (8 * sizeof special - 1))
            array[i] = other[i];
    }
}

static MPIDDP_NOINLINE TARGET void NAME(mean_in_place)(
    char *const *buffers, size_t ranks, size_t first, size_t count, double divisor)
{
    const int multiply = mpiddp_is_power_of_two(divisor);
    const SUM scale = (SUM)mpiddp_scale(divisor);
    const SUM factor = multiply ? scale : (SUM)divisor;
    SUM wide[MPIDDP_BLOCK];
    size_t n;
    if (ranks == 2 && multiply)
        NAME(pass)(MPIDDP_MEAN, 2, 1, factor, scale, wide, buffers, first, count);
    else if (ranks == 2)
        NAME(pass)(MPIDDP_MEAN, 2, 0, factor, scale, wide, buffers, first, count);
    else if (ranks == 3 && multiply)
        NAME(pass)(MPIDDP_MEAN, 3, 1, factor, scale, wide, buffers, first, count);
    else if (ranks == 3)
        NAME(pass)(MPIDDP_MEAN, 3, 0, factor, scale, wide, buffers, first, count);
    else if (ranks == 4 && multiply)
        NAME(pass)(MPIDDP_MEAN, 4, 1, factor, scale, wide, buffers, first, count);
    else if (ranks == 4)
        NAME(pass)(MPIDDP_MEAN, 4, 0, factor, scale, wide, buffers, first, count);
    else
        for (; count > 0; count -= n, first += n) {
            n = count < MPIDDP_BLOCK ? count : MPIDDP_BLOCK;
            NAME(sum_to)(wide, buffers, ranks, first, n);
#if OVERFLOWS
            if (!NAME(all_finite)(wide, n)) {
                SUM scaled[MPIDDP_BLOCK];
                NAME(scaled_sum_to)(scaled, buffers, ranks, first, n, divisor);
                NAME(spread_scaled_mean)(buffers, ranks, first, n, wide, scaled, divisor);
                continue;
            }
#endif
            NAME(spread_mean)(buffers, ranks, first, n, wide, divisor);
        }
}

#undef ELEMENT
#undef ELEMENT_IS_SUM
#undef ELEMENT_NAME
#undef SUM
#undef OVERFLOWS
#undef BITS
#undef OVERFLOW
#undef CHOOSE_SUM
#undef ELEMENT_BITS
#undef SPECIAL
#undef VECTOR
#undef LANES
#undef LOAD
#undef STORE
#undef LOAD_SUM
#undef STORE_SUM
#undef ADD
#undef MULTIPLY
#undef DIVIDE
#undef SPREAD
#undef DIVIDE_EACH
#undef CHOOSE
