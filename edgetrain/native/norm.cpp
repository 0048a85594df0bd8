// Batch norm of a training step on the CPU, with the clamp after it (none, ReLU, ReLU6): channels-last floats.
//
// x is a dense matrix of `rows` by C: an N,C,H,W tensor in channels-last order, rows = N*H*W. Three functions:
//
//     statistics   mean[C], invstd[C] and the running statistics                            reads x once
//     apply        y = clamp((x - mean) * (invstd * weight) + bias, low, high)               reads x once
//     backward     dx, dweight, dbias, with dy taken as 0 where y is clamped                 reads dy and x twice
//
// Exact: every sum is over a column, so the lanes of a vector never mix. Four or eight rows are added as a tree of
// floats, and that sum to a double. The variance is that of x less a shift, the mean of the rows before, by blocks;
// these are merged as by Chan, Golub and LeVeque. The distance of the shift from the mean of a block is part of the
// variance itself, so that rounding stays small relative to it wherever the mean lies.
//
// Repeatable: the rows are cut into parts that depend on the shape alone, parts are merged in order, and the compiler
// may not fuse a product and a sum (-ffp-contract=off, see setup.py). So the results are bitwise the same on every
// call, with any number of threads and any vector width, and `backward` computes the same y as `apply`.
//
// Fast: large tensors come from memory, and a thread waits less when it reads several places at once. So a run of rows
// is read as a few streams, far apart. (Adjacent rows read at once confuse the prefetcher: a third of the speed.)
//
//     rows of x       |  part 0  |  part 1  |  part 2  |      a part is the work of one thread
//     a part          | block      | block      | blo |       256 wide rows, one shift
//     a block         | stream | stream | stream |            rows 0, n/8, 2n/8, ... together, then the next of each
//     a wide row      | row | row | row | row |               few channels: enough rows to fill vectors (fold)
//     many channels   | tile                | tile    |       a tile's sums fit on the stack and in L1

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#if defined(__x86_64__)
#define ET_VECTOR __attribute__((target_clones("default", "avx2")))
#else
#define ET_VECTOR
#endif

#define ET_INLINE inline __attribute__((always_inline))

// Each lane is on its own, even where the result is written over an input.
#define ET_LANES _Pragma("GCC ivdep")

namespace {

constexpr int64_t kTile = 1024;             // lanes at one time
constexpr int64_t kFullLanes = 128;         // rows narrower than this are folded into wide ones
constexpr int64_t kBlock = 256;             // wide rows of one shift
constexpr int64_t kPartElements = 1 << 16;  // about 20 µs of work, several times the cost of waking a thread
constexpr int64_t kMaxParts = 16;

// Streams of rows in one tensor, tuned on Zen 3: eight in all while reading, fewer when writing.
constexpr int kSumStreams = 8;
constexpr int kGradientStreams = 4;
constexpr int kWriteStreams = 2;

struct Shape {
  int64_t rows;
  int64_t channels;
  int64_t fold = 1;
  int64_t n_parts;

  Shape(int64_t n_rows, int64_t n_channels) : rows(n_rows), channels(n_channels) {
    while (fold * channels < kFullLanes) fold *= 2;
    const int64_t wanted = std::clamp(rows * channels / kPartElements, int64_t{1}, kMaxParts);
    // A power of two, which divides evenly among most numbers of threads.
    n_parts = std::min(static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(wanted))), n_units());
  }

  // Parts are whole units, so that their streams come out even.
  int64_t unit() const { return kSumStreams * fold; }
  int64_t n_units() const { return (rows + unit() - 1) / unit(); }

  // The first row of a part.
  int64_t row_at(int64_t part) const { return std::min(n_units() * part / n_parts * unit(), rows); }
};

// Channels [first, first + width), `fold` rows to a wide one.
struct Tile {
  int64_t first;
  int64_t width;
  int64_t fold;
  int64_t lanes() const { return width * fold; }
};

// Rows of a tile, wide or not: the offset of the first, their stride and lanes.
struct Run {
  int64_t at;
  int64_t n_rows;
  int64_t stride;
  int64_t lanes;
};

struct Clamp {
  float low;
  float high;
};

