/* The kernels for 64-bit ARM: every one has NEON and converts float16. */
#define VARIANT neon
#define TARGET
#define FLOAT16_VECTOR float32x4_t
#define FLOAT16_LANES 4
#define FLOAT16_LOAD(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define FLOAT16_STORE(p, v) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)))
#define FLOAT16_LOAD_SUM(p) vld1q_f32(p)
#define FLOAT16_STORE_SUM(p, v) vst1q_f32(p, v)
#define FLOAT16_ADD(v, w) vaddq_f32(v, w)
#define FLOAT16_MULTIPLY(v, sum) vmulq_f32(v, vdupq_n_f32(sum))
#define FLOAT16_DIVIDE(v, sum) vdivq_f32(v, vdupq_n_f32(sum))
#include "kernels_variant.h"
