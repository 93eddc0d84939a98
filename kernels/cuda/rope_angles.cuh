// SPDX-License-Identifier: Apache-2.0

// Angles of rotary embeddings, in f64 as in the host backend, and the rotation of a pair.
#pragma once

#include <cstdint>

// Sine and cosine within 1e-10 for magnitudes below 2^20. The argument is reduced to |r| <= pi / 4
// by a pi / 2 in two parts; then Taylor series follow.
__device__ inline void sine_cosine(double x, double *sine, double *cosine) {
    double quarter = round(x / 1.5707963267948966);
    double r = (x - quarter * 1.5707963267341256) - quarter * 6.077100506506192e-11;
    double r2 = r * r;
    double s = r2 * (1.0 / 6227020800.0);
    s = (s + -1.0 / 39916800.0) * r2;
    s = (s + 1.0 / 362880.0) * r2;
    s = (s + -1.0 / 5040.0) * r2;
    s = (s + 1.0 / 120.0) * r2;
    s = (s + -1.0 / 6.0) * r2;
    s = r * (s + 1.0);
    double c = r2 * (1.0 / 479001600.0);
    c = (c + -1.0 / 3628800.0) * r2;
    c = (c + 1.0 / 40320.0) * r2;
    c = (c + -1.0 / 720.0) * r2;
    c = (c + 1.0 / 24.0) * r2;
    c = (c + -0.5) * r2;
    c = c + 1.0;
    switch (static_cast<long long>(quarter) & 3) {
        case 0: *sine = s, *cosine = c; break;
        case 1: *sine = c, *cosine = -s; break;
        case 2: *sine = -s, *cosine = -c; break;
        default: *sine = -c, *cosine = s;
    }
}

__device__ inline void rope_angle(uint32_t position, float inverse_frequency, float magnitude, float *cosine,
                                  float *sine) {
    double s, c;
    sine_cosine(double(position) * double(inverse_frequency), &s, &c);
    *sine = float(s * double(magnitude));
    *cosine = float(c * double(magnitude));
}

__device__ inline void rotate_pair(float &first, float &second, float cosine, float sine) {
    float a = first, b = second;
    first = a * cosine - b * sine;
    second = a * sine + b * cosine;
}
