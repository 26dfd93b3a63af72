/* Sum, and the other reductions, over parts in rank order: the same bits on every rank.
 *
 * Compiled for the plainest machine of its architecture; on x86-64 the loops exist for AVX2 and
 * AVX-512 too and the processor is asked once, so a wheel never dies of an unknown instruction.
 */
#include "engine.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

enum { EC_BLOCK = 2048 }; /* elements: running totals stay in the first-level cache */

typedef void fold_fn(void *target, const void *left, const void *right, size_t count);

struct kernels {
    const char *name;
    fold_fn *(*fold_of)(enum ec_dtype dtype, enum ec_reduce_op op);
    void (*divide_f32)(void *target, size_t count, int divisor);
    void (*divide_f64)(void *target, size_t count, int divisor);
    void (*widen[2])(float *out, const uint16_t *in, size_t count); /* float16, bfloat16 */
    void (*narrow[2])(uint16_t *out, const float *in, size_t count);
};

/* ---- float16 where the processor does not convert it ---- */

static float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF, bits;
    float value;
    if (magnitude >= 0x7C00) { /* infinity, or NaN made quiet with its payload */
        bits = sign | 0x7F800000 | (magnitude & 0x3FF) << 13 | (magnitude > 0x7C00) << 22;
    } else if (magnitude >= 0x0400) {
        bits = sign | ((magnitude << 13) + ((127 - 15) << 23));
    } else {
        value = (float)magnitude * 0x1p-24f;
        return sign ? -value : value;
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t float_to_half(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000)
        return sign | 0x7E00 | (uint16_t)(bits >> 13 & 0x3FF);
    if (bits >= 0x477FF000) /* rounds to 65536 or more */
        return sign | 0x7C00;
    if (bits >= 0x38800000) { /* normal */
        bits -= (127 - 15) << 23;
        return sign | (uint16_t)((bits + 0xFFF + (bits >> 13 & 1)) >> 13);
    }
    float magnitude;
    memcpy(&magnitude, &bits, sizeof bits);
    return sign | (uint16_t)lrintf(magnitude * 0x1p24f); /* denormal: to nearest, ties to even */
}

#define KERNEL(name) name##_plain
#define KERNEL_NAME "plain"
#define TARGET
#define HALF_BY_F16C 0
#include "kernels.h"

#if defined(__x86_64__)
#define KERNEL(name) name##_avx2
#define KERNEL_NAME "avx2"
#define TARGET __attribute__((target("avx2,f16c")))
#define HALF_BY_F16C 1
#include "kernels.h"

#define KERNEL(name) name##_avx512
#define KERNEL_NAME "avx512"
#define TARGET __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#define HALF_BY_F16C 1
#include "kernels.h"
#endif

static const struct kernels *choose(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2"))
        return &kernels_plain;
    /* Every processor with AVX2 has F16C; compilers before GCC 11 cannot ask for it. */
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &kernels_avx512;
    return &kernels_avx2;
#else
    return &kernels_plain;
#endif
}

static const struct kernels *chosen(void)
{
    static const struct kernels *_Atomic known;
    const struct kernels *kernels = atomic_load_explicit(&known, memory_order_relaxed);
    if (!kernels) {
        kernels = choose();
        atomic_store_explicit(&known, kernels, memory_order_relaxed);
    }
    return kernels;
}

const char *ec_instructions(void)
{
    return chosen()->name;
}

size_t ec_item_bytes(enum ec_dtype dtype)
{
    static const uint8_t sizes[EC_NUM_DTYPES] = {
        [EC_BOOL] = 1,    [EC_INT8] = 1,    [EC_INT16] = 2,   [EC_INT32] = 4,    [EC_INT64] = 8,
        [EC_UINT8] = 1,   [EC_UINT16] = 2,  [EC_UINT32] = 4,  [EC_UINT64] = 8,   [EC_FLOAT16] = 2,
        [EC_BFLOAT16] = 2, [EC_FLOAT32] = 4, [EC_FLOAT64] = 8,
    };
    return sizes[dtype];
}

static bool is_half(enum ec_dtype dtype)
{
    return dtype == EC_FLOAT16 || dtype == EC_BFLOAT16;
}

static bool is_bitwise(enum ec_reduce_op op)
{
    return op == EC_BAND || op == EC_BOR || op == EC_BXOR;
}

