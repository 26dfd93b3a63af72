/* The reductions for one instruction set. reduce.c includes this once for each, with
 *   KERNEL(name)  the function's name for that set
 *   TARGET        the attribute that allows it
 *   HALF_BY_F16C  1 where float16 is converted by F16C
 * so that one object file holds all of them and the choice is made at run time.
 *
 * Loops are written plainly for the compiler to vectorize. INDEPENDENT says that the output may be
 * exactly one of the inputs but never overlaps one in another way.
 */

#define LOOP2(NAME, TYPE, EXPRESSION)                                                             \
    TARGET static void KERNEL(NAME)(void *target, const void *left, const void *right,            \
                                    size_t count)                                                 \
    {                                                                                             \
        TYPE *out = target;                                                                       \
        const TYPE *l = left, *r = right;                                                         \
        INDEPENDENT                                                                               \
        for (size_t i = 0; i < count; i++) {                                                      \
            TYPE a = l[i], b = r[i];                                                              \
            out[i] = (TYPE)(EXPRESSION);                                                          \
        }                                                                                         \
    }

/* Sums and products wrap around, so they are taken unsigned; the rest needs the true type. */
#define INTEGER(SUFFIX, TYPE, WIDE)                                                               \
    LOOP2(sum_##SUFFIX, TYPE, (WIDE)a + (WIDE)b)                                                  \
    LOOP2(prod_##SUFFIX, TYPE, (WIDE)a *(WIDE)b)                                                  \
    LOOP2(min_##SUFFIX, TYPE, a < b ? a : b)                                                      \
    LOOP2(max_##SUFFIX, TYPE, a > b ? a : b)

/* NaN wins, as in NumPy. */
#define FLOATING(SUFFIX, TYPE)                                                                    \
    LOOP2(sum_##SUFFIX, TYPE, a + b)                                                              \
    LOOP2(prod_##SUFFIX, TYPE, a *b)                                                              \
    LOOP2(min_##SUFFIX, TYPE, (a < b || a != a) ? a : b)                                          \
    LOOP2(max_##SUFFIX, TYPE, (a > b || a != a) ? a : b)                                          \
    TARGET static void KERNEL(divide_##SUFFIX)(void *target, size_t count, int divisor)           \
    {                                                                                             \
        TYPE *out = target;                                                                       \
        for (size_t i = 0; i < count; i++)                                                        \
            out[i] /= (TYPE)divisor;                                                              \
    }

INTEGER(i8, int8_t, uint32_t)
INTEGER(i16, int16_t, uint32_t)
INTEGER(i32, int32_t, uint32_t)
INTEGER(i64, int64_t, uint64_t)
INTEGER(u8, uint8_t, uint32_t)
INTEGER(u16, uint16_t, uint32_t)
INTEGER(u32, uint32_t, uint32_t)
INTEGER(u64, uint64_t, uint64_t)
FLOATING(f32, float)
FLOATING(f64, double)
LOOP2(band, uint8_t, a &b)
LOOP2(bor, uint8_t, a | b)
LOOP2(bxor, uint8_t, a ^ b)

#undef LOOP2
#undef INTEGER
#undef FLOATING

/* ---- 16-bit floats: widened, reduced as float32, rounded once ---- */

TARGET static void KERNEL(widen_bf16)(float *out, const uint16_t *in, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

/* To nearest, ties to even; any NaN becomes the one quiet NaN. */
TARGET static void KERNEL(narrow_bf16)(uint16_t *out, const float *in, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &in[i], sizeof bits);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        out[i] = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)rounded;
    }
}

TARGET static void KERNEL(widen_f16)(float *out, const uint16_t *in, size_t count)
{
    size_t i = 0;
#if HALF_BY_F16C
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < count; i++)
        out[i] = half_to_float(in[i]);
}

TARGET static void KERNEL(narrow_f16)(uint16_t *out, const float *in, size_t count)
{
    size_t i = 0;
#if HALF_BY_F16C
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; i++)
        out[i] = float_to_half(in[i]);
}

static fold_fn *KERNEL(fold_of)(enum ec_dtype dtype, enum ec_reduce_op op)
{
#define ROW(SUFFIX)                                                                               \
    {                                                                                             \
        [EC_SUM] = KERNEL(sum_##SUFFIX), [EC_AVG] = KERNEL(sum_##SUFFIX),                         \
        [EC_MIN] = KERNEL(min_##SUFFIX), [EC_MAX] = KERNEL(max_##SUFFIX),                         \
        [EC_PROD] = KERNEL(prod_##SUFFIX)                                                         \
    }
    static fold_fn *const folds[EC_NUM_DTYPES][EC_NUM_REDUCE_OPS] = {
        [EC_BOOL] = ROW(u8),     [EC_INT8] = ROW(i8),      [EC_INT16] = ROW(i16),
        [EC_INT32] = ROW(i32),   [EC_INT64] = ROW(i64),    [EC_UINT8] = ROW(u8),
        [EC_UINT16] = ROW(u16),  [EC_UINT32] = ROW(u32),   [EC_UINT64] = ROW(u64),
        [EC_FLOAT16] = ROW(f32), [EC_BFLOAT16] = ROW(f32), [EC_FLOAT32] = ROW(f32),
        [EC_FLOAT64] = ROW(f64),
    };
#undef ROW
    switch (op) {
    case EC_BAND:
        return KERNEL(band);
    case EC_BOR:
        return KERNEL(bor);
    case EC_BXOR:
        return KERNEL(bxor);
    default:
        return folds[dtype][op];
    }
}

static const struct kernels KERNEL(kernels) = {
    .name = KERNEL_NAME,
    .fold_of = KERNEL(fold_of),
    .divide_f32 = KERNEL(divide_f32),
    .divide_f64 = KERNEL(divide_f64),
    .widen = {KERNEL(widen_f16), KERNEL(widen_bf16)},
    .narrow = {KERNEL(narrow_f16), KERNEL(narrow_bf16)},
};

#undef KERNEL
#undef KERNEL_NAME
#undef TARGET
#undef HALF_BY_F16C
