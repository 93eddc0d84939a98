// attention.cu over keys and values of q8_0: a product's operand is scale times byte, rounded to f16.

#include "attention/bytes.cuh"
#include "attention/chunk.cuh"
#include "attention/plain.cuh"
#include "attention/split.cuh"

SPLIT(64, Bytes<64>)
SPLIT(96, Bytes<96>)
SPLIT(128, Bytes<128>)
CHUNK(64, Bytes<64>)
CHUNK(96, Bytes<96>)
CHUNK(128, Bytes<128>)
PLAIN(q8_0, StoredBytes)
