//! Launcher of shortlist.cu: of each row of logits what a sampler needs.

use ops::rank::RankedLogit;
use ops::{DrawParams, NO_ARGMAX, SHORTLIST_LEN, Shortlist};

use super::module::{arguments, image};
use super::norm::ensure_same_len;
use super::{CudaError, Device, Family, Launch, Stream, View, ViewMut};

/// As shortlist.cu.
const THREADS: u32 = 256;
const GROUPS: usize = 2048;
const CANDIDATES_MAX: usize = 1024;
/// What is candidates takes the place of the groups, which are u32 and no longer needed.
const _: () = assert!(GROUPS <= 2 * CANDIDATES_MAX);
const BLOCK: usize = 1024;
const SUMS: usize = 4;
/// Values of a row at most: its partial sums stand in shared memory.
pub const COLS_MAX: usize = 1024 * BLOCK;
/// u32 words of a row's weighing.
pub const WEIGHING_WORDS: usize = 4;
/// u64 words of what is found of a row: count of best values, sum of weights, drawn token, best values.
pub const RESULT_WORDS: usize = 3 + SHORTLIST_LEN;

pub struct ShortlistKernels(Family);

/// u64 work_words that the rows need: the results, and behind them what is between the kernels.
pub fn work_words(rows: usize, cols: usize) -> usize {
    rows * (RESULT_WORDS + 1 + cols.div_ceil(BLOCK) + CANDIDATES_MAX) + rows.div_ceil(2)
}

/// The words of a weighing.
pub fn weighing_words(weighing: &DrawParams) -> [u32; WEIGHING_WORDS] {
    let uniform = weighing.uniform.unwrap_or(0.0).to_bits();
    [
        weighing.temperature.to_bits(),
        u32::from(weighing.uniform.is_some()),
        uniform as u32,
        (uniform >> 32) as u32,
    ]
}

/// The list that a result of [`RESULT_WORDS`] work_words says.
pub fn decode_result(result: &[u64], list: &mut Shortlist) {
    let [count, total, drawn, best @ ..] = result else { return list.clear() };
    let best = best.iter().take(*count as usize).map(|&bits| RankedLogit::from_bits(bits));
    list.set(best, f64::from_bits(*total), Some(*drawn as u32).filter(|&drawn| drawn != NO_ARGMAX));
}

impl ShortlistKernels {
    pub fn new(device: &Device) -> Self {
        Self(Family::new(device, "shortlist", image!("shortlist")))
    }

    /// The results of the rows of `x`, which have `cols` values, come first in `work`, which has [`work_words`]. A weighing is
    /// four work_words: temperature, whether a token is wanted, and the low and high half of the uniform number.
    pub fn rows(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        cols: usize,
        draw_params: View<'_, u32>,
        work: &mut ViewMut<'_, u64>,
    ) -> Result<(), CudaError> {
        let rows = draw_params.len() / WEIGHING_WORDS;
        ensure_same_len("words of draw_params", draw_params.len(), rows * WEIGHING_WORDS)?;
        ensure_same_len("rows to shortlist", x.len(), rows * cols)?;
        ensure_same_len("columns to shortlist", cols.clamp(1, COLS_MAX), cols)?;
        ensure_same_len("work space of shortlists", work.len(), work_words(rows, cols))?;
        if rows == 0 {
            return Ok(());
        }
        let launch = |blocks: usize, rows: usize| Launch {
            grid: (blocks as u32, rows as u32, 1),
            block: THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
        };
        let blocks = cols.div_ceil(BLOCK);
        let results = work.address();
        let mut work_words = 0;
        let mut next = |of_row: usize| {
            work_words += rows * of_row;
            results + (work_words * size_of::<u64>()) as u64
        };
        let thresholds = next(RESULT_WORDS);
        let sums = next(1);
        let candidates = next(blocks);
        let groups = candidates;
        let counts = next(CANDIDATES_MAX);
        let (x, draw_params, columns) = (x.address(), draw_params.address(), cols as u32);
        let kernel = self.0.kernel(c"shortlist_group_max")?;
        // SAFETY: (const float *, uint32_t, uint32_t *); block (b, r) reads values of row r, and writes group maxima
        // b * THREADS .. of it.
        unsafe {
            kernel.launch(stream, launch(GROUPS / THREADS as usize, rows), arguments![x, columns, groups])?;
        }
        let kernel = self.0.kernel(c"shortlist_threshold")?;
        // SAFETY: (const uint32_t *, Head *, uint32_t *), a Head is a word; block r reads group maxima of row r, and writes
        // its head and count.
        unsafe { kernel.launch(stream, launch(rows, 1), arguments![groups, thresholds, counts])? };
        let kernel = self.0.kernel(c"shortlist_collect")?;
        // SAFETY: (const float *, uint32_t, const uint32_t *, const Head *, uint32_t *, uint64_t *, double *); block (b, r)
        // reads row r, its weighing and head, adds to its count, and writes below CANDIDATES_MAX of its finds and sums b * SUMS ..
        // of it, as far as there are.
        unsafe {
            let each = launch(blocks.div_ceil(SUMS), rows);
            kernel.launch(
                stream,
                each,
                arguments![x, columns, draw_params, thresholds, counts, candidates, sums],
            )?;
        }
        let kernel = self.0.kernel(c"shortlist_sort_and_draw")?;
        // SAFETY: (const float *, uint32_t, const uint32_t *, const Head *, const uint32_t *, const uint64_t *,
        // const double *, uint64_t *); blocks (r, 0) and (r, 1) read what belongs to row r and write parts of result r.
        unsafe {
            let arguments =
                arguments![x, columns, draw_params, thresholds, counts, candidates, sums, results];
            kernel.launch(stream, launch(rows, 2), arguments)
        }
    }
}
