/* The JSON of container images: OCI index, manifest and configuration, and docker-archive's
 * manifest.json.  From outside, so every text is bounded, every digest and name checked, and
 * nothing is taken for granted; knows no files.  Fuzzed: tests/fuzz/fuzz_oci.c. */
#ifndef AGENTENV_TASK_OCI_JSON_H
#define AGENTENV_TASK_OCI_JSON_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/error.h"

enum { OCI_JSON_MAX = 4 << 20, OCI_LAYERS_MAX = 512, OCI_NAME = 256, OCI_ENV_MAX = 256 };

/* A file of the image: its name below the layout or in the archive, and the SHA-256 it must have in
 * hexadecimal, "" where the format gives none. */
struct oci_blob {
    char name[OCI_NAME];
    char sha256[65];
};

struct oci_layers {
    struct oci_blob config;
    struct oci_blob *items; /* bottom first */
    size_t n;
};
void oci_layers_finish(struct oci_layers *l);

/* The manifest for this machine (linux, `arch` as Go calls it: "amd64", "arm64"), or the only one.
 * *index: what was found is an index again. */
int oci_parse_index(const char *text, size_t len, const char *arch, struct oci_blob *out,
                    bool *index, struct lh_error *err);
int oci_parse_manifest(const char *text, size_t len, struct oci_layers *out, struct lh_error *err);
/* Of docker-archive: one image. */
int oci_parse_docker(const char *text, size_t len, struct oci_layers *out, struct lh_error *err);

/* How the image says its processes run. */
struct oci_config {
    char *user, *workdir; /* "" = not said */
    char **env;           /* NAME=value */
    size_t n_env;
};
int oci_parse_config(const char *text, size_t len, struct oci_config *out, struct lh_error *err);
void oci_config_finish(struct oci_config *c);

#endif