// body(part, first row, end row), on the threads of PyTorch.
template <class Body>
void each_part(const Shape& shape, const Body& body) {
  at::parallel_for(0, shape.n_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) body(part, shape.row_at(part), shape.row_at(part + 1));
  });
}

template <class Body>
void each_tile(const Shape& shape, const Body& body) {
  for (int64_t first = 0; first < shape.channels; first += kTile) {
    body(Tile{first, std::min(kTile, shape.channels - first), shape.fold});
  }
}

// body(run): the wide rows, then those that fill no wide one.
template <class Body>
void each_run(const Shape& shape, const Tile& tile, int64_t first_row, int64_t end_row, const Body& body) {
  const int64_t n_wide = (end_row - first_row) / tile.fold;
  const int64_t left_at = first_row + n_wide * tile.fold;
  body(Run{first_row * shape.channels + tile.first, n_wide, tile.fold * shape.channels, tile.lanes()});
  if (left_at == end_row) return;
  body(Run{left_at * shape.channels + tile.first, end_row - left_at, shape.channels, tile.width});
}

// The rows of a run that remain after so many equal streams.
Run rest(const Run& run, int n_streams) {
  const int64_t done = run.n_rows / n_streams * n_streams;
  return Run{run.at + done * run.stride, run.n_rows - done, run.stride, run.lanes};
}

// Repeats the values of the first row for all rows of a wide one.
void widen(float* values, const Tile& tile) {
  for (int64_t lane = tile.width; lane < tile.lanes(); ++lane) values[lane] = values[lane - tile.width];
}

