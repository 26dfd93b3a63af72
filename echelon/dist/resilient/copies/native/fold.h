#ifndef CP_FOLD_H
#define CP_FOLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Prepare the table; whether this processor has the instructions. */
bool cp_prepare(void);

/* Use the instructions that multiply two lanes, if wanted and if this processor has them; whether it
 * does so from now on. */
bool cp_widen(bool wanted);

/* Each continues a CRC-32 that begins with 0. */
uint32_t cp_crc(const void *data, size_t length, uint32_t crc);
uint32_t cp_copy(void *target, const void *source, size_t length, uint32_t crc);
uint32_t cp_zeros(void *target, size_t length, uint32_t crc);

#endif
