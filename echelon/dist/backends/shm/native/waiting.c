/* Counters, bells and sleep: how ranks notice each other's progress, and each other's death. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef EC_WEAKEN_PUBLISH /* for the test that ThreadSanitizer sees what we think it sees */
#define EC_PUBLISH memory_order_relaxed
#else
#define EC_PUBLISH memory_order_seq_cst /* a release, and the first half of Dekker's pattern */
#endif

/* How long to spin before sleeping follows what spinning brought: doubled when the peer came in
 * time, cut to a quarter when it did not, and tried at full length once in a while, since a short
 * spin never sees the end of waits that are longer. Measured on two cores beside busy neighbors:
 * a yield there costs a whole time slice of the neighbor (ms), and a fixed spin costs all of
 * itself whenever the peer is the one whom it keeps off the core. */
enum { EC_LEAST_SPIN_NS = 4000, EC_MOST_SPIN_NS = 100000, EC_PAUSES = 64, EC_TRY_AGAIN = 16 };

_Atomic uint64_t ec_num_lost_wakes;

int64_t ec_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

void ec_ring_bell(struct ec_control *control)
{
    atomic_fetch_add(&control->bell, 1);
    syscall(SYS_futex, &control->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Wake a peer if it sleeps on this rank. */
void ec_tell(struct ec_engine *engine, int peer)
{
    struct ec_control *control = &engine->controls[peer];
    uint32_t on = atomic_load(&control->sleeps_on);
    if (on == EC_ANYONE || on == (uint32_t)engine->rank + 1)
        ec_ring_bell(control);
}

/* Move a counter that others wait on: `peer`, or all if it is negative. */
void ec_announce(struct ec_engine *engine, _Atomic uint64_t *counter, uint64_t value, int peer)
{
    struct ec_control *mine = &engine->controls[engine->rank];
    atomic_store_explicit(&mine->tells, 1, memory_order_relaxed);
    atomic_store_explicit(counter, value, EC_PUBLISH);
    if (peer >= 0) {
        ec_tell(engine, peer);
    } else {
        for (int rank = 0; rank < engine->size; rank++)
            if (rank != engine->rank)
                ec_tell(engine, rank);
    }
    atomic_store_explicit(&mine->tells, 0, memory_order_release);
}

static bool has_moved(struct ec_engine *engine, const struct ec_wait *waits, int num)
{
    if (atomic_load(&engine->kicked))
        return true;
    for (int i = 0; i < num; i++)
        if (atomic_load(waits[i].word) >= waits[i].value)
            return true;
    return false;
}

static void set_spin(struct ec_engine *engine, int64_t spin_ns)
{
    engine->spin_ns = spin_ns < EC_LEAST_SPIN_NS  ? EC_LEAST_SPIN_NS
                      : spin_ns > EC_MOST_SPIN_NS ? EC_MOST_SPIN_NS
                                                  : spin_ns;
}

static bool moves_while_spinning(struct ec_engine *engine, const struct ec_wait *waits, int num)
{
    int64_t stop = ec_now_ns() + engine->spin_ns;
    do {
        for (int i = 0; i < EC_PAUSES; i++) {
            if (has_moved(engine, waits, num)) {
                set_spin(engine, 2 * engine->spin_ns);
                engine->statistics.num_spins++;
                return true;
            }
            relax();
        }
    } while (ec_now_ns() < stop);
    engine->num_slept++;
    set_spin(engine, engine->num_slept % EC_TRY_AGAIN ? engine->spin_ns / 4 : EC_MOST_SPIN_NS);
    return false;
}

/* Sleep while the bell shows `bell`; false: the time is up. */
static bool sleep_on_bell(struct ec_control *mine, uint32_t bell, int64_t slice_ns)
{
    struct timespec limit = {slice_ns / 1000000000, slice_ns % 1000000000};
    long said = syscall(SYS_futex, &mine->bell, FUTEX_WAIT, bell, &limit, NULL, 0);
    return said == 0 || errno != ETIMEDOUT;
}

/* A sleep ended by time: count it if the rank that moved its counter rang no bell. That rank may just
 * be about to: it says when it has told all others. */
static void count_lost_wake(struct ec_engine *engine, const struct ec_wait *waits, int num,
                            uint32_t bell)
{
    for (int i = 0; i < num; i++) {
        const struct ec_control *mover = &engine->controls[waits[i].rank];
        if (atomic_load(waits[i].word) < waits[i].value || atomic_load(&mover->tells))
            continue;
        if (atomic_load(&engine->controls[engine->rank].bell) != bell)
            return;
        engine->statistics.num_lost_wakes++;
        atomic_fetch_add(&ec_num_lost_wakes, 1);
        return;
    }
}

/* Dekker's pattern, the sleeper's half: true if a counter has moved after all. */
static bool moves_before_sleep(struct ec_engine *engine, const struct ec_wait *waits, int num,
                         uint32_t on)
{
    _Atomic uint32_t *sleeps_on = &engine->controls[engine->rank].sleeps_on;
#ifdef EC_WEAKEN_SLEEP
    /* For the test that a lost wake is counted: what a relaxed store allows, made likely. It becomes
     * visible only after the load that follows it. */
    bool moved = has_moved(engine, waits, num);
    for (int i = 0; i < 2000; i++)
        relax();
    atomic_store_explicit(sleeps_on, on, memory_order_relaxed);
    return moved;
#else
    atomic_store(sleeps_on, on);
    return has_moved(engine, waits, num);
#endif
}

/* Wait until one of the counters has moved, at most `slice_ns`. */
void ec_sleep(struct ec_engine *engine, const struct ec_wait *waits, int num, int64_t slice_ns)
{
    if (engine->spins && moves_while_spinning(engine, waits, num))
        return;
    struct ec_control *mine = &engine->controls[engine->rank];
    uint32_t bell = atomic_load(&mine->bell);
    uint32_t on = num == 1 ? (uint32_t)waits[0].rank + 1 : EC_ANYONE;
    if (!moves_before_sleep(engine, waits, num, on)) {
        engine->statistics.num_sleeps++;
        if (!sleep_on_bell(mine, bell, slice_ns))
            count_lost_wake(engine, waits, num, bell);
    }
    atomic_store(&mine->sleeps_on, 0);
}

/* State letter and start time of a process, as /proc has them; false if it is gone. */
static bool read_stat(int pid, char *state, uint64_t *start_ticks)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    char *rest = strrchr(text, ')'); /* the name before it may hold anything */
    if (!rest || rest[1] != ' ')
        return false;
    *state = rest[2];
    rest += 2;
    for (int field = 3; field < 22 && rest; field++)
        if ((rest = strchr(rest, ' ')))
            rest++;
    *start_ticks = rest ? strtoull(rest, NULL, 10) : 0;
    return true;
}

bool ec_is_dead(struct ec_peer *peer)
{
    if (!peer->pid)
        return false;
    if (peer->pidfd >= 0) {
        struct pollfd waits = {.fd = peer->pidfd, .events = POLLIN};
        return poll(&waits, 1, 0) > 0 && (waits.revents & POLLIN);
    }
    char state = 0;
    uint64_t ticks = 0;
    if (!read_stat(peer->pid, &state, &ticks))
        return true;
    return state == 'Z' || state == 'X' || ticks != peer->start_ticks;
}
