/* CRC-32 by folding, with carry-less multiplication.
 *
 * The method and the constants, which are powers of x modulo the CRC's polynomial, are those of Gopal
 * et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009).
 * Four lanes of 16 bytes are each multiplied forward by 64 bytes and added to the next 64. In the end
 * they are 16 bytes with the CRC of all that came before, and these go through a table.
 *
 * One carry-less multiplication per lane is slower than the memory. Where the processor multiplies two
 * lanes in one instruction (VPCLMULQDQ), eight lanes are therefore multiplied forward by 128 bytes.
 */
#include "fold.h"

#include <string.h>

static uint32_t table[256];

static uint32_t bytewise(const unsigned char *at, size_t length, uint32_t state)
{
    for (; length; length--, at++)
        state = (state >> 8) ^ table[(state ^ *at) & 0xFF];
    return state;
}

static void make_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++)
            value = (value >> 1) ^ (0xEDB88320u & (0u - (value & 1)));
        table[i] = value;
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define FOLDING __attribute__((target("pclmul,sse2"), always_inline)) static inline
#define ENTRY __attribute__((target("pclmul,sse2"), noinline)) static
#define WIDE_FOLDING __attribute__((target("vpclmulqdq,pclmul,avx2"), always_inline)) static inline
#define WIDE_ENTRY __attribute__((target("vpclmulqdq,pclmul,avx2"), noinline)) static

enum { LANE = 16, BLOCK = 64, PAIR = 32, WIDE_BLOCK = 128 };

/* How a block is written: not at all, or past the caches, or to any address. */
enum store { NOWHERE, STREAM, ANYWHERE };

FOLDING __m128i forward(__m128i lane, __m128i factors)
{
    return _mm_xor_si128(_mm_clmulepi64_si128(lane, factors, 0x00),
                         _mm_clmulepi64_si128(lane, factors, 0x11));
}

FOLDING __m128i take(const unsigned char *from, unsigned char *to, enum store store)
{
    __m128i lane = _mm_loadu_si128((const __m128i *)from);
    if (store == STREAM)
        _mm_stream_si128((__m128i *)to, lane);
    else if (store == ANYWHERE)
        _mm_storeu_si128((__m128i *)to, lane);
    return lane;
}

/* Add lanes and what is left of whole lanes after them; return the state of the CRC after all. */
FOLDING uint32_t finish(const __m128i *lanes, int num, unsigned char *to, const unsigned char *from,
                        size_t length, enum store store)
{
    const __m128i by_lane = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i sum = lanes[0];
    unsigned char rest[LANE];
    for (int i = 1; i < num; i++)
        sum = _mm_xor_si128(forward(sum, by_lane), lanes[i]);
    for (size_t at = 0; at < length; at += LANE)
        sum = _mm_xor_si128(forward(sum, by_lane), take(from + at, to + at, store));
    if (store == STREAM)
        _mm_sfence();
    _mm_storeu_si128((__m128i *)rest, sum);
    return bytewise(rest, LANE, 0);
}

/* Copy whole lanes, at least a block; return the state of the CRC after them. */
FOLDING uint32_t fold(unsigned char *to, const unsigned char *from, size_t num_lanes,
                      uint32_t state, enum store store)
{
    const __m128i by_block = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    __m128i lanes[4];
    size_t at = BLOCK, end = num_lanes * LANE;
    for (int i = 0; i < 4; i++)
        lanes[i] = take(from + i * LANE, to + i * LANE, store);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)state));
    for (; at + BLOCK <= end; at += BLOCK)
        for (int i = 0; i < 4; i++)
            lanes[i] = _mm_xor_si128(forward(lanes[i], by_block),
                                     take(from + at + i * LANE, to + at + i * LANE, store));
    return finish(lanes, 4, to + at, from + at, end - at, store);
}

ENTRY uint32_t fold_only(const unsigned char *from, size_t num_lanes, uint32_t state)
{
    /* Nothing is written, so any address will do. */
    return fold((unsigned char *)(uintptr_t)from, from, num_lanes, state, NOWHERE);
}

ENTRY uint32_t fold_streaming(unsigned char *to, const unsigned char *from, size_t num_lanes,
                              uint32_t state)
{
    return fold(to, from, num_lanes, state, STREAM);
}

ENTRY uint32_t fold_anywhere(unsigned char *to, const unsigned char *from, size_t num_lanes,
                             uint32_t state)
{
    return fold(to, from, num_lanes, state, ANYWHERE);
}

WIDE_FOLDING __m256i wide_take(const unsigned char *from, unsigned char *to, enum store store)
{
    __m256i pair = _mm256_loadu_si256((const __m256i *)from);
    if (store == STREAM)
        _mm256_stream_si256((__m256i *)to, pair);
    else if (store == ANYWHERE)
        _mm256_storeu_si256((__m256i *)to, pair);
    return pair;
}

