// Rotary position embedding in place: pair i of every head of row r turns by positions[r] * inverse_frequencies[i].
//
// One thread block per row; a thread forms the angle of one pair (in f64, as the host backend does) and turns that pair of
// several heads. Limit: bytes, 8 per value; the angles are 64 evaluations a row.

#include "numeric.cuh"

namespace {

constexpr int THREADS = 256;

// Sine and cosine for magnitudes below 2^20 within 1e-10: two-part pi / 2, then Taylor series on |r| <= pi / 4.
__device__ void sine_cosine(double x, double *sine, double *cosine) {
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

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    rope(float *x, const uint32_t *positions, const float *inverse_frequencies, float magnitude, int adjacent, int pairs, int head_dim, int heads) {
    wait_for_predecessor();
    let_successor_start();
    // Threads that share a pair take heads in turn; with more pairs than threads, a thread takes several pairs.
    int sharing = max(THREADS / pairs, 1);
    int share = threadIdx.x / pairs % sharing;
    if (int(threadIdx.x) >= sharing * pairs) return;
    float *row = x + size_t(blockIdx.x) * heads * head_dim;
    double position = positions[blockIdx.x];
    for (int pair = threadIdx.x % pairs; pair < pairs; pair += THREADS) {
        double sine, cosine;
        sine_cosine(position * double(inverse_frequencies[pair]), &sine, &cosine);
        float s = float(sine * double(magnitude)), c = float(cosine * double(magnitude));
        int first = adjacent ? 2 * pair : pair, second = adjacent ? 2 * pair + 1 : pair + pairs;
        for (int head = share; head < heads; head += sharing) {
            float *values = row + head * head_dim;
            float a = values[first], b = values[second];
            values[first] = a * c - b * s;
            values[second] = a * s + b * c;
        }
    }
}
