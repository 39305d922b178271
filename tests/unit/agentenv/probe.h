/* What the parts of the probe share. */
#ifndef TESTS_UNIT_AGENTENV_PROBE_H
#define TESTS_UNIT_AGENTENV_PROBE_H

#include <stdbool.h>

/* `result` follows the convention of system calls: negative with errno = it did not work. */
void must_fail(const char *what, long result);
/* For conditions that are seen, not tried. */
void must_hold(const char *what, bool holds);
/* Runs try in a child, since success would change this process. */
void must_fail_apart(const char *what, long (*try)(void));

/* probe_inside.c: files of the kernel, and init. */
long probe_write(const char *path, const char *text);
void probe_secrets(void);
void probe_controls(void);
void probe_init(void);
/* probe_kernel.c: other processes, namespaces, mounts, interfaces. */
void probe_namespaces(void);
void probe_mounts(void);
void probe_interfaces(void);
/* probe_outside.c: devices, sockets of the host, its resources. */
void probe_devices(void);
void probe_sockets(const char *host_socket, int host_port);
void probe_resources(void);

#endif