/* The same with pairs of lanes; at least a wide block. */
WIDE_FOLDING uint32_t wide_fold(unsigned char *to, const unsigned char *from, size_t num_lanes,
                                uint32_t state, enum store store)
{
    const __m256i by_block = _mm256_set_epi64x(0x14a7fe880, 0x1e88ef372, 0x14a7fe880, 0x1e88ef372);
    __m256i pairs[4];
    __m128i lanes[8];
    size_t at = WIDE_BLOCK, end = num_lanes * LANE;
    for (int i = 0; i < 4; i++)
        pairs[i] = wide_take(from + i * PAIR, to + i * PAIR, store);
    pairs[0] = _mm256_xor_si256(pairs[0], _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, (int)state));
    for (; at + WIDE_BLOCK <= end; at += WIDE_BLOCK)
        for (int i = 0; i < 4; i++) {
            __m256i low = _mm256_clmulepi64_epi128(pairs[i], by_block, 0x00);
            __m256i high = _mm256_clmulepi64_epi128(pairs[i], by_block, 0x11);
            __m256i next = wide_take(from + at + i * PAIR, to + at + i * PAIR, store);
            pairs[i] = _mm256_xor_si256(_mm256_xor_si256(low, high), next);
        }
    for (int i = 0; i < 8; i++)
        lanes[i] = i % 2 ? _mm256_extracti128_si256(pairs[i / 2], 1)
                         : _mm256_castsi256_si128(pairs[i / 2]);
    return finish(lanes, 8, to + at, from + at, end - at, store);
}

WIDE_ENTRY uint32_t wide_fold_only(const unsigned char *from, size_t num_lanes, uint32_t state)
{
    return wide_fold((unsigned char *)(uintptr_t)from, from, num_lanes, state, NOWHERE);
}

WIDE_ENTRY uint32_t wide_fold_streaming(unsigned char *to, const unsigned char *from,
                                        size_t num_lanes, uint32_t state)
{
    return wide_fold(to, from, num_lanes, state, STREAM);
}

WIDE_ENTRY uint32_t wide_fold_anywhere(unsigned char *to, const unsigned char *from,
                                       size_t num_lanes, uint32_t state)
{
    return wide_fold(to, from, num_lanes, state, ANYWHERE);
}

static bool is_wide;

bool cp_widen(bool wanted)
{
    is_wide = wanted && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2");
    return is_wide;
}

bool cp_prepare(void)
{
    make_table();
    __builtin_cpu_init();
    cp_widen(true);
    return __builtin_cpu_supports("pclmul");
}

uint32_t cp_crc(const void *data, size_t length, uint32_t crc)
{
    const unsigned char *from = data;
    size_t whole = length < BLOCK ? 0 : length / LANE;
    uint32_t state = ~crc;
    if (is_wide && length >= WIDE_BLOCK)
        state = wide_fold_only(from, whole, state);
    else if (whole)
        state = fold_only(from, whole, state);
    return ~bytewise(from + whole * LANE, length - whole * LANE, state);
}

uint32_t cp_copy(void *target, const void *source, size_t length, uint32_t crc)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    size_t whole = length < BLOCK ? 0 : length / LANE, done = whole * LANE;
    uint32_t state = ~crc;
    if (is_wide && length >= WIDE_BLOCK && (uintptr_t)to % PAIR == 0)
        state = wide_fold_streaming(to, from, whole, state);
    else if (is_wide && length >= WIDE_BLOCK)
        state = wide_fold_anywhere(to, from, whole, state);
    else if (whole && (uintptr_t)to % LANE == 0)
        state = fold_streaming(to, from, whole, state);
    else if (whole)
        state = fold_anywhere(to, from, whole, state);
    if (length > done)
        memcpy(to + done, from + done, length - done);
    return ~bytewise(to + done, length - done, state);
}

#else

bool cp_widen(bool wanted)
{
    (void)wanted;
    return false;
}

bool cp_prepare(void)
{
    make_table();
    return false;
}

uint32_t cp_crc(const void *data, size_t length, uint32_t crc)
{
    return ~bytewise(data, length, ~crc);
}

uint32_t cp_copy(void *target, const void *source, size_t length, uint32_t crc)
{
    if (length)
        memcpy(target, source, length);
    return ~bytewise(target, length, ~crc);
}

#endif

uint32_t cp_zeros(void *target, size_t length, uint32_t crc)
{
    if (length)
        memset(target, 0, length);
    return ~bytewise(target, length, ~crc);
}
