#include "deploy/plot.h"

#include <stdio.h>

void plot_print(const char *title, const double *value, size_t columns, unsigned rows,
                const char *unit)
{
    double top = 0;

    for (size_t c = 0; c < columns; c++)
        top = value[c] > top ? value[c] : top;
    printf("\n%s\n", title);
    for (unsigned row = rows; row > 0; row--) {
        printf("%8.2f |", top * row / rows);
        for (size_t c = 0; c < columns; c++)
            putchar(top > 0 && value[c] >= top * (row - 0.5) / rows ? '#' : ' ');
        putchar('\n');
    }
    printf("%8s +", "0");
    for (size_t c = 0; c < columns; c++)
        putchar('-');
    printf(" %s\n", unit);
}
