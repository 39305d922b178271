/* Counter-based random numbers: a function of (seed, index), with no state to save or to share, so
 * a resumed trajectory draws what the uninterrupted one would have drawn.  Philox4x32-10 (Salmon et
 * al., SC 2011). */
#ifndef TRAINER_POLICY_RANDOM_H
#define TRAINER_POLICY_RANDOM_H

#include <stdint.h>

uint64_t policy_random(uint64_t seed, uint64_t index);
double policy_uniform(uint64_t seed, uint64_t index); /* [0, 1), 53 bits */
double policy_normal(uint64_t seed, uint64_t index);  /* mean 0, variance 1 */

#endif
