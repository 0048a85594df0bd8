/* `correlate` for images of few channels, which do not fill a vector. Returns 0 where it cannot. */
#ifndef CORRELATE_NARROW_H
#define CORRELATE_NARROW_H

#include "convolve.h"

int correlate_narrow(const correlation *c);

#endif
