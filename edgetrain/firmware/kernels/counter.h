/* A count that a model keeps, such as the batches that a batch norm has seen. */
#ifndef COUNTER_H
#define COUNTER_H

#include <stdint.h>

void counter_add(int64_t *counter, int64_t number);

#endif
