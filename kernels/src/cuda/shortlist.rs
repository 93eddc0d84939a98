// SPDX-License-Identifier: Apache-2.0

//! Launcher of shortlist.cu: computes the [`Shortlist`] of each row of logits for the sampler.

use ops::rank::RankedLogit;
use ops::{DrawParams, NO_ARGMAX, Shortlist};

pub use super::abi::shortlist::{DRAW_PARAM_WORDS, SHORTLIST_RESULT_WORDS as RESULT_WORDS};
use super::abi::shortlist::{
    SHORTLIST_BLOCK, SHORTLIST_CANDIDATES_MAX, SHORTLIST_GROUPS, SHORTLIST_LEN, SHORTLIST_SUMS,
    SHORTLIST_SUMS_MAX, SHORTLIST_THREADS, ShortlistCollect, ShortlistGroupMax, ShortlistSortAndDraw,
    ShortlistThreshold,
};
use super::launch::{kernel_name, launch_spread};
use super::module::image;
use super::norm::ensure_same_len;
use super::{CudaError, Device, DeviceView, DeviceViewMut, LaunchConfig, LazyModule, Stream};

const _: () = assert!(SHORTLIST_LEN == ops::SHORTLIST_LEN);
/// Candidates overwrite the group maxima (u32), which are no longer needed by then.
const _: () = assert!(SHORTLIST_GROUPS <= 2 * SHORTLIST_CANDIDATES_MAX);
/// The largest number of values in a row. The kernel keeps a row's partial sums in shared memory.
pub const COLS_MAX: usize = SHORTLIST_SUMS_MAX * SHORTLIST_BLOCK;

pub struct ShortlistKernels(LazyModule);

/// The u64 words of the work space. It holds the results of all rows first, then the intermediate
/// data that one kernel leaves for the next.
pub fn work_words(rows: usize, cols: usize) -> usize {
    rows * (RESULT_WORDS + 1 + cols.div_ceil(SHORTLIST_BLOCK) + SHORTLIST_CANDIDATES_MAX) + rows.div_ceil(2)
}

/// Returns one row's parameters in the form that kernels read. The words are the temperature,
/// whether to draw a token, and both halves of the uniform random number, low half first.
pub fn draw_param_words(params: &DrawParams) -> [u32; DRAW_PARAM_WORDS] {
    let uniform = params.uniform.unwrap_or(0.0).to_bits();
    [
        params.temperature.to_bits(),
        u32::from(params.uniform.is_some()),
        uniform as u32,
        (uniform >> 32) as u32,
    ]
}

/// Fills `list` from a result of [`RESULT_WORDS`] words.
pub fn decode_result(result: &[u64], list: &mut Shortlist) {
    let [count, total, drawn, best @ ..] = result else { return list.clear() };
    let best = best.iter().take(*count as usize).map(|&bits| RankedLogit::from_bits(bits));
    list.set(best, f64::from_bits(*total), Some(*drawn as u32).filter(|&drawn| drawn != NO_ARGMAX));
}

impl ShortlistKernels {
    pub fn new(device: &Device) -> Self {
        Self(LazyModule::new(device, "shortlist", image!("shortlist")))
    }

    /// Writes the result of each row of `x` to the beginning of `work`. A row has `cols` values,
    /// `work` has [`work_words`], and `draw_params` has [`draw_param_words`] of each row.
    ///
    /// With `tokens`, results have no lists. A row that draws a token writes it there, and a row
    /// without a finite maximum writes [`NO_ARGMAX`].
    pub fn rows(
        &self,
        stream: &Stream,
        x: DeviceView<'_, f32>,
        cols: usize,
        draw_params: DeviceView<'_, u32>,
        work: &mut DeviceViewMut<'_, u64>,
        tokens: Option<DeviceViewMut<'_, u32>>,
    ) -> Result<(), CudaError> {
        let rows = draw_params.len() / DRAW_PARAM_WORDS;
        ensure_same_len("words of draw parameters", draw_params.len(), rows * DRAW_PARAM_WORDS)?;
        ensure_same_len("rows to shortlist", x.len(), rows * cols)?;
        ensure_same_len("columns to shortlist", cols.clamp(1, COLS_MAX), cols)?;
        ensure_same_len("work space of shortlists", work.len(), work_words(rows, cols))?;
        if let Some(tokens) = &tokens {
            ensure_same_len("tokens to draw", tokens.len(), rows)?;
        }
        let tokens = tokens.map_or(0, |tokens| tokens.address());
        if rows == 0 {
            return Ok(());
        }
        let launch = |blocks: usize, rows: usize| LaunchConfig {
            grid: (blocks as u32, rows as u32, 1),
            block: SHORTLIST_THREADS,
            shared_bytes: 0,
            overlaps_predecessor: true,
            cluster: 1,
        };
        let blocks = cols.div_ceil(SHORTLIST_BLOCK);
        let results = work.address();
        let mut words = 0;
        let mut skip_words = |of_row: usize| {
            words += rows * of_row;
            results + (words * size_of::<u64>()) as u64
        };
        let thresholds = skip_words(RESULT_WORDS);
        let sums = skip_words(1);
        let candidates = skip_words(blocks);
        let counts = skip_words(SHORTLIST_CANDIDATES_MAX);
        let groups = candidates;
        let (x, draw_params, cols) = (x.address(), draw_params.address(), cols as u32);

        let name = kernel_name!("shortlist", "shortlist_group_max");
        let each = launch(SHORTLIST_GROUPS / SHORTLIST_THREADS as usize, rows);
        // SAFETY: block (b, r) reads values of row r and writes the row's group maxima from b *
        // THREADS on.
        unsafe { launch_spread(&self.0, name, stream, each, &ShortlistGroupMax { x, cols, groups })? };

        let name = kernel_name!("shortlist", "shortlist_threshold");
        let arguments = ShortlistThreshold { groups, thresholds, counts };
        // SAFETY: a RowThreshold is one word. Block r reads the group maxima of row r and writes
        // the row's threshold and count.
        unsafe { launch_spread(&self.0, name, stream, launch(rows, 1), &arguments)? };

        let name = kernel_name!("shortlist", "shortlist_collect");
        let arguments = ShortlistCollect { x, cols, draw_params, thresholds, counts, candidates, sums };
        let each = launch(blocks.div_ceil(SHORTLIST_SUMS), rows);
        // SAFETY: block (b, r) reads row r with its parameters and threshold, and adds to its
        // count. It writes candidates below CANDIDATES_MAX, and existing sums from b * SUMS on.
        unsafe { launch_spread(&self.0, name, stream, each, &arguments)? };

        let name = kernel_name!("shortlist", "shortlist_sort_and_draw");
        let arguments = ShortlistSortAndDraw {
            x,
            cols,
            draw_params,
            thresholds,
            counts,
            candidates,
            sums,
            results,
            tokens,
        };
        // SAFETY: blocks (r, 0) and (r, 1) read the data of row r and write parts of result r.
        unsafe { launch_spread(&self.0, name, stream, launch(rows, 2), &arguments) }
    }
}
