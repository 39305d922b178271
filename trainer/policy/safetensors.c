#include "trainer/policy/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/file.h"

enum { HEADER_MAX = 100 * 1000 * 1000, MAX_DIMS = 8 };

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian");

static const struct {
    const char *name;
    size_t size;
} types[ST_TYPES] = {
    [ST_F32] = {"F32", 4}, [ST_F16] = {"F16", 2}, [ST_BF16] = {"BF16", 2}, [ST_I32] = {"I32", 4}};

struct safetensors {
    const char *data; /* behind the header */
    size_t data_len;
    json_t *header; /* owns the names */
    struct safetensor *tensors;
    size_t n;
    void *map;
    size_t map_len;
};

static int read_type(const json_t *entry, struct safetensor *t)
{
    const char *name = json_string_value(json_object_get(entry, "dtype"));

    for (int i = 0; name && i < ST_TYPES; i++)
        if (!strcmp(name, types[i].name)) {
            t->type = (enum safetensors_type)i;
            return 0;
        }
    return -1;
}

static int read_shape(const json_t *entry, struct safetensor *t)
{
    const json_t *shape = json_object_get(entry, "shape");
    size_t i;
    json_t *v;

    if (!json_is_array(shape) || json_array_size(shape) > MAX_DIMS)
        return -1;
    t->count = 1;
    json_array_foreach(shape, i, v)
    {
        json_int_t x = json_integer_value(v);

        if (!json_is_integer(v) || x < 0 || __builtin_mul_overflow(t->count, (size_t)x, &t->count))
            return -1;
        t->shape[t->dims++] = x;
    }
    return 0;
}

static int read_range(const json_t *entry, size_t data_len, size_t *from, size_t *to)
{
    const json_t *range = json_object_get(entry, "data_offsets");
    const json_t *a = json_array_get(range, 0), *b = json_array_get(range, 1);

    if (json_array_size(range) != 2 || !json_is_integer(a) || !json_is_integer(b) ||
        json_integer_value(a) < 0 || json_integer_value(b) < json_integer_value(a) ||
        (uint64_t)json_integer_value(b) > data_len)
        return -1;
    *from = (size_t)json_integer_value(a);
    *to = (size_t)json_integer_value(b);
    return 0;
}

static int read_entry(struct safetensors *s, const char *key, const json_t *entry, const char *name,
                      struct lh_error *err)
{
    struct safetensor t = {.name = key};
    size_t from, to, bytes;

    if (read_type(entry, &t))
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "%s: tensor %s: dtype must be F32, F16, BF16 or I32", name, key);
    if (read_shape(entry, &t))
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "%s: tensor %s: shape must be at most %d sizes whose product fits", name,
                       key, MAX_DIMS);
    if (read_range(entry, s->data_len, &from, &to))
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "%s: tensor %s: data_offsets must lie in the %zu bytes of data", name, key,
                       s->data_len);
    if (__builtin_mul_overflow(t.count, types[t.type].size, &bytes) || bytes != to - from)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "%s: tensor %s: %zu bytes of data do not fit its shape and dtype", name, key,
                       to - from);
    t.data = s->data + from;
    s->tensors[s->n++] = t;
    return 0;
}

static int by_place(const void *a, const void *b)
{
    const struct safetensor *x = a, *y = b;

    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return (x->count > y->count) - (x->count < y->count); /* empty ones first */
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct safetensor *)a)->name, ((const struct safetensor *)b)->name);
}

/* Overlap would let one tensor's bytes be another's; padding holes are harmless. */
static int check_overlap(struct safetensors *s, const char *name, struct lh_error *err)
{
    qsort(s->tensors, s->n, sizeof *s->tensors, by_place);
    for (size_t i = 1; i < s->n; i++) {
        const struct safetensor *a = &s->tensors[i - 1], *b = &s->tensors[i];

        if ((const char *)a->data + a->count * types[a->type].size > (const char *)b->data)
            return lh_fail(err, LH_INVALID_ARGUMENT, "%s: tensors %s and %s overlap", name, a->name,
                           b->name);
    }
    qsort(s->tensors, s->n, sizeof *s->tensors, by_name);
    return 0;
}

static int read_header(struct safetensors *s, const char *bytes, size_t len, const char *name,
                       struct lh_error *err)
{
    json_error_t at;
    const char *key;
    json_t *entry;

    s->header = json_loadb(bytes, len, JSON_REJECT_DUPLICATES, &at);
    if (!json_is_object(s->header))
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: header is not a JSON object: %s", name,
                       s->header ? "another type" : at.text);
    s->tensors = calloc(json_object_size(s->header) + 1, sizeof *s->tensors);
    if (!s->tensors)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s: out of memory", name);
    json_object_foreach(s->header, key, entry)
    {
        int rc = strcmp(key, "__metadata__") ? read_entry(s, key, entry, name, err) : 0;

        if (rc)
            return rc;
    }
    return check_overlap(s, name, err);
}

static int parse(struct safetensors *s, const char *bytes, size_t len, const char *name,
                 struct lh_error *err)
{
    uint64_t header;

    if (len < sizeof header)
        return lh_fail(err, LH_INVALID_ARGUMENT, "%s: %zu bytes are too few for safetensors", name,
                       len);
    memcpy(&header, bytes, sizeof header);
    if (header > HEADER_MAX || header > len - sizeof header)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "%s: header of %llu bytes exceeds the file or the limit of 100 MB", name,
                       (unsigned long long)header);
    s->data = bytes + sizeof header + header;
    s->data_len = len - sizeof header - (size_t)header;
    return read_header(s, bytes + sizeof header, (size_t)header, name, err);
}

