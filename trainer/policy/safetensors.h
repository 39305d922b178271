/* safetensors: u64 header length, JSON header, raw little-endian data.
 *
 * Files come from outside, so nothing of them is trusted: header at most 100 MB, every entry's
 * type, shape and byte range must agree, ranges must lie in the file and not overlap.  Messages
 * name the file and the tensor. */
#ifndef TRAINER_POLICY_SAFETENSORS_H
#define TRAINER_POLICY_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "proto/cleanup.h"
#include "proto/error.h"

enum safetensors_type { ST_F32, ST_F16, ST_BF16, ST_I32, ST_TYPES };

struct safetensor {
    const char *name;
    enum safetensors_type type;
    int dims;
    int64_t shape[8];
    size_t count;     /* elements */
    const void *data; /* in the map, unaligned */
};

struct safetensors;

struct safetensors *safetensors_open(const char *path, struct lh_error *err);
/* The same from memory that outlives the object; `name` is for messages. */
struct safetensors *safetensors_parse(const void *bytes, size_t len, const char *name,
                                      struct lh_error *err);
void safetensors_destroy(struct safetensors *s);
LH_DEFINE_AUTO(safetensors, safetensors_destroy)

/* NULL when there is none of that name. */
const struct safetensor *safetensors_find(const struct safetensors *s, const char *name);
size_t safetensors_count(const struct safetensors *s);
const struct safetensor *safetensors_at(const struct safetensors *s, size_t i); /* by name */

/* Any floating type, converted. */
int safetensor_floats(const struct safetensor *t, float *to, struct lh_error *err);

/* Writes float32 tensors sorted by name; same tensors, same bytes.  The file is complete or absent
 * after a crash.  `data` of each must point to count floats. */
int safetensors_write(const char *path, struct safetensor *tensors, size_t n, struct lh_error *err);

#endif
