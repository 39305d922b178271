/* Curves in the terminal. */
#ifndef DEPLOY_PLOT_H
#define DEPLOY_PLOT_H

#include <stddef.h>

enum { PLOT_WIDTH = 60 };

/* `columns` values, at most PLOT_WIDTH, as bars; the axis runs from 0 to the largest of them. */
void plot_print(const char *title, const double *value, size_t columns, unsigned rows,
                const char *unit);

#endif
