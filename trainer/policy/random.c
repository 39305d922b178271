#include "trainer/policy/random.h"

#include <math.h>

static void philox(const uint32_t seed[2], uint32_t c[4])
{
    uint32_t k0 = seed[0], k1 = seed[1];

    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1,
                            (uint32_t)(p0 >> 32) ^ c[3] ^ k1, (uint32_t)p0};

        for (int i = 0; i < 4; i++)
            c[i] = next[i];
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

static void draw(uint64_t seed, uint64_t index, uint64_t out[2])
{
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t c[4] = {(uint32_t)index, (uint32_t)(index >> 32)};

    philox(key, c);
    out[0] = (uint64_t)c[1] << 32 | c[0];
    out[1] = (uint64_t)c[3] << 32 | c[2];
}

static double unit(uint64_t x)
{
    return (double)(x >> 11) * 0x1p-53;
}

uint64_t policy_random(uint64_t seed, uint64_t index)
{
    uint64_t x[2];

    draw(seed, index, x);
    return x[0];
}

double policy_uniform(uint64_t seed, uint64_t index)
{
    return unit(policy_random(seed, index));
}

double policy_normal(uint64_t seed, uint64_t index)
{
    uint64_t x[2];

    draw(seed, index, x);
    return sqrt(-2 * log(1 - unit(x[0]))) * cos(2 * M_PI * unit(x[1])); /* Box-Muller */
}
