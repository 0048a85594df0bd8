/* exp, log and tanh with the same bits on every core, whatever C library is linked. */
#ifndef FUNCTIONS_H
#define FUNCTIONS_H

float exp_float(float x);
float log_float(float x);
float tanh_float(float x);

#endif
