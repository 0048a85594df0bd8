/* convolve_backward_weight for images of few channels, which do not fill a vector. Returns 0 if it does not apply. */
#ifndef CONVOLVE_BACKWARD_WEIGHT_NARROW_H
#define CONVOLVE_BACKWARD_WEIGHT_NARROW_H

#include "convolve.h"

int convolve_backward_weight_narrow(const weight_gradient *g);

#endif
