// SPDX-License-Identifier: Apache-2.0

//! The interface of the shortlist kernels, which select logits for the sampler.

abi! {
    header "shortlist.cuh";

    constants {
        const SHORTLIST_THREADS: u32 = 256;
        /// Values of a list. Equal to ops::SHORTLIST_LEN.
        const SHORTLIST_LEN: usize = 256;
        /// Groups of a row. Their maxima give the threshold.
        const SHORTLIST_GROUPS: usize = 2048;
        /// The largest number of candidates of a row. A row with more candidates has no list.
        const SHORTLIST_CANDIDATES_MAX: usize = 1024;
        /// Values of a partial sum, as in ops::softmax.
        const SHORTLIST_BLOCK: usize = 1024;
        /// Partial sums of a thread block: as many as one warp adds at once.
        const SHORTLIST_SUMS: usize = 4;
        /// The largest number of partial sums of a row. They are kept in shared memory.
        const SHORTLIST_SUMS_MAX: usize = 1024;
        /// u32 words of a row's temperature and random number.
        const DRAW_PARAM_WORDS: usize = 4;
        /// u64 words of a row's result: count, sum of weights, drawn token, best values.
        const SHORTLIST_RESULT_WORDS: usize = 3 + SHORTLIST_LEN;
    }
    structs {
        /// The facts about a row that the first pass finds before the second pass reads the values
        /// again. Both are sort keys.
        struct RowThreshold [8 bytes] {
            highest: u32,
            threshold: u32,
        }
    }
    kernels {
        kernel ShortlistGroupMax(x: u64 as "const float *", cols: u32, groups: u64 as "uint32_t *");
        kernel ShortlistThreshold(
            groups: u64 as "const uint32_t *",
            thresholds: u64 as "RowThreshold *",
            counts: u64 as "uint32_t *",
        );
        kernel ShortlistCollect(
            x: u64 as "const float *",
            cols: u32,
            draw_params: u64 as "const uint32_t *",
            thresholds: u64 as "const RowThreshold *",
            counts: u64 as "uint32_t *",
            candidates: u64 as "uint64_t *",
            sums: u64 as "double *",
        );
        kernel ShortlistSortAndDraw(
            x: u64 as "const float *",
            cols: u32,
            draw_params: u64 as "const uint32_t *",
            thresholds: u64 as "const RowThreshold *",
            counts: u64 as "const uint32_t *",
            candidates: u64 as "const uint64_t *",
            sums: u64 as "const double *",
            results: u64 as "uint64_t *",
            tokens: u64 as "uint32_t *",
        );
    }
}