static const uint8_t *at(const void *part, size_t offset)
{
    return (const uint8_t *)part + offset;
}

static void reduce_halves(uint16_t *target, const void *const *parts, int num_parts, size_t count,
                          enum ec_dtype dtype, enum ec_reduce_op op)
{
    const struct kernels *kernels = chosen();
    fold_fn *fold = kernels->fold_of(dtype, op);
    int which = dtype == EC_BFLOAT16;
    float total[EC_BLOCK], next[EC_BLOCK];
    for (size_t start = 0; start < count; start += EC_BLOCK) {
        size_t num = count - start < EC_BLOCK ? count - start : EC_BLOCK;
        kernels->widen[which](total, (const uint16_t *)parts[0] + start, num);
        for (int part = 1; part < num_parts; part++) {
            kernels->widen[which](next, (const uint16_t *)parts[part] + start, num);
            fold(total, total, next, num);
        }
        if (op == EC_AVG)
            kernels->divide_f32(total, num, num_parts);
        kernels->narrow[which](target + start, total, num);
    }
}

/* Integers are truncated toward zero, as C divides. WIDE holds the divisor, which TYPE may not. */
#define DIVIDE(TYPE, WIDE)                                                                        \
    do {                                                                                          \
        TYPE *out = target;                                                                       \
        for (size_t i = 0; i < count; i++)                                                        \
            out[i] = (TYPE)((WIDE)out[i] / (WIDE)divisor);                                        \
    } while (0);                                                                                  \
    break

static void divide(const struct kernels *kernels, void *target, size_t count, int divisor,
                   enum ec_dtype dtype)
{
    switch (dtype) {
    case EC_FLOAT32:
        kernels->divide_f32(target, count, divisor);
        break;
    case EC_FLOAT64:
        kernels->divide_f64(target, count, divisor);
        break;
    case EC_INT8:
        DIVIDE(int8_t, int32_t);
    case EC_INT16:
        DIVIDE(int16_t, int32_t);
    case EC_INT32:
        DIVIDE(int32_t, int32_t);
    case EC_INT64:
        DIVIDE(int64_t, int64_t);
    case EC_UINT8:
        DIVIDE(uint8_t, uint32_t);
    case EC_UINT16:
        DIVIDE(uint16_t, uint32_t);
    case EC_UINT32:
        DIVIDE(uint32_t, uint32_t);
    case EC_UINT64:
        DIVIDE(uint64_t, uint64_t);
    default: /* bool has no average; 16-bit floats are divided before they are rounded */
        break;
    }
}
#undef DIVIDE

/* Totals of more than two parts are kept aside: the target may be one of the later parts. */
static void reduce_wide(uint8_t *target, const void *const *parts, int num_parts, size_t num_bytes,
                        enum ec_dtype dtype, enum ec_reduce_op op)
{
    const struct kernels *kernels = chosen();
    fold_fn *fold = kernels->fold_of(dtype, op);
    size_t item = is_bitwise(op) ? 1 : ec_item_bytes(dtype);
    size_t block = EC_BLOCK * item;
    double aside[EC_BLOCK];
    for (size_t start = 0; start < num_bytes; start += block) {
        size_t bytes = num_bytes - start < block ? num_bytes - start : block;
        size_t count = bytes / item;
        void *total = num_parts == 2 ? (void *)(target + start) : (void *)aside;
        fold(total, at(parts[0], start), at(parts[1], start), count);
        for (int part = 2; part < num_parts; part++)
            fold(total, total, at(parts[part], start), count);
        if (op == EC_AVG)
            divide(kernels, total, count, num_parts, dtype);
        if (total == aside)
            memcpy(target + start, aside, bytes);
    }
}

/* `target` may be exactly one of the parts. */
void ec_reduce(void *target, const void *const *parts, int num_parts, size_t num_bytes,
               enum ec_dtype dtype, enum ec_reduce_op op)
{
    if (is_half(dtype) && !is_bitwise(op))
        reduce_halves(target, parts, num_parts, num_bytes / 2, dtype, op);
    else if (num_parts > 1)
        reduce_wide(target, parts, num_parts, num_bytes, dtype, op);
    else if (target != parts[0])
        memmove(target, parts[0], num_bytes);
}