struct safetensors *safetensors_parse(const void *bytes, size_t len, const char *name,
                                      struct lh_error *err)
{
    lh_auto(safetensors) s = calloc(1, sizeof *s);

    if (!s) {
        lh_fail(err, LH_RESOURCE_EXHAUSTED, "%s: out of memory", name);
        return NULL;
    }
    return parse(s, bytes, len, name, err) ? NULL : lh_steal(&s);
}

struct safetensors *safetensors_open(const char *path, struct lh_error *err)
{
    lh_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct safetensors *s;
    struct stat st;
    void *map;

    if (fd < 0 || fstat(fd, &st)) {
        lh_fail_errno(err, errno, "opening %s", path);
        return NULL;
    }
    if (!S_ISREG(st.st_mode) || st.st_size < 8) {
        lh_fail(err, LH_INVALID_ARGUMENT, "%s: not a safetensors file", path);
        return NULL;
    }
    map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) {
        lh_fail_errno(err, errno, "mapping %s", path);
        return NULL;
    }
    s = safetensors_parse(map, (size_t)st.st_size, path, err);
    if (!s) {
        munmap(map, (size_t)st.st_size);
        return NULL;
    }
    s->map = map;
    s->map_len = (size_t)st.st_size;
    return s;
}

void safetensors_destroy(struct safetensors *s)
{
    if (!s)
        return;
    json_decref(s->header);
    free(s->tensors);
    if (s->map)
        munmap(s->map, s->map_len);
    free(s);
}

const struct safetensor *safetensors_find(const struct safetensors *s, const char *name)
{
    struct safetensor key = {.name = name};

    return bsearch(&key, s->tensors, s->n, sizeof key, by_name);
}

size_t safetensors_count(const struct safetensors *s)
{
    return s->n;
}

const struct safetensor *safetensors_at(const struct safetensors *s, size_t i)
{
    return &s->tensors[i];
}

static float from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = (h >> 10) & 31, fraction = h & 1023;
    uint32_t bits = exponent == 31 ? sign | 0x7f800000u | fraction << 13
                                   : sign | (exponent + 112) << 23 | fraction << 13;
    float f;

    if (exponent == 0) /* subnormal: fraction * 2^-24 */
        return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static float from_bf16(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;

    memcpy(&f, &bits, sizeof f);
    return f;
}

int safetensor_floats(const struct safetensor *t, float *to, struct lh_error *err)
{
    if (t->type == ST_I32)
        return lh_fail(err, LH_INVALID_ARGUMENT, "tensor %s: I32 where floats are wanted", t->name);
    if (t->type == ST_F32) {
        memcpy(to, t->data, t->count * sizeof *to);
        return 0;
    }
    for (size_t i = 0; i < t->count; i++) {
        uint16_t h;

        memcpy(&h, (const char *)t->data + 2 * i, sizeof h);
        to[i] = t->type == ST_F16 ? from_f16(h) : from_bf16(h);
    }
    return 0;
}

/* The header's text, or NULL when memory is out. */
static char *print_header(const struct safetensor *tensors, size_t n)
{
    json_t *root = json_object();
    size_t at = 0;
    char *text;

    json_object_set_new(root, "__metadata__", json_pack("{ss}", "format", "pt"));
    for (size_t i = 0; i < n; i++) {
        const struct safetensor *t = &tensors[i];
        size_t end = at + t->count * sizeof(float);
        json_t *shape = json_array();

        for (int d = 0; d < t->dims; d++)
            json_array_append_new(shape, json_integer(t->shape[d]));
        json_object_set_new(root, t->name,
                            json_pack("{sssos[II]}", "dtype", "F32", "shape", shape, "data_offsets",
                                      (json_int_t)at, (json_int_t)end));
        at = end;
    }
    text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

static int write_tensors(int fd, const struct safetensor *tensors, size_t n, struct lh_error *err)
{
    lh_autofree char *header = print_header(tensors, n);
    size_t len = header ? strlen(header) : 0;
    uint64_t padded = (len + 7) / 8 * 8; /* data begins aligned */
    int rc;

    if (!header)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "header: out of memory");
    rc = lh_write_all(fd, &padded, sizeof padded, err);
    if (!rc)
        rc = lh_write_all(fd, header, len, err);
    if (!rc)
        rc = lh_write_all(fd, "       ", padded - len, err);
    for (size_t i = 0; !rc && i < n; i++)
        rc = lh_write_all(fd, tensors[i].data, tensors[i].count * sizeof(float), err);
    if (!rc && fdatasync(fd))
        rc = lh_fail_errno(err, errno, "syncing");
    return rc;
}

int safetensors_write(const char *path, struct safetensor *tensors, size_t n, struct lh_error *err)
{
    lh_autofree char *tmp = lh_format("%s.tmp", path);
    lh_autoclose int fd = tmp ? open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
    int rc;

    if (!tmp)
        return lh_fail(err, LH_RESOURCE_EXHAUSTED, "writing %s: out of memory", path);
    if (fd < 0)
        return lh_fail_errno(err, errno, "creating %s", tmp);
    qsort(tensors, n, sizeof *tensors, by_name);
    rc = write_tensors(fd, tensors, n, err);
    if (rc)
        lh_wrap(err, "writing %s", tmp);
    else if (rename(tmp, path))
        rc = lh_fail_errno(err, errno, "renaming %s to %s", tmp, path);
    if (rc) {
        unlink(tmp);
        return rc;
    }
    return lh_sync_dir_of(path, err);
}
