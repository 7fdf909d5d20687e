/* The functions of cuBLAS that mpiddp calls, on the simulated GPU: sums of vectors on a stream.
 *
 * MPIDDP_SIMULATED_SUMS says what is wrong with it: "wrong" adds one too much to the first
 * element, "crash" writes through a null pointer, "hang" never ends.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* In simulated_gpu.c. */
int simulatedCall(void *stream, double seconds, void (*function)(void *), void *argument);
int simulatedInjected(const char *call);

enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { FLOAT32 = 0, FLOAT64 = 1, FLOAT16 = 2, BFLOAT16 = 14 };

typedef struct {
    void *stream;
} Handle;

typedef struct {
    int type;
    size_t count;
    const void *source;
    void *to;
} Sum;

static double delay;

void simulatedSetSumDelay(double seconds)
{
    delay = seconds;
}

static float from_bfloat16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void add(void *argument)
{
    Sum *sum = argument;
    const char *wrong = getenv("MPIDDP_SIMULATED_SUMS");
    if (wrong && !strcmp(wrong, "crash"))
        *(volatile int *)0 = 1;
    while (wrong && !strcmp(wrong, "hang"))
        sleep(1);
    for (size_t i = 0; i < sum->count; i++)
        switch (sum->type) {
        case FLOAT32: ((float *)sum->to)[i] += ((const float *)sum->source)[i]; break;
        case FLOAT64: ((double *)sum->to)[i] += ((const double *)sum->source)[i]; break;
#ifdef __FLT16_MAX__
        case FLOAT16:
            ((_Float16 *)sum->to)[i] = (_Float16)((float)((_Float16 *)sum->to)[i]
                                                  + (float)((const _Float16 *)sum->source)[i]);
            break;
#endif
        case BFLOAT16:
            ((uint16_t *)sum->to)[i] = to_bfloat16(from_bfloat16(((uint16_t *)sum->to)[i])
                                           + from_bfloat16(((const uint16_t *)sum->source)[i]));
            break;
        }
    if (wrong && !strcmp(wrong, "wrong"))
        ((char *)sum->to)[sum->count / 2] ^= 1;
    free(sum);
}

int cublasCreate_v2(void **handle)
{
    int code = simulatedInjected("cublasCreate_v2");
    if (!code)
        *handle = calloc(1, sizeof(Handle));
    return code;
}

int cublasDestroy_v2(void *handle)
{
    free(handle);
    return SUCCESS;
}

int cublasSetStream_v2(void *handle, void *stream)
{
    ((Handle *)handle)->stream = stream;
    return SUCCESS;
}

int cublasAxpyEx(void *handle, int count, const void *factor, int factor_type, const void *source,
                 int source_type, int source_step, void *to, int to_type, int to_step,
                 int computed_in)
{
    int wide = source_type == FLOAT64 ? FLOAT64 : FLOAT32;
    int code = simulatedInjected("cublasAxpyEx");
    Sum *sum;
    if (code)
        return code;
    if (!handle)
        return NOT_INITIALIZED;
    if (count < 0 || source_step != 1 || to_step != 1 || source_type != to_type)
        return INVALID_VALUE;
    if (factor_type != wide || computed_in != wide
        || (wide == FLOAT64 ? *(const double *)factor : *(const float *)factor) != 1)
        return INVALID_VALUE;
#ifndef __FLT16_MAX__
    if (source_type == FLOAT16)
        return NOT_SUPPORTED;
#endif
    if (source_type > FLOAT16 && source_type != BFLOAT16)
        return NOT_SUPPORTED;
    sum = malloc(sizeof *sum);
    *sum = (Sum){source_type, (size_t)count, source, to};
    return simulatedCall(((Handle *)handle)->stream, delay, add, sum);
}
