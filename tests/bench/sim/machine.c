/* The hidden truth: how fast things are, and how that changes.  Every minute and a half each of the
 * two rates jumps to somewhere between half and twice its nominal value, so by up to a factor of
 * four, and independently of the other; a second kind of drift would only be gentler. */
#include <math.h>

#include "tests/bench/sim/sim.h"

enum { COMPUTE = 11, DEVICE = 12 };
static const int64_t DRIFT_US = 90000000;
static const double DEVICE_LATENCY_S = 0.001;

const struct sim_model sim_models[] = {
    /* Two devices that share 40 GiB of KV; sizes from the model's config (bf16 latents of 7 MLA
     * layers, fp32 states of 20 KDA layers). */
    {.name = "Kimi-Linear-48B",
     .unit_tokens = 512,
     .pass_tokens = 8192,
     .block_bytes = 512 * 8064,
     .state_bytes = 43417600,
     .prompt_s = 1 / 120e3,
     .context_s = 1 / 120e3 / 40e3,
     .pass_s = 0.006,
     .row_s = 50e-6,
     .row_context_s = 2e-9,
     .kv_bytes = 40ull << 30,
     .staging_bytes = 32ull << 30,
     .store_bytes = 1ull << 40},
    /* Eight devices with 200 GiB; 24 MLA and 69 KDA layers. */
    {.name = "K3",
     .unit_tokens = 512,
     .pass_tokens = 8192,
     .block_bytes = 512 * 27648,
     .state_bytes = 449372160,
     .prompt_s = 1 / 40e3,
     .context_s = 1 / 40e3 / 40e3,
     .pass_s = 0.015,
     .row_s = 100e-6,
     .row_context_s = 2e-9,
     .kv_bytes = 200ull << 30,
     .staging_bytes = 128ull << 30,
     .store_bytes = 4ull << 40},
};

static double factor(const struct sim_machine *m, int64_t now_us, uint64_t what)
{
    uint64_t period = (uint64_t)(now_us / DRIFT_US);

    if (!m->o->drift)
        return 1;
    return exp2(2 * sim_uniform(m->o->seed * 8 + what, period) - 1);
}

double sim_pass_seconds(const struct sim_machine *m, int64_t now_us, unsigned rows, double contexts,
                        double prompt_tokens, double prompt_contexts)
{
    const struct sim_model *k = m->o->model;
    double decode = k->pass_s + rows * k->row_s + contexts * k->row_context_s;
    double prompt = prompt_tokens * k->prompt_s + prompt_contexts * k->context_s;

    return (decode + prompt) / factor(m, now_us, COMPUTE);
}

int64_t sim_device(struct sim_machine *m, int64_t now_us, uint64_t bytes, bool write)
{
    double rate = m->o->bytes_per_s * factor(m, now_us, DEVICE);
    int64_t from = m->free_us > now_us ? m->free_us : now_us;

    m->free_us = from + (int64_t)((double)bytes / rate * 1e6) + 1;
    *(write ? &m->written : &m->read) += bytes;
    return m->free_us + (int64_t)(DEVICE_LATENCY_S * 1e6);
}