// Reduces the sums of a wide row's lanes to one for each channel: by halves, as a tree.
void narrow(double* sums, const Tile& tile) {
  for (int64_t half = tile.lanes() / 2; half >= tile.width; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
}

template <int n>
ET_INLINE float tree(const float* values) {
  if constexpr (n == 1) {
    return values[0];
  } else {
    return tree<n / 2>(values) + tree<n / 2>(values + n / 2);
  }
}

// The value before the clamp. One expression for `apply` and `backward`, so that they agree to the last bit.
ET_INLINE float affine(float centred, float scale, float bias) { return centred * scale + bias; }

// As torch.clamp and hardtanh: NaN stays NaN.
ET_INLINE float clamped(float value, Clamp clamp) {
  const float raised = value < clamp.low ? clamp.low : value;
  return raised > clamp.high ? clamp.high : raised;
}

// As hardtanh_backward and the gradient of ReLU: nothing flows at the bounds themselves.
ET_INLINE float masked(float gradient, float value, Clamp clamp) {
  return (value <= clamp.low) | (value >= clamp.high) ? 0.0f : gradient;
}

// sum += x - shift, square += (x - shift)², lane by lane.
template <int n_streams>
ET_INLINE void add_streams(const float* x, const Run& run, const float* shift, double* sum, double* square) {
  const int64_t length = run.n_rows / n_streams;
  const int64_t apart = length * run.stride;
  for (int64_t row = 0; row < length; ++row) {
    const float* xs = x + run.at + row * run.stride;
    ET_LANES
    for (int64_t lane = 0; lane < run.lanes; ++lane) {
      float from_shift[n_streams], squared[n_streams];
      for (int k = 0; k < n_streams; ++k) {
        from_shift[k] = xs[k * apart + lane] - shift[lane];
        squared[k] = from_shift[k] * from_shift[k];
      }
      sum[lane] += tree<n_streams>(from_shift);
      square[lane] += tree<n_streams>(squared);
    }
  }
}

ET_VECTOR void add_rows(const float* x, const Run& run, const float* shift, double* sum, double* square) {
  add_streams<kSumStreams>(x, run, shift, sum, square);
  add_streams<1>(x, rest(run, kSumStreams), shift, sum, square);
}

// Sums about the shift become the mean and the sum of squares about it.
ET_VECTOR void centre(double n, const float* shift, double* sum, double* square, int64_t width) {
  const double share = 1.0 / n;
  ET_LANES
  for (int64_t c = 0; c < width; ++c) {
    const double from_shift = sum[c] * share;
    square[c] = std::max(square[c] - sum[c] * from_shift, 0.0);
    sum[c] = shift[c] + from_shift;
  }
}

// Mean and sum of squares of n rows, and those of `n_more` others, become those of all.
ET_VECTOR void merge(double n, double* mean, double* square, double n_more, const double* mean_more,
                     const double* square_more, int64_t width) {
  const double share = n_more / (n + n_more);
  ET_LANES
  for (int64_t c = 0; c < width; ++c) {
    const double apart = mean_more[c] - mean[c];
    mean[c] += apart * share;
    square[c] += square_more[c] + apart * apart * (n * share);
  }
}

ET_VECTOR void invert(const double* square, double share, double eps, float* invstd, int64_t width) {
  ET_LANES
  for (int64_t c = 0; c < width; ++c) invstd[c] = static_cast<float>(1.0 / std::sqrt(square[c] * share + eps));
}

// A running statistic takes a step towards values * factor.
ET_VECTOR void follow(float* running, const double* values, double factor, double momentum, int64_t width) {
  ET_LANES
  for (int64_t c = 0; c < width; ++c) {
    running[c] = static_cast<float>((1.0 - momentum) * running[c] + momentum * (values[c] * factor));
  }
}

// A shift for the first block: the mean of a few of its rows.
void guess_shift(const float* x, const Run& run, int64_t width, float* shift) {
  const int64_t n = std::min<int64_t>(run.n_rows, kSumStreams);
  const float share = 1.0f / static_cast<float>(n);
  std::fill_n(shift, width, 0.0f);
  for (int64_t k = 0; k < n; ++k) {
    const float* xs = x + run.at + k * (run.n_rows / n) * run.stride;
    for (int64_t c = 0; c < width; ++c) shift[c] += xs[c] * share;
  }
}

// Mean and sum of squares about it, of rows [first, end).
void part_statistics(const float* x, const Shape& shape, const Tile& tile, int64_t first, int64_t end, double* mean,
                     double* square) {
  float shift[kTile];
  double block_mean[kTile], block_square[kTile];
  std::fill_n(mean, tile.width, 0.0);
  std::fill_n(square, tile.width, 0.0);
  const int64_t block_rows = kBlock * tile.fold;
  for (int64_t row = first; row < end; row += block_rows) {
    const int64_t n = std::min(block_rows, end - row);
    if (row == first) {
      guess_shift(x, Run{row * shape.channels + tile.first, n, shape.channels, tile.width}, tile.width, shift);
    } else {
      std::copy_n(mean, tile.width, shift);
    }
    widen(shift, tile);
    std::fill_n(block_mean, tile.lanes(), 0.0);
    std::fill_n(block_square, tile.lanes(), 0.0);
    each_run(shape, tile, row, row + n, [&](const Run& run) { add_rows(x, run, shift, block_mean, block_square); });
    narrow(block_mean, tile);
    narrow(block_square, tile);
    centre(static_cast<double>(n), shift, block_mean, block_square, tile.width);
    merge(static_cast<double>(row - first), mean, square, static_cast<double>(n), block_mean, block_square, tile.width);
  }
}

// What normalises each lane of a tile.
struct Normal {
  float mean[kTile];
  float scale[kTile];
  float bias[kTile];

  Normal(const Tile& tile, const float* means, const float* invstd, const float* weight, const float* biases) {
    for (int64_t c = 0; c < tile.width; ++c) {
      const int64_t channel = tile.first + c;
      mean[c] = means[channel];
      scale[c] = weight == nullptr ? invstd[channel] : invstd[channel] * weight[channel];
      bias[c] = biases == nullptr ? 0.0f : biases[channel];
    }
    widen(mean, tile);
    widen(scale, tile);
    widen(bias, tile);
  }
};

template <int n_streams>
ET_INLINE void apply_streams(const float* x, float* y, const Run& run, const Normal& by, Clamp clamp) {
  const int64_t length = run.n_rows / n_streams;
  const int64_t apart = length * run.stride;
  for (int64_t row = 0; row < length; ++row) {
    const float* xs = x + run.at + row * run.stride;
    float* ys = y + run.at + row * run.stride;
    ET_LANES
    for (int64_t lane = 0; lane < run.lanes; ++lane) {
      for (int k = 0; k < n_streams; ++k) {
        const float centred = xs[k * apart + lane] - by.mean[lane];
        ys[k * apart + lane] = clamped(affine(centred, by.scale[lane], by.bias[lane]), clamp);
      }
    }
  }
}

ET_VECTOR void apply_rows(const float* x, float* y, const Run& run, const Normal& by, Clamp clamp) {
  apply_streams<kWriteStreams>(x, y, run, by, clamp);
  apply_streams<1>(x, y, rest(run, kWriteStreams), by, clamp);
}

// sum += dy, dot += dy * (x - mean), lane by lane, with dy as the clamp lets it through.
template <int n_streams>
ET_INLINE void add_gradient_streams(const float* dy, const float* x, const Run& run, const Normal& by, Clamp clamp,
                                    double* sum, double* dot) {
  const int64_t length = run.n_rows / n_streams;
  const int64_t apart = length * run.stride;
  for (int64_t row = 0; row < length; ++row) {
    const float* dys = dy + run.at + row * run.stride;
    const float* xs = x + run.at + row * run.stride;
    ET_LANES
    for (int64_t lane = 0; lane < run.lanes; ++lane) {
      float gradient[n_streams], product[n_streams];
      for (int k = 0; k < n_streams; ++k) {
        const float centred = xs[k * apart + lane] - by.mean[lane];
        gradient[k] = masked(dys[k * apart + lane], affine(centred, by.scale[lane], by.bias[lane]), clamp);
        product[k] = gradient[k] * centred;
      }
      sum[lane] += tree<n_streams>(gradient);
      dot[lane] += tree<n_streams>(product);
    }
  }
}

ET_VECTOR void add_gradients(const float* dy, const float* x, const Run& run, const Normal& by, Clamp clamp,
                             double* sum, double* dot) {
  add_gradient_streams<kGradientStreams>(dy, x, run, by, clamp, sum, dot);
  add_gradient_streams<1>(dy, x, rest(run, kGradientStreams), by, clamp, sum, dot);
}

// What is removed from dy: its mean, and its projection on x.
struct Removed {
  float average[kTile];
  float slope[kTile];

  Removed(const Tile& tile, const double* averages, const double* slopes) {
    std::copy_n(averages + tile.first, tile.width, average);
    std::copy_n(slopes + tile.first, tile.width, slope);
    widen(average, tile);
    widen(slope, tile);
  }
};

template <int n_streams>
ET_INLINE void write_gradient_streams(const float* dy, const float* x, float* dx, const Run& run, const Normal& by,
                                      const Removed& removed, Clamp clamp) {
  const int64_t length = run.n_rows / n_streams;
  const int64_t apart = length * run.stride;
  for (int64_t row = 0; row < length; ++row) {
    const float* dys = dy + run.at + row * run.stride;
    const float* xs = x + run.at + row * run.stride;
    float* dxs = dx + run.at + row * run.stride;
    ET_LANES
    for (int64_t lane = 0; lane < run.lanes; ++lane) {
      for (int k = 0; k < n_streams; ++k) {
        const float centred = xs[k * apart + lane] - by.mean[lane];
        const float gradient = masked(dys[k * apart + lane], affine(centred, by.scale[lane], by.bias[lane]), clamp);
        dxs[k * apart + lane] = (gradient - removed.average[lane] - centred * removed.slope[lane]) * by.scale[lane];
      }
    }
  }
}

ET_VECTOR void write_gradients(const float* dy, const float* x, float* dx, const Run& run, const Normal& by,
                               const Removed& removed, Clamp clamp) {
  write_gradient_streams<kWriteStreams>(dy, x, dx, run, by, removed, clamp);
  write_gradient_streams<1>(dy, x, dx, rest(run, kWriteStreams), by, removed, clamp);
}

// sums += dy and dots += dy * (x - mean), of rows [first, end), a double for each channel.
void part_gradients(const float* dy, const float* x, const Shape& shape, const Tile& tile, int64_t first, int64_t end,
                    const Normal& by, Clamp clamp, double* sums, double* dots) {
  double sum[kTile], dot[kTile];
  std::fill_n(sum, tile.lanes(), 0.0);
  std::fill_n(dot, tile.lanes(), 0.0);
  each_run(shape, tile, first, end, [&](const Run& run) { add_gradients(dy, x, run, by, clamp, sum, dot); });
  narrow(sum, tile);
  narrow(dot, tile);
  std::copy_n(sum, tile.width, sums);
  std::copy_n(dot, tile.width, dots);
}

// Two doubles a channel for each part; reused by the calling thread, as a step calls this for every layer.
double* part_sums(const Shape& shape) {
  thread_local std::vector<double> sums;
  const size_t needed = static_cast<size_t>(2 * shape.n_parts * shape.channels);
  if (sums.size() < needed) sums.resize(needed);
  return sums.data();
}

}  // namespace

