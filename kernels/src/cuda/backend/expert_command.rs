//! What a mixture of experts asks of the device: the part of a step's commands that experts.rs makes.

use ops::OpError;

use super::command::{Floats, Matrix, Panels};
use super::step::Words;
use crate::cuda::Stream;
use crate::cuda::experts::{ExpertKernels, Grouped, Grouping, Routing, Stack};
use crate::cuda::rounded::Rounded;

/// Pairs of (row, rank) in order of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Groups {
    pub(super) pairs: u32,
    /// Experts.
    pub(super) count: u32,
    pub(super) grouping: Grouping,
    pub(super) words: Words,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ExpertCommand {
    Route {
        logits: Floats,
        used: u32,
        experts: Words,
        shares: Floats,
        groups: Groups,
    },
    /// Few pairs of an expert.
    Product {
        panels: Panels,
        pairs_per_token: u32,
        groups: Groups,
        first: (Matrix, Floats),
        second: Option<(Matrix, Floats)>,
    },
    /// Rows of `x` to panels in order of slots, for [`Self::Tiles`].
    Round {
        x: Floats,
        pairs_per_token: u32,
        groups: Groups,
        panels: Panels,
    },
    /// Many pairs of an expert.
    Tiles {
        panels: Panels,
        groups: Groups,
        by_pair: bool,
        first: (Matrix, Floats),
        second: Option<(Matrix, Floats)>,
    },
    Floats {
        x: Floats,
        experts: Words,
        pairs_per_token: u32,
        count: u32,
        stack: Matrix,
        out: Floats,
    },
    Combine {
        contributions: Floats,
        shares: Floats,
        used: u32,
        out: Floats,
    },
}

impl ExpertCommand {
    /// # Safety
    /// As [`super::command::Kernels::give`]; and groups are those of the `Route` before.
    pub(super) unsafe fn give(&self, kernels: &ExpertKernels, stream: &Stream) -> Result<(), OpError> {
        // SAFETY: for all calls and views below, the caller's contract.
        unsafe {
            match *self {
                Self::Route { logits, used, experts, shares, groups } => {
                    let mut routing = Routing {
                        experts: experts.view_mut(),
                        shares: shares.view_mut(),
                        grouping: groups.grouping,
                        groups: groups.words.view_mut(),
                    };
                    kernels.route(stream, logits.view(), groups.count as usize, used as usize, &mut routing)
                }
                Self::Product { panels, pairs_per_token, groups, first, second } => {
                    let mut stacks = stacks(groups.count, first, second)?;
                    let x = panels.activations();
                    kernels.product(stream, x, pairs_per_token as usize, groups.grouped(), &mut stacks)
                }
                Self::Round { x, pairs_per_token, groups, panels } => {
                    let rounded = Rounded { format: panels.format, panels: panels.range.view_mut() };
                    let (cols, per_token) = (panels.cols as usize, pairs_per_token as usize);
                    kernels.round(stream, x.view(), cols, per_token, groups.grouped(), &rounded)
                }
                Self::Tiles { panels, groups, by_pair, first, second } => {
                    let mut stacks = stacks(groups.count, first, second)?;
                    kernels.tiles(stream, panels.activations(), groups.grouped(), by_pair, &mut stacks)
                }
                Self::Floats { x, experts, pairs_per_token, count, stack, out } => kernels.float_product(
                    stream,
                    x.view(),
                    experts.view(),
                    pairs_per_token as usize,
                    count as usize,
                    &mut stack.of_experts(count, out)?,
                ),
                Self::Combine { contributions, shares, used, out } => kernels.combine(
                    stream,
                    contributions.view(),
                    shares.view(),
                    used as usize,
                    &mut out.view_mut(),
                ),
            }
        }
    }
}

impl Groups {
    /// # Safety
    /// As [`ExpertCommand::give`].
    unsafe fn grouped<'a>(&self) -> Grouped<'a> {
        // SAFETY: the caller's contract.
        let groups = unsafe { self.words.view() };
        Grouped { pairs: self.pairs as usize, count: self.count as usize, groups }
    }
}

/// # Safety
/// As [`ExpertCommand::give`].
unsafe fn stacks<'a>(
    count: u32,
    first: (Matrix, Floats),
    second: Option<(Matrix, Floats)>,
) -> Result<Vec<Stack<'a>>, OpError> {
    let all = [Some(first), second].into_iter().flatten();
    // SAFETY: the caller's contract.
    all.map(|(matrix, out)| unsafe { matrix.of_experts(count, out) }).collect()
}

impl Matrix {
    /// One of `count` experts' matrices that this one is made of, and where its products go.
    ///
    /// # Safety
    /// As [`ExpertCommand::give`].
    unsafe fn of_experts<'a>(&self, count: u32, out: Floats) -> Result<Stack<'a>, OpError> {
        let rows = self.rows / count.max(1);
        let shape = Matrix { rows, ..*self }.tiles()?;
        // SAFETY: the caller's contract.
        Ok(unsafe { Stack { shape, tiles: self.range.view(), out: out.view_mut() } })
    }
}
