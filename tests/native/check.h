/* Ranks as threads of one process over one mapping: what the checks share. */
#ifndef ECHELON_CHECK_H
#define ECHELON_CHECK_H

#define _GNU_SOURCE
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 3, SLOT_BYTES = 4096, RING_BYTES = 2048, MAX_COUNT = 9000 };

struct group {
    void *memory;
    int size;
    size_t slot_bytes;
    bool spins;
    int rounds;
};

extern _Atomic int num_wrong;
extern _Atomic uint64_t num_lost_wakes;

void expect(bool right, const char *what, int rank, int round);
struct ec_op operation(enum ec_kind kind, uint64_t sequence, void *source, void *target,
                       size_t source_bytes, size_t target_bytes, int root);
struct ec_op message(enum ec_kind kind, int tag, void *bytes, size_t num_bytes, int peer);
void finish(struct ec_engine *engine, struct ec_op *op, int round);
void run(struct ec_engine *engine, struct ec_op *op, int round);
void open_rank(struct ec_engine *engine, const struct group *group, int rank);
void close_rank(struct ec_engine *engine);
void on_ranks(int size, size_t slot_bytes, bool spins, int rounds,
              void (*body)(const struct group *group, int rank));

/* operations.c: every collective and every way of a message, right results demanded. */
void check_operations(const struct group *group, int rank);
void check_many_ranks(const struct group *group, int rank);

/* endings.c: every way in which a group ends. */
void check_endings(bool spins, int rounds);

#endif
