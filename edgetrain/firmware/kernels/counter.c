#include "counter.h"

void counter_add(int64_t *counter, int64_t number)
{
    *counter += number;
}
