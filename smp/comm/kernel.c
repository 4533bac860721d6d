/* The rounds of smp/comm/arena.py, in C: what a short collective spends its time on. No headers but the C library's and Linux's.
 *
 * The protocol is the one of arena.py, word for word, so that a rank with this kernel and one without it work together.
 * Nothing here waits for long: a function that finds a peer absent says so, and Python sleeps, watches and calls again.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
  uint8_t *base;                    /* of the segment */
  int64_t rank, size;               /* of the ranks of this host */
  int64_t counters, line;           /* where the counters are, and how far apart; the "asleep" word follows each */
  int64_t slots, stride, per_rank;  /* where the slots are, how far apart, how many of each rank */
  int64_t data;                     /* where a slot's data begins */
  int64_t signature_bytes;
  int64_t spins, yields;            /* how often to look for a peer before giving up */
} Arena;

typedef struct {
  const void *signature;
  const uint8_t *source;            /* this rank's bytes */
  const int64_t *sizes;             /* bytes that each rank gives */
  uint8_t *const *addresses;           /* where they go to */
  int64_t chunk, count;             /* bytes of a round at most, and rounds */
  uint32_t first;                   /* number of the first round */
  /* where it stands, zero at first */
  uint32_t needed;                  /* the round that an absent peer has not posted */
  int64_t index, filled, taken;
} Gather;

enum { DONE = 0, MISMATCH = -1 };   /* a positive result is 1 + the peer that is not there */

static uint32_t *counter(const Arena *a, int64_t rank) { return (uint32_t *)(a->base + a->counters + a->line * rank); }

static uint8_t *slot(const Arena *a, int64_t rank, uint32_t k) {
  return a->base + a->slots + a->stride * (a->per_rank * rank + k % a->per_rank);
}

static int posted(const Arena *a, int64_t rank, uint32_t k) {
  return (int32_t)(__atomic_load_n(counter(a, rank), __ATOMIC_ACQUIRE) - k) >= 0;
}

static int there(const Arena *a, int64_t rank, uint32_t k) {
  if (posted(a, rank, k)) return 1;
  for (int64_t i = 0; i < a->spins; i++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (posted(a, rank, k)) return 1;
  }
  for (int64_t i = 0; i < a->yields; i++) {
    sched_yield();
    if (posted(a, rank, k)) return 1;
  }
  return 0;
}

static void post(const Arena *a, uint32_t k) {
  uint32_t *own = counter(a, a->rank);
  __atomic_store_n(own, k, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  for (int64_t i = 1; i < a->size; i++)
    if (__atomic_load_n(counter(a, (a->rank + i) % a->size) + 1, __ATOMIC_RELAXED)) {
      syscall(SYS_futex, own, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
      return;
    }
}

/* Whether every peer is in round k and does the same. */
int64_t smp_agree(const Arena *a, uint32_t k, const void *signature) {
  int differs = 0;
  for (int64_t i = 1; i < a->size; i++) {
    int64_t other = (a->rank + i) % a->size;
    if (!there(a, other, k)) return 1 + other;
    differs |= memcmp(slot(a, other, k), signature, a->signature_bytes) != 0;
  }
  return differs ? MISMATCH : DONE;
}

/* Sign and post round k, whose slot is filled, and see that all agree. */
int64_t smp_meet(const Arena *a, uint32_t k, const void *signature) {
  memcpy(slot(a, a->rank, k), signature, a->signature_bytes);
  post(a, k);
  return smp_agree(a, k, signature);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t fill(const Arena *a, Gather *g, uint32_t k) {
  int64_t start = g->index * g->chunk, mine = g->sizes[a->rank];
  for (int64_t i = 1; i < a->size; i++) {
    int64_t other = (a->rank + i) % a->size;
    g->needed = k - 2;
    if (!there(a, other, g->needed)) return 1 + other;
  }
  if (start < mine) memcpy(slot(a, a->rank, k) + a->data, g->source + start, least(g->chunk, mine - start));
  if (g->index == 0) memcpy(slot(a, a->rank, k), g->signature, a->signature_bytes);
  post(a, k);
  return DONE;
}

static int64_t take(const Arena *a, Gather *g, int64_t index) {
  uint32_t k = g->first + (uint32_t)index;
  int64_t start = index * g->chunk, mine = g->sizes[a->rank];
  if (g->taken == 0) {
    if (start < mine && g->addresses[a->rank] != g->source)
      memcpy(g->addresses[a->rank] + start, g->source + start, least(g->chunk, mine - start));
    g->taken = 1;
  }
  for (; g->taken < a->size; g->taken++) {
    int64_t other = (a->rank + g->taken) % a->size, size = g->sizes[other];
    g->needed = k;
    if (!there(a, other, k)) return 1 + other;
    if (start < size)
      memcpy(g->addresses[other] + start, slot(a, other, k) + a->data, least(g->chunk, size - start));
  }
  g->taken = 0;
  return DONE;
}

/* All rounds of an all_gather or broadcast; called again after an absent peer has come. */
int64_t smp_gather(const Arena *a, Gather *g) {
  int64_t status;
  for (; g->index < g->count; g->index++, g->filled = 0) {
    if (!g->filled) {
      if ((status = fill(a, g, g->first + (uint32_t)g->index)) != DONE) return status;
      g->filled = 1;
    }
    if (g->index == 0) {
      g->needed = g->first;
      status = smp_agree(a, g->first, g->signature);
    } else {
      status = take(a, g, g->index - 1);
    }
    if (status != DONE) return status;
  }
  return take(a, g, g->count - 1);
}