extern "C" {

// The PyTorch that it was built for: its thread pool may differ in another.
const char* et_torch_version() { return ET_TORCH_VERSION; }

// running_mean and running_var are updated in place, or null.
void et_norm_statistics(const float* x, int64_t rows, int64_t channels, float* mean, float* invstd, float* running_mean,
                        float* running_var, double momentum, double eps) {
  const Shape shape(rows, channels);
  double* means = part_sums(shape);
  double* squares = means + shape.n_parts * channels;
  each_part(shape, [&](int64_t part, int64_t first, int64_t end) {
    each_tile(shape, [&](const Tile& tile) {
      const int64_t at = part * channels + tile.first;
      part_statistics(x, shape, tile, first, end, means + at, squares + at);
    });
  });
  for (int64_t part = 1; part < shape.n_parts; ++part) {
    const int64_t before = shape.row_at(part);
    const int64_t more = shape.row_at(part + 1) - before;
    merge(static_cast<double>(before), means, squares, static_cast<double>(more), means + part * channels,
          squares + part * channels, channels);
  }
  const double n = static_cast<double>(rows);
  std::copy_n(means, channels, mean);
  invert(squares, 1.0 / n, eps, invstd, channels);
  if (running_mean == nullptr) return;
  follow(running_mean, means, 1.0, momentum, channels);
  follow(running_var, squares, 1.0 / (n - 1.0), momentum, channels);
}

// weight and bias may be null, for 1 and 0. y may be x.
void et_norm_apply(const float* x, float* y, int64_t rows, int64_t channels, const float* mean, const float* invstd,
                   const float* weight, const float* bias, float low, float high) {
  const Shape shape(rows, channels);
  each_part(shape, [&](int64_t, int64_t first, int64_t end) {
    each_tile(shape, [&](const Tile& tile) {
      const Normal by(tile, mean, invstd, weight, bias);
      each_run(shape, tile, first, end, [&](const Run& run) { apply_rows(x, y, run, by, Clamp{low, high}); });
    });
  });
}

// weight and bias, dweight and dbias may be null. dx may be dy.
void et_norm_backward(const float* dy, const float* x, float* dx, int64_t rows, int64_t channels, const float* mean,
                      const float* invstd, const float* weight, const float* bias, float low, float high,
                      float* dweight, float* dbias) {
  const Shape shape(rows, channels);
  const Clamp clamp{low, high};
  const double share = 1.0 / static_cast<double>(rows);
  double* sums = part_sums(shape);
  double* dots = sums + shape.n_parts * channels;
  each_part(shape, [&](int64_t part, int64_t first, int64_t end) {
    each_tile(shape, [&](const Tile& tile) {
      const Normal by(tile, mean, invstd, weight, bias);
      const int64_t at = part * channels + tile.first;
      part_gradients(dy, x, shape, tile, first, end, by, clamp, sums + at, dots + at);
    });
  });
  for (int64_t part = 1; part < shape.n_parts; ++part) {
    for (int64_t c = 0; c < channels; ++c) sums[c] += sums[part * channels + c];
    for (int64_t c = 0; c < channels; ++c) dots[c] += dots[part * channels + c];
  }
  for (int64_t c = 0; c < channels; ++c) {
    if (dweight != nullptr) dweight[c] = static_cast<float>(dots[c] * invstd[c]);
    if (dbias != nullptr) dbias[c] = static_cast<float>(sums[c]);
    sums[c] *= share;
    dots[c] *= share * invstd[c] * invstd[c];
  }
  each_part(shape, [&](int64_t, int64_t first, int64_t end) {
    each_tile(shape, [&](const Tile& tile) {
      const Normal by(tile, mean, invstd, weight, bias);
      const Removed removed(tile, sums, dots);
      each_run(shape, tile, first, end, [&](const Run& run) { write_gradients(dy, x, dx, run, by, removed, clamp); });
    });
  });
}

}  // extern "C"
