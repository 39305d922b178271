/* Counter-based randomness: a number is a function of (seed, counter), never of what was drawn
 * before. So a resumed job draws what the uninterrupted one would have. */
#ifndef TRAINER_INTAKE_RANDOM_H
#define TRAINER_INTAKE_RANDOM_H

#include <stdint.h>

/* SplitMix64's finaliser over the pair (Steele, Lea, Flood: Fast Splittable PRNGs, 2014). */
static inline uint64_t random_u64(uint64_t seed, uint64_t counter)
{
    uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* 0..n-1; the bias of the multiplication is below n / 2^64. */
static inline uint64_t random_below(uint64_t seed, uint64_t counter, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)random_u64(seed, counter) * n) >> 64);
}

#endif
