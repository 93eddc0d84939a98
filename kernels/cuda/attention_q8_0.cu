// attention.cu over keys and values of q8_0: a product's operand is scale times byte, rounded to f16.

#include "attention/bytes.cuh"
#include "attention/chunk.cuh"
#include "attention/plain.cuh"
#include "attention/split.cuh"

namespace {

// Bytes to be copied two tiles ahead, and three blocks of the split kernel on a multiprocessor: on an H200, 64 rows at 16,000
// keys take 0.80 ms so, 0.99 three tiles ahead with two blocks, and 0.89 with blocks of eight warps.
template <int DIM>
using Rows = Bytes<DIM, 2>;
template <int DIM>
using Chunks = Bytes<DIM, 1>;

}  // namespace

SPLIT(64, Rows<64>)
SPLIT(96, Rows<96>)
SPLIT(128, Rows<128>)
CHUNK(64, Chunks<64>)
CHUNK(96, Chunks<96>)
CHUNK(128, Chunks<128>)
PLAIN(q8_0, StoredBytes)
