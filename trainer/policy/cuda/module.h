/* The way into the CUDA module (longhaul-cuda.so) from C. */
#ifndef TRAINER_POLICY_CUDA_MODULE_H
#define TRAINER_POLICY_CUDA_MODULE_H

#include "proto/error.h"

struct policy_backend;

#define POLICY_CUDA_OPEN "policy_cuda_open"

/* The backend of that name, "cuda" or "cuda-bf16", on the first GPU.  UNAVAILABLE, with the
 * driver's reason, where there is none. */
typedef const struct policy_backend *policy_cuda_open_fn(const char *name, struct lh_error *err);

policy_cuda_open_fn policy_cuda_open;

#endif
