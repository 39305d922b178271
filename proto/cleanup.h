/* Ownership of locals by cleanup attribute, and its explicit end by steal.
 *
 *     lh_autofree char *path = lh_format(...);
 *     lh_autoclose int fd = open(...);
 *     ...
 *     out->fd = lh_steal_fd(&fd);      // ownership leaves: nothing is closed at scope end
 *
 * LH_DEFINE_AUTO(type, destroy) makes `lh_auto(type) x` for any object with a destroy(NULL)-safe
 * destructor:  LH_DEFINE_AUTO(kv_client, kv_client_destroy)  →  lh_auto(kv_client) c = NULL; */
#ifndef PROTO_CLEANUP_H
#define PROTO_CLEANUP_H

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static inline void lh_cleanup_free(void *p)
{
    free(*(void **)p);
}

static inline void lh_cleanup_close(const int *fd)
{
    if (*fd >= 0)
        close(*fd);
}

static inline void lh_cleanup_fclose(FILE **f)
{
    if (*f)
        fclose(*f);
}

static inline void lh_cleanup_closedir(DIR **d)
{
    if (*d)
        closedir(*d);
}

static inline void lh_cleanup_unlock(pthread_mutex_t **m)
{
    if (*m)
        pthread_mutex_unlock(*m);
}

#define lh_autofree     __attribute__((cleanup(lh_cleanup_free)))
#define lh_autoclose    __attribute__((cleanup(lh_cleanup_close)))
#define lh_autofclose   __attribute__((cleanup(lh_cleanup_fclose)))
#define lh_autoclosedir __attribute__((cleanup(lh_cleanup_closedir)))

/* Holds the mutex to the end of the scope. */
#define LH_LOCK_CAT_(a, b) a##b
#define LH_LOCK_NAME_(l)   LH_LOCK_CAT_(lh_lock_, l)
#define LH_LOCKED(mutex)                                                                           \
    __attribute__((cleanup(lh_cleanup_unlock), unused)) pthread_mutex_t *LH_LOCK_NAME_(__LINE__) = \
        (pthread_mutex_lock(mutex), (mutex))

#define LH_DEFINE_AUTO(type, destroy)                                                              \
    static inline void lh_cleanup_##type(struct type **p)                                          \
    {                                                                                              \
        destroy(*p);                                                                               \
    }
#define lh_auto(type) __attribute__((cleanup(lh_cleanup_##type))) struct type *

#define lh_steal(ptr)                                                                              \
    __extension__({                                                                                \
        __typeof__(*(ptr)) v_ = *(ptr);                                                            \
        *(ptr) = NULL;                                                                             \
        v_;                                                                                        \
    })

static inline int lh_steal_fd(int *fd)
{
    int v = *fd;

    *fd = -1;
    return v;
}

#define LH_ARRAY_SIZE(a) (sizeof(a) / sizeof *(a))

#endif
