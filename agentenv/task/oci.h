/* Container images as files: an OCI image layout (directory, or a tar of one) and docker-archive.
 */
#ifndef AGENTENV_TASK_OCI_H
#define AGENTENV_TASK_OCI_H

#include <archive.h>

#include "agentenv/task/oci_json.h"
#include "proto/cleanup.h"

struct oci;

/* *out stays NULL, with 0, when `path` is no such image: a plain root file system. */
int oci_open(const char *path, struct oci **out, struct lh_error *err);
void oci_close(struct oci *o); /* NULL is fine */
LH_DEFINE_AUTO(oci, oci_close)

const struct oci_config *oci_config(const struct oci *o);

/* Each layer, bottom first, as an archive at its beginning; all of it is read and, where the image
 * gives a digest, compared (DATA_LOSS) after the function has returned.  Each is read twice: what
 * it removes concerns the layers below only, and may stand behind what it adds. */
typedef int oci_layer_fn(void *ctx, struct archive *layer, struct lh_error *err);
int oci_each_layer(struct oci *o, oci_layer_fn *removals, oci_layer_fn *additions, void *ctx,
                   struct lh_error *err);

#endif
